"""What becomes of the scores before their softmax, besides the masks by position: one description for Python and Triton.

`Scores` travels into kernels as a single parameter. A field that is None costs nothing there.
"""

from typing import Any, NamedTuple

from jtops._compat.triton import tl, triton
from jtops.kernels._lib.device.activations import tanh
from jtops.kernels._lib.frame.launch import Launch
from jtops.kernels.attention.mask import operand_of, operand_row

MAX_COLUMNS = 1 << 23  # of a table: the offsets in a tile of up to 256 rows have 32 bits


class Scores(NamedTuple):
    """Logits are ``softcap * tanh(scale * products / softcap) + bias - slopes * distance``, and -inf where `mask` is False.

    The exponential of a sink is added to the sum of a row's exponentials. Bias and mask have the axes [batch, h, s, t]; beside each
    stand the sizes of its last three, None in place of 1: here, because Triton takes no None inside a bundle that is in a bundle.
    """

    scale: Any
    softcap: Any = None
    bias: Any = None  # Operand
    bias_h: Any = None
    bias_s: Any = None
    bias_t: Any = None
    mask: Any = None  # Operand, of booleans
    mask_h: Any = None
    mask_s: Any = None
    mask_t: Any = None
    sinks: Any = None  # Operand [h]
    slopes: Any = None  # Operand [h]


def _table(launch: Launch, x, name: str) -> tuple:
    """A bias or mask of the call as a kernel takes it, and its sizes."""
    if (operand := operand_of(launch, x, name)) is None:
        return (None,) * 4
    return operand, *(None if size == 1 else size for size in operand.array.shape[1:])


def scores_of(launch: Launch, x) -> Scores:
    """The scores of a call as a kernel takes them."""
    softcap = launch.options["softcap"]
    return Scores._make(
        (
            float(launch.options["scale"]),
            None if softcap is None else float(softcap),
            *_table(launch, x, "bias"),
            *_table(launch, x, "mask"),
            operand_of(launch, x, "sinks"),
            operand_of(launch, x, "alibi_slopes"),
        )
    )


# -------------------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def table_tile(table, h, s, t, b, head, start_m, rows, start_n, cols, OTHER: tl.constexpr, INSIDE: tl.constexpr):
    """Load a tile of a table, queries ``start_m + rows`` and keys ``start_n + cols``, either with the axis of the other.

    `h`, `s` and `t` are the table's sizes, None in place of 1; an axis of size 1 has that size in the tile, or is missing. INSIDE:
    the table has all these keys.
    """
    line = operand_row(table, b)
    if h is not None:
        line = line * h + head
    if s is not None:
        line = line * s + start_m
    if t is not None:
        line = line * t + start_n
    ptr = table.array + line
    if s is not None and t is not None:
        inside = start_m + rows < s
        if not INSIDE:
            inside = inside & (start_n + cols < t)
        tile = tl.load(ptr + (rows * t + cols), mask=inside, other=OTHER)
    elif s is not None:
        tile = tl.load(ptr + rows, mask=start_m + rows < s, other=OTHER)
    elif t is not None:
        if INSIDE:
            tile = tl.load(ptr + cols)
        else:
            tile = tl.load(ptr + cols, mask=start_n + cols < t, other=OTHER)
    else:
        tile = tl.load(ptr)
    return tile


@triton.jit
def of_head(operand, b, head, shape):
    """The number that an operand [h] has for a head."""
    return tl.load(operand.array + operand_row(operand, b) * shape.h + head).to(tl.float32)


@triton.jit
def logits_of(
    products, scale2, scores, b, head, start_m, rows, start_n, cols, first_position, shape, INSIDE: tl.constexpr
):  # fmt: skip
    """Return logits in base 2 of a tile of products, and the derivative of the capped scores by the scores: 1 without a cap.

    Queries and keys are those of `table_tile`; `scale2` is the scale in base 2, `first_position` the position of query start_m.
    """
    slope = 1.0
    if scores.softcap is not None:
        capped = tanh(products * (scores.scale / scores.softcap))
        slope = 1.0 - capped * capped
        logits = capped * (scores.softcap * 1.4426950408889634)
    else:
        logits = products * scale2
    if scores.bias is not None:
        h, s, t = scores.bias_h, scores.bias_s, scores.bias_t
        bias = table_tile(scores.bias, h, s, t, b, head, start_m, rows, start_n, cols, 0.0, INSIDE)
        logits = logits + bias.to(tl.float32) * 1.4426950408889634
    if scores.slopes is not None:
        distance = tl.abs((first_position - start_n) + rows - cols)
        logits = logits - distance.to(tl.float32) * (of_head(scores.slopes, b, head, shape) * 1.4426950408889634)
    if scores.mask is not None:
        h, s, t = scores.mask_h, scores.mask_s, scores.mask_t
        shown = table_tile(scores.mask, h, s, t, b, head, start_m, rows, start_n, cols, 0, INSIDE) != 0
        logits = tl.where(shown, logits, -float("inf"))
    return logits, slope
