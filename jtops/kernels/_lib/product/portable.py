"""The product for every GPU: its launcher, and one kernel into which the choice of tiles and what becomes of them are plugged."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import precision as precisions
from jtops.kernels._lib.frame.launch import Launch
from jtops.kernels._lib.product import tiles
from jtops.kernels._lib.product.side import load, masked, pointers, step_down, step_right

# ------------------------------------------------------------------------------------------------------------- on the device


class Term(NamedTuple):
    """What is added to each sum: sum i gets a @ bs[i]. The operands are `Side`s in a kernel and `Matrix`es on the host."""

    a: Any
    bs: tuple


class Problem(NamedTuple):
    """Sizes of the product, and which ends of c cut a tile (see `Side`)."""

    m: Any
    n: Any
    k: Any
    masked: str


class Work(NamedTuple):
    """How programs share a dense product: k in `splits` sums of `k_per_split`, a multiple of BLOCK_K."""

    splits: Any
    k_per_split: Any


class Tile(NamedTuple):
    """What one program does: rows and columns of c from m and n on, of row `batch` of the call, summed over first_k to last_k.

    `line` is the matrix of c that it belongs to.
    """

    line: Any
    batch: Any
    m: Any
    n: Any
    first_k: Any
    last_k: Any


class Place(NamedTuple):
    """Where sums stand: offsets in c and which are inside; row of the call, number of columns, the tile's and which are inside."""

    offsets: Any
    inside: Any
    batch: Any
    n: Any
    columns: Any
    columns_inside: Any


@triton.jit
def dense(pid, problem, work, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The schedule down columns of 8 tiles, so that programs that run together share lines of a and b in the L2 cache."""
    tiles_m = tl.cdiv(problem.m, BLOCK_M)
    tiles_n = tl.cdiv(problem.n, BLOCK_N)
    tile = pid % (tiles_m * tiles_n)
    line = pid // (tiles_m * tiles_n)
    first_m = tile // (8 * tiles_n) * 8
    pid_m = first_m + tile % (8 * tiles_n) % tl.minimum(tiles_m - first_m, 8)
    pid_n = tile % (8 * tiles_n) // tl.minimum(tiles_m - first_m, 8)
    first_k = line % work.splits * work.k_per_split
    last_k = tl.minimum(first_k + work.k_per_split, problem.k)
    batch = (line // work.splits).to(tl.int64)
    return Tile(line, batch, pid_m.to(tl.int64) * BLOCK_M, pid_n.to(tl.int64) * BLOCK_N, first_k, last_k)


@triton.jit
def store(sums, nothing, c_ptr, d_ptr, place):
    """The epilogue of a plain product: the first sum to c, the second, if there is one, to d."""
    tl.store(c_ptr + place.offsets, sums[0].to(c_ptr.dtype.element_ty), mask=place.inside)
    if d_ptr is not None:
        tl.store(d_ptr + place.offsets, sums[1].to(d_ptr.dtype.element_ty), mask=place.inside)


@triton.jit
def _with(items, item):
    """The tuple with one more item."""
    return items + (item,)  # noqa: RUF005 (Triton has no unpacking)


@triton.jit
def _add(
    sums, term, tile, offs_m, offs_n, DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Add one term to the sums. Loop invariant: sums[i] has a @ bs[i] over the k before."""
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = pointers(term.a, tile.batch, offs_m, tile.first_k + offs_k)
    b_ptrs = ()
    for i in tl.static_range(SUMS):
        b_ptrs = _with(b_ptrs, pointers(term.bs[i], tile.batch, tile.first_k + offs_k, offs_n))
    for start in range(tile.first_k, tile.last_k, BLOCK_K):
        x = load(term.a, a_ptrs, offs_m, offs_k, 0, start).to(DOT_DTYPE)
        next_ptrs = ()
        next_sums = ()
        for i in tl.static_range(SUMS):
            y = load(term.bs[i], b_ptrs[i], offs_k, offs_n, start, 0).to(DOT_DTYPE)
            next_sums = _with(next_sums, tl.dot(x, y, sums[i], input_precision=PRECISION))
            next_ptrs = _with(next_ptrs, b_ptrs[i] + step_down(term.bs[i], BLOCK_K))
        a_ptrs += step_right(term.a, BLOCK_K)
        b_ptrs = next_ptrs
        sums = next_sums
    return sums


@triton.jit
def _finish(sums, epilogue, c_ptr, d_ptr, problem, tile, offs_m, offs_n, EPILOGUE: tl.constexpr):
    columns_inside = offs_n < problem.n
    if problem.masked == "none":
        inside = tl.full(sums[0].shape, True, tl.int1)
    else:
        inside = (offs_m < problem.m)[:, None] & columns_inside[None, :]
    offsets = tile.line.to(tl.int64) * problem.m * problem.n + offs_m[:, None] * problem.n + offs_n[None, :]
    EPILOGUE(sums, epilogue, c_ptr, d_ptr, Place(offsets, inside, tile.batch, problem.n, offs_n, columns_inside))


@triton.jit
def product_kernel(
    terms,
    epilogue,
    c_ptr,
    d_ptr,
    problem,
    work,
    SCHEDULE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
    SUMS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: the tile that SCHEDULE gives it, of one or two sums over all terms; EPILOGUE makes c, and d, of them.

    PARTS is 2 if the epilogue shall see the left and the right half of the tile one after the other: some epilogues hold so much
    beside the sums that the largest tile would spill.
    """
    tile = SCHEDULE(tl.program_id(0), problem, work, BLOCK_M, BLOCK_N)
    offs_m = tile.m + tl.arange(0, BLOCK_M)
    offs_n = tile.n + tl.arange(0, BLOCK_N)
    sums = ()
    for _ in tl.static_range(SUMS):
        sums = _with(sums, tl.zeros((BLOCK_M, BLOCK_N), tl.float32))
    for t in tl.static_range(TERMS):
        sums = _add(sums, terms[t], tile, offs_m, offs_n, DOT_DTYPE, PRECISION, SUMS, BLOCK_K)
    if PARTS == 2:
        left = ()
        right = ()
        for i in tl.static_range(SUMS):
            one, other = tl.split(tl.permute(tl.reshape(sums[i], (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
            left = _with(left, one)
            right = _with(right, other)
        offs_n = tile.n + tl.arange(0, BLOCK_N // 2)
        _finish(left, epilogue, c_ptr, d_ptr, problem, tile, offs_m, offs_n, EPILOGUE)
        _finish(right, epilogue, c_ptr, d_ptr, problem, tile, offs_m, offs_n + BLOCK_N // 2, EPILOGUE)
    else:
        _finish(sums, epilogue, c_ptr, d_ptr, problem, tile, offs_m, offs_n, EPILOGUE)


# --------------------------------------------------------------------------------------------------------------- on the host

_TL_DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
_WORTH_PADDING = 64  # least size in every direction


class Epilogue(NamedTuple):
    """The epilogue of a product: what becomes of the sums.

    `kernel(sums, arguments, c_ptr, d_ptr, place)` is jitted; `arguments` is a NamedTuple or None. `plain` does the same to whole
    float32 sums [batch, m, n] in jax.numpy, where k was split. `heavy` says that it holds much beside the sums.
    """

    kernel: Any = store
    arguments: Any = None
    plain: Callable[..., tuple] = lambda *sums: sums
    heavy: bool = False


STORE = Epilogue()


def product(
    launch: Launch,
    terms: tuple[Term, ...],
    batch: int,
    dtypes: tuple,
    epilogue: Epilogue = STORE,
    name: str = "",
) -> tuple[jax.Array, ...]:
    """Apply `epilogue` to the sums of `terms`, in one launch: one or two arrays [batch, m, n] of these dtypes.

    Where k is split, XLA completes the sums and applies the epilogue: two stages, and the same order every time.
    """
    (m, k), (_, n), sums = terms[0].a.shape, terms[0].bs[0].shape, len(terms[0].bs)
    if min(m, n, k) >= _WORTH_PADDING:
        terms = tuple(Term(t.a.padded(), tuple(b.padded() for b in t.bs)) for t in terms)
    dot_dtype = jnp.result_type(*(x.array for t in terms for x in (t.a, *t.bs)))
    precision = precisions.dot_precision(launch.options["precision"], launch.target)
    arithmetic = "half" if dot_dtype.itemsize == 2 else "tf32" if precision == "tf32" else "tf32x3"
    b_transposed = any(b.transposed for t in terms for b in t.bs)
    shape = tiles.Shape(m, n, k, batch, sums, len(terms), dot_dtype.itemsize, arithmetic, b_transposed)
    constants = {"DOT_DTYPE": _TL_DTYPES[str(dot_dtype)], "PRECISION": precision, "TERMS": len(terms), "SUMS": sums}
    results = _outputs(dtypes, (batch, m, n))
    config = launch.choose(
        tiles.heuristic(shape, launch.target),
        (product_kernel, dense, epilogue.kernel),
        {
            "terms": _sides(terms, 0, 0, 0),
            "epilogue": epilogue.arguments,
            "problem": Problem(m, n, k, masked(m, n, 0, 0)),
            "EPILOGUE": epilogue.kernel,
            **results,
            **constants,
        },
        name=name or ("out" if results["d_ptr"] is None else "fwd"),
        rounded=_SIZES,
        aligned=_SIZES,
        batch=next_power_of_2(batch),
    )
    block_m, block_n, block_k = (config[f"BLOCK_{axis}"] for axis in "MNK")
    k_per_split = cdiv(cdiv(k, shape.splits(config, launch.target)), block_k) * block_k
    splits = cdiv(k, k_per_split)
    after = epilogue if splits == 1 else STORE
    out = launch(
        product_kernel,
        config=config,
        name=name,
        flops=2 * batch * m * n * k * sums * len(terms),
        grid=batch * splits * cdiv(m, block_m) * cdiv(n, block_n),
        outputs=results if splits == 1 else _outputs((jnp.float32,) * sums, (batch, splits, m, n)),
        terms=_sides(terms, block_m, block_n, block_k),
        epilogue=after.arguments,
        problem=Problem(m, n, k, masked(m, n, block_m, block_n)),
        work=Work(splits, k_per_split),
        SCHEDULE=dense,
        EPILOGUE=after.kernel,
        PARTS=2 if block_n >= 128 and after.heavy else 1,
        **constants,
    )
    written = [x for x in out.values() if x is not None]
    if splits > 1:
        written = [x.astype(d) for x, d in zip(epilogue.plain(*(x.sum(1) for x in written)), dtypes, strict=False)]
    return tuple(written)


def _sides(terms: tuple[Term, ...], block_m: int, block_n: int, block_k: int) -> tuple[Term, ...]:
    return tuple(Term(t.a.side(block_m, block_k), tuple(b.side(block_k, block_n) for b in t.bs)) for t in terms)


# Only the size of these integers, and how wide they can be loaded, matters for a choice of tiles.
_SIZES = frozenset(
    [f"problem.{size}" for size in "mnk"]
    + [f"terms[{t}].{side}.{size}" for t in range(2) for side in ("a", "bs[0]", "bs[1]") for size in ("lines", "length")]
)


def _outputs(dtypes: tuple, shape: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct | None]:
    return {x: jax.ShapeDtypeStruct(shape, d) if d else None for x, d in zip(("c_ptr", "d_ptr"), (*dtypes, None), strict=False)}
