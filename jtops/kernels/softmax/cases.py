"""The SPECs of softmax, log_softmax and logsumexp."""

from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.spec import Case, Meshed, Spec, mask, normal
from jtops.kernels.softmax.op import log_softmax, logsumexp, softmax

_TILES, _BLOCKS, _SPLIT, _STRIDED = (Config(BLOCK_M=2, BLOCK_N=n, PROGRAMS=p) for n, p in ((8, 2), (64, 2), (64, 32), (8, 1)))


def _x(*shape, where=None, p=0.5, name="x", **more):
    """The operand, and a mask if one is asked for by its shape."""
    return {name: normal(shape, **more)} | ({} if where is None else {"where": mask(where, p)})


def _a(*shape, **more):
    return _x(*shape, name="a", **more)


_LAST = {"axis": -1}
_KEEP = {"axis": -1, "keepdims": True}
_LARGE = {"mean": 1000.0, "std": 3.0}
SOFTMAX = Spec(
    name="softmax",
    function=softmax,
    small=(Case("small", _x(3, 4, 8, where=(4, 8), p=0.8), "a mask shared by the batch", axes="b m n, m n -> b m n"),),
    meshed=(Meshed("meshed", _x(16, 8, 32), "rows on many devices", axes="b m n -> b m n", split="b m", gathered="n"),),
    cases=(
        Case("one", _x(5, 1), "a row of one element is 1, with gradient 0"),
        Case("vector", _x(1000), "no batch axis; odd length"),
        Case("odd", _x(3, 5, 257), "rows and columns that fill no block"),
        Case("large_values", _x(4, 100, **_LARGE), "exp overflows unless the maximum goes first"),
        Case("axis0", _x(33, 7), "not the last axis", {"axis": 0}),
        Case("axes", _x(4, 5, 6), "two axes, not neighbours", {"axis": (0, 2)}),
        Case("inner", _x(2, 40, 3, 5, where=(2, 40, 1, 1), p=0.7), "a mask by row of strided columns", {"axis": 1}),
        Case("pair", _x(2, 4, 6, 5, where=(6, 5), p=0.7), "two strided neighbours", {"axis": (1, -2)}, _STRIDED),
        Case("columns", _x(4096, 3, where=(4096, 1)), "few and long columns: turned", {"axis": 0}),
        Case("where", _x(6, 40, where=(6, 40)), "each element masked by itself"),
        Case("where_row", _x(6, 40, where=(40,)), "one mask for all rows"),
        Case("where_column", _x(6, 40, where=(6, 1)), "whole rows masked: all zeros"),
        Case("where_batch", _x(3, 4, 40, where=(3, 1, 40), p=0.7), "a mask per batch element"),
        Case("where_axes", _x(4, 5, 6, where=(4, 5, 1), p=0.7), "a mask on moved axes", {"axis": (0, 2)}),
        Case("tiles", _x(11, 7), "several tiles a program", config=_TILES),
        Case("split", _x(3, 300, where=(3, 300)), "few long rows, several programs each", config=_SPLIT),
        Case("blocks", _x(3, 300), "rows longer than a block: two passes", config=_BLOCKS),
        Case("shifted", _x(8, 101), "rows that begin inside a vector"),
        Case("shifted_blocks", _x(8, 301), "the same, in two passes", config=_BLOCKS),
        Case("shifted_split", _x(8, 301), "the same, by several programs", config=_SPLIT),
        Case("where_blocks", _x(3, 300, where=(3, 300)), "the same, masked", config=_BLOCKS),
    ),
    compiled=(
        Case("short", _x(65536, 256), "several rows a program"),
        Case("middle", _x(8192, 4096), "a row a program"),
        Case("long", _x(64, 131072), "two passes"),
        Case("where", _x(8192, 4096, where=(8192, 4096)), "mask"),
    ),
    tuned=tuple(Case(f"width_{n}", _x(8192, n), f"a model's width or vocabulary: {n}") for n in (4096, 32000, 128256)),
    backward_kernels=1,
    kept=1,
    forward_bytes=lambda y, x, **where: 2 * x.nbytes + sum(w.nbytes for w in where.values()),
    backward_bytes=lambda y, x, **where: 3 * x.nbytes + sum(w.nbytes for w in where.values()),
    model=True,
)
LOG_SOFTMAX = Spec(
    name="log_softmax",
    function=log_softmax,
    small=(Case("small", _x(3, 4, 8), "no mask: what is masked is -inf, which no loss may touch", axes="b m n -> b m n"),),
    meshed=SOFTMAX.meshed,
    cases=(
        Case("one", _x(5, 1), "a row of one element is 0, with gradient 0"),
        Case("odd", _x(3, 5, 257), "rows and columns that fill no block"),
        Case("large_values", _x(4, 100, **_LARGE), "exp overflows unless the maximum goes first"),
        Case("axis0", _x(33, 7), "not the last axis", {"axis": 0}),
        Case("where", _x(6, 40, where=(6, 40)), "each element masked by itself"),
        Case("split", _x(3, 300, where=(3, 300)), "few long rows, several programs each", config=_SPLIT),
        Case("blocks", _x(3, 300, where=(3, 300)), "rows longer than a block: two passes", config=_BLOCKS),
    ),
    compiled=(Case("middle", _x(8192, 4096), "a row a program"), Case("long", _x(64, 131072), "two passes")),
    backward_kernels=1,
    kept=1,
    forward_bytes=SOFTMAX.forward_bytes,
    backward_bytes=SOFTMAX.backward_bytes,
    alike="softmax",
)
LOGSUMEXP = Spec(
    name="logsumexp",
    function=logsumexp,
    small=(Case("small", _a(3, 4, 8, where=(4, 8), p=0.8), "a mask shared by the batch", _KEEP, axes="b m n, m n -> b m 1"),),
    meshed=(Meshed("meshed", _a(16, 8, 32), "rows on many devices", _KEEP, axes="b m n -> b m 1", split="b m", gathered="n"),),
    cases=(
        Case("all", _a(5, 7), "all axes, to a scalar"),
        Case("odd", _a(3, 5, 257), "rows and columns that fill no block", _LAST),
        Case("large_values", _a(4, 100, **_LARGE), "exp overflows otherwise", {"axis": 1}),
        Case("axis0", _a(33, 7), "not the last axis", {"axis": 0, "keepdims": True}),
        Case("axes", _a(4, 5, 6, where=(4, 5, 1), p=0.7), "two axes, not neighbours", {"axis": (0, 2)}),
        Case("split", _a(3, 300, where=(3, 300)), "few long rows, several programs each", _LAST, _SPLIT),
        Case("blocks", _a(3, 300, where=(3, 300)), "rows longer than a block", _LAST, _BLOCKS),
    ),
    compiled=(Case("middle", _a(8192, 4096), "a row a program", _LAST), Case("long", _a(64, 131072), "long rows", _LAST)),
    backward_kernels=1,
    kept=1,
    forward_bytes=lambda y, a, **where: a.nbytes + y.nbytes + sum(w.nbytes for w in where.values()),
    backward_bytes=lambda y, a, **where: 2 * a.nbytes + y.nbytes + sum(w.nbytes for w in where.values()),
)
