"""softmax."""

from jtops.kernels.softmax.op import softmax

__all__ = ["softmax"]
