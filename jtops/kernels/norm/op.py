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
    """Make one of the four ops: of a sum if it `adds`; layer_norm if it is `centred`, else rms_norm."""
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
    """Check the operands and options of a norm and return them, the named arrays first."""
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

    >>> y = jtops.layer_norm(jnp.array([[99.0, 100.0, 101.0], [0.0, 0.0, 0.0]]), scale=jnp.full(3, 2.0))
    >>> print(y.round(2))  # each row has mean 0, and deviation 2 unless it is constant
    [[-2.45  0.    2.45]
     [ 0.    0.    0.  ]]

    Args:
      x: floating array of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale, bias: arrays [n] of any floating dtype; None is ones and zeros, without the work.
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

    >>> x = jnp.array([[10.0, -10.0], [3.0, 3.0]])
    >>> print(jtops.rms_norm(x, scale=jnp.array([1.0, 2.0])).round(2))  # each row has mean square 1 before it is scaled
    [[ 1. -2.]
     [ 1.  2.]]

    Args:
      x: floating array of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale: array [n] of any floating dtype; None is ones, without the work.
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

    >>> x, stream = jnp.ones((2, 16)), jnp.arange(16.0) * jnp.ones((2, 1))
    >>> y, stream = jtops.add_layer_norm(x, stream)  # the next block's input, and the residual stream that goes past it
    >>> print(stream[0, :4])
    [1. 2. 3. 4.]

    Args:
      x, residual: floating arrays of one shape, of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale, bias: arrays [n] of any floating dtype; None is ones and zeros, without the work.
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

    >>> x, stream = jnp.ones((2, 16)), jnp.full((2, 16), 2.0)
    >>> y, stream = jtops.add_rms_norm(x, stream)  # the next block's input, and the residual stream that goes past it
    >>> print(y[0, 0].round(2), stream[0, 0])
    1.0 3.0

    Args:
      x, residual: floating arrays of one shape, of at least one axis. Kernel dtypes: float32, bfloat16, float16; any length.
      scale: array [n] of any floating dtype; None is ones, without the work.
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
