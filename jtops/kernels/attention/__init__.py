"""Flash attention: exact attention that never writes the matrix of scores."""

from jtops.kernels.attention.dot_product import dot_product_attention
from jtops.kernels.attention.op import flash_attention

__all__ = ["dot_product_attention", "flash_attention"]
