"""Device functions that several ops share."""

from jtops._compat.triton import tl, triton


@triton.jit
def row(b, rows):
    """The row of an operand that serves row b of the call; `rows` is the operand's `Rows`. Gluon kernels use it, too."""
    # Counts past 2^31 would be unsigned beside b, which `//` refuses.
    return b // tl.cast(rows.inner, b.dtype) % tl.cast(rows.own, b.dtype)


@triton.jit
def length(n, UNIT: tl.constexpr, INDEX: tl.constexpr):
    """`n` in a form that shows the compiler that it is a multiple of UNIT: what is aligned is loaded by vectors.

    INDEX: where positions among n need 64 bits (see `index_type` of `jtops.kernels._lib.rows.host`), n has them, too.
    """
    if INDEX is not None:
        n = tl.full((), n, tl.int64)
    return n // UNIT * UNIT


@triton.jit
def position(i, INDEX: tl.constexpr):
    """A count of blocks in the type of positions, which the INDEX of `length` gives."""
    return i.to(tl.int32 if INDEX is None else tl.int64)


LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(x):
    """``exp(x)``, where results below 2^-126 may be 0: a third of the instructions of ``tl.exp``, which scales to save them."""
    return tl.exp2(x * LOG2E)
