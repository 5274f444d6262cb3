"""Flash attention: exact attention that never writes the matrix of scores."""

from jtops.kernels.attention.op import SPEC, flash_attention

__all__ = ["SPEC", "flash_attention"]
