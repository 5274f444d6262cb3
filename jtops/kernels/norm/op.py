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
from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.spec import Case, Input, Spec
from jtops.kernels.norm.backward import backward
from jtops.kernels.norm.forward import forward


def _reference(x, scale, bias=None, *, epsilon, scale_offset, centred):
    wide = accumulator(x.dtype)
    y = x.astype(wide)
    mean = None
    if centred:
        mean = jnp.mean(y, -1, keepdims=True)
        y = y - mean
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + epsilon)
    y = y * rstd
    if scale is not None:
        y = y * (scale.astype(wide) + scale_offset)
    if bias is not None:
        y = y + bias.astype(wide)
    statistics = (rstd,) if mean is None else (mean, rstd)
    return y.astype(x.dtype), *(s[..., 0] for s in statistics)


def _added(x, residual, *parameters, **options):
    """The norm of the sum, as it is stored; and the sum. The norm has the dtype of x, statistics come last."""
    total = jnp.add(x, residual)
    y, *statistics = _reference(total, *parameters, **options)
    return y.astype(x.dtype), total, *statistics


def _norm(name: str, *, adds: bool, centred: bool):
    """One of the four ops: of a sum if it `adds`; layer_norm if it is `centred`, else rms_norm."""
    operands = ("x", "residual") if adds else ("x",)
    parameters = ("scale", "bias") if centred else ("scale",)
    return fused_op(
        name,
        operands=dict.fromkeys(operands + parameters, "n"),
        results={"y": "n", "sum": "n"} if adds else {"y": "n"},
        residuals={"mean": "", "rstd": ""} if centred else {"rstd": ""},
        saves=("sum",) if adds else (),
        whole="n",
        reference=functools.partial(_added if adds else _reference, centred=centred),
        forward=functools.partial(forward, adds=adds, centred=centred),
        backward=functools.partial(backward, adds=adds, centred=centred),
        limits=checks.kernel_floats,
        blocks="BLOCK_M BLOCK_N PROGRAMS",
    )


_layer_norm = _norm("layer_norm", adds=False, centred=True)
_rms_norm = _norm("rms_norm", adds=False, centred=False)
_add_layer_norm = _norm("add_layer_norm", adds=True, centred=True)
_add_rms_norm = _norm("add_rms_norm", adds=True, centred=False)


def _checked(op: str, parameters: dict[str, Any], epsilon, scale_offset, **arrays) -> tuple[tuple, dict[str, float]]:
    """-> the operands and options of a norm, checked; the named arrays first."""
    arrays = {name: checks.array(op, name, value) for name, value in arrays.items()}
    parameters = {name: None if value is None else checks.array(op, name, value) for name, value in parameters.items()}
    first, *others = arrays.items()
    for name, value in others:
        if value.shape != first[1].shape:
            raise ValueError(f"{op}: {first[0]} and {name} must have one shape; got {first[1].shape} and {value.shape}.")
    checks.axes(op, **{name: (v, "... n") for name, v in arrays.items()}, **{name: (v, "n") for name, v in parameters.items()})
    options = {
        "epsilon": checks.static_float(op, "epsilon", epsilon),
        "scale_offset": checks.static_float(op, "scale_offset", scale_offset),
    }
    return (*arrays.values(), *parameters.values()), options


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
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (elements of a row) of a tile; ``PROGRAMS``: at most so many share the work.
        ``cluster_size``: so many programs share a row. None: chosen by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: not floating; `epsilon` or `scale_offset` traced.
      ValueError: `x` without axes, or lengths that differ.
      UnsupportedError: float64, where a kernel must run.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, section 3.
    """
    operands, options = _checked("layer_norm", {"scale": scale, "bias": bias}, epsilon, scale_offset, x=x)
    return _layer_norm(*operands, implementation=implementation, config=config, **options)[0]


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
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (elements of a row) of a tile; ``PROGRAMS``: at most so many share the work.
        ``cluster_size``: so many programs share a row. None: chosen by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: not floating; `epsilon` or `scale_offset` traced.
      ValueError: `x` without axes, or lengths that differ.
      UnsupportedError: float64, where a kernel must run.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 3.
    """
    operands, options = _checked("rms_norm", {"scale": scale}, epsilon, scale_offset, x=x)
    return _rms_norm(*operands, implementation=implementation, config=config, **options)[0]


def add_layer_norm(
    x: Float[Array, "*batch n"],
    residual: Float[Array, "*batch n"],
    scale: Float[Array, " n"] | None = None,
    bias: Float[Array, " n"] | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
    """``(layer_norm(x + residual, scale, bias), x + residual)`` in one op: the step between blocks of a transformer.

    The sum is rounded to its dtype before it is normalised, so that the two results are those of the two ops. Everything else is
    as in `layer_norm`. The gradient takes the cotangents of both results together; x and residual share it. Rows that a
    program holds pass through memory once; longer ones are read twice.

    Args:
      x, residual: floating arrays of one shape, of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale, bias: of shape [n], of any floating dtype; None is ones and zeros, without the work.
      epsilon: added to the variance; a plain number.
      scale_offset: added to `scale`, for parameters stored around zero; unused without `scale`.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: as for `layer_norm`.

    Returns:
      The norm, of the dtype of `x`; and the sum, of the dtype that `x` and `residual` promote to: a float32 residual stays one.

    Raises:
      TypeError: not floating; `epsilon` or `scale_offset` traced.
      ValueError: `x` without axes, or shapes that differ.
      UnsupportedError: float64, where a kernel must run.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, section 3.
    """
    parameters = {"scale": scale, "bias": bias}
    operands, options = _checked("add_layer_norm", parameters, epsilon, scale_offset, x=x, residual=residual)
    y, total = _add_layer_norm(*operands, implementation=implementation, config=config, **options)
    return y, total


def add_rms_norm(
    x: Float[Array, "*batch n"],
    residual: Float[Array, "*batch n"],
    scale: Float[Array, " n"] | None = None,
    *,
    epsilon: float = 1e-6,
    scale_offset: float = 0.0,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> tuple[Float[Array, "*batch n"], Float[Array, "*batch n"]]:
    """``(rms_norm(x + residual, scale), x + residual)`` in one op: the step between two blocks of a transformer.

    The sum is rounded to its dtype before it is normalised, so that the two results are those of the two ops. Everything else is
    as in `rms_norm`. The gradient takes the cotangents of both results together; x and residual share it. Rows that a
    program holds pass through memory once; longer ones are read twice.

    Args:
      x, residual: floating arrays of one shape, of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale: of shape [n], of any floating dtype; None is ones, without the work.
      epsilon: added to the mean of squares; a plain number.
      scale_offset: added to `scale`, for parameters stored around zero; unused without `scale`.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: as for `rms_norm`.

    Returns:
      The norm, of the dtype of `x`; and the sum, of the dtype that `x` and `residual` promote to: a float32 residual stays one.

    Raises:
      TypeError: not floating; `epsilon` or `scale_offset` traced.
      ValueError: `x` without axes, or shapes that differ.
      UnsupportedError: float64, where a kernel must run.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, section 3.
    """
    operands, options = _checked("add_rms_norm", {"scale": scale}, epsilon, scale_offset, x=x, residual=residual)
    y, total = _add_rms_norm(*operands, implementation=implementation, config=config, **options)
    return y, total


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
        Case("tail", (Input((5, 70)), Input((70,)), Input((70,))), "rows a little longer than a block", config=_BLOCKS),
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


def _present_bytes(*parameters) -> int:
    return sum(p.nbytes for p in parameters if p is not None)


_ROWS = Input((5, 300))
_ADD_LAYER_NORM = Spec(
    name="add_layer_norm",
    function=add_layer_norm,
    operands=("x", "residual", "scale", "bias"),
    small=Case("small", (Input((2, 3, 8)), Input((2, 3, 8)), Input((8,)), Input((8,))), "all operands"),
    meshed=Case("meshed", (Input((8, 8, 8)), Input((8, 8, 8)), Input((8,)), Input((8,))), "rows on many devices"),
    cases=(
        Case("full", (Input((3, 5, 257)), Input((3, 5, 257)), Input((257,)), Input((257,))), "rows and columns that fill no block"),
        Case("bare", (Input((7, 48)), Input((7, 48), mean=3.0), None, None), "no parameters"),
        Case("blocks", (_ROWS, _ROWS, Input((300,)), Input((300,))), "rows longer than a block", config=_BLOCKS),
        Case("split", (_ROWS, _ROWS, Input((300,)), Input((300,))), "few long rows, several programs each", config=_SPLIT),
    ),
    compiled=(
        Case("middle", (Input((8192, 4096)), Input((8192, 4096)), Input((4096,)), Input((4096,))), "transformer width"),
        Case("long", (Input((64, 131072)), Input((64, 131072)), Input((131072,)), Input((131072,))), "several blocks a row"),
    ),
    backward_kernels=1,
    forward_bytes=lambda out, x, residual, *p: x.nbytes + residual.nbytes + sum(o.nbytes for o in out) + _present_bytes(*p),
    backward_bytes=lambda out, x, residual, *p: 4 * out[1].nbytes + 2 * _present_bytes(*p),
)
_ADD_RMS_NORM = Spec(
    name="add_rms_norm",
    function=add_rms_norm,
    operands=("x", "residual", "scale"),
    small=Case("small", (Input((2, 3, 8)), Input((2, 3, 8)), Input((8,))), "all operands"),
    meshed=Case("meshed", (Input((8, 8, 8)), Input((8, 8, 8)), Input((8,))), "rows on many devices, scale on all"),
    cases=(
        Case("full", (Input((3, 5, 257)), Input((3, 5, 257)), Input((257,))), "rows and columns that fill no block"),
        Case("bare", (Input((7, 48)), Input((7, 48)), None), "no scale"),
        Case("blocks", (_ROWS, _ROWS, Input((300,))), "rows longer than a block", config=_BLOCKS),
        Case("split", (_ROWS, _ROWS, Input((300,))), "few long rows, several programs each", config=_SPLIT),
    ),
    compiled=(Case("middle", (Input((8192, 4096)), Input((8192, 4096)), Input((4096,))), "transformer width"),),
    backward_kernels=1,
    forward_bytes=_ADD_LAYER_NORM.forward_bytes,
    backward_bytes=_ADD_LAYER_NORM.backward_bytes,
)
SPECS = (_LAYER_NORM, _RMS_NORM, _ADD_LAYER_NORM, _ADD_RMS_NORM)
