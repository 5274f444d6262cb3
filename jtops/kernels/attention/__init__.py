"""Flash attention: exact attention that never writes the matrix of scores."""

from jtops.kernels.attention.op import flash_attention

__all__ = ["flash_attention"]
