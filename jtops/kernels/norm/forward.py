"""Forward kernels of the norms and their launcher.

Rows that fit a block, or a cluster of blocks, are held in registers, several to a program where they are short. Longer ones are
read twice: once for their statistics, once to be normalised; by one program each, or, where there are few, by several in two
launches.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.cluster import cluster_gather, cluster_parts, fits, has_clusters, members, part_of_row
from jtops.kernels._lib.device.rows import counted, multiple_of, own_row, unit
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.launch import OuterRows as Rows
from jtops.kernels.norm.config import forward_config, tail


@triton.jit
def mean_of(total, n):
    """total / n, correctly rounded: the default division is not, and a gradient that cancels to 0 would not be 0."""
    return tl.div_rn(total, tl.full(total.shape, n, tl.float32))


@triton.jit
def parameter(ptr, rows, cols, mask, n, inner, own, EACH: tl.constexpr):
    """A tile of scale or bias in float32. EACH: the rows of x may have different ones (see `Rows`)."""
    if EACH:
        p = tl.load(ptr + own_row(rows, inner, own)[:, None] * n + cols, mask=mask, other=0.0)
    else:
        p = tl.load(ptr + cols, mask=mask, other=0.0, eviction_policy="evict_last")
    return p.to(tl.float32)


@triton.jit
def _input(x_ptr, residual_ptr, sum_ptr, offsets, rows, cols, mask, n, inner, own, SHARED: tl.constexpr, EVICT: tl.constexpr):
    """A float32 tile of x; of x + residual as it is stored, where there is a residual, which rows may share."""
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)
    if residual_ptr is not None:
        residual_offsets = own_row(rows, inner, own) * n + cols if SHARED else offsets
        x = (x + tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
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
def _normalised(
    x, rstd, rows, cols, mask, inside_n, scale_ptr, scale, bias_ptr, bias,
    n, scale_inner, scale_own, bias_inner, bias_own, scale_offset,
    SCALE_EACH: tl.constexpr, BIAS_EACH: tl.constexpr, HOLD: tl.constexpr,
):  # fmt: skip
    """y of a tile of deviations x; `scale` and `bias` are what is held of them."""
    y = x * rstd[:, None]
    if scale_ptr is not None:
        if not HOLD or SCALE_EACH:
            scale = parameter(scale_ptr, rows, cols, mask if SCALE_EACH else inside_n, n, scale_inner, scale_own, SCALE_EACH)
        y = y * (scale + scale_offset)
    if bias_ptr is not None:
        if not HOLD or BIAS_EACH:
            bias = parameter(bias_ptr, rows, cols, mask if BIAS_EACH else inside_n, n, bias_inner, bias_own, BIAS_EACH)
        y = y + bias
    return y


@triton.jit
def _held(ptr, cols, inside_n, n, HELD: tl.constexpr):
    p = 0.0
    if HELD and ptr is not None:
        p = parameter(ptr, None, cols, inside_n, n, 1, 1, False)
    return p


@counted
def _forward_kernel(
    x_ptr, residual_ptr, scale_ptr, bias_ptr, y_ptr, sum_ptr, mean_ptr, rstd_ptr,
    r, n, tiles, programs, part_n, residual_inner, residual_own, scale_inner, scale_own, bias_inner, bias_own,
    epsilon, scale_offset, SHARED: tl.constexpr, CENTRED: tl.constexpr, SCALE_EACH: tl.constexpr, BIAS_EACH: tl.constexpr,
    HOLD: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, CLUSTER: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program: `tiles` tiles of BLOCK_M whole rows, `programs` tiles apart; of a cluster, the same `part_n` columns of each.

    Nothing is carried from one tile to the next. Rows a little longer than a power of two have a second tile, of their TAIL.

    The variance is the mean of squared deviations from the mean, never E[x^2] - E[x]^2. HOLD: what all rows share of scale and
    bias stays in registers; else it is read when it is needed, so that registers serve rows on their way.
    """
    pid = tl.program_id(0).to(tl.int64)
    n = multiple_of(n, UNIT)
    pid, part, cols, inside_n = part_of_row(pid, part_n, n, BLOCK_N, CLUSTER, FULL)
    own_n = n if CLUSTER == 1 else tl.minimum(part_n, n - part * part_n)
    scale = _held(scale_ptr, cols, inside_n, n, HOLD and not SCALE_EACH)
    bias = _held(bias_ptr, cols, inside_n, n, HOLD and not BIAS_EACH)
    if TAIL > 0:
        cols_t = BLOCK_N + tl.arange(0, TAIL)[None, :]
        inside_t = cols_t < n
        scale_t = _held(scale_ptr, cols_t, inside_t, n, HOLD and not SCALE_EACH)
        bias_t = _held(bias_ptr, cols_t, inside_t, n, HOLD and not BIAS_EACH)
    for i in tl.range(0, tiles, num_stages=STAGES):
        rows = (i * programs + pid) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < r)[:, None] & inside_n
        offsets = rows[:, None] * n + cols
        x = _input(
            x_ptr, residual_ptr, sum_ptr, offsets, rows[:, None], cols, mask, n, residual_inner, residual_own, SHARED, "evict_first"
        )  # fmt: skip
        if TAIL > 0:
            mask_t = (rows < r)[:, None] & inside_t
            offsets_t = rows[:, None] * n + cols_t
            t = _input(
                x_ptr, residual_ptr, sum_ptr, offsets_t, rows[:, None], cols_t, mask_t, n, residual_inner, residual_own, SHARED,
                "evict_first",
            )  # fmt: skip
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
        rstd = tl.rsqrt(mean_of(square, n) + epsilon)
        if part == 0:
            if mean_ptr is not None:
                tl.store(mean_ptr + rows, mean, mask=rows < r)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + rows, rstd, mask=rows < r)
        y = _normalised(
            x, rstd, rows, cols, mask, inside_n, scale_ptr, scale, bias_ptr, bias,
            n, scale_inner, scale_own, bias_inner, bias_own, scale_offset, SCALE_EACH, BIAS_EACH, HOLD,
        )  # fmt: skip
        tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
        if TAIL > 0:
            y = _normalised(
                t, rstd, rows, cols_t, mask_t, inside_t, scale_ptr, scale_t, bias_ptr, bias_t,
                n, scale_inner, scale_own, bias_inner, bias_own, scale_offset, SCALE_EACH, BIAS_EACH, HOLD,
            )  # fmt: skip
            tl.store(y_ptr + offsets_t, y.to(y_ptr.dtype.element_ty), mask=mask_t)


@counted
def _long_forward_kernel(
    x_ptr, residual_ptr, scale_ptr, bias_ptr, means_ptr, squares_ptr,
    y_ptr, sum_ptr, mean_ptr, rstd_ptr, part_means_ptr, part_squares_ptr,
    n, splits, per_split, residual_inner, residual_own, scale_inner, scale_own, bias_inner, bias_own, epsilon, scale_offset,
    SHARED: tl.constexpr, CENTRED: tl.constexpr, STATISTICS: tl.constexpr, APPLY: tl.constexpr, SPLITS: tl.constexpr,
    UNIT: tl.constexpr, STAGES: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one of `splits` parts of a row. STATISTICS and APPLY: both, of a row in one part, or in two launches.

    Loop invariant of the first pass: lane j has the mean, and the sum of squared deviations from it, of the elements j, j + BLOCK_N
    ... so far (Welford). The second pass goes backwards: what was read last is still in the cache.
    """
    pid = tl.program_id(0).to(tl.int64)
    row, split = pid // splits, (pid % splits).to(tl.int32)
    n = multiple_of(n, UNIT)
    first = split * per_split
    last = tl.minimum(first + per_split, n)
    blocks = tl.cdiv(last - first, BLOCK_N)
    lanes = tl.arange(0, BLOCK_N)
    base = row * n
    if STATISTICS:
        means = tl.zeros((BLOCK_N,), tl.float32)
        squares = tl.zeros((BLOCK_N,), tl.float32)
        for i in tl.range(0, blocks, num_stages=STAGES):
            cols = first + i * BLOCK_N + lanes
            x = _input(
                x_ptr, residual_ptr, sum_ptr, base + cols, row, cols, cols < last, n, residual_inner, residual_own, SHARED, ""
            )  # fmt: skip
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
        if not APPLY:
            if CENTRED:
                tl.store(part_means_ptr + pid, mean)
            tl.store(part_squares_ptr + pid, square)
    else:
        parts = tl.arange(0, SPLITS)
        squares = tl.load(squares_ptr + row * splits + parts, mask=parts < splits, other=0.0)
        if CENTRED:
            means = tl.load(means_ptr + row * splits + parts, mask=parts < splits, other=0.0)
            counts = tl.maximum(tl.minimum(n - parts * per_split, per_split), 0).to(tl.float32)
            mean, square = _merged(means, squares, counts, n)
        else:
            mean, square = 0.0, tl.sum(squares, 0)
    if APPLY:
        rstd = tl.rsqrt(mean_of(square, n) + epsilon)
        if split == 0:
            if mean_ptr is not None:
                tl.store(mean_ptr + row, mean)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + row, rstd)
        scale_base = own_row(row, scale_inner, scale_own) * n
        bias_base = own_row(row, bias_inner, bias_own) * n
        if STATISTICS and residual_ptr is not None:
            tl.debug_barrier()  # the sum is read by other threads than those that wrote it
        for i in tl.range(0, blocks, num_stages=STAGES):
            cols = first + (blocks - 1 - i) * BLOCK_N + lanes
            if residual_ptr is not None and STATISTICS:
                x = tl.load(sum_ptr + base + cols, mask=cols < last, other=0.0).to(tl.float32)
            else:
                x = tl.load(x_ptr + base + cols, mask=cols < last, other=0.0, eviction_policy="evict_first").to(tl.float32)
            y = (x - mean) * rstd
            if scale_ptr is not None:
                y = y * (tl.load(scale_ptr + scale_base + cols, mask=cols < last, other=0.0).to(tl.float32) + scale_offset)
            if bias_ptr is not None:
                y = y + tl.load(bias_ptr + bias_base + cols, mask=cols < last, other=0.0).to(tl.float32)
            tl.store(y_ptr + base + cols, y.to(y_ptr.dtype.element_ty), mask=cols < last, eviction_policy="evict_first")


def absent(present: dict[str, bool]) -> dict[str, Any]:
    """Keywords of the result pointers that are not there."""
    return {f"{name}_ptr": None for name, there in present.items() if not there}


def rows_of(name: str, rows: Rows | None) -> dict[str, Any]:
    """Keywords that say which row of a parameter serves which row of x."""
    return {f"{name}_inner": rows.inner if rows else 1, f"{name}_own": rows.own if rows else 1}


def forward(launch: Launch, x, *others):
    """Launcher of all four ops; of those that add, the residual comes after x, and their sum after the result."""
    residual: Any = None
    dtype, x_rows, residual_rows = x.dtype, launch.rows[0], None
    parameters, parameter_rows = others, launch.rows[1:]
    if adds := launch.op.startswith("add_"):
        residual, parameters, residual_rows, parameter_rows = others[0], others[1:], launch.rows[1], launch.rows[2:]
        if x_rows.own < launch.batch == residual_rows.own:  # the kernel lets rows share what it calls the residual
            x, residual, x_rows, residual_rows = residual, x, residual_rows, x_rows
    scale, bias = (*parameters, None)[:2]
    scale_rows, bias_rows = (*parameter_rows, None)[:2]
    x = x_rows.full(x)
    r, n = x.shape
    centred = launch.op.endswith("layer_norm")
    clusters = has_clusters(launch) and n * x.dtype.itemsize % 16 == 0
    heuristic = forward_config(launch.target, r, n, x.dtype.itemsize, 1 + adds, clusters=clusters)
    each = tuple(p is not None and p.own > 1 for p in (scale_rows, bias_rows))
    shared = residual_rows is not None and residual_rows.own < r
    kernels = (_forward_kernel, _long_forward_kernel)
    config = launch.choose(heuristic, kernels, (x, residual, scale, bias), {"r": r}, n=n, each=each, shared=shared)
    results = {"y": jax.ShapeDtypeStruct(x.shape, dtype)}
    if adds:
        results["sum"] = jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, residual.dtype))
    if launch.residuals:
        results |= {name: jax.ShapeDtypeStruct((r,), jnp.float32) for name in ("mean", "rstd")[not centred :]}
    run = _rows if fits(launch, config, n - tail(config, n)) else _long
    numbers = {
        "n": n,
        "epsilon": launch.options["epsilon"],
        "scale_offset": launch.options["scale_offset"],
        "SHARED": shared,
        "CENTRED": centred,
        "UNIT": unit(n),
        "STAGES": config["num_stages"] or 1,
        **rows_of("residual", residual_rows),
        **rows_of("scale", scale_rows),
        **rows_of("bias", bias_rows),
    }
    got = run(launch, config, {"x_ptr": x, "residual_ptr": residual, "scale_ptr": scale, "bias_ptr": bias}, results, numbers)
    return tuple(got[name] for name in results)


def _rows(launch: Launch, config: Config, arrays, results, numbers) -> dict[str, jax.Array]:
    r, n = arrays["x_ptr"].shape
    total = cdiv(r, config["BLOCK_M"])
    programs = min(config["PROGRAMS"], total)
    out = launch(
        _forward_kernel, **arrays, **numbers, **absent({name: name in results for name in ("sum", "mean", "rstd")}),
        **cluster_parts(config, n, programs), r=r, tiles=cdiv(total, programs), programs=programs, config=config, flops=8 * r * n,
        out_type=list(results.values()), SCALE_EACH=numbers["scale_own"] > 1, BIAS_EACH=numbers["bias_own"] > 1,
        HOLD=programs < total, TAIL=tail(config, n),
    )  # fmt: skip
    return dict(zip(results, out, strict=True))


def _long(launch: Launch, config: Config, arrays, results, numbers) -> dict[str, jax.Array]:
    x, block = arrays["x_ptr"], config["BLOCK_N"]
    r, n = x.shape
    per_split = cdiv(cdiv(n, block), max(1, config["PROGRAMS"] // r)) * block
    splits = cdiv(n, per_split)
    shared = {**numbers, "config": config, "flops": 8 * r * n, "grid": r * splits, "splits": splits, "per_split": per_split}
    shared |= {"SPLITS": next_power_of_2(splits), "means_ptr": None, "squares_ptr": None}

    def run(given, wanted: dict[str, jax.ShapeDtypeStruct], **more):
        missing = absent({name: name in wanted for name in ("y", "sum", "mean", "rstd", "part_means", "part_squares")})
        out = launch(_long_forward_kernel, **given, **{**shared, **more}, **missing, out_type=list(wanted.values()))
        return dict(zip(wanted, out, strict=True))

    if splits == 1:
        return run(arrays, results, STATISTICS=True, APPLY=True)
    early = {name: t for name, t in results.items() if name == "sum"}
    late = {name: t for name, t in results.items() if name != "sum"}
    parts = ["part_means", "part_squares"][not numbers["CENTRED"] :]
    part = dict.fromkeys(parts, jax.ShapeDtypeStruct((r, splits), jnp.float32))
    without = {**arrays, "scale_ptr": None, "bias_ptr": None}
    done = run(without, early | part, STATISTICS=True, APPLY=False, name=f"{launch.stage}_statistics")
    ready = {**arrays, "x_ptr": done.get("sum", x), "residual_ptr": None}
    got = run(ready, late, STATISTICS=False, APPLY=True, means_ptr=done.get("part_means"), squares_ptr=done["part_squares"])
    return done | got
