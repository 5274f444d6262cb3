"""The choice of a program's tile, apart from what the program does there."""

from jtops._compat.triton import tl, triton


@triton.jit
def tile_of_queries(pid, shape, BLOCK: tl.constexpr):
    """Return batch element, head and first query. The latest queries, which see most keys under causality, are first."""
    blocks = tl.cdiv(shape.s, BLOCK)
    line = pid // blocks
    return line // shape.h, line % shape.h, (blocks - 1 - pid % blocks) * BLOCK


@triton.jit
def tile_of_keys(pid, shape, BLOCK: tl.constexpr):
    """Return batch element, key/value head and first key. The earliest keys, which most queries see under causality, are first."""
    blocks = tl.cdiv(shape.t, BLOCK)
    line = pid // blocks
    return line // shape.g, line % shape.g, pid % blocks * BLOCK
