"""Backward kernels of the norms and their launcher.

With x_hat the normalised row and w = g * (scale + scale_offset): dx = rstd * (w - mean(w) - x_hat * mean(w * x_hat)), dscale sums
g * x_hat over rows, dbias sums g. Without a mean, mean(w) is left out.

Rows that fit a block, or a cluster of blocks, are read once. Longer ones are read twice, because the sums of their parameters'
gradients fit no program's registers: a first launch gives each program a part of the columns and finds all sums, a second gives dx.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.cluster import cluster_gather, cluster_parts, fits, has_clusters, members, part_of_row
from jtops.kernels._lib.device.rows import counted, multiple_of, own_row, unit
from jtops.kernels._lib.device.sums import sum_parts
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.launch import OuterRows as Rows
from jtops.kernels.norm.config import backward_config
from jtops.kernels.norm.forward import absent, mean_of, rows_of


@triton.jit
def _statistic(ptr, rows, r):
    """A column of a statistic per row; 0 where it is absent, as the mean is in rms_norm."""
    value = tl.zeros((rows.shape[0], 1), tl.float32)
    if ptr is not None:
        value = tl.load(ptr + rows, mask=rows < r, other=0.0)[:, None]
    return value


@triton.jit
def _scale(scale_ptr, row, cols, mask, n, scale_offset):
    """scale + scale_offset of a row of scale; 1 where there is none."""
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32) + scale_offset
    return scale


@triton.jit
def _x_hat(x_ptr, offsets, mask, mean, rstd):
    return tl.where(mask, (tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32) - mean) * rstd, 0.0)


@triton.jit
def _store_dx(dx_ptr, dsum_ptr, offsets, mask, dx):
    if dsum_ptr is not None:  # what the sum's own cotangent adds
        dx = dx + tl.load(dsum_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _terms(x_ptr, scale_ptr, g_ptr, offsets, mask, mean, rstd, scale):
    """x_hat, g and w of a tile."""
    x_hat = _x_hat(x_ptr, offsets, mask, mean, rstd)
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    w = g
    if scale_ptr is not None:
        w = g * scale
    return x_hat, g, w


@triton.jit
def _write_dx(dx_ptr, dsum_ptr, mean_ptr, offsets, mask, x_hat, w, mean_w, mean_wx, rstd):
    dx = w
    if mean_ptr is not None:
        dx = dx - mean_w[:, None]
    _store_dx(dx_ptr, dsum_ptr, offsets, mask, rstd * (dx - x_hat * mean_wx[:, None]))


@triton.jit
def _write_sum(ptr, pid, n, cols, inside_n, sums):
    if ptr is not None:
        total = tl.sum(sums, 0, keep_dims=True).to(ptr.dtype.element_ty)
        tl.store(ptr + pid * n + cols, total, mask=inside_n)


@counted
def _backward_kernel(
    x_ptr, scale_ptr, g_ptr, dsum_ptr, mean_ptr, rstd_ptr, dx_ptr, dscale_ptr, dbias_ptr,
    n, tiles, parts, group_rows, part_n, scale_inner, scale_own, scale_offset,
    UNIT: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLUSTER: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """One program: one of `parts` parts of a group of rows that share their parameters: `tiles` tiles of BLOCK_M rows; in a cluster
    the same `part_n` columns of each.

    Loop invariant: element (i, j) of dscale and dbias has the sums over the rows so far that stood i-th in their tile.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    pid, _, cols, inside_n = part_of_row(pid, part_n, n, BLOCK_N, CLUSTER, FULL)
    group, part = pid // parts, pid % parts
    scale_row = own_row(group * group_rows, scale_inner, scale_own)
    scale = _scale(scale_ptr, scale_row, cols, inside_n, n, scale_offset)
    dscale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    end = (group + 1) * group_rows
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = group * group_rows + (i * parts + part) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < end)[:, None] & inside_n
        offsets = rows[:, None] * n + cols
        mean, rstd = _statistic(mean_ptr, rows, end), _statistic(rstd_ptr, rows, end)
        x_hat, g, w = _terms(x_ptr, scale_ptr, g_ptr, offsets, mask, mean, rstd, scale)
        sum_wx = tl.sum(w * x_hat, 1)
        sum_w = tl.zeros((BLOCK_M,), tl.float32)
        if mean_ptr is not None:
            sum_w = tl.sum(w, 1)
        if CLUSTER > 1:
            sums_w, sums_wx = cluster_gather(sum_w, sum_wx, i)
            sum_w = tl.sum(tl.where(members(CLUSTER), sums_w, 0.0), 0)[None]
            sum_wx = tl.sum(tl.where(members(CLUSTER), sums_wx, 0.0), 0)[None]
        mean_w, mean_wx = mean_of(sum_w, n), mean_of(sum_wx, n)
        _write_dx(dx_ptr, dsum_ptr, mean_ptr, offsets, mask, x_hat, w, mean_w, mean_wx, rstd)
        if dscale_ptr is not None:
            dscale += g * x_hat
        if dbias_ptr is not None:
            dbias += g
    _write_sum(dscale_ptr, pid, n, cols, inside_n, dscale)
    _write_sum(dbias_ptr, pid, n, cols, inside_n, dbias)


@counted
def _sums_kernel(
    x_ptr, scale_ptr, g_ptr, mean_ptr, rstd_ptr, dscale_ptr, dbias_ptr, sum_w_ptr, sum_wx_ptr,
    n, tiles, parts, group_rows, scale_inner, scale_own, scale_offset,
    UNIT: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of one part of a group, as above; and each row's share of sum(w) and sum(w x_hat)."""
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    blocks = tl.cdiv(n, BLOCK_N)
    block = (pid % blocks).to(tl.int32)
    group, part = pid // blocks // parts, pid // blocks % parts
    scale_row = own_row(group * group_rows, scale_inner, scale_own)
    cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
    scale = _scale(scale_ptr, scale_row, cols, cols < n, n, scale_offset)
    dscale = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    end = (group + 1) * group_rows
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = group * group_rows + (i * parts + part) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < end)[:, None] & (cols < n)[None, :]
        offsets = rows[:, None] * n + cols[None, :]
        x_hat = _x_hat(x_ptr, offsets, mask, _statistic(mean_ptr, rows, end), _statistic(rstd_ptr, rows, end))
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        w = g
        if scale_ptr is not None:
            w = g * scale[None, :]
        tl.store(sum_wx_ptr + rows * blocks + block, tl.sum(w * x_hat, 1), mask=rows < end)
        if mean_ptr is not None:
            tl.store(sum_w_ptr + rows * blocks + block, tl.sum(w, 1), mask=rows < end)
        if dscale_ptr is not None:
            dscale += g * x_hat
        if dbias_ptr is not None:
            dbias += g
    if dscale_ptr is not None:
        total = tl.sum(dscale, 0).to(dscale_ptr.dtype.element_ty)
        tl.store(dscale_ptr + (group * parts + part) * n + cols, total, mask=cols < n)
    if dbias_ptr is not None:
        total = tl.sum(dbias, 0).to(dbias_ptr.dtype.element_ty)
        tl.store(dbias_ptr + (group * parts + part) * n + cols, total, mask=cols < n)


@counted
def _dx_kernel(
    x_ptr, scale_ptr, g_ptr, dsum_ptr, mean_ptr, rstd_ptr, sum_w_ptr, sum_wx_ptr, dx_ptr,
    n, shares, scale_inner, scale_own, scale_offset, SHARES: tl.constexpr, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N elements of a row of dx. Programs go backwards: what `_sums_kernel` read last is still in the cache."""
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    n = multiple_of(n, UNIT)
    blocks = tl.cdiv(n, BLOCK_N)
    row, cols = pid // blocks, (pid % blocks).to(tl.int32) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    w = tl.load(g_ptr + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        w = w * _scale(scale_ptr, own_row(row, scale_inner, scale_own), cols, cols < n, n, scale_offset)
    mean = 0.0
    rstd = tl.load(rstd_ptr + row)
    share = tl.arange(0, SHARES)
    dx = w
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + row)
        dx = dx - mean_of(tl.sum(tl.load(sum_w_ptr + row * shares + share, mask=share < shares, other=0.0), 0), n)
    mean_wx = mean_of(tl.sum(tl.load(sum_wx_ptr + row * shares + share, mask=share < shares, other=0.0), 0), n)
    _store_dx(dx_ptr, dsum_ptr, row * n + cols, cols < n, rstd * (dx - (x - mean) * rstd * mean_wx))


def _backend_options(launch: Launch, config: Config) -> dict[str, Any]:
    """No fused multiply-add: it would subtract the rounded mean(w) from the unrounded w, and what should cancel would not.

    With 16 elements a thread, what a program carries fits 128 registers (sm_90, without spills), so that two programs share a
    multiprocessor; left alone, the compiler takes 163.
    """
    elements = config["BLOCK_M"] * config["BLOCK_N"] // (32 * config["num_warps"])
    limit = {"maxnreg": 128} if launch.target.platform == "cuda" and elements <= 16 and config["num_warps"] <= 16 else {}
    return {"enable_fp_fusion": False, **limit}


def backward(launch: Launch, operands, saved, cotangents):
    """Launcher of all four ops. Those that add saved their sum, and have its cotangent too; x and residual share a gradient."""
    adds = launch.op.startswith("add_")
    if adds:
        (x, *statistics), (g, dsum) = saved, cotangents
        scale, scale_rows = operands[2], launch.rows[2:]
        wanted = launch.wanted[2:]
    else:
        (x, *_), statistics, (g,), dsum = operands, saved, cotangents, None
        x, scale, scale_rows, wanted = launch.rows[0].full(x), operands[1], launch.rows[1:], launch.wanted[1:]
    r, n = x.shape
    if g is None:  # only the sum was used
        zero = lambda p, wants: jnp.zeros(p.shape, p.dtype) if wants else None
        return *(dsum if w else None for w in launch.wanted[:2]), *map(zero, operands[2:], wanted)
    *mean, rstd = statistics
    # Groups of neighbouring rows that share all parameters' rows; each is summed in parts.
    group_rows = min((rows.inner for rows in scale_rows if rows and rows.own > 1), default=r)
    arrays = {"x_ptr": x, "scale_ptr": scale, "g_ptr": g, "mean_ptr": mean[0] if mean else None, "rstd_ptr": rstd}
    numbers: dict[str, Any] = {"n": n, "scale_offset": launch.options["scale_offset"], "UNIT": unit(n)}
    numbers |= rows_of("scale", scale_rows[0])
    parameters = operands[2 if adds else 1 :]
    written = {"dscale": None, "dbias": None}
    written |= {name: p.dtype for name, p, w in zip(written, parameters, wanted, strict=False) if w}
    arrays_read, clusters = 2 if dsum is None else 3, has_clusters(launch) and n * x.dtype.itemsize % 16 == 0
    heuristic = backward_config(launch.target, r, n, x.dtype.itemsize, arrays_read, clusters=clusters)
    kernels, sizes = (_backward_kernel, _sums_kernel, _dx_kernel), {"r": r, "groups": r // group_rows}
    config = launch.choose(heuristic, kernels, (x, scale, g, dsum), sizes, n=n, wanted=tuple(wanted))
    numbers["backend_options"] = _backend_options(launch, config)
    run = _rows if fits(launch, config, n) else _long
    dx, partial = run(launch, config, group_rows, written, arrays, dsum, numbers)
    totals = _totals(launch, partial, group_rows, scale_rows, parameters, wanted)
    return *([dx if w else None for w in launch.wanted[:2]] if adds else [dx]), *totals


def _parts(config: Config, groups: int, group_rows: int, blocks: int = 1) -> tuple[int, int]:
    """-> parts of a group, tiles of a part."""
    total = cdiv(group_rows, config["BLOCK_M"])
    tiles = cdiv(total, min(total, max(1, config["PROGRAMS"] // (groups * blocks))))
    return cdiv(total, tiles), tiles


def _rows(launch: Launch, config: Config, group_rows: int, written, arrays, dsum, numbers):
    """dx, and a part's sums per program: arrays [groups, parts, n]."""
    r, n = arrays["x_ptr"].shape
    groups = r // group_rows
    parts, tiles = _parts(config, groups, group_rows)
    dx, *partial = launch(
        _backward_kernel, **arrays, dsum_ptr=dsum, **numbers, tiles=tiles, parts=parts, group_rows=group_rows,
        **absent(_asked(written)),
        config=config, flops=16 * r * n, STAGES=config["num_stages"] or 1,
        **cluster_parts(config, n, groups * parts),
        out_type=[jax.ShapeDtypeStruct((r, n), arrays["x_ptr"].dtype), *_sum_types(groups, parts, n, written)],
    )  # fmt: skip
    return dx, partial


def _long(launch: Launch, config: Config, group_rows: int, written, arrays, dsum, numbers):
    """The same in two launches."""
    r, n = arrays["x_ptr"].shape
    groups, blocks = r // group_rows, cdiv(n, config["BLOCK_N"])
    parts, tiles = _parts(config, groups, group_rows, blocks)
    centred = arrays["mean_ptr"] is not None
    shares = jax.ShapeDtypeStruct((r, blocks), jnp.float32)
    *partial, sum_wx = launch(
        _sums_kernel, **arrays, **numbers, tiles=tiles, parts=parts, group_rows=group_rows,
        **absent(_asked(written) | {"sum_w": centred}), name=f"{launch.stage}_sums", config=config, flops=10 * r * n,
        STAGES=config["num_stages"] or 1, grid=groups * parts * blocks,
        out_type=_sum_types(groups, parts, n, written) + [shares] * (1 + centred),
    )  # fmt: skip
    block = config["BLOCK_M"] * config["BLOCK_N"]
    (dx,) = launch(
        _dx_kernel, **arrays, dsum_ptr=dsum, **numbers, shares=blocks, sum_w_ptr=partial.pop() if centred else None,
        sum_wx_ptr=sum_wx, SHARES=next_power_of_2(blocks), config=Config(BLOCK_N=block, num_warps=config["num_warps"]),
        out_type=[jax.ShapeDtypeStruct((r, n), arrays["x_ptr"].dtype)], flops=8 * r * n, grid=r * cdiv(n, block),
    )  # fmt: skip
    return dx, partial


def _asked(written: dict[str, Any]) -> dict[str, bool]:
    return {name: dtype is not None for name, dtype in written.items()}


def _sum_types(groups: int, parts: int, n: int, written: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """Sums of parts are float32; what needs no second stage has its parameter's dtype at once."""
    done = groups == parts == 1
    return [
        jax.ShapeDtypeStruct((groups, parts, n), dtype if done else jnp.float32) for dtype in written.values() if dtype is not None
    ]


def _totals(launch: Launch, partial, group_rows: int, rows, parameters, wanted) -> list:
    """Gradients of scale and bias from sums [groups, parts, n]."""
    if not partial:
        return [None] * len(wanted)
    groups = partial[0].shape[0]
    given = [p for p, w in zip(parameters, wanted, strict=True) if w]
    totals = iter(sum_parts(launch, partial, [p.dtype if groups == 1 else jnp.float32 for p in given]))

    def complete(own: Rows, group_sums):
        return group_sums if groups == 1 else _shared(own, group_sums, group_rows)

    return [complete(own, next(totals)) if w else None for own, w in zip(rows, wanted, strict=True)]


def _shared(own: Rows, group_sums, group_rows: int):
    """Groups' sums into one per row of the parameter."""
    if own.own > 1:
        return Rows(own.outer, own.own, own.inner // group_rows).sum(group_sums)
    return group_sums.sum(0, keepdims=True)
