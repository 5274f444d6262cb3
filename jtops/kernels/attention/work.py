"""Which tile a program does, apart from what it does there."""

from jtops._compat.triton import tl, triton


@triton.jit
def tile_of_queries(pid, shape, BLOCK: tl.constexpr):
    """-> batch element, head, first query. The latest queries, which under causality see most keys, are first."""
    blocks = tl.cdiv(shape.s, BLOCK)
    line = pid // blocks
    return line // shape.h, line % shape.h, (blocks - 1 - pid % blocks) * BLOCK


@triton.jit
def tile_of_keys(pid, shape, BLOCK: tl.constexpr):
    """-> batch element, key/value head, first key. The earliest keys, which under causality most queries see, are first."""
    blocks = tl.cdiv(shape.t, BLOCK)
    line = pid // blocks
    return line // shape.g, line % shape.g, pid % blocks * BLOCK
