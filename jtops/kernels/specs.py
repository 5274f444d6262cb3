"""Every op's SPEC: a line for each. Tests, benchmarks and `jtops.tune` go by these."""

from jtops.kernels import add, cross_entropy, gated_linear_unit, matmul, rope, swiglu
from jtops.kernels._lib.spec import Spec
from jtops.kernels.attention import cases as attention
from jtops.kernels.norm import cases as norm
from jtops.kernels.softmax import cases as softmax

_ALL = (
    add.SPEC,
    norm.ADD_LAYER_NORM,
    norm.ADD_RMS_NORM,
    attention.DOT_PRODUCT,
    cross_entropy.SPEC,
    attention.SPEC,
    gated_linear_unit.SPEC,
    swiglu.GEGLU,
    norm.LAYER_NORM,
    softmax.LOG_SOFTMAX,
    softmax.LOGSUMEXP,
    matmul.SPEC,
    norm.RMS_NORM,
    rope.SPEC,
    softmax.SOFTMAX,
    swiglu.SWIGLU,
)
SPECS: dict[str, Spec] = {spec.name: spec for spec in _ALL}
