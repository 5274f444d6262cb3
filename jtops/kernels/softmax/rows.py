"""Kernels of the softmax family for rows whose elements are neighbours in memory, and their launchers.

Rows that fit a block are held in registers, several to a program where they are short. Longer ones are read twice: once for their
maximum and sum, once for the result; by one program each, or, where there are few, by several in two launches.

OP is the public name. What it makes of infinities is jax.nn's: a row of nothing but -inf is NaN, logsumexp of it -inf.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jtops.core.compat import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device import counted, multiple_of, own_row, unit
from jtops.kernels._lib.launch import Config, Launch
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
def result(x, mask, m, s, OP: tl.constexpr):
    """softmax or log_softmax of a tile whose rows have maximum m and sum of exp(x - m) s; what is masked is 0, or -inf."""
    if OP == "softmax":
        y = tl.where(mask, tl.exp(x - m) / s, 0.0)
    else:
        y = tl.where(mask, x - m - tl.log(s), -float("inf"))
    return y


@triton.jit
def gradient(a, g, top, log, first, mask, OP: tl.constexpr):
    """dx of a tile. softmax: y * (g - sum(y g) / sum(y)), a being y: rounded as it is, y need not sum to 1, and this keeps the
    gradient of a constant cotangent at 0. log_softmax: g - p sum(g); logsumexp: p g; a being x, p = exp(x - top - log)."""
    if OP == "softmax":
        dx = a * (g - first)
    elif OP == "log_softmax":
        dx = g - tl.exp(a - top - log) * first
    else:
        dx = tl.exp(a - top - log) * first
    return tl.where(mask, dx, 0.0)


@counted
def _forward_kernel(
    x_ptr, where_ptr, y_ptr, top_ptr, log_ptr, r, n, tiles, programs, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: `tiles` tiles of BLOCK_M whole rows, `programs` tiles apart. Nothing is carried from one to the next."""
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    cols = tl.arange(0, BLOCK_N)[None, :]
    where_n = n if WHERE_N else 1
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = (i * programs + pid) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < r)[:, None] & (cols < n)
        where_base = own_row(rows, where_inner, where_own)[:, None] * where_n
        mask = taking_part(where_ptr, where_base, cols, inside, WHERE_N)
        offsets = rows[:, None] * n + cols
        x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        m = finite(tl.max(x, 1), OP)
        s = tl.sum(tl.exp(x - m[:, None]), 1)
        if OP == "logsumexp":
            tl.store(y_ptr + rows, (m + tl.log(s)).to(y_ptr.dtype.element_ty), mask=rows < r)
        else:
            tl.store(y_ptr + offsets, result(x, mask, m[:, None], s[:, None], OP).to(y_ptr.dtype.element_ty), mask=inside)
        if top_ptr is not None:
            tl.store(top_ptr + rows, m, mask=rows < r)
            tl.store(log_ptr + rows, tl.log(s), mask=rows < r)


@counted
def _long_forward_kernel(
    x_ptr, where_ptr, maxima_ptr, sums_ptr, y_ptr, top_ptr, log_ptr, part_maxima_ptr, part_sums_ptr,
    n, splits, per_split, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, STATISTICS: tl.constexpr, APPLY: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, VECTOR: tl.constexpr, AXIS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one of `splits` parts of a row. STATISTICS and APPLY: both, of a row in one part, or in two launches.

    Loop invariant of the first pass: what a thread has read so far has maximum m and sum s of exp(x - m); threads meet only after
    it. VECTOR elements of a thread are neighbours (AXIS 1), or, where rows are not aligned for that, neighbours of other threads'.
    The second pass goes backwards: what was read last is still in the cache.
    """
    pid = tl.program_id(0).to(tl.int64)
    row, split = pid // splits, (pid % splits).to(tl.int32)
    n = multiple_of(n, UNIT)
    first = split * per_split
    last = tl.minimum(first + per_split, n)
    blocks = tl.cdiv(last - first, BLOCK_N)
    where_base = own_row(row, where_inner, where_own) * (n if WHERE_N else 1)
    if AXIS == 1:
        lanes = tl.arange(0, BLOCK_N // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    else:
        lanes = tl.arange(0, VECTOR)[:, None] * (BLOCK_N // VECTOR) + tl.arange(0, BLOCK_N // VECTOR)[None, :]
    if STATISTICS:
        m = tl.full((BLOCK_N // VECTOR,), -float("inf"), tl.float32)
        s = tl.zeros((BLOCK_N // VECTOR,), tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
            cols = first + i * BLOCK_N + lanes
            mask = taking_part(where_ptr, where_base, cols, cols < last, WHERE_N)
            x = tl.load(x_ptr + row * n + cols, mask=mask, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m, tl.max(x, AXIS))
            safe = finite(m_new, OP)
            s = tl.where(m == m_new, s, s * tl.exp(m - safe)) + tl.sum(tl.exp(x - tl.expand_dims(safe, AXIS)), AXIS)
            m = m_new
    else:
        parts = tl.arange(0, SPLITS)
        m = tl.load(maxima_ptr + row * splits + parts, mask=parts < splits, other=-float("inf"))
        s = tl.load(sums_ptr + row * splits + parts, mask=parts < splits, other=0.0)
    top = tl.max(m, 0)
    safe_top = finite(top, OP)
    total = tl.sum(tl.where(m == top, s, s * tl.exp(m - safe_top)), 0)
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
                x = tl.load(x_ptr + row * n + cols, mask=mask, other=-float("inf")).to(tl.float32)
                y = result(x, mask, safe_top, total, OP)
                tl.store(y_ptr + row * n + cols, y.to(y_ptr.dtype.element_ty), mask=cols < last, eviction_policy="evict_first")


@counted
def _backward_kernel(
    a_ptr, g_ptr, top_ptr, log_ptr, where_ptr, dx_ptr, r, n, tiles, programs, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: tiles of rows as in the forward; a is y for softmax, x for the others."""
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    cols = tl.arange(0, BLOCK_N)[None, :]
    where_n = n if WHERE_N else 1
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = (i * programs + pid) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (rows < r)[:, None] & (cols < n)
        where_base = own_row(rows, where_inner, where_own)[:, None] * where_n
        mask = taking_part(where_ptr, where_base, cols, inside, WHERE_N)
        offsets = rows[:, None] * n + cols
        a = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        top, log = 0.0, 0.0
        if top_ptr is not None:
            top = tl.load(top_ptr + rows, mask=rows < r, other=0.0)[:, None]
            log = tl.load(log_ptr + rows, mask=rows < r, other=0.0)[:, None]
        if OP == "logsumexp":
            g = 0.0
            weight = tl.load(g_ptr + rows, mask=rows < r, other=0.0).to(tl.float32)
        else:
            g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            if OP == "softmax":
                total = tl.sum(a, 1)
                weight = tl.sum(a * g, 1) / tl.where(total == 0.0, 1.0, total)
            else:
                weight = tl.sum(g, 1)
        dx = gradient(a, g, top, log, weight[:, None], mask, OP)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@counted
def _long_backward_kernel(
    a_ptr, g_ptr, top_ptr, log_ptr, where_ptr, totals_ptr, weights_ptr, dx_ptr, part_totals_ptr, part_weights_ptr,
    n, splits, per_split, where_inner, where_own,
    OP: tl.constexpr, WHERE_N: tl.constexpr, STATISTICS: tl.constexpr, APPLY: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a part of a row, as in the long forward. Sums are kept per lane until the end of the first pass."""
    pid = tl.program_id(0).to(tl.int64)
    row, split = pid // splits, (pid % splits).to(tl.int32)
    n = multiple_of(n, UNIT)
    first = split * per_split
    last = tl.minimum(first + per_split, n)
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
            g = tl.load(g_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
            if OP == "softmax":
                y = tl.load(a_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
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
            a = tl.load(a_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
            g = 0.0
            if OP != "logsumexp":
                g = tl.load(g_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
            dx = gradient(a, g, top, log, weight, mask, OP)
            tl.store(dx_ptr + row * n + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < last, eviction_policy="evict_first")


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


def _tiles(config: Config, r: int) -> dict[str, Any]:
    """-> the grid of whole rows, and what its kernels must know of it."""
    total = cdiv(r, config["BLOCK_M"])
    programs = min(config["PROGRAMS"], total)
    return {"r": r, "tiles": cdiv(total, programs), "programs": programs, "grid": programs}


def _split(config: Config, r: int, n: int) -> dict[str, Any]:
    """-> the grid of long rows, and what its kernels must know of it."""
    block = config["BLOCK_N"]
    per_split = cdiv(cdiv(n, block), max(1, config["PROGRAMS"] // r)) * block
    splits = cdiv(n, per_split)
    return {"splits": splits, "per_split": per_split, "SPLITS": next_power_of_2(splits), "grid": r * splits}


def forward(launch: Launch, x, where, keeps: bool):
    """x [r, n] -> the result; and if it `keeps` them, the maxima and the logarithms of the sums."""
    r, n = x.shape
    config = launch.config or rows_config(launch.target, r, n, x.dtype.itemsize, 1)
    shared = _shared(launch, where, n, config) | {"flops": 5 * r * n}
    results = [jax.ShapeDtypeStruct((r,) if launch.op == "logsumexp" else (r, n), x.dtype)]
    results += [jax.ShapeDtypeStruct((r,), jnp.float32)] * (2 * keeps)
    if n <= config["BLOCK_N"]:
        return launch(_forward_kernel, x, **shared, **_absent(top=keeps, log=keeps), **_tiles(config, r), out_type=results)
    shared |= {**_split(config, r, n), "VECTOR": min(16 // x.dtype.itemsize, config["BLOCK_N"])}
    shared["AXIS"] = int(n * x.dtype.itemsize % 16 == 0)
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
    config = launch.config or rows_config(launch.target, r, n, a.dtype.itemsize, 2)
    shared = _shared(launch, where, n, config) | {"flops": 5 * r * n}
    out = jax.ShapeDtypeStruct((r, n), a.dtype)
    if n <= config["BLOCK_N"]:
        return launch(_backward_kernel, a, g, top, log, **shared, **_tiles(config, r), out_type=out)
    shared |= _split(config, r, n)
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
