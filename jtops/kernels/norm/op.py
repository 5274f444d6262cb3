"""layer_norm and rms_norm over the last axis, also of a sum: rms_norm is layer_norm that subtracts no mean and adds no bias.

Bound by memory: one read and one write; the backward reads x and dy and writes dx.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtops.config import Implementation
from jtops.kernels._lib import checks
from jtops.kernels._lib.fused_op import fused_op
from jtops.kernels._lib.launch import Config
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.spec import Case, Input, Spec
from jtops.kernels.norm.backward import backward
from jtops.kernels.norm.forward import forward


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
    "forward": forward,
    "backward": backward,
    "whole": "n",
    "limits": checks.kernel_floats,
    "blocks": "BLOCK_M BLOCK_N PROGRAMS",
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
_TILES, _BLOCKS, _SPLIT = (Config(BLOCK_M=2, BLOCK_N=n, PROGRAMS=p) for n, p in ((8, 4), (64, 4), (64, 32)))
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
        Case("tiles", (Input((37, 6)), Input((6,)), Input((6,))), "several tiles a program", config=_TILES),
        Case("blocks", (Input((5, 300)), Input((300,)), Input((300,))), "rows longer than a block", config=_BLOCKS),
        Case("split", (Input((5, 300)), Input((300,)), Input((300,))), "few long rows, several programs each", config=_SPLIT),
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
        Case("tiles", (Input((37, 6)), Input((6,))), "several tiles a program", config=_TILES),
        Case("blocks", (Input((5, 300)), Input((300,))), "rows longer than a block", config=_BLOCKS),
        Case("split", (Input((5, 300)), Input((300,))), "few long rows, several programs each", config=_SPLIT),
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
