"""What `jtops.linen` and `jtops.nnx` share: which calls of Flax's layers the ops serve, and as which calls of ops. No Flax here."""

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jtops.kernels._lib.checks import KERNEL_FLOATS
from jtops.kernels.attention import flash_attention
from jtops.kernels.matmul import matmul


def of_flax(flax: ModuleType, name: str, module: str) -> Any:
    """What `module`, which stands in for `flax`, does not define: that module's attribute or, as ``from ... import``, submodule."""
    if not name.startswith("_"):  # those make a module this module
        try:
            return getattr(flax, name)
        except AttributeError:
            if importlib.util.find_spec(submodule := f"{flax.__name__}.{name}"):
                return importlib.import_module(submodule)
    raise AttributeError(f"module {module!r} has no attribute {name!r}, nor has {flax.__name__!r}")


def _last(axes: Any, ndim: int) -> bool:
    axes = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    return {axis + ndim if axis < 0 else axis for axis in axes} == {ndim - 1}


def serves_norm(layer: Any, x: Any, mask: Any) -> bool:
    """Whether layer_norm and rms_norm compute what this normalisation layer of Flax is set to."""
    ndim = jnp.ndim(x)
    dtypes = (jnp.result_type(x), layer.param_dtype, layer.dtype or layer.param_dtype)
    return (
        ndim > 0
        and mask is None
        and layer.axis_name is None
        and _last(layer.reduction_axes, ndim)
        and _last(layer.feature_axes, ndim)
        and not isinstance(layer.epsilon, jax.core.Tracer)
        and not any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    )


def normalize(op: Callable[..., jax.Array], x: Any, *parameters: jax.Array | None, epsilon: Any, dtype: Any) -> jax.Array:
    """`op` of `x`, rounded once, to `dtype`, as Flax's layers round: neither `x` nor the result passes through a shorter one."""
    x = jnp.asarray(x)
    return op(x.astype(jnp.promote_types(x.dtype, dtype)), *parameters, epsilon=epsilon).astype(dtype)


def _serves_product(x: jax.Array, kernel: jax.Array, precision: Any) -> bool:
    return (
        x.dtype == kernel.dtype
        and x.dtype in (*KERNEL_FLOATS, jnp.float64)
        and (precision is None or isinstance(precision, str | lax.Precision))
    )


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
) -> jax.Array:
    """``jax.lax.dot_general`` by `jtops.matmul`, where the product is one of matrices as they lie in memory.

    That is: batch axes lead in both operands, the last axes of `lhs` are summed with the next of `rhs`, both in order, and both
    have one of the dtypes float32, bfloat16, float16 and float64, as in Flax's dense and attention layers. Everything else (a
    summed axis elsewhere, other or two dtypes, an `out_sharding`, a `precision` for each operand) is ``jax.lax.dot_general``'s.

    Args:
      lhs: [*batch, *free, *summed].
      rhs: [*batch, *summed, *features].
      dimension_numbers: ``((lhs summed, rhs summed), (lhs batch, rhs batch))``.
      precision: None is what ``jax_default_matmul_precision`` says, else float32 accuracy.
      preferred_element_type: dtype of the result; None is that of the operands.
      out_sharding: of the result.

    Returns:
      [*batch, *free, *features].
    """
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = (tuple(map(tuple, axes)) for axes in dimension_numbers)
    b, c = len(lhs_batch), len(lhs_summed)
    if not (
        c
        and out_sharding is None
        and lhs_batch == rhs_batch == tuple(range(b))
        and lhs_summed == tuple(range(lhs.ndim - c, lhs.ndim))
        and rhs_summed == tuple(range(b, b + c))
        and _serves_product(lhs, rhs, precision)
    ):
        return lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)
    batch, free, summed, features = lhs.shape[:b], lhs.shape[b : lhs.ndim - c], rhs.shape[b : b + c], rhs.shape[b + c :]
    k = math.prod(summed)
    y = matmul(
        lhs.reshape(*batch, *((math.prod(free),) if b else free), k),
        rhs.reshape(*batch, k, math.prod(features)),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return y.reshape(*batch, *free, *features)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, precision: Any) -> jax.Array:
    """``x @ kernel + bias`` over the last axis of `x`, in one kernel where there is one."""
    if bias is not None and bias.dtype == x.dtype and _serves_product(x, kernel, precision):
        return matmul(x, kernel, bias=bias, precision=precision)
    y = dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision)
    return y if bias is None else y + bias


# What flash_attention does as Flax says (always: the softmax in float32), or what says nothing without dropout. Every other option
# that is not at its default, of this version of Flax or another, is Flax's own business.
_SERVED = {
    "query", "key", "value", "dtype", "precision", "promote_dtype", "is_causal", "force_fp32_for_softmax",
    "broadcast_dropout", "dropout_rng", "dropout_rate", "deterministic",
}  # fmt: skip


def attend(flax_attention: Callable[..., jax.Array], promote_dtype: Callable, *args: Any, causal: bool = False, **kwargs: Any):
    """A call of Flax's attention function by flash_attention, or by itself where that lacks an option.

    `promote_dtype` is Flax's, of a tuple. `causal` is bottom-right: a single query sees all keys, so that `mask` alone rules a
    step of decoding.
    """
    parameters = inspect.signature(flax_attention).parameters
    options = inspect.signature(flax_attention).bind(*args, **kwargs).arguments
    if causal:
        options.pop("is_causal", None)
    given = {name for name, value in options.items() if value is not parameters[name].default}
    dropout = options.get("dropout_rate", 0.0) > 0.0 and not options.get("deterministic", False)
    precision = options.get("precision")
    if given - _SERVED or dropout or not (precision is None or isinstance(precision, str | lax.Precision)):
        if causal:
            options["mask"] = _causal_mask(options["query"], options["key"], options.get("mask"))
        return flax_attention(**options)
    promote_dtype = options.get("promote_dtype", promote_dtype)
    q, k, v = promote_dtype((options["query"], options["key"], options["value"]), dtype=options.get("dtype"))
    return flash_attention(q, k, v, causal="bottom_right" if causal else options.get("is_causal", False), precision=precision)


def _causal_mask(query: jax.Array, key: jax.Array, mask: jax.Array | None) -> jax.Array:
    s, t = query.shape[-3], key.shape[-3]
    causal = jnp.tril(jnp.ones((s, t), bool), t - s).reshape(*(1,) * (query.ndim - 2), s, t)
    return causal if mask is None else jnp.logical_and(mask, causal)
