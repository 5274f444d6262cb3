"""Kernels of the softmax family for rows whose elements are neighbours in memory, and their launchers.

Rows that fit a block, or a cluster of blocks, are held in registers, several to a program where they are short. Longer ones are
read twice: once for their maximum and sum, once for the result; by one program each, or, where there are few, by several in two
launches.

OP is the public name. Infinities are treated as jax.nn does: a row of nothing but -inf gives NaN, and its logsumexp is -inf.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.device.rows import exp, length
from jtops.kernels._lib.device.rows import row as row_of
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.rows import host
from jtops.kernels._lib.rows.cluster import cluster_gather, members, part_of_row
from jtops.kernels._lib.rows.device import (
    edges,
    lanes_of,
    load_row,
    of_parts,
    part_of_long_row,
    row_start,
    rows_of_tile,
    store_row,
)
from jtops.kernels.softmax.config import rows_config


class Kept(NamedTuple):
    """What the forward leaves to the backward of each row: its maximum and the logarithm of its sum."""

    top: Any
    log: Any


class Maxima(NamedTuple):
    """The statistics of each part of a long row, found first: its maximum and its sum of exp(x - maximum)."""

    maxima: Any
    sums: Any


class Totals(NamedTuple):
    """The sums of each part of a long row that the backward finds first: of y, for softmax alone, and of its weights."""

    totals: Any
    weights: Any


@triton.jit
def taking_part(where_ptr, base, cols, inside, WHERE_N: tl.constexpr):
    """The mask of elements that are inside and that `where` lets take part.

    Without WHERE_N it has one element a row; `row_of` has kept these in bounds.
    """
    if where_ptr is not None:
        if WHERE_N:
            inside = inside & (tl.load(where_ptr + base + cols, mask=inside, other=0) != 0)
        else:
            inside = inside & (tl.load(where_ptr + base) != 0)
    return inside


@triton.jit
def finite(m, OP: tl.constexpr):
    """A maximum that can be subtracted: 0 for -inf, so that exp gives 0; in logsumexp 0 for +inf, too, so that it is +inf."""
    if OP == "logsumexp":
        m = tl.where(tl.abs(m) == float("inf"), 0.0, m)
    else:
        m = tl.where(m == -float("inf"), 0.0, m)
    return m


@triton.jit
def result(x, e, mask, m, s, OP: tl.constexpr):
    """The softmax or log_softmax of a tile: rows have maximum m, e = exp(x - m) has sum s; what is masked, if any, is 0 or -inf."""
    if OP == "softmax":
        y = e * (1.0 / s)
        nothing = 0.0
    else:
        y = x - m - tl.log(s)
        nothing = -float("inf")
    if mask is not None:
        y = tl.where(mask, y, nothing)
    return y


@triton.jit
def merged(tops, sums, OP: tl.constexpr):
    """The maximum of a whole, and its sum of exp(x - maximum), from those of its parts."""
    top = tl.max(tops, 0)
    return top, tl.sum(tl.where(tops == top, sums, sums * exp(tops - finite(top, OP))), 0)


@triton.jit
def gradient(a, g, top, log, first, mask, OP: tl.constexpr):
    """The gradient dx of a tile. softmax: y * (g - sum(y g) / sum(y)), a being y: rounded as it is, y need not sum to 1, and this
    keeps the gradient of a constant cotangent at 0. log_softmax: g - p sum(g); logsumexp: p g; a being x, p = exp(x - top - log).
    """
    if OP == "softmax":
        dx = a * (g - first)
    elif OP == "log_softmax":
        dx = g - exp(a - top - log) * first
    else:
        dx = exp(a - top - log) * first
    if mask is not None:
        dx = tl.where(mask, dx, 0.0)
    return dx


@triton.jit
def _where_base(where_rows, rows, n, WHERE_N: tl.constexpr):
    """The offsets at which the rows of `where` begin that serve these rows."""
    base = rows * 0
    if where_rows is not None:
        base = row_of(rows, where_rows) * (n if WHERE_N else 1)
    return base


@triton.jit
def _whole_tile(
    i, pid, n, work, where_ptr, where_rows, lanes, here, WHERE_N: tl.constexpr, BLOCK_M: tl.constexpr, VECTOR: tl.constexpr
):
    """Return the rows of a tile; start and begin of each; which elements are inside, and which of them take part."""
    rows = rows_of_tile(i, pid, work, BLOCK_M)
    start, begin = row_start(rows, n, VECTOR)
    inside = (rows < work.r)[:, None] & here
    mask = taking_part(where_ptr, _where_base(where_rows, rows, n, WHERE_N)[:, None], lanes, inside, WHERE_N)
    return rows, start[:, None], begin[:, None], inside, mask


@triton.jit
def _kept(kept, rows, mask):
    """Maximum and logarithm of each row, as columns; 0 where there are none, as for softmax."""
    top, log = 0.0, 0.0
    if kept is not None:
        top = tl.load(kept.top + rows, mask=mask, other=0.0)[:, None]
        log = tl.load(kept.log + rows, mask=mask, other=0.0)[:, None]
    return top, log


@triton.jit
def _write_result(x_ptr, y_ptr, offsets, mask, m, s, OP: tl.constexpr):
    """Write the result of single elements: the edges of shifted rows."""
    x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
    y = result(x, exp(x - m), None, m, s, OP)
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _write_gradient(a_ptr, g_ptr, dx_ptr, offsets, mask, top, log, weight, OP: tl.constexpr):
    a = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    g = 0.0
    if OP != "logsumexp":
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dx = gradient(a, g, top, log, weight, None, OP)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["work", "where_rows"])
def _forward_kernel(
    x_ptr,
    where_ptr,
    y_ptr,
    top_ptr,
    log_ptr,
    n,
    part_n,
    work,
    where_rows,
    OP: tl.constexpr,
    WHERE_N: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
    CLUSTER: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the tiles of BLOCK_M whole rows that `work` gives it; of a cluster, the same `part_n` columns of each.

    Nothing is carried from one tile to the next.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, None)
    pid, part, lanes, here = part_of_row(pid, part_n, lanes_of(n, VECTOR), BLOCK_N, CLUSTER, FULL)
    for i in tl.range(0, work.tiles, num_stages=num_stages):
        rows, start, begin, inside, mask = _whole_tile(
            i, pid, n, work, where_ptr, where_rows, lanes, here, WHERE_N, BLOCK_M, VECTOR
        )
        x = load_row(x_ptr, start, lanes, begin, mask, n, -float("inf"), VECTOR, "")
        top = tl.max(x, 1)
        m = finite(top, OP)
        e = exp(x - m[:, None])
        s = tl.sum(e, 1)
        if CLUSTER > 1:
            tops, sums = cluster_gather(top, s, i)
            own = tl.where(top == -float("inf"), 0.0, m)
            top, s = merged(tl.where(members(CLUSTER), tops, -float("inf")), tl.where(members(CLUSTER), sums, 0.0), OP)
            m = finite(top, OP)[None]
            e *= exp(tl.minimum(own - m, 0.0))[:, None]
            s = s[None]
        if OP != "logsumexp":
            y = result(x, e, mask if where_ptr is not None else None, m[:, None], s[:, None], OP)
            store_row(y_ptr, start, lanes, begin, inside, y, n, VECTOR, "")
            if VECTOR > 1:
                cols, edge = edges(begin, n, VECTOR)
                _write_result(x_ptr, y_ptr, start + cols, edge & (rows < work.r)[:, None], m[:, None], s[:, None], OP)
        if part == 0:
            if OP == "logsumexp":
                tl.store(y_ptr + rows, (m + tl.log(s)).to(y_ptr.dtype.element_ty), mask=rows < work.r)
            if top_ptr is not None:
                tl.store(top_ptr + rows, m, mask=rows < work.r)
                tl.store(log_ptr + rows, tl.log(s), mask=rows < work.r)


@triton.jit(do_not_specialize_on_alignment=["split", "where_rows"])
def _long_forward_kernel(
    x_ptr,
    where_ptr,
    found,
    y_ptr,
    top_ptr,
    log_ptr,
    part_maxima_ptr,
    part_sums_ptr,
    n,
    split,
    where_rows,
    OP: tl.constexpr,
    WHERE_N: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    NEAR: tl.constexpr,
    AXIS: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: one part of a row. It finds the part's maximum and sum, unless all parts' are `found`; then it writes these, if
    it is asked to, or else the result.

    Loop invariant of the first pass: what a thread has read so far has maximum m and sum s of exp(x - m); threads meet only after
    it. NEAR elements of a thread are neighbours (AXIS 1), or, where rows are not aligned for that, neighbours of other threads'.
    The second pass goes backwards: what was read last is still in the cache.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, split.index_type)
    row, part, _, first, last, blocks = part_of_long_row(pid, n, split, VECTOR, BLOCK_N)
    start, begin = row_start(row, n, VECTOR)
    where_base = _where_base(where_rows, row, n, WHERE_N)
    if AXIS == 1:
        lanes = tl.arange(0, BLOCK_N // NEAR)[:, None] * NEAR + tl.arange(0, NEAR)[None, :]
    else:
        lanes = tl.arange(0, NEAR)[:, None] * (BLOCK_N // NEAR) + tl.arange(0, BLOCK_N // NEAR)[None, :]
    if found.sums is None:
        m = tl.full((BLOCK_N // NEAR,), -float("inf"), tl.float32)
        s = tl.zeros((BLOCK_N // NEAR,), tl.float32)
        for i in tl.range(0, blocks, num_stages=num_stages):
            cols = first + i * BLOCK_N + lanes
            mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
            x = load_row(x_ptr, start, cols, begin, mask, n, -float("inf"), VECTOR, "")
            m_new = tl.maximum(m, tl.max(x, AXIS))
            safe = finite(m_new, OP)
            s = tl.where(m == m_new, s, s * exp(m - safe)) + tl.sum(exp(x - tl.expand_dims(safe, AXIS)), AXIS)
            m = m_new
    else:
        m = of_parts(found.maxima, row, split, SPLITS, -float("inf"))
        s = of_parts(found.sums, row, split, SPLITS, 0.0)
    top, total = merged(m, s, OP)
    safe_top = finite(top, OP)
    if part_sums_ptr is not None:
        tl.store(part_maxima_ptr + pid, top)
        tl.store(part_sums_ptr + pid, total)
    else:
        if part == 0:
            if OP == "logsumexp":
                tl.store(y_ptr + row, (safe_top + tl.log(total)).to(y_ptr.dtype.element_ty))
            if top_ptr is not None:
                tl.store(top_ptr + row, safe_top)
                tl.store(log_ptr + row, tl.log(total))
        if OP != "logsumexp":
            for i in tl.range(0, blocks, num_stages=num_stages):
                cols = first + (blocks - 1 - i) * BLOCK_N + lanes
                mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
                x = load_row(x_ptr, start, cols, begin, mask, n, -float("inf"), VECTOR, "evict_first")
                y = result(x, exp(x - safe_top), mask if where_ptr is not None else None, safe_top, total, OP)
                store_row(y_ptr, start, cols, begin, cols < last, y, n, VECTOR, "evict_first")
            if VECTOR > 1:  # noqa: SIM102 known while compiling, unlike what follows
                if part == 0:
                    cols, edge = edges(begin, n, VECTOR)
                    _write_result(x_ptr, y_ptr, start + cols, edge, safe_top, total, OP)


@triton.jit(do_not_specialize_on_alignment=["work", "where_rows"])
def _backward_kernel(
    a_ptr,
    g_ptr,
    kept,
    where_ptr,
    dx_ptr,
    n,
    part_n,
    work,
    where_rows,
    OP: tl.constexpr,
    WHERE_N: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    FULL: tl.constexpr,
    CLUSTER: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: tiles of rows, or parts of them, as in the forward; a is y for softmax, x for the others."""
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, None)
    pid, _, lanes, here = part_of_row(pid, part_n, lanes_of(n, VECTOR), BLOCK_N, CLUSTER, FULL)
    for i in tl.range(0, work.tiles, num_stages=num_stages):
        rows, start, begin, inside, mask = _whole_tile(
            i, pid, n, work, where_ptr, where_rows, lanes, here, WHERE_N, BLOCK_M, VECTOR
        )
        a = load_row(a_ptr, start, lanes, begin, mask, n, 0.0, VECTOR, "")
        top, log = _kept(kept, rows, rows < work.r)
        if OP == "logsumexp":
            g = 0.0
            weight = tl.load(g_ptr + rows, mask=rows < work.r, other=0.0).to(tl.float32)
        else:
            g = load_row(g_ptr, start, lanes, begin, mask, n, 0.0, VECTOR, "")
            if OP == "softmax":
                total = tl.sum(a, 1)
                weight = tl.sum(a * g, 1)
            else:
                total = tl.full((BLOCK_M,), 1.0, tl.float32)
                weight = tl.sum(g, 1)
            if CLUSTER > 1:
                totals, weights = cluster_gather(total, weight, i)
                total = tl.sum(tl.where(members(CLUSTER), totals, 0.0), 0)[None]
                weight = tl.sum(tl.where(members(CLUSTER), weights, 0.0), 0)[None]
            if OP == "softmax":
                weight = weight / tl.where(total == 0.0, 1.0, total)
        dx = gradient(a, g, top, log, weight[:, None], mask if where_ptr is not None else None, OP)
        store_row(dx_ptr, start, lanes, begin, inside, dx, n, VECTOR, "")
        if VECTOR > 1:
            cols, edge = edges(begin, n, VECTOR)
            _write_gradient(a_ptr, g_ptr, dx_ptr, start + cols, edge & (rows < work.r)[:, None], top, log, weight[:, None], OP)


@triton.jit(do_not_specialize_on_alignment=["split", "where_rows"])
def _long_backward_kernel(
    a_ptr,
    g_ptr,
    kept,
    where_ptr,
    found,
    dx_ptr,
    part_totals_ptr,
    part_weights_ptr,
    n,
    split,
    where_rows,
    OP: tl.constexpr,
    WHERE_N: tl.constexpr,
    SPLITS: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    num_stages: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a part of a row, as in the long forward. Sums are kept per lane until the end of the first pass."""
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, UNIT, split.index_type)
    row, part, _, first, last, blocks = part_of_long_row(pid, n, split, VECTOR, BLOCK_N)
    start, begin = row_start(row, n, VECTOR)
    where_base = _where_base(where_rows, row, n, WHERE_N)
    lanes = tl.arange(0, BLOCK_N)
    if OP == "logsumexp":
        weight = tl.load(g_ptr + row).to(tl.float32)
    elif found.weights is None:
        totals = tl.zeros((BLOCK_N,), tl.float32)
        weights = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.range(0, blocks, num_stages=num_stages):
            cols = first + i * BLOCK_N + lanes
            mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
            g = load_row(g_ptr, start, cols, begin, mask, n, 0.0, VECTOR, "")
            if OP == "softmax":
                y = load_row(a_ptr, start, cols, begin, mask, n, 0.0, VECTOR, "")
                totals += y
                weights += y * g
            else:
                weights += g
        weight, total = tl.sum(weights, 0), tl.sum(totals, 0)
    else:
        weight = tl.sum(of_parts(found.weights, row, split, SPLITS, 0.0), 0)
        if OP == "softmax":
            total = tl.sum(of_parts(found.totals, row, split, SPLITS, 0.0), 0)
    if part_weights_ptr is not None:
        tl.store(part_weights_ptr + pid, weight)
        if OP == "softmax":
            tl.store(part_totals_ptr + pid, total)
    else:
        if OP == "softmax":
            weight = weight / tl.where(total == 0.0, 1.0, total)
        top, log = 0.0, 0.0
        if kept is not None:
            top, log = tl.load(kept.top + row), tl.load(kept.log + row)
        for i in tl.range(0, blocks, num_stages=num_stages):
            cols = first + (blocks - 1 - i) * BLOCK_N + lanes
            mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
            a = load_row(a_ptr, start, cols, begin, mask, n, 0.0, VECTOR, "evict_first")
            g = 0.0
            if OP != "logsumexp":
                g = load_row(g_ptr, start, cols, begin, mask, n, 0.0, VECTOR, "evict_first")
            dx = gradient(a, g, top, log, weight, mask if where_ptr is not None else None, OP)
            store_row(dx_ptr, start, cols, begin, cols < last, dx, n, VECTOR, "evict_first")
        if VECTOR > 1:  # noqa: SIM102
            if part == 0:
                cols, edge = edges(begin, n, VECTOR)
                _write_gradient(a_ptr, g_ptr, dx_ptr, start + cols, edge, top, log, weight, OP)


def _masked(launch: Launch, where, n: int) -> dict[str, Any]:
    """The arguments that every kernel here has."""
    return {
        "where_ptr": where,
        "where_rows": launch.rows.where,
        "WHERE_N": where is not None and where.shape[1] != 1,
        "n": n,
        "UNIT": host.unit(n),
        "OP": launch.op,
    }


def _vector(where, r: int, n: int, itemsize: int, room: float) -> int:
    """The constant VECTOR (see `vector`); a mask has vectors of its own, so that rows with one are not shifted."""
    return 1 if where is not None else host.vector(r, n, itemsize, room)


def _launch_whole(launch: Launch, kernel, config: Config, x, arguments: dict[str, Any], outputs) -> dict[str, Any]:
    r, n = x.shape
    vector = _vector(arguments["where_ptr"], r, n, x.dtype.itemsize, host.room(config))
    shared = host.whole_rows(config, r, n + vector - 1)
    return launch(kernel, outputs=outputs, VECTOR=vector, flops=5 * x.size, **shared, **arguments)


def _launch_long(launch: Launch, kernel, config: Config, x, arguments: dict[str, Any], outputs, partial, kind) -> dict[str, Any]:
    """Launch once, or twice where rows have several parts, of which something has to be found first.

    `partial` says by output whether that is to be found; `kind` is the bundle of what was found.
    """
    r, n = x.shape
    vector = _vector(arguments["where_ptr"], r, n, x.dtype.itemsize, math.inf)
    shared = host.long_rows(config, r, n, vector) | {"VECTOR": vector, "flops": 5 * x.size}
    if kernel is _long_forward_kernel:
        shared["NEAR"] = min(16 // x.dtype.itemsize, config["BLOCK_N"])
        shared["AXIS"] = 1 if n * x.dtype.itemsize % 16 == 0 or vector > 1 else 0
    found = kind(None, None)
    splits = shared["split"].splits
    if splits > 1 and any(partial.values()):
        part = jax.ShapeDtypeStruct((r, splits), jnp.float32)
        wanted = dict.fromkeys(outputs) | {name: part if asked else None for name, asked in partial.items()}
        got = launch(kernel, outputs=wanted, name=f"{launch.stage}_statistics", found=found, **shared, **arguments)
        found = kind(*(got[name] for name in partial))
    return launch(kernel, outputs=outputs | dict.fromkeys(partial), found=found, **shared, **arguments)


def forward(launch: Launch, x, where) -> tuple:
    """Launch the forward on x [r, n]; return the result and, if the backward wants them, maxima and logarithms of sums."""
    r, n = x.shape
    keeps = launch.residuals and launch.op != "softmax"
    of_rows = jax.ShapeDtypeStruct((r,), jnp.float32) if keeps else None
    y = jax.ShapeDtypeStruct((r,) if launch.op == "logsumexp" else (r, n), x.dtype)
    outputs = {"y_ptr": y, "top_ptr": of_rows, "log_ptr": of_rows}
    heuristic = rows_config(launch, r, n, x.dtype.itemsize, arrays=1, writes=launch.op != "logsumexp")
    arguments = {"x_ptr": x, **_masked(launch, where, n)}
    name = "fwd" if keeps else "out"  # softmax keeps nothing else: its two stages launch the same
    config = launch.choose(heuristic, (_forward_kernel, _long_forward_kernel), arguments, name=name, r=next_power_of_2(r))
    if n <= host.room(config):
        out = _launch_whole(launch, _forward_kernel, config, x, arguments, outputs)
    else:
        partial = {"part_maxima_ptr": True, "part_sums_ptr": True}
        out = _launch_long(launch, _long_forward_kernel, config, x, arguments, outputs, partial, Maxima)
    return tuple(value for value in out.values() if value is not None)


def backward(launch: Launch, a, g, kept: Kept | None, where):
    """Launch the backward on a [r, n] and g, of its shape or [r]; return dx."""
    r, n = a.shape
    outputs = {"dx_ptr": jax.ShapeDtypeStruct((r, n), a.dtype)}
    heuristic = rows_config(launch, r, n, a.dtype.itemsize, arrays=2, writes=True)
    arguments = {"a_ptr": a, "g_ptr": g, "kept": kept, **_masked(launch, where, n)}
    config = launch.choose(heuristic, (_backward_kernel, _long_backward_kernel), arguments, r=next_power_of_2(r))
    if n <= host.room(config):
        return _launch_whole(launch, _backward_kernel, config, a, arguments, outputs)["dx_ptr"]
    partial = {"part_totals_ptr": launch.op == "softmax", "part_weights_ptr": launch.op != "logsumexp"}
    return _launch_long(launch, _long_backward_kernel, config, a, arguments, outputs, partial, Totals)["dx_ptr"]
