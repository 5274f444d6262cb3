"""What `jtops.linen` and `jtops.nnx` share: which calls of Flax's layers the ops serve, and as which calls of ops.

Nothing here imports Flax. A rule that says whether an op serves a call gives None, or the reason why Flax's own code computes it
(`by_flax`).
"""

import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jtops import config
from jtops.errors import UnsupportedError
from jtops.kernels._lib.checks import KERNEL_FLOATS
from jtops.kernels.attention import flash_attention
from jtops.kernels.attention.op import limits as attention_limits
from jtops.kernels.matmul import matmul


def of_flax(flax: ModuleType, name: str, module: str) -> Any:
    """Find a name that `module`, which stands in for `flax`, does not define: Flax's attribute or, in ``from ... import``,
    submodule.
    """
    if not name.startswith("_"):  # those make a module this module
        try:
            return getattr(flax, name)
        except AttributeError:
            if importlib.util.find_spec(submodule := f"{flax.__name__}.{name}"):
                return importlib.import_module(submodule)
    raise AttributeError(f"module {module!r} has no attribute {name!r}, nor has {flax.__name__!r}")


def names_of(module: dict[str, Any], flax: ModuleType) -> list[str]:
    """What ``dir`` shows of a module that stands in for `flax`: its own public names, and Flax's."""
    return sorted({*module["__all__"], *(name for name in dir(flax) if not name.startswith("_"))})


def by_flax(what: str, reason: str):
    """Context manager in which Flax's own code, or XLA, computes a call of `what` that no op serves.

    Its name scope tells `jtops.explain` so, also about functions that were traced before.

    Raises:
      UnsupportedError: under ``jtops.config.flax_fallback("error")``.
    """
    if config.flax_fallback.value == "error":
        raise UnsupportedError(
            f'{what}: no op of jtops serves this call ({reason}), and jtops_flax_fallback is "error". Change the call, or let Flax '
            'compute it: jtops.config.flax_fallback("allow").'
        )
    return jax.named_scope(f"jtops_{what}_flax__{re.sub(r'\W+', '_', reason)}")


def _no_kernel(*dtypes: Any) -> str | None:
    others = sorted({str(jnp.dtype(dtype)) for dtype in dtypes if jnp.dtype(dtype) not in KERNEL_FLOATS})
    return f"no kernel for {' and '.join(others)}" if others else None


def _at_least_16_bits(dtype: Any) -> Any:
    """Replace floats of 8 bits, which have no kernel and promote to nothing, by float32; every other dtype stays as it is."""
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize == 1 else dtype


def _last(axes: Any, ndim: int) -> bool:
    axes = tuple(axes) if isinstance(axes, Iterable) else (axes,)
    return {axis + ndim if axis < 0 else axis for axis in axes} == {ndim - 1}


def unserved_norm(layer: Any, x: Any, mask: Any, *parameters: Any) -> str | None:
    """Why layer_norm and rms_norm do not compute what this normalisation layer of Flax is set to.

    `parameters` are the dtypes of scale and bias, as far as the layer has them.
    """
    ndim = jnp.ndim(x)
    if ndim == 0:
        return "the input has no axis"
    if mask is not None:
        return "a mask is given"
    if layer.axis_name is not None:
        return "statistics are shared over axis_name"
    if not (_last(layer.reduction_axes, ndim) and _last(layer.feature_axes, ndim)):
        return "reduction or feature axes are not the last one"
    if isinstance(layer.epsilon, jax.core.Tracer):
        return "epsilon is traced"
    dtypes = (jnp.result_type(x), *parameters, *([layer.dtype] if layer.dtype else ()))
    return _no_kernel(
        *(_at_least_16_bits(dtype) for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact))
    )  # integers become floats


def normalize(op: Callable[..., jax.Array], x: Any, *parameters: jax.Array | None, epsilon: Any, dtype: Any) -> jax.Array:
    """Apply `op` to `x` and round once, to `dtype`, as Flax does: neither `x` nor the result passes through a shorter one."""
    x = jnp.asarray(x)
    wide = lambda p: None if p is None else p.astype(_at_least_16_bits(p.dtype))
    with jax.numpy_dtype_promotion("standard"):  # the promotion is ours, not the caller's
        x = x.astype(jnp.promote_types(_at_least_16_bits(x.dtype), _at_least_16_bits(dtype)))
    return op(x, *map(wide, parameters), epsilon=epsilon).astype(dtype)


def _unserved_product(x: jax.Array, kernel: jax.Array, precision: Any) -> str | None:
    if x.dtype != kernel.dtype:
        return f"two dtypes, {x.dtype} and {kernel.dtype}"
    if not (precision is None or isinstance(precision, str | lax.Precision)):
        return "a precision for each operand"
    return _no_kernel(x.dtype)


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

    In such a product batch axes lead in both operands, the last axes of `lhs` are summed with the next of `rhs`, both in order, and
    both operands have one of the dtypes float32, bfloat16 and float16, as in Flax's dense and attention layers. Everything else (a
    summed axis elsewhere, other or two dtypes, an `out_sharding`, a `precision` for each operand) is ``jax.lax.dot_general``'s.

    Args:
      lhs: [*batch, *free, *summed].
      rhs: [*batch, *summed, *features].
      dimension_numbers: ``((lhs summed, rhs summed), (lhs batch, rhs batch))``.
      precision: None is what ``jax_default_matmul_precision`` says, else float32 accuracy.
      preferred_element_type: dtype of the result; None is that of the operands.
      out_sharding: sharding of the result.

    Returns:
      [*batch, *free, *features].
    """
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = (tuple(map(tuple, axes)) for axes in dimension_numbers)
    b, c = len(lhs_batch), len(lhs_summed)
    as_matrices = (
        c
        and lhs_batch == rhs_batch == tuple(range(b))
        and lhs_summed == tuple(range(lhs.ndim - c, lhs.ndim))
        and rhs_summed == tuple(range(b, b + c))
    )
    reason = (
        "an out_sharding is given"
        if out_sharding is not None
        else _unserved_product(lhs, rhs, precision)
        if as_matrices
        else "the operands are no matrices as they lie in memory"
    )
    if reason is not None:
        with by_flax("dot_general", reason):
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
    if bias is not None and bias.dtype == x.dtype and _unserved_product(x, kernel, precision) is None:
        return matmul(x, kernel, bias=bias, precision=precision)
    y = dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision)
    return y if bias is None else y + bias


# Options that flash_attention follows as Flax does (its softmax is always in float32), or that mean nothing without dropout. Flax
# itself computes calls with any other option that is not at its default, in this version of Flax or another.
_SERVED = {
    "query", "key", "value", "bias", "mask", "dtype", "precision", "promote_dtype", "is_causal", "force_fp32_for_softmax",
    "broadcast_dropout", "dropout_rng", "dropout_rate", "deterministic",
}  # fmt: skip


def attend(flax_attention: Callable[..., jax.Array], promote_dtype: Callable, *args: Any, causal: bool = False, **kwargs: Any):
    """Compute a call of Flax's attention function by flash_attention, or by Flax where flash_attention lacks an option.

    `promote_dtype` is Flax's and takes a tuple. `causal` is bottom-right: a single query sees all keys, so that `mask` alone rules
    a step of decoding.
    """
    parameters = inspect.signature(flax_attention).parameters
    options = inspect.signature(flax_attention).bind(*args, **kwargs).arguments
    if causal:
        options.pop("is_causal", None)
    dtype = options.get("dtype")
    promote_dtype = options.get("promote_dtype", promote_dtype)
    q, k, v = promote_dtype((options["query"], options["key"], options["value"]), dtype=dtype)
    if (reason := _unserved_attention(options, parameters, q, k, v)) is not None:
        if causal:
            options["mask"] = _causal_mask(options["query"], options["key"], options.get("mask"))
        with by_flax("dot_product_attention", reason):
            return flax_attention(**options)
    mask = options.get("mask")
    shown: dict[str, Any] = {
        "bias": options.get("bias"),
        "causal": "bottom_right" if causal else options.get("is_causal", False),
        "precision": options.get("precision"),
    }
    if mask is None:
        return flash_attention(q, k, v, **shown)
    out, lse = flash_attention(q, k, v, mask=jnp.asarray(mask).astype(bool), return_lse=True, **shown)
    # To a query that may see no key Flax shows all: its masked logits are one finite number.
    mean = jnp.mean(v.astype(jnp.float32), -3, keepdims=True).astype(v.dtype)
    return jnp.where(lse[..., None] > -jnp.inf, out, jnp.repeat(mean, q.shape[-2] // v.shape[-2], -2))


def _unserved_attention(options: dict[str, Any], parameters: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> str | None:
    given = {name for name, value in options.items() if value is not parameters[name].default}
    if others := sorted(given - _SERVED):
        return f"{' and '.join(others)} given"
    if options.get("dropout_rate", 0.0) > 0.0 and not options.get("deterministic", False):
        return "dropout is active"
    if not (options.get("precision") is None or isinstance(options["precision"], str | lax.Precision)):
        return "a precision for each operand"
    if not q.dtype == k.dtype == v.dtype:
        return f"several dtypes, {q.dtype}, {k.dtype} and {v.dtype}"
    tables = {name: x for name in ("bias", "mask") if (x := options.get(name)) is not None}
    scores = (*jnp.broadcast_shapes(q.shape[:-3], k.shape[:-3]), q.shape[-2], q.shape[-3], k.shape[-3])
    for name, x in tables.items():
        try:
            fits = jnp.broadcast_shapes(jnp.shape(x), scores) == scores
        except ValueError:  # which Flax will say
            fits = False
        if not fits:
            return f"a {name} that does not broadcast to the scores"
    return _no_kernel(q.dtype, *(jnp.result_type(x) for name, x in tables.items() if name == "bias")) or attention_limits(q, k, v)


def _causal_mask(query: jax.Array, key: jax.Array, mask: jax.Array | None) -> jax.Array:
    s, t = query.shape[-3], key.shape[-3]
    causal = jnp.tril(jnp.ones((s, t), bool), t - s).reshape(*(1,) * (query.ndim - 2), s, t)
    return causal if mask is None else jnp.logical_and(mask, causal)
