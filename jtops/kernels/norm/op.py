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


def _added(x, residual, *parameters, **options):
    """The norm of the sum, as it is stored; and the sum. The norm has the dtype of x, statistics come last."""
    total = jnp.add(x, residual)
    y, *statistics = _reference(total, *parameters, **options)
    return y.astype(x.dtype), total, *statistics


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
_add_layer_norm = fused_op(
    "add_layer_norm", "n, n, n, n -> n, n", residuals="(), ()", saves=(1,),
    reference=functools.partial(_added, centred=True), **_shared,
)  # fmt: skip
_add_rms_norm = fused_op(
    "add_rms_norm", "n, n, n -> n, n", residuals="()", saves=(1,), reference=functools.partial(_added, centred=False), **_shared
)


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
