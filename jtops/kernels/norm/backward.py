"""Backward kernels of the norms and their launcher.

With x_hat the normalised row and w = g * (scale + scale_offset): dx = rstd * (w - mean(w) - x_hat * mean(w * x_hat)), dscale sums
g * x_hat over rows, dbias sums g. Without a mean, mean(w) is left out.

Rows that fit a block, or a cluster of blocks, are read once. Longer ones are read twice, because the sums of their parameters'
gradients fit no program's registers: a first launch gives each program a part of the columns and finds all sums, a second gives dx.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.rows import length, position
from jtops.kernels._lib.device.rows import row as row_of
from jtops.kernels._lib.frame.launch import Config, Launch, Rows
from jtops.kernels._lib.rows import host
from jtops.kernels._lib.rows.cluster import cluster_gather, members, part_of_row
from jtops.kernels._lib.rows.sums import sum_parts
from jtops.kernels.norm.config import backward_config
from jtops.kernels.norm.forward import mean_of


class Given(NamedTuple):
    """What the backward reads; None where it is absent: the mean in rms_norm, the sum's cotangent where nothing is added."""

    x: Any
    scale: Any
    g: Any
    dsum: Any
    mean: Any
    rstd: Any


class Groups(NamedTuple):
    """How programs share the rows: groups of `rows` neighbours that share their parameters, each in `parts` of `tiles` tiles."""

    rows: int
    parts: int
    tiles: int


class Shares(NamedTuple):
    """The parts of sum(w) and sum(w x_hat) that each block of columns of a row has, and the number of blocks."""

    sum_w: Any
    sum_wx: Any
    blocks: int


_SHARES = 8192  # that each program of a launch sums anew; more, of rows of millions, are summed before


@triton.jit
def _statistic(ptr, rows, mask):
    """A column of a statistic per row; 0 where it is absent, as the mean is in rms_norm."""
    value = tl.zeros((rows.shape[0], 1), tl.float32)
    if ptr is not None:
        value = tl.load(ptr + rows, mask=mask, other=0.0)[:, None]
    return value


@triton.jit
def _scale(scale_ptr, own, row, cols, mask, n, scale_offset):
    """The ``scale + scale_offset`` of a row; 1 where there is none. `own`: scale's `Rows`, None where it has one for all."""
    scale = 1.0
    if scale_ptr is not None:
        base = row * 0
        if own is not None:
            base = row_of(row, own) * n
        scale = tl.load(scale_ptr + base + cols, mask=mask, other=0.0).to(tl.float32) + scale_offset
    return scale


@triton.jit
def _terms(given, offsets, mask, mean, rstd, scale):
    """The x_hat, g and w of a tile."""
    x = tl.load(given.x + offsets, mask=mask, other=0.0).to(tl.float32)
    x_hat = tl.where(mask, (x - mean) * rstd, 0.0)
    g = tl.load(given.g + offsets, mask=mask, other=0.0).to(tl.float32)
    w = g
    if given.scale is not None:
        w = g * scale
    return x_hat, g, w


@triton.jit
def _store_dx(dx_ptr, given, offsets, mask, dx):
    if given.dsum is not None:  # what the sum's own cotangent adds
        dx = dx + tl.load(given.dsum + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_sum(ptr, pid, n, cols, inside_n, sums):
    if ptr is not None:
        total = tl.sum(sums, 0, keep_dims=True).to(ptr.dtype.element_ty)
        tl.store(ptr + pid * n + cols, total, mask=inside_n)


@triton.jit
def _rows_of_group(i, group, part, groups, BLOCK_M: tl.constexpr):
    """Return the rows of a part's tile number i, and which of them are of the group."""
    rows = group * groups.rows + (i * groups.parts + part) * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, rows < (group + 1) * groups.rows


@triton.jit(do_not_specialize_on_alignment=["groups", "own"])
def _backward_kernel(
    given,
    dx_ptr,
    dscale_ptr,
    dbias_ptr,
    n,
    part_n,
    groups,
    own,
    scale_offset,
    UNIT: tl.constexpr,
    FULL: tl.constexpr,
    CLUSTER: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one part of a group of rows; in a cluster the same `part_n` columns of each.

    Loop invariant: element (i, j) of dscale and dbias has the sums over the rows so far that stood i-th in their tile.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, None)
    pid, _, cols, inside_n = part_of_row(pid, part_n, n, BLOCK_N, CLUSTER, FULL)
    group, part = pid // groups.parts, pid % groups.parts
    scale = _scale(given.scale, own, group * groups.rows, cols, inside_n, n, scale_offset)
    dscale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(0, groups.tiles, num_stages=num_stages):
        rows, here = _rows_of_group(i, group, part, groups, BLOCK_M)
        mask = here[:, None] & inside_n
        offsets = rows[:, None] * n + cols
        mean, rstd = _statistic(given.mean, rows, here), _statistic(given.rstd, rows, here)
        x_hat, g, w = _terms(given, offsets, mask, mean, rstd, scale)
        sum_wx = tl.sum(w * x_hat, 1)
        sum_w = tl.zeros((BLOCK_M,), tl.float32)
        if given.mean is not None:
            sum_w = tl.sum(w, 1)
        if CLUSTER > 1:
            sums_w, sums_wx = cluster_gather(sum_w, sum_wx, i)
            sum_w = tl.sum(tl.where(members(CLUSTER), sums_w, 0.0), 0)[None]
            sum_wx = tl.sum(tl.where(members(CLUSTER), sums_wx, 0.0), 0)[None]
        mean_w, mean_wx = mean_of(sum_w, n), mean_of(sum_wx, n)
        dx = w
        if given.mean is not None:
            dx = dx - mean_w[:, None]
        _store_dx(dx_ptr, given, offsets, mask, rstd * (dx - x_hat * mean_wx[:, None]))
        if dscale_ptr is not None:
            dscale += g * x_hat
        if dbias_ptr is not None:
            dbias += g
    _write_sum(dscale_ptr, pid, n, cols, inside_n, dscale)
    _write_sum(dbias_ptr, pid, n, cols, inside_n, dbias)


@triton.jit(do_not_specialize_on_alignment=["groups", "own"])
def _sums_kernel(
    given,
    dscale_ptr,
    dbias_ptr,
    sum_w_ptr,
    sum_wx_ptr,
    n,
    groups,
    own,
    scale_offset,
    UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_N columns of one part of a group, as above; and each row's share of sum(w) and sum(w x_hat)."""
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, INDEX)
    blocks = tl.cdiv(n, BLOCK_N)
    block, pid = position(pid % blocks, INDEX), pid // blocks
    group, part = pid // groups.parts, pid % groups.parts
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    scale = _scale(given.scale, own, group * groups.rows, cols, cols < n, n, scale_offset)
    dscale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.range(0, groups.tiles, num_stages=num_stages):
        rows, here = _rows_of_group(i, group, part, groups, BLOCK_M)
        mask = here[:, None] & (cols < n)
        mean, rstd = _statistic(given.mean, rows, here), _statistic(given.rstd, rows, here)
        x_hat, g, w = _terms(given, rows[:, None] * n + cols, mask, mean, rstd, scale)
        tl.store(sum_wx_ptr + rows * blocks + block, tl.sum(w * x_hat, 1), mask=here)
        if given.mean is not None:
            tl.store(sum_w_ptr + rows * blocks + block, tl.sum(w, 1), mask=here)
        if dscale_ptr is not None:
            dscale += g * x_hat
        if dbias_ptr is not None:
            dbias += g
    _write_sum(dscale_ptr, pid, n, cols, cols < n, dscale)
    _write_sum(dbias_ptr, pid, n, cols, cols < n, dbias)


@triton.jit
def _mean_of_shares(ptr, row, count, n, SHARES: tl.constexpr):
    share = tl.arange(0, SHARES)
    return mean_of(tl.sum(tl.load(ptr + row * count + share, mask=share < count, other=0.0), 0), n)


@triton.jit(do_not_specialize_on_alignment=["own"])
def _dx_kernel(
    given,
    shares,
    dx_ptr,
    n,
    own,
    scale_offset,
    SHARES: tl.constexpr,
    UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_N elements of a row of dx. Programs go backwards: what `_sums_kernel` read last is still in the cache."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    n = length(n, UNIT, INDEX)
    blocks = tl.cdiv(n, BLOCK_N)
    row, cols = pid // blocks, position(pid % blocks, INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(given.x + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    w = tl.load(given.g + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    if given.scale is not None:
        w = w * _scale(given.scale, own, row, cols, cols < n, n, scale_offset)
    mean = 0.0
    rstd = tl.load(given.rstd + row)
    dx = w
    if given.mean is not None:
        mean = tl.load(given.mean + row)
        dx = dx - _mean_of_shares(shares.sum_w, row, shares.blocks, n, SHARES)
    mean_wx = _mean_of_shares(shares.sum_wx, row, shares.blocks, n, SHARES)
    _store_dx(dx_ptr, given, row * n + cols, cols < n, rstd * (dx - (x - mean) * rstd * mean_wx))


def _backend_options(launch: Launch, config: Config) -> dict[str, Any]:
    """Compiler options without fused multiply-add, which would subtract the rounded mean(w) from the unrounded w, so that terms
    that should cancel would not.

    With 16 elements a thread, what a program carries fits 128 registers (sm_90, without spills), so that two programs share a
    multiprocessor; left alone, the compiler takes 163.
    """
    elements = config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    limit = {"maxnreg": 128} if launch.target.platform == "cuda" and elements <= 16 and config["num_warps"] <= 16 else {}
    return {"enable_fp_fusion": False, **limit}


def backward(launch: Launch, operands, saved, cotangents, *, adds: bool, centred: bool) -> tuple:
    """Launch for all four ops. Those that add have saved their sum and get its cotangent, too; x and residual share a gradient."""
    dsum = cotangents.sum if adds else None
    parameters = {name: getattr(operands, name) for name in ("scale", "bias") if name in operands._fields}
    rows = {name: getattr(launch.rows, name) for name in parameters}
    wanted = {name: getattr(launch.wanted, name) for name in parameters}
    if cotangents.y is None:  # only the sum was used
        dx = dsum
        totals = {name: jnp.zeros(p.shape, p.dtype) for name, p in parameters.items() if wanted[name]}
    else:
        x = saved.sum if adds else launch.full("x", operands.x)
        given = Given(x, operands.scale, cotangents.y, dsum, saved.mean if centred else None, saved.rstd)
        # Groups of neighbouring rows that share all parameters' rows; each is summed in parts.
        group_rows = min((own.inner for own in rows.values() if own and own.own > 1), default=launch.batch)
        dtypes = {name: p.dtype for name, p in parameters.items() if wanted[name]}
        dx, partial = _launched(launch, given, group_rows, dtypes)
        totals = _totals(launch, partial, group_rows, rows, dtypes)
    gradients = {"x": dx, "residual": dx, **totals}
    return tuple(gradients[name] if asked else None for name, asked in launch.wanted._asdict().items())


def _launched(launch: Launch, given: Given, group_rows: int, dtypes: dict[str, Any]):
    """Return dx and, for each parameter in `dtypes`, which has its gradient's type, the parts' sums: arrays [groups, parts, n]."""
    r, n = given.x.shape
    own = launch.rows.scale
    arguments = {
        "given": given,
        "n": n,
        "own": own if own is not None and own.own > 1 else None,
        "scale_offset": launch.options["scale_offset"],
        "UNIT": host.unit(n),
    }
    heuristic = backward_config(launch, r, n, given.x.dtype.itemsize, arrays=2 if given.dsum is None else 3)
    kernels = (_backward_kernel, _sums_kernel, _dx_kernel)
    config = launch.choose(
        heuristic,
        kernels,
        arguments,
        wanted=tuple(dtypes),
        r=next_power_of_2(r),
        groups=next_power_of_2(r // group_rows),
    )
    arguments["backend_options"] = _backend_options(launch, config)
    run = _whole if n <= host.room(config) else _long
    return run(launch, config, arguments, group_rows, dtypes)


def _groups(config: Config, count: int, rows: int, blocks: int = 1) -> Groups:
    """The grid of so many groups of rows, whose columns are in so many blocks."""
    total = cdiv(rows, config["BLOCK_M"])
    programs = config["PROGRAMS"] or count * blocks * total
    tiles = cdiv(total, min(total, max(1, programs // (count * blocks))))
    return Groups(rows, cdiv(total, tiles), tiles)


def _whole(launch: Launch, config: Config, arguments: dict[str, Any], group_rows: int, dtypes):
    """Launch once, for rows that a program, or a cluster, holds."""
    x = arguments["given"].x
    r, n = x.shape
    count = r // group_rows
    groups = _groups(config, count, group_rows)
    sums = _sum_types(count, groups.parts, n, dtypes)
    shared = host.clustered(config, n, count * groups.parts) | arguments
    outputs = {"dx_ptr": jax.ShapeDtypeStruct((r, n), x.dtype), **sums}
    got = launch(_backward_kernel, outputs=outputs, groups=groups, flops=16 * r * n, **shared)
    return got["dx_ptr"], [got[name] for name in sums if got[name] is not None]


def _long(launch: Launch, config: Config, arguments: dict[str, Any], group_rows: int, dtypes):
    """Launch twice, for rows that are too long to hold."""
    given = arguments["given"]
    r, n = given.x.shape
    count, blocks = r // group_rows, cdiv(n, config["BLOCK_N"])
    groups = _groups(config, count, group_rows, blocks)
    share = jax.ShapeDtypeStruct((r, blocks), jnp.float32)
    sums = _sum_types(count, groups.parts, n, dtypes)
    arguments |= {"INDEX": host.index_type(n)}
    got = launch(
        _sums_kernel,
        outputs={**sums, "sum_w_ptr": None if given.mean is None else share, "sum_wx_ptr": share},
        config=host.launched(config),
        grid=count * groups.parts * blocks,
        name=f"{launch.stage}_sums",
        flops=10 * r * n,
        groups=groups,
        **arguments,
    )
    shares = Shares(got["sum_w_ptr"], got["sum_wx_ptr"], blocks)
    if blocks > _SHARES:
        whole = lambda sums: None if sums is None else sums.sum(1, keepdims=True)
        shares = Shares(whole(shares.sum_w), whole(shares.sum_wx), 1)
    block = config["BLOCK_M"] * config["BLOCK_N"]
    dx = launch(
        _dx_kernel,
        outputs={"dx_ptr": jax.ShapeDtypeStruct((r, n), given.x.dtype)},
        config=Config(BLOCK_N=block, num_warps=config["num_warps"]),
        grid=r * cdiv(n, block),
        flops=8 * r * n,
        shares=shares,
        SHARES=next_power_of_2(shares.blocks),
        **arguments,
    )
    return dx["dx_ptr"], [got[name] for name in sums if got[name] is not None]


def _sum_types(groups: int, parts: int, n: int, dtypes: dict[str, Any]) -> dict[str, jax.ShapeDtypeStruct | None]:
    """Sums of parts are float32; what needs no second stage has its parameter's dtype at once."""
    done = groups == parts == 1
    of = lambda name: jax.ShapeDtypeStruct((groups, parts, n), dtypes[name] if done else jnp.float32) if name in dtypes else None
    return {"dscale_ptr": of("scale"), "dbias_ptr": of("bias")}


def _totals(launch: Launch, partial: list, group_rows: int, rows: dict[str, Any], dtypes: dict[str, Any]) -> dict[str, jax.Array]:
    """Gradients of scale and bias from sums [groups, parts, n], in the order of `dtypes`."""
    if not partial:
        return {}
    groups = partial[0].shape[0]
    totals = sum_parts(launch, partial, [dtype if groups == 1 else jnp.float32 for dtype in dtypes.values()])
    return {name: _complete(rows[name], total, group_rows) for name, total in zip(dtypes, totals, strict=True)}


def _complete(own: Rows, group_sums, group_rows: int):
    """Add the groups' sums up to one per row of the parameter."""
    if len(group_sums) == 1:
        return group_sums
    if own.own > 1:
        return Rows(own.inner // group_rows, own.own).sum(group_sums)
    return group_sums.sum(0, keepdims=True)
