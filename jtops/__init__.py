"""jtops: ready-made fused GPU ops for JAX, written in Triton."""

from jtops import config, errors
from jtops.core.call import triton_call
from jtops.core.sizes import cdiv, next_power_of_2, strides_from_shape
from jtops.errors import UnsupportedError
from jtops.kernels._lib.launch import Config
from jtops.kernels.add import add
from jtops.kernels.layer_norm import layer_norm
from jtops.kernels.softmax import softmax

__all__ = [
    "Config",
    "UnsupportedError",
    "add",
    "cdiv",
    "config",
    "errors",
    "layer_norm",
    "next_power_of_2",
    "softmax",
    "strides_from_shape",
    "triton_call",
]
