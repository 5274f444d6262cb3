"""Forward kernels of the norms and their launcher.

Rows that fit a block, or a cluster of blocks, are held in registers, several to a program where they are short. Longer ones are
read twice: once for their statistics, once to be normalised; by one program each, or, where there are few, by several in two
launches.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.device.rows import length
from jtops.kernels._lib.device.rows import row as row_of
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.rows import host
from jtops.kernels._lib.rows.cluster import cluster_gather, members, part_of_row
from jtops.kernels._lib.rows.device import of_parts, part_of_long_row, rows_of_tile
from jtops.kernels.norm.config import forward_config, tail


class Norm(NamedTuple):
    """What a norm reads: arrays, None where one is absent; or their `Rows`, None where they serve the call's rows plainly. That is
    row by row for x and the residual, and one row for all for scale and bias.
    """

    x: Any = None
    residual: Any = None
    scale: Any = None
    bias: Any = None


class Statistics(NamedTuple):
    """The statistics of each part of a long row, found first: its mean, if rows are centred, and its sum of squared deviations."""

    means: Any
    squares: Any


class Numbers(NamedTuple):
    """The numbers that are added to the variance and to each element of scale."""

    epsilon: float
    scale_offset: float


@triton.jit
def mean_of(total, n):
    """``total / n``, correctly rounded: the default division is not, and a gradient that cancels to 0 would not be 0."""
    return tl.div_rn(total, tl.full(total.shape, n, tl.float32))


@triton.jit
def _parameter(ptr, own, rows, cols, mask, inside_n, n):
    """A tile of scale or bias in float32, of a row for each of `rows` if it has its `own`."""
    if own is not None:
        p = tl.load(ptr + row_of(rows, own)[:, None] * n + cols, mask=mask, other=0.0)
    else:
        p = tl.load(ptr + cols, mask=inside_n, other=0.0, eviction_policy="evict_last")
    return p.to(tl.float32)


@triton.jit
def _input(norm, residual_rows, sum_ptr, offsets, rows, cols, mask, n, EVICT: tl.constexpr):
    """A float32 tile of x; of x + residual as it is stored, where there is a residual, which rows may share."""
    x = tl.load(norm.x + offsets, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if norm.residual is not None:
        residual_offsets = offsets
        if residual_rows is not None:
            residual_offsets = row_of(rows, residual_rows) * n + cols
        x = (x + tl.load(norm.residual + residual_offsets, mask=mask, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + offsets, x, mask=mask)
        x = x.to(tl.float32)
    return x


@triton.jit
def _merged(means, squares, counts, n):
    """Mean and sum of squared deviations of a whole, from those of its parts (Chan, Golub and LeVeque).

    Means are summed as differences from one of them, so that a constant row has exactly its constant as mean.
    """
    origin = tl.max(tl.where(counts > 0, means, -float("inf")), 0)
    origin = tl.where(tl.abs(origin) < float("inf"), origin, 0.0)  # infinities are not to make NaN of what has none
    mean = origin + mean_of(tl.sum(tl.where(counts > 0, counts * (means - origin), 0.0), 0), n)
    return mean, tl.sum(tl.where(counts > 0, squares + counts * (means - mean) * (means - mean), 0.0), 0)


@triton.jit
def _of_cluster(mean, square, turn, n, part_n, CENTRED: tl.constexpr, CLUSTER: tl.constexpr):
    """Mean and sum of squared deviations of a row, from those of each member's columns."""
    means, squares = cluster_gather(mean, square, turn)
    if CENTRED:
        counts = tl.minimum(part_n, n - tl.arange(0, 8) * part_n)
        counts = tl.where(members(CLUSTER) & (counts > 0), counts, 0).to(tl.float32)
        mean, square = _merged(means, squares, counts, n)
    else:
        mean, square = 0.0, tl.sum(tl.where(members(CLUSTER), squares, 0.0), 0)
    return mean + tl.zeros((1,), tl.float32), square + tl.zeros((1,), tl.float32)


@triton.jit
def _scaled(y, rows, cols, mask, inside_n, norm, scale_rows, bias_rows, scale, bias, n, scale_offset, HOLD: tl.constexpr):
    """A tile of normalised rows times scale plus bias; `scale` and `bias` are what is held of them."""
    if norm.scale is not None:
        if not HOLD or scale_rows is not None:
            scale = _parameter(norm.scale, scale_rows, rows, cols, mask, inside_n, n)
        y = y * (scale + scale_offset)
    if norm.bias is not None:
        if not HOLD or bias_rows is not None:
            bias = _parameter(norm.bias, bias_rows, rows, cols, mask, inside_n, n)
        y = y + bias
    return y


@triton.jit
def _held(ptr, own, cols, inside_n, n, HOLD: tl.constexpr):
    p = 0.0
    if HOLD and ptr is not None:  # noqa: SIM102 known while compiling, unlike what it loads
        if own is None:
            p = _parameter(ptr, None, None, cols, None, inside_n, n)
    return p


@triton.jit(do_not_specialize_on_alignment=["own", "work"])
def _forward_kernel(
    norm,
    own,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    n,
    part_n,
    work,
    numbers,
    CENTRED: tl.constexpr,
    HOLD: tl.constexpr,
    UNIT: tl.constexpr,
    TAIL: tl.constexpr,
    FULL: tl.constexpr,
    CLUSTER: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the tiles of BLOCK_M whole rows that `work` gives it; of a cluster, the same `part_n` columns of each.

    Nothing is carried from one tile to the next. Rows a little longer than a power of two have a second tile, of their TAIL.

    The variance is the mean of squared deviations from the mean, never E[x^2] - E[x]^2. HOLD: what all rows share of scale and
    bias stays in registers; else it is read when it is needed, so that registers serve rows on their way.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, None)
    pid, part, cols, inside_n = part_of_row(pid, part_n, n, BLOCK_N, CLUSTER, FULL)
    own_n = n if CLUSTER == 1 else tl.minimum(part_n, n - part * part_n)
    # Triton 3.6 forgets, in a loop, a 1 that it compiles into a bundle's bundle.
    residual_rows, scale_rows, bias_rows = own.residual, own.scale, own.bias
    scale = _held(norm.scale, scale_rows, cols, inside_n, n, HOLD)
    bias = _held(norm.bias, bias_rows, cols, inside_n, n, HOLD)
    if TAIL > 0:
        cols_t = BLOCK_N + tl.arange(0, TAIL)[None, :]
        inside_t = cols_t < n
        scale_t = _held(norm.scale, scale_rows, cols_t, inside_t, n, HOLD)
        bias_t = _held(norm.bias, bias_rows, cols_t, inside_t, n, HOLD)
    for i in tl.range(0, work.tiles, num_stages=num_stages):
        rows = rows_of_tile(i, pid, work, BLOCK_M)
        mask = (rows < work.r)[:, None] & inside_n
        offsets = rows[:, None] * n + cols
        x = _input(norm, residual_rows, sum_ptr, offsets, rows[:, None], cols, mask, n, "evict_first")
        if TAIL > 0:
            mask_t = (rows < work.r)[:, None] & inside_t
            offsets_t = rows[:, None] * n + cols_t
            t = _input(norm, residual_rows, sum_ptr, offsets_t, rows[:, None], cols_t, mask_t, n, "evict_first")
        mean = tl.zeros((BLOCK_M,), tl.float32)
        if CENTRED:
            mean = tl.sum(x, 1)
            if TAIL > 0:
                mean += tl.sum(t, 1)
            mean = mean_of(mean, own_n)
            x = tl.where(inside_n, x - mean[:, None], 0.0)
        square = tl.sum(x * x, 1)
        if TAIL > 0:
            if CENTRED:
                t = tl.where(inside_t, t - mean[:, None], 0.0)
            square += tl.sum(t * t, 1)
        if CLUSTER > 1:
            whole, square = _of_cluster(mean, square, i, n, part_n, CENTRED, CLUSTER)
            x = tl.where(inside_n, x + (mean - whole)[:, None], 0.0)
            mean = whole
        rstd = tl.rsqrt(mean_of(square, n) + numbers.epsilon)
        if part == 0:
            if mean_ptr is not None:
                tl.store(mean_ptr + rows, mean, mask=rows < work.r)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + rows, rstd, mask=rows < work.r)
        y = x * rstd[:, None]
        y = _scaled(y, rows, cols, mask, inside_n, norm, scale_rows, bias_rows, scale, bias, n, numbers.scale_offset, HOLD)
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if TAIL > 0:
            y = t * rstd[:, None]
            y = _scaled(
                y, rows, cols_t, mask_t, inside_t, norm, scale_rows, bias_rows, scale_t, bias_t, n, numbers.scale_offset, HOLD
            )
            tl.store(y_ptr + offsets_t, y.to(y_ptr.dtype.element_ty), mask=mask_t)


@triton.jit
def _base(own, row, n):
    """The offset at which the row of scale or bias begins that serves a row."""
    base = row * 0
    if own is not None:
        base = row_of(row, own) * n
    return base


@triton.jit(do_not_specialize_on_alignment=["own", "split"])
def _long_forward_kernel(
    norm,
    own,
    found,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    part_means_ptr,
    part_squares_ptr,
    n,
    split,
    numbers,
    CENTRED: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one part of a row. It finds the part's statistics, unless all parts' are `found`; then it writes these, if it is
    asked to, or else the result.

    Loop invariant of the first pass: lane j has the mean, and the sum of squared deviations from it, of the elements j, j + BLOCK_N
    ... so far (Welford). The second pass goes backwards: what was read last is still in the cache.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, split.index_type)
    row, part, size, first, last, blocks = part_of_long_row(pid, n, split, 1, BLOCK_N)
    lanes = tl.arange(0, BLOCK_N)
    base = row * n
    residual_rows = own.residual
    if found.squares is None:
        means = tl.zeros((BLOCK_N,), tl.float32)
        squares = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.range(0, blocks, num_stages=num_stages):
            cols = first + i * BLOCK_N + lanes
            x = _input(norm, residual_rows, sum_ptr, base + cols, row, cols, cols < last, n, "")
            if CENTRED:
                step = tl.where(cols < last, x - means, 0.0)
                means += step * (1.0 / tl.full((), i + 1, tl.float32))
                squares += tl.where(cols < last, step * (x - means), 0.0)
            else:
                squares += x * x
        if CENTRED:
            counts = tl.maximum((last - first - lanes + BLOCK_N - 1) // BLOCK_N, 0).to(tl.float32)
            mean, square = _merged(means, squares, counts, last - first)
        else:
            mean, square = 0.0, tl.sum(squares, 0)
    else:
        squares = of_parts(found.squares, row, split, SPLITS, 0.0)
        if CENTRED:
            means = of_parts(found.means, row, split, SPLITS, 0.0)
            counts = tl.maximum(tl.minimum(n - tl.arange(0, SPLITS) * size, size), 0).to(tl.float32)
            mean, square = _merged(means, squares, counts, n)
        else:
            mean, square = 0.0, tl.sum(squares, 0)
    if part_squares_ptr is not None:
        if CENTRED:
            tl.store(part_means_ptr + pid, mean)
        tl.store(part_squares_ptr + pid, square)
    else:
        rstd = tl.rsqrt(mean_of(square, n) + numbers.epsilon)
        if part == 0:
            if mean_ptr is not None:
                tl.store(mean_ptr + row, mean)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + row, rstd)
        scale_base, bias_base = _base(own.scale, row, n), _base(own.bias, row, n)
        if norm.residual is not None:
            tl.debug_barrier()  # the sum is read by other threads than those that wrote it
        for i in tl.range(0, blocks, num_stages=num_stages):
            cols = first + (blocks - 1 - i) * BLOCK_N + lanes
            if norm.residual is not None:
                x = tl.load(sum_ptr + base + cols, mask=cols < last, other=0.0).to(tl.float32)
            else:
                x = tl.load(norm.x + base + cols, mask=cols < last, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = (x - mean) * rstd
            if norm.scale is not None:
                scale = tl.load(norm.scale + scale_base + cols, mask=cols < last, other=0.0).to(tl.float32)
                y = y * (scale + numbers.scale_offset)
            if norm.bias is not None:
                y = y + tl.load(norm.bias + bias_base + cols, mask=cols < last, other=0.0).to(tl.float32)
            tl.store(y_ptr + base + cols, y.to(y_ptr.dtype.element_ty), mask=cols < last, eviction_policy="evict_first")


def _served(launch: Launch, operands, x: str, residual: str) -> Norm:
    """The `Rows` of operands that do not serve the call's rows plainly, by the kernel's names of them."""
    rows = launch.rows._asdict()
    own = {name: rows.get(name) for name in ("scale", "bias")}
    return Norm(
        residual=rows[residual] if residual in rows and rows[residual].own < launch.batch else None,
        **{name: r if r is not None and r.own > 1 else None for name, r in own.items()},
    )


def forward(launch: Launch, operands, *, adds: bool, centred: bool) -> tuple:
    """Launch for all four ops. They differ in whether they add a residual to x, and whether they centre."""
    x, residual = "x", "residual"
    if adds and launch.rows.x.own < launch.batch == launch.rows.residual.own:
        x, residual = residual, x  # the kernel lets rows share what it calls the residual
    given = operands._asdict()
    norm = Norm(launch.full(x, given[x]), given.get(residual), operands.scale, given.get("bias"))
    r, n = norm.x.shape
    arguments = {
        "norm": norm,
        "own": _served(launch, operands, x, residual),
        "n": n,
        "numbers": Numbers(launch.options["epsilon"], launch.options["scale_offset"]),
        "CENTRED": centred,
        "UNIT": host.unit(n),
    }
    heuristic = forward_config(launch, r, n, norm.x.dtype.itemsize, arrays=1 + adds)
    config = launch.choose(heuristic, (_forward_kernel, _long_forward_kernel), arguments, r=next_power_of_2(r))
    of_rows = jax.ShapeDtypeStruct((r,), jnp.float32) if launch.residuals else None
    outputs = {
        "y_ptr": jax.ShapeDtypeStruct((r, n), operands.x.dtype),
        "sum_ptr": jax.ShapeDtypeStruct((r, n), jnp.promote_types(norm.x.dtype, norm.residual.dtype)) if adds else None,
        "mean_ptr": of_rows if centred else None,
        "rstd_ptr": of_rows,
    }
    run = _whole if n - tail(config, n) <= host.room(config) else _long
    got = run(launch, config, arguments, outputs)
    return tuple(value for value in got.values() if value is not None)


def _whole(launch: Launch, config: Config, arguments: dict[str, Any], outputs) -> dict[str, Any]:
    r, n = arguments["norm"].x.shape
    shared = host.whole_rows(config, r, n)
    hold = shared["work"].tiles > 1
    return launch(_forward_kernel, outputs=outputs, flops=8 * r * n, HOLD=hold, TAIL=tail(config, n), **shared, **arguments)


def _long(launch: Launch, config: Config, arguments: dict[str, Any], outputs) -> dict[str, Any]:
    """Launch once, or twice where rows have several parts. The first then finds the parts' statistics, and the sum if asked for."""
    norm = arguments["norm"]
    r, n = norm.x.shape
    shared = {**arguments, **host.long_rows(config, r, n), "flops": 8 * r * n}
    nothing = {"part_means_ptr": None, "part_squares_ptr": None}
    if shared["split"].splits == 1:
        return launch(_long_forward_kernel, outputs=outputs | nothing, found=Statistics(None, None), **shared)
    part = jax.ShapeDtypeStruct((r, shared["split"].splits), jnp.float32)
    parts = {"part_means_ptr": part if arguments["CENTRED"] else None, "part_squares_ptr": part}
    wanted = {**dict.fromkeys(outputs), "sum_ptr": outputs["sum_ptr"], **parts}
    first = shared | {"norm": norm._replace(scale=None, bias=None)}
    got = launch(_long_forward_kernel, outputs=wanted, name=f"{launch.stage}_statistics", found=Statistics(None, None), **first)
    found = Statistics(got["part_means_ptr"], got["part_squares_ptr"])
    if got["sum_ptr"] is not None:
        shared["norm"] = norm._replace(x=got["sum_ptr"], residual=None)
    late = launch(_long_forward_kernel, outputs={**outputs, "sum_ptr": None, **nothing}, found=found, **shared)
    return late | {"sum_ptr": got["sum_ptr"]}
