"""Device functions that several ops share, and what their launchers tell them."""

import math

from jtops._compat.triton import tl, triton

# Counts of rows, and what follows from them. Whether 16 divides them aligns no address: no kernel is compiled anew for it.
COUNTS = (
    *("r", "m", "tiles", "programs", "parts", "group_rows", "rows_per_part", "splits", "shares"),
    *(f"{name}_{part}" for name in ("where", "residual", "scale", "bias", "x", "y") for part in ("inner", "own", "rows")),
)
counted = triton.jit(do_not_specialize_on_alignment=COUNTS)


@triton.jit
def row(b, rows):
    """The row of an operand that serves row b of the call; `rows` is the operand's `Rows`."""
    return b // rows.inner % rows.own


@triton.jit
def own_row(row, inner, own):
    """The row of an operand that serves row `row` of the call (see `Rows`)."""
    return row // inner % own


@triton.jit
def multiple_of(n, UNIT: tl.constexpr):
    """`n`, which is a multiple of UNIT, in a form from which the compiler sees it: what is aligned is loaded by vectors."""
    return n // UNIT * UNIT


def unit(n: int) -> int:
    """UNIT for a size: a multiple of 16 is known to be one already, what else a vector of 8 divides has to be said."""
    return 1 if n % 16 == 0 else math.gcd(n, 8)


_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """exp(x), where what is below 2^-126 may be 0: a third of the instructions of ``tl.exp``, which scales to save it."""
    return tl.exp2(x * _LOG2E)
