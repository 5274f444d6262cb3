"""The kernels of flash attention, stage by stage: each call takes the first that fits."""

from jtops.kernels._lib.frame.variants import Variant
from jtops.kernels.attention.hopper import backward as hopper_backward
from jtops.kernels.attention.hopper import forward as hopper_forward
from jtops.kernels.attention.hopper import limits
from jtops.kernels.attention.portable import backward as portable_backward
from jtops.kernels.attention.portable import forward as portable_forward

_PORTABLE = frozenset({"BLOCK_M", "BLOCK_N"})

FORWARD = (
    Variant(
        name="hopper",
        blocks=frozenset({"WARPGROUPS", "BLOCK_N"}),
        unfit=hopper_forward.unfit,
        slow=limits.slow,
        run=hopper_forward.forward,
    ),
    Variant(name="portable", blocks=_PORTABLE, run=portable_forward.forward),
)
BACKWARD = (
    Variant(name="hopper", blocks=_PORTABLE, unfit=hopper_backward.unfit, run=hopper_backward.backward),
    Variant(name="portable", blocks=_PORTABLE, run=portable_backward.backward),
)
