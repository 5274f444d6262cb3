"""jtops: ready-made fused GPU ops for JAX, written in Triton."""

from importlib.metadata import PackageNotFoundError, version

from jtops import config, errors, utils
from jtops.core.call import triton_call
from jtops.core.descriptor import TensorDescriptor
from jtops.core.explain import explain
from jtops.core.launch.lowering import export_checks
from jtops.core.launch.vmap import GridBatch
from jtops.core.mesh.sharded import ShardingRule, sharded_call
from jtops.core.sizes import cdiv, next_power_of_2, strides_from_shape
from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame.launch import Config
from jtops.kernels.add import add
from jtops.kernels.attention import dot_product_attention, flash_attention
from jtops.kernels.cross_entropy import cross_entropy
from jtops.kernels.gated_linear_unit import gated_linear_unit
from jtops.kernels.matmul import matmul
from jtops.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jtops.kernels.rope import rope
from jtops.kernels.softmax import log_softmax, logsumexp, softmax
from jtops.kernels.swiglu import geglu, swiglu

__all__ = [
    "Config",
    "GridBatch",
    "ShardingRule",
    "TensorDescriptor",
    "UnsupportedError",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "cdiv",
    "config",
    "cross_entropy",
    "dot_product_attention",
    "errors",
    "explain",
    "export_checks",
    "flash_attention",
    "gated_linear_unit",
    "geglu",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "matmul",
    "next_power_of_2",
    "rms_norm",
    "rope",
    "sharded_call",
    "softmax",
    "strides_from_shape",
    "swiglu",
    "triton_call",
    "utils",
]

try:
    __version__ = version("jtops")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
