"""layer_norm and rms_norm over the last axis: rms_norm is layer_norm that subtracts no mean and adds no bias.

Bound by memory: one read and one write; the backward reads x and dy and writes dx.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtops.config import Implementation
from jtops.core.compat import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib.device import own_row
from jtops.kernels._lib.fused_op import fused_op
from jtops.kernels._lib.launch import Config, Launch, Rows
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.spec import Case, Input, Spec


@triton.jit
def _load(ptr, row, cols, n):
    return tl.load(ptr + row * n + cols, mask=cols < n, other=0.0).to(tl.float32)


@triton.jit
def _mean(total, n):
    """total / n, correctly rounded: the default division is not, and a gradient that cancels to 0 would not be 0."""
    return tl.div_rn(total, tl.full((), n, tl.float32))


@triton.jit
def _affine(x_hat, scale_ptr, bias_ptr, scale_row, bias_row, cols, n, scale_offset):
    """x_hat * (scale + scale_offset) + bias, of those that are there."""
    if scale_ptr is not None:
        x_hat = x_hat * (_load(scale_ptr, scale_row, cols, n) + scale_offset)
    if bias_ptr is not None:
        x_hat = x_hat + _load(bias_ptr, bias_row, cols, n)
    return x_hat


@triton.jit
def _forward_kernel(
    x_ptr, scale_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    n, scale_inner, scale_own, bias_inner, bias_own, epsilon, scale_offset,
    CENTRED: tl.constexpr, ONE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one row. The variance is the mean of squared deviations from the mean, never E[x^2] - E[x]^2."""
    row = tl.program_id(0).to(tl.int64)
    scale_row = own_row(row, scale_inner, scale_own)
    bias_row = own_row(row, bias_inner, bias_own)
    cols = tl.arange(0, BLOCK_N)
    mean = 0.0
    if ONE_BLOCK:
        centred = _load(x_ptr, row, cols, n)
        if CENTRED:
            mean = _mean(tl.sum(centred, 0), n)
            centred = tl.where(cols < n, centred - mean, 0.0)
        rstd = tl.rsqrt(_mean(tl.sum(centred * centred, 0), n) + epsilon)
        y = _affine(centred * rstd, scale_ptr, bias_ptr, scale_row, bias_row, cols, n, scale_offset)
        tl.store(y_ptr + row * n + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n)
    else:
        if CENTRED:
            acc = tl.zeros((BLOCK_N,), tl.float32)
            for start in range(0, n, BLOCK_N):
                acc += _load(x_ptr, row, start + cols, n)
            mean = _mean(tl.sum(acc, 0), n)
        acc = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, n, BLOCK_N):
            centred = tl.where(start + cols < n, _load(x_ptr, row, start + cols, n) - mean, 0.0)
            acc += centred * centred
        rstd = tl.rsqrt(_mean(tl.sum(acc, 0), n) + epsilon)
        for start in range(0, n, BLOCK_N):
            x_hat = (_load(x_ptr, row, start + cols, n) - mean) * rstd
            y = _affine(x_hat, scale_ptr, bias_ptr, scale_row, bias_row, start + cols, n, scale_offset)
            tl.store(y_ptr + row * n + start + cols, y.to(y_ptr.dtype.element_ty), mask=start + cols < n)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)


@triton.jit
def _add_to_row(ptr, value, cols, n, first):
    """Add `value` to a row of float32 that this program alone owns; the first time, write it."""
    before = tl.load(ptr + cols, mask=(cols < n) & (not first), other=0.0)
    tl.store(ptr + cols, before + value, mask=cols < n)


@triton.jit
def _backward_kernel(
    x_ptr, scale_ptr, g_ptr, mean_ptr, rstd_ptr, dx_ptr, dscale_ptr, dbias_ptr,
    n, scale_inner, scale_own, scale_offset, group_rows, parts, rows_per_part,
    ONE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one part of a group of rows that share scale and bias; dx of each row, and the part's sums of dscale and dbias.

    With x_hat the normalised row and w = g * (scale + scale_offset): dx = rstd * (w - mean(w) - x_hat * mean(w * x_hat)), dscale
    sums g * x_hat, dbias sums g. Without a mean, mean(w) is left out. Loop invariant: dscale and dbias hold the sums over the rows
    before.
    """
    pid = tl.program_id(0).to(tl.int64)
    group, part = pid // parts, pid % parts
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, group_rows)
    scale_row = own_row(group * group_rows, scale_inner, scale_own)
    cols = tl.arange(0, BLOCK_N)
    dscale = tl.zeros((BLOCK_N,), tl.float32)
    dbias = tl.zeros((BLOCK_N,), tl.float32)
    for i in range(first, last):
        row = group * group_rows + i
        mean = 0.0
        mean_w = 0.0
        if mean_ptr is not None:
            mean = tl.load(mean_ptr + row)
        rstd = tl.load(rstd_ptr + row)
        if ONE_BLOCK:
            g = _load(g_ptr, row, cols, n)
            x_hat = tl.where(cols < n, (_load(x_ptr, row, cols, n) - mean) * rstd, 0.0)
            w = _affine(g, scale_ptr, None, scale_row, 0, cols, n, scale_offset)
            if mean_ptr is not None:
                mean_w = _mean(tl.sum(w, 0), n)
            dx = rstd * (w - mean_w - x_hat * _mean(tl.sum(w * x_hat, 0), n))
            tl.store(dx_ptr + row * n + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < n)
            dscale += g * x_hat
            dbias += g
        else:
            sum_w = tl.zeros((BLOCK_N,), tl.float32)
            sum_wx = tl.zeros((BLOCK_N,), tl.float32)
            for start in range(0, n, BLOCK_N):
                g = _load(g_ptr, row, start + cols, n)
                x_hat = (_load(x_ptr, row, start + cols, n) - mean) * rstd
                w = _affine(g, scale_ptr, None, scale_row, 0, start + cols, n, scale_offset)
                sum_w += w
                sum_wx += w * x_hat
            if mean_ptr is not None:
                mean_w = _mean(tl.sum(sum_w, 0), n)
            mean_wx = _mean(tl.sum(sum_wx, 0), n)
            for start in range(0, n, BLOCK_N):
                g = _load(g_ptr, row, start + cols, n)
                x_hat = (_load(x_ptr, row, start + cols, n) - mean) * rstd
                w = _affine(g, scale_ptr, None, scale_row, 0, start + cols, n, scale_offset)
                dx = rstd * (w - mean_w - x_hat * mean_wx)
                tl.store(dx_ptr + row * n + start + cols, dx.to(dx_ptr.dtype.element_ty), mask=start + cols < n)
                if dscale_ptr is not None:
                    _add_to_row(dscale_ptr + pid * n, g * x_hat, start + cols, n, i == first)
                if dbias_ptr is not None:
                    _add_to_row(dbias_ptr + pid * n, g, start + cols, n, i == first)
    if ONE_BLOCK:
        if dscale_ptr is not None:
            tl.store(dscale_ptr + pid * n + cols, dscale, mask=cols < n)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + pid * n + cols, dbias, mask=cols < n)


_PARTS = 512  # programs that sum parameter gradients: a few for each multiprocessor of the largest GPUs


def _config(n: int, largest: int) -> Config:
    block_n = min(next_power_of_2(n), largest)
    return Config(BLOCK_N=block_n, num_warps=max(1, min(16, block_n // 256)))


def _forward(launch: Launch, x, scale, bias=None):
    x = launch.rows[0].full(x)
    r, n = x.shape
    config = launch.config or _config(n, 16384)
    scale_rows, bias_rows, *_ = *launch.rows[1:], None
    statistic = jax.ShapeDtypeStruct((r,), jnp.float32)
    centred = launch.op == "layer_norm"
    written = {"mean_ptr": launch.residuals and centred, "rstd_ptr": launch.residuals}
    return tuple(
        launch(
            _forward_kernel, x, scale, n=n, config=config, flops=8 * r * n, grid=r,
            out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] + [statistic] * sum(written.values()), **_absent(written),
            bias_ptr=bias, **_rows_of("scale", scale_rows), **_rows_of("bias", bias_rows),
            epsilon=launch.options["epsilon"], scale_offset=launch.options["scale_offset"],
            CENTRED=centred, ONE_BLOCK=n <= config["BLOCK_N"],
        )
    )  # fmt: skip


def _absent(present: dict[str, bool]) -> dict[str, Any]:
    return {name: None for name, there in present.items() if not there}


def _rows_of(name: str, rows: Rows | None) -> dict[str, Any]:
    return {f"{name}_inner": rows.inner if rows else 1, f"{name}_own": rows.own if rows else 1}


def _backward(launch: Launch, operands, saved, cotangents):
    (x, scale, *_), (*mean, rstd), (g,) = operands, saved, cotangents
    x = launch.rows[0].full(x)
    r, n = x.shape
    config = launch.config or _config(n, 8192)
    # Groups of neighbouring rows that share all parameters' rows; each is summed in parts.
    group_rows = min((rows.inner for rows in launch.rows[1:] if rows and rows.own > 1), default=r)
    groups = r // group_rows
    rows_per_part = cdiv(group_rows, max(1, _PARTS // groups))
    parts = cdiv(group_rows, rows_per_part)
    sums = jax.ShapeDtypeStruct((groups * parts, n), jnp.float32)
    _, *wanted = launch.wanted
    written = dict(zip(("dscale_ptr", "dbias_ptr"), (*wanted, False), strict=False))
    dx, *partial = launch(
        _backward_kernel, x, scale, g, mean[0] if mean else None, rstd, n=n, config=config, flops=16 * r * n, grid=groups * parts,
        out_type=[jax.ShapeDtypeStruct(x.shape, x.dtype)] + [sums] * sum(wanted), **_absent(written),
        **_rows_of("scale", launch.rows[1]), scale_offset=launch.options["scale_offset"],
        group_rows=group_rows, parts=parts, rows_per_part=rows_per_part, ONE_BLOCK=n <= config["BLOCK_N"],
        # A fused multiply-add would subtract the rounded mean(w) from the unrounded w: what should cancel to 0 would not.
        backend_options={"enable_fp_fusion": False},
    )  # fmt: skip

    def complete(rows: Rows) -> jax.Array:
        part = partial.pop(0).reshape(-1, n) if parts == 1 else partial.pop(0).reshape(groups, parts, n).sum(1)
        return Rows(rows.outer, rows.own, rows.inner // group_rows).sum(part) if rows.own > 1 else part.sum(0, keepdims=True)

    return dx, *(complete(rows) if wants else None for rows, wants in zip(launch.rows[1:], wanted, strict=True))


def _reference(x, scale, bias=None, *, epsilon, scale_offset, centred):
    wide = accumulator(x.dtype)
    y = x.astype(wide)
    means = [jnp.mean(y, -1, keepdims=True)] if centred else []
    for mean in means:
        y = y - mean
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + epsilon)
    y = y * rstd
    if scale is not None:
        y = y * (scale.astype(wide) + scale_offset)
    if bias is not None:
        y = y + bias.astype(wide)
    return y.astype(x.dtype), *(mean[..., 0] for mean in means), rstd[..., 0]


_shared: dict[str, Any] = {
    "forward": _forward,
    "backward": _backward,
    "whole": "n",
    "limits": checks.kernel_floats,
    "blocks": "BLOCK_N",
}
_layer_norm = fused_op(
    "layer_norm", "n, n, n -> n", residuals="(), ()", reference=functools.partial(_reference, centred=True), **_shared
)
_rms_norm = fused_op("rms_norm", "n, n -> n", residuals="()", reference=functools.partial(_reference, centred=False), **_shared)


def _norm(op: str, f, x, scale, bias, epsilon, scale_offset, **choice):
    """Check and call: (x, scale[, bias]) of layer_norm or rms_norm."""
    x = checks.array(op, "x", x)
    parameters = {k: None if v is None else checks.array(op, k, v) for k, v in {"scale": scale, **bias}.items()}
    checks.axes(op, x=(x, "... n"), **{k: (v, "n") for k, v in parameters.items()})
    options = {
        "epsilon": checks.static_float(op, "epsilon", epsilon),
        "scale_offset": checks.static_float(op, "scale_offset", scale_offset),
    }
    return f(x, *parameters.values(), **choice, **options)[0]


def layer_norm(
    x: Float[Array, "*batch n"],
    scale: Float[Array, " n"] | None = None,
    bias: Float[Array, " n"] | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch n"]:
    """``(x - mean) / sqrt(variance + epsilon) * (scale + scale_offset) + bias`` over the last axis.

    Mean and (biased, two-pass) variance are float32, and so is all arithmetic; float64 inputs compute in float64. Parameter
    gradients are summed in float32 in two stages, with the same bits every time, and have their parameter's dtype.

    Args:
      x: floating array of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale, bias: of shape [n], of any floating dtype; None is ones and zeros, without the work.
      epsilon: added to the variance; a plain number.
      scale_offset: added to `scale`, for parameters stored around zero; unused without `scale`.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: block ``BLOCK_N`` (elements of a row at a time). None: chosen by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: not floating; `epsilon` or `scale_offset` traced.
      ValueError: `x` without axes, or lengths that differ.
      UnsupportedError: float64, where a kernel must run.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, section 3.
    """
    return _norm(
        "layer_norm", _layer_norm, x, scale, {"bias": bias}, epsilon, scale_offset, implementation=implementation, config=config
    )


def rms_norm(
    x: Float[Array, "*batch n"],
    scale: Float[Array, " n"] | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch n"]:
    """``x / sqrt(mean(x^2) + epsilon) * (scale + scale_offset)`` over the last axis.

    The mean of squares is float32, and so is all arithmetic; float64 inputs compute in float64. The gradient of `scale` is summed
    in float32 in two stages, with the same bits every time, and has its dtype.

    Args:
      x: floating array of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale: of shape [n], of any floating dtype; None is ones, without the work.
      epsilon: added to the mean of squares; a plain number.
      scale_offset: added to `scale`, for parameters stored around zero; unused without `scale`.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: block ``BLOCK_N`` (elements of a row at a time). None: chosen by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: not floating; `epsilon` or `scale_offset` traced.
      ValueError: `x` without axes, or lengths that differ.
      UnsupportedError: float64, where a kernel must run.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 3.
    """
    return _norm("rms_norm", _rms_norm, x, scale, {}, epsilon, scale_offset, implementation=implementation, config=config)


_N = Input((1000,))
_LAYER_NORM = Spec(
    name="layer_norm",
    function=layer_norm,
    operands=("x", "scale", "bias"),
    small=Case("small", (Input((2, 3, 8)), Input((8,)), Input((8,))), "all operands"),
    meshed=Case("meshed", (Input((8, 8, 8)), Input((8,)), Input((8,))), "rows on many devices, parameters on all"),
    cases=(
        Case("full", (Input((3, 5, 257)), Input((257,)), Input((257,))), "rows and columns that fill no block"),
        Case("bare", (Input((7, 48)), None, None), "no parameters"),
        Case("scale", (Input((7, 48)), Input((48,)), None), "scale alone"),
        Case("bias", (Input((7, 48)), None, Input((48,))), "bias alone"),
        Case("vector", (_N, _N, _N), "no batch axis"),
        Case("one", (Input((5, 1)), Input((1,)), Input((1,))), "a row of one element: bias, and gradient 0"),
        Case("offset", (Input((7, 48)), Input((48,)), Input((48,))), "scale stored around zero", {"scale_offset": 1.0}),
        Case("epsilon", (Input((7, 48), std=1e-2), Input((48,)), None), "epsilon as large as the variance", {"epsilon": 1e-4}),
        Case("mean", (Input((5, 96), mean=100.0), Input((96,)), None), "mean far above the spread"),
        Case("parts", (Input((520, 6)), Input((6,)), Input((6,))), "parameter gradients summed in several parts"),
        Case("blocks", (Input((5, 300)), Input((300,)), Input((300,))), "rows longer than a block", config=Config(BLOCK_N=64)),
    ),
    compiled=(
        Case("short", (Input((65536, 256)), Input((256,)), Input((256,))), "short rows"),
        Case("middle", (Input((8192, 4096)), Input((4096,)), Input((4096,))), "transformer width"),
        Case("bare", (Input((8192, 4096)), None, None), "no parameters"),
        Case("long", (Input((64, 131072)), Input((131072,)), Input((131072,))), "several blocks a row"),
    ),
    backward_kernels=1,
    forward_bytes=lambda y, x, scale, bias: 2 * x.nbytes + sum(p.nbytes for p in (scale, bias) if p is not None),
    backward_bytes=lambda y, x, scale, bias: 3 * x.nbytes + sum(p.nbytes for p in (scale, bias) if p is not None),
)
_RMS_NORM = Spec(
    name="rms_norm",
    function=rms_norm,
    operands=("x", "scale"),
    small=Case("small", (Input((2, 3, 8)), Input((8,))), "all operands"),
    meshed=Case("meshed", (Input((8, 8, 8)), Input((8,))), "rows on many devices, scale on all"),
    cases=(
        Case("full", (Input((3, 5, 257)), Input((257,))), "rows and columns that fill no block"),
        Case("bare", (Input((7, 48)), None), "no scale"),
        Case("vector", (_N, _N), "no batch axis"),
        Case("one", (Input((5, 1)), Input((1,))), "a row of one element", {"epsilon": 0.5}),
        Case("offset", (Input((7, 48)), Input((48,))), "scale stored around zero", {"scale_offset": 1.0}),
        Case("epsilon", (Input((7, 48), std=1e-2), Input((48,))), "epsilon as large as the mean square", {"epsilon": 1e-4}),
        Case("parts", (Input((520, 6)), Input((6,))), "the gradient of scale summed in several parts"),
        Case("blocks", (Input((5, 300)), Input((300,))), "rows longer than a block", config=Config(BLOCK_N=64)),
    ),
    compiled=(
        Case("short", (Input((65536, 256)), Input((256,))), "short rows"),
        Case("middle", (Input((8192, 4096)), Input((4096,))), "transformer width"),
        Case("long", (Input((64, 131072)), Input((131072,))), "several blocks a row"),
    ),
    backward_kernels=1,
    forward_bytes=lambda y, x, scale: 2 * x.nbytes + (0 if scale is None else scale.nbytes),
    backward_bytes=lambda y, x, scale: 3 * x.nbytes + (0 if scale is None else scale.nbytes),
)
SPECS = (_LAYER_NORM, _RMS_NORM)
