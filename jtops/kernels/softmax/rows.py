"""Kernels of the softmax family for rows whose elements are neighbours in memory, and their launchers.

Rows that fit a block, or a cluster of blocks, are held in registers, several to a program where they are short. Longer ones are
read twice: once for their maximum and sum, once for the result; by one program each, or, where there are few, by several in two
launches.

OP is the public name. What it makes of infinities is jax.nn's: a row of nothing but -inf is NaN, logsumexp of it -inf.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.cluster import cluster_gather, cluster_parts, fits, has_clusters, members, part_of_row
from jtops.kernels._lib.device.rows import counted, exp, multiple_of, own_row, unit
from jtops.kernels._lib.device.vectors import edges, row_start, vector, vectors_read, vectors_written
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels.softmax.config import rows_config


@triton.jit
def taking_part(where_ptr, base, cols, inside, WHERE_N: tl.constexpr):
    """The mask of elements that are inside and that `where` lets take part.

    Without WHERE_N it has one element a row; `own_row` has kept these in bounds.
    """
    if where_ptr is not None:
        if WHERE_N:
            inside = inside & (tl.load(where_ptr + base + cols, mask=inside, other=0) != 0)
        else:
            inside = inside & (tl.load(where_ptr + base) != 0)
    return inside


@triton.jit
def finite(m, OP: tl.constexpr):
    """A maximum in a form that can be subtracted: of nothing but -inf 0, so that exp gives 0; of +inf, logsumexp is +inf."""
    if OP == "logsumexp":
        m = tl.where(tl.abs(m) == float("inf"), 0.0, m)
    else:
        m = tl.where(m == -float("inf"), 0.0, m)
    return m


@triton.jit
def result(x, e, mask, m, s, OP: tl.constexpr):
    """softmax or log_softmax of a tile: rows have maximum m, e = exp(x - m) has sum s; what is masked, if any, is 0 or -inf."""
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
    """Maximum of a whole, and its sum of exp(x - maximum), from those of its parts."""
    top = tl.max(tops, 0)
    return top, tl.sum(tl.where(tops == top, sums, sums * exp(tops - finite(top, OP))), 0)


@triton.jit
def gradient(a, g, top, log, first, mask, OP: tl.constexpr):
    """dx of a tile. softmax: y * (g - sum(y g) / sum(y)), a being y: rounded as it is, y need not sum to 1, and this keeps the
    gradient of a constant cotangent at 0. log_softmax: g - p sum(g); logsumexp: p g; a being x, p = exp(x - top - log)."""
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
def load_row(ptr, start, lanes, begin, mask, n, OTHER: tl.constexpr, VECTOR: tl.constexpr, EVICT: tl.constexpr):
    """A tile in float32, OTHER where `mask`, or the row that begins at lane `begin`, is not."""
    if VECTOR == 1:
        x = tl.load(ptr + start + lanes, mask=mask, other=OTHER, eviction_policy=EVICT).to(tl.float32)
    else:
        read = mask & vectors_read(lanes, begin, n, VECTOR)
        x = tl.load(ptr + start + lanes, mask=read, other=OTHER, eviction_policy=EVICT).to(tl.float32)
        x = tl.where((lanes >= begin) & (lanes < begin + n), x, OTHER)
    return x


@triton.jit
def store_row(ptr, start, lanes, begin, inside, x, n, VECTOR: tl.constexpr, EVICT: tl.constexpr):
    """Write a tile, less the edges of shifted rows."""
    if VECTOR > 1:
        inside = inside & vectors_written(lanes, begin, n, VECTOR)
    tl.store(ptr + start + lanes, x.to(ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)


@triton.jit
def _write_gradient(a_ptr, g_ptr, dx_ptr, offsets, mask, top, log, weight, OP: tl.constexpr):
    a = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    g = 0.0
    if OP != "logsumexp":
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    dx = gradient(a, g, top, log, weight, None, OP)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@counted
def _forward_kernel(
    x_ptr, where_ptr, y_ptr, top_ptr, log_ptr, r, n, tiles, programs, part_n, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLUSTER: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program: `tiles` tiles of BLOCK_M whole rows, `programs` tiles apart; of a cluster, the same `part_n` columns of each.

    Nothing is carried from one tile to the next.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    pid, part, lanes, here = part_of_row(pid, part_n, (n + 2 * (VECTOR - 1)) // VECTOR * VECTOR, BLOCK_N, CLUSTER, FULL)
    where_n = n if WHERE_N else 1
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = (i * programs + pid) * BLOCK_M + tl.arange(0, BLOCK_M)
        start, begin = row_start(rows, n, VECTOR)
        inside = (rows < r)[:, None] & here
        where_base = own_row(rows, where_inner, where_own)[:, None] * where_n
        mask = taking_part(where_ptr, where_base, lanes, inside, WHERE_N)
        x = load_row(x_ptr, start[:, None], lanes, begin[:, None], mask, n, -float("inf"), VECTOR, "")
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
            store_row(y_ptr, start[:, None], lanes, begin[:, None], inside, y, n, VECTOR, "")
            if VECTOR > 1:
                cols, edge = edges(begin[:, None], n, VECTOR)
                edge = edge & (rows < r)[:, None]
                x = tl.load(x_ptr + start[:, None] + cols, mask=edge, other=-float("inf")).to(tl.float32)
                y = result(x, exp(x - m[:, None]), None, m[:, None], s[:, None], OP)
                tl.store(y_ptr + start[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=edge)
        if part == 0:
            if OP == "logsumexp":
                tl.store(y_ptr + rows, (m + tl.log(s)).to(y_ptr.dtype.element_ty), mask=rows < r)
            if top_ptr is not None:
                tl.store(top_ptr + rows, m, mask=rows < r)
                tl.store(log_ptr + rows, tl.log(s), mask=rows < r)


@counted
def _long_forward_kernel(
    x_ptr, where_ptr, maxima_ptr, sums_ptr, y_ptr, top_ptr, log_ptr, part_maxima_ptr, part_sums_ptr,
    n, splits, per_split, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, STATISTICS: tl.constexpr, APPLY: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr, NEAR: tl.constexpr, AXIS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one of `splits` parts of a row. STATISTICS and APPLY: both, of a row in one part, or in two launches.

    Loop invariant of the first pass: what a thread has read so far has maximum m and sum s of exp(x - m); threads meet only after
    it. NEAR elements of a thread are neighbours (AXIS 1), or, where rows are not aligned for that, neighbours of other threads'.
    The second pass goes backwards: what was read last is still in the cache.
    """
    pid = tl.program_id(0).to(tl.int64)
    row, split = pid // splits, (pid % splits).to(tl.int32)
    n = multiple_of(n, UNIT)
    start, begin = row_start(row, n, VECTOR)
    first = split * per_split
    last = tl.minimum(first + per_split, (n + 2 * (VECTOR - 1)) // VECTOR * VECTOR)
    blocks = tl.cdiv(last - first, BLOCK_N)
    where_base = own_row(row, where_inner, where_own) * (n if WHERE_N else 1)
    if AXIS == 1:
        lanes = tl.arange(0, BLOCK_N // NEAR)[:, None] * NEAR + tl.arange(0, NEAR)[None, :]
    else:
        lanes = tl.arange(0, NEAR)[:, None] * (BLOCK_N // NEAR) + tl.arange(0, BLOCK_N // NEAR)[None, :]
    if STATISTICS:
        m = tl.full((BLOCK_N // NEAR,), -float("inf"), tl.float32)
        s = tl.zeros((BLOCK_N // NEAR,), tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
            cols = first + i * BLOCK_N + lanes
            mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
            x = load_row(x_ptr, start, cols, begin, mask, n, -float("inf"), VECTOR, "")
            m_new = tl.maximum(m, tl.max(x, AXIS))
            safe = finite(m_new, OP)
            s = tl.where(m == m_new, s, s * exp(m - safe)) + tl.sum(exp(x - tl.expand_dims(safe, AXIS)), AXIS)
            m = m_new
    else:
        parts = tl.arange(0, SPLITS)
        m = tl.load(maxima_ptr + row * splits + parts, mask=parts < splits, other=-float("inf"))
        s = tl.load(sums_ptr + row * splits + parts, mask=parts < splits, other=0.0)
    top, total = merged(m, s, OP)
    safe_top = finite(top, OP)
    if not APPLY:
        tl.store(part_maxima_ptr + pid, top)
        tl.store(part_sums_ptr + pid, total)
    else:
        if split == 0:
            if OP == "logsumexp":
                tl.store(y_ptr + row, (safe_top + tl.log(total)).to(y_ptr.dtype.element_ty))
            if top_ptr is not None:
                tl.store(top_ptr + row, safe_top)
                tl.store(log_ptr + row, tl.log(total))
        if OP != "logsumexp":
            for i in tl.range(0, blocks, num_stages=STAGES):
                cols = first + (blocks - 1 - i) * BLOCK_N + lanes
                mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
                x = load_row(x_ptr, start, cols, begin, mask, n, -float("inf"), VECTOR, "evict_first")
                y = result(x, exp(x - safe_top), mask if where_ptr is not None else None, safe_top, total, OP)
                store_row(y_ptr, start, cols, begin, cols < last, y, n, VECTOR, "evict_first")
            if VECTOR > 1:  # noqa: SIM102 known while compiling, unlike what follows
                if split == 0:
                    cols, edge = edges(begin, n, VECTOR)
                    x = tl.load(x_ptr + start + cols, mask=edge, other=-float("inf")).to(tl.float32)
                    y = result(x, exp(x - safe_top), None, safe_top, total, OP)
                    tl.store(y_ptr + start + cols, y.to(y_ptr.dtype.element_ty), mask=edge)


@counted
def _backward_kernel(
    a_ptr, g_ptr, top_ptr, log_ptr, where_ptr, dx_ptr, r, n, tiles, programs, part_n, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CLUSTER: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """One program: tiles of rows, or parts of them, as in the forward; a is y for softmax, x for the others."""
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    pid, _, lanes, here = part_of_row(pid, part_n, (n + 2 * (VECTOR - 1)) // VECTOR * VECTOR, BLOCK_N, CLUSTER, FULL)
    where_n = n if WHERE_N else 1
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = (i * programs + pid) * BLOCK_M + tl.arange(0, BLOCK_M)
        start, begin = row_start(rows, n, VECTOR)
        inside = (rows < r)[:, None] & here
        where_base = own_row(rows, where_inner, where_own)[:, None] * where_n
        mask = taking_part(where_ptr, where_base, lanes, inside, WHERE_N)
        a = load_row(a_ptr, start[:, None], lanes, begin[:, None], mask, n, 0.0, VECTOR, "")
        top, log = 0.0, 0.0
        if top_ptr is not None:
            top = tl.load(top_ptr + rows, mask=rows < r, other=0.0)[:, None]
            log = tl.load(log_ptr + rows, mask=rows < r, other=0.0)[:, None]
        if OP == "logsumexp":
            g = 0.0
            weight = tl.load(g_ptr + rows, mask=rows < r, other=0.0).to(tl.float32)
        else:
            g = load_row(g_ptr, start[:, None], lanes, begin[:, None], mask, n, 0.0, VECTOR, "")
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
        store_row(dx_ptr, start[:, None], lanes, begin[:, None], inside, dx, n, VECTOR, "")
        if VECTOR > 1:
            cols, edge = edges(begin[:, None], n, VECTOR)
            edge = edge & (rows < r)[:, None]
            _write_gradient(a_ptr, g_ptr, dx_ptr, start[:, None] + cols, edge, top, log, weight[:, None], OP)


@counted
def _long_backward_kernel(
    a_ptr, g_ptr, top_ptr, log_ptr, where_ptr, totals_ptr, weights_ptr, dx_ptr, part_totals_ptr, part_weights_ptr,
    n, splits, per_split, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, STATISTICS: tl.constexpr, APPLY: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a part of a row, as in the long forward. Sums are kept per lane until the end of the first pass."""
    pid = tl.program_id(0).to(tl.int64)
    row, split = pid // splits, (pid % splits).to(tl.int32)
    n = multiple_of(n, UNIT)
    start, begin = row_start(row, n, VECTOR)
    first = split * per_split
    last = tl.minimum(first + per_split, (n + 2 * (VECTOR - 1)) // VECTOR * VECTOR)
    blocks = tl.cdiv(last - first, BLOCK_N)
    where_base = own_row(row, where_inner, where_own) * (n if WHERE_N else 1)
    lanes = tl.arange(0, BLOCK_N)
    if OP == "logsumexp":
        weight = tl.load(g_ptr + row).to(tl.float32)
    elif STATISTICS:
        totals = tl.zeros((BLOCK_N,), tl.float32)
        weights = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
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
        if not APPLY:
            tl.store(part_weights_ptr + pid, weight)
            if OP == "softmax":
                tl.store(part_totals_ptr + pid, total)
    else:
        parts = tl.arange(0, SPLITS)
        weight = tl.sum(tl.load(weights_ptr + row * splits + parts, mask=parts < splits, other=0.0), 0)
        if OP == "softmax":
            total = tl.sum(tl.load(totals_ptr + row * splits + parts, mask=parts < splits, other=0.0), 0)
    if APPLY:
        if OP == "softmax":
            weight = weight / tl.where(total == 0.0, 1.0, total)
        top, log = 0.0, 0.0
        if top_ptr is not None:
            top = tl.load(top_ptr + row)
            log = tl.load(log_ptr + row)
        for i in tl.range(0, blocks, num_stages=STAGES):
            cols = first + (blocks - 1 - i) * BLOCK_N + lanes
            mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
            a = load_row(a_ptr, start, cols, begin, mask, n, 0.0, VECTOR, "evict_first")
            g = 0.0
            if OP != "logsumexp":
                g = load_row(g_ptr, start, cols, begin, mask, n, 0.0, VECTOR, "evict_first")
            dx = gradient(a, g, top, log, weight, mask if where_ptr is not None else None, OP)
            store_row(dx_ptr, start, cols, begin, cols < last, dx, n, VECTOR, "evict_first")
        if VECTOR > 1:  # noqa: SIM102
            if split == 0:
                cols, edge = edges(begin, n, VECTOR)
                _write_gradient(a_ptr, g_ptr, dx_ptr, start + cols, edge, top, log, weight, OP)


def _choice(launch: Launch, heuristic: Config, x, where, name: str) -> Config:
    r, n = x.shape
    kernels = (_backward_kernel, _long_backward_kernel) if name == "vjp" else (_forward_kernel, _long_forward_kernel)
    where_n = where is not None and where.shape[-1] != 1
    return launch.choose(heuristic, kernels, (x, where), {"r": r}, name, n=n, where_n=where_n)


def _absent(**present: bool) -> dict[str, Any]:
    return {f"{name}_ptr": None for name, there in present.items() if not there}


def _shared(launch: Launch, where, n: int, config: Config) -> dict[str, Any]:
    rows = launch.rows[1]
    return {
        "where_ptr": where,
        "n": n,
        "where_inner": rows.inner if rows else 1,
        "where_own": rows.own if rows else 1,
        "OP": launch.op,
        "WHERE_N": where is not None and where.shape[-1] != 1,
        "UNIT": unit(n),
        "STAGES": config["num_stages"] or 1,
        "config": config,
    }


def _tiles(config: Config, r: int, n: int, itemsize: int, where) -> dict[str, Any]:
    """-> the grid of whole rows, and what its kernels must know of it."""
    total = cdiv(r, config["BLOCK_M"])
    programs = min(config["PROGRAMS"], total)
    shift = 1 if where is not None else vector(r, n, itemsize, config["BLOCK_N"] * (config["cluster_size"] or 1))
    shared = {"r": r, "tiles": cdiv(total, programs), "programs": programs, "VECTOR": shift}
    return shared | cluster_parts(config, n + shift - 1, programs)


def _split(config: Config, r: int, n: int, itemsize: int, where) -> dict[str, Any]:
    """-> the grid of long rows, and what its kernels must know of it."""
    block = config["BLOCK_N"]
    shift = 1 if where is not None else vector(r, n, itemsize, 1 << 31)
    lanes = cdiv(n + shift - 1, shift) * shift
    per_split = cdiv(cdiv(lanes, block), max(1, config["PROGRAMS"] // r)) * block
    splits = cdiv(lanes, per_split)
    return {"splits": splits, "per_split": per_split, "SPLITS": next_power_of_2(splits), "grid": r * splits, "VECTOR": shift}


def forward(launch: Launch, x, where, keeps: bool):
    """x [r, n] -> the result; and if it `keeps` them, the maxima and the logarithms of the sums."""
    r, n = x.shape
    writes, clusters = launch.op != "logsumexp", has_clusters(launch)
    heuristic = rows_config(launch.target, r, n, x.dtype.itemsize, 1, writes=writes, clusters=clusters)
    config = _choice(launch, heuristic, x, where, "fwd" if keeps else "out")
    shared = _shared(launch, where, n, config) | {"flops": 5 * r * n}
    results = [jax.ShapeDtypeStruct((r,) if launch.op == "logsumexp" else (r, n), x.dtype)]
    results += [jax.ShapeDtypeStruct((r,), jnp.float32)] * (2 * keeps)
    if fits(launch, config, n):
        return launch(
            _forward_kernel,
            x,
            **shared,
            **_absent(top=keeps, log=keeps),
            **_tiles(config, r, n, x.dtype.itemsize, where),
            out_type=results,
        )
    shared |= _split(config, r, n, x.dtype.itemsize, where)
    shared |= {"NEAR": min(16 // x.dtype.itemsize, config["BLOCK_N"])}
    shared["AXIS"] = int(n * x.dtype.itemsize % 16 == 0 or shared["VECTOR"] > 1)
    late = shared | _absent(top=keeps, log=keeps, part_maxima=False, part_sums=False) | {"out_type": results}
    if shared["splits"] == 1:
        return launch(_long_forward_kernel, x, **late, maxima_ptr=None, sums_ptr=None, STATISTICS=True, APPLY=True)
    part = jax.ShapeDtypeStruct((r, shared["splits"]), jnp.float32)
    maxima, sums = launch(
        _long_forward_kernel, x, **shared, maxima_ptr=None, sums_ptr=None, STATISTICS=True, APPLY=False, out_type=[part, part],
        name=f"{launch.stage}_statistics", **_absent(y=False, top=False, log=False),
    )  # fmt: skip
    return launch(_long_forward_kernel, x, **late, maxima_ptr=maxima, sums_ptr=sums, STATISTICS=False, APPLY=True)


def backward(launch: Launch, a, g, top, log, where):
    """a [r, n] and g, of its shape or [r] -> dx."""
    r, n = a.shape
    heuristic = rows_config(launch.target, r, n, a.dtype.itemsize, 2, clusters=has_clusters(launch))
    config = _choice(launch, heuristic, a, where, "vjp")
    shared = _shared(launch, where, n, config) | {"flops": 5 * r * n}
    out = jax.ShapeDtypeStruct((r, n), a.dtype)
    if fits(launch, config, n):
        return launch(_backward_kernel, a, g, top, log, **shared, **_tiles(config, r, n, a.dtype.itemsize, where), out_type=out)
    shared |= _split(config, r, n, a.dtype.itemsize, where)
    late = shared | _absent(part_totals=False, part_weights=False) | {"out_type": out}
    none: dict[str, Any] = {"totals_ptr": None, "weights_ptr": None}
    if shared["splits"] == 1 or launch.op == "logsumexp":
        return launch(_long_backward_kernel, a, g, top, log, **late, **none, STATISTICS=True, APPLY=True)
    part, soft = jax.ShapeDtypeStruct((r, shared["splits"]), jnp.float32), launch.op == "softmax"
    *totals, weights = launch(
        _long_backward_kernel, a, g, top, log, **shared, **none, STATISTICS=True, APPLY=False, out_type=[part] * (1 + soft),
        name=f"{launch.stage}_statistics", **_absent(dx=False, part_totals=soft),
    )  # fmt: skip
    done: dict[str, Any] = {"totals_ptr": totals[0] if soft else None, "weights_ptr": weights}
    return launch(_long_backward_kernel, a, g, top, log, **late, **done, STATISTICS=False, APPLY=True)
