"""Flax NNX layers that compute by jtops ops: import ``jtops.nnx`` in place of ``flax.nnx``.

Each class is a subclass of Flax's class of the same name and changes the computation alone. Arguments, parameters, their initial
values and metadata are Flax's, and so are states and checkpoints. Flax's own code computes what an op lacks; the classes say what
that is. Dtypes follow Flax: parameters have `param_dtype`, results `dtype`, and None is the dtype that inputs and parameters
promote to.

    from jtops import nnx  # was: from flax import nnx

    norm = nnx.LayerNorm(512, rngs=rngs)
    attention = nnx.MultiHeadAttention(8, 512, decode=False, rngs=rngs)
    x = x + attention(norm(x), is_causal=True)

Everything that is not defined here, such as ``nnx.Module``, is Flax's.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

try:
    from flax import nnx
    from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'jtops.nnx needs Flax 0.12: pip install "flax==0.12.*". ({error})', name=error.name) from error

from jtops import _layers
from jtops._layers import dot_general
from jtops.kernels.norm import layer_norm, rms_norm

__all__ = [
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "MultiHeadAttention",
    "RMSNorm",
    "causal_attention",
    "dot_general",
    "dot_product_attention",
    "dot_product_attention_with_rope",
]


if TYPE_CHECKING:  # so that type checkers know everything else as Flax's own
    from flax.nnx import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Flax's name for everything that is not defined here, so that this module stands in for ``flax.nnx``."""
        return _layers.of_flax(nnx, name, __name__)


def __dir__() -> list[str]:
    return _layers.names_of(globals(), nnx)


def _signature_of[F: Callable](layer: Any) -> Callable[[F], F]:
    wrap: Any = functools.wraps(layer.__init__, assigned=())
    return wrap


def _value(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _dtypes(*parameters: jax.Array | None) -> list:
    return [x.dtype for x in parameters if x is not None]


class LayerNorm(nnx.LayerNorm):
    """``flax.nnx.LayerNorm`` by `jtops.layer_norm`.

    Statistics and arithmetic are float32. The variance is the mean of squared deviations, in two passes,
    whatever `use_fast_variance` says: more accurate than Flax's default.

    Flax computes: reduction or feature axes other than the last, `axis_name`, a `mask`, a traced `epsilon`, dtypes without a kernel
    (float64, complex numbers).
    """

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise [..., num_features] to dtype `dtype`; None is what x, scale and bias promote to."""
        given = x
        x, scale, bias = self.promote_dtype((x, _value(self.scale), _value(self.bias)), dtype=self.dtype)
        if (reason := _layers.unserved_norm(self, x, mask, *_dtypes(scale, bias))) is not None:
            with _layers.by_flax("LayerNorm", reason):
                return super().__call__(given, mask=mask)
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        return _layers.normalize(layer_norm, x, scale, bias, epsilon=self.epsilon, dtype=dtype)


class RMSNorm(nnx.RMSNorm):
    """``flax.nnx.RMSNorm`` by `jtops.rms_norm`. Flax computes the same options as of `LayerNorm`."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Normalise [..., num_features] to dtype `dtype`; None is what x and scale promote to."""
        given = x
        x, scale = self.promote_dtype((x, _value(self.scale)), dtype=self.dtype)
        if (reason := _layers.unserved_norm(self, x, mask, *_dtypes(scale))) is not None:
            with _layers.by_flax("RMSNorm", reason):
                return super().__call__(given, mask=mask)
        dtype = canonicalize_dtype(x, scale, dtype=self.dtype)
        return _layers.normalize(rms_norm, x, scale, epsilon=self.epsilon, dtype=dtype)


class Linear(nnx.Linear):
    """``flax.nnx.Linear`` by `jtops.matmul`, which adds the bias before it rounds.

    Sums are float32. ``precision=None`` is what ``jax_default_matmul_precision`` says, else float32 accuracy.

    Flax computes: a `dot_general` of one's own, `out_sharding`, `preferred_element_type` (the product is still `jtops.matmul`).
    XLA multiplies what `dot_general` hands it: dtypes other than floats of 16 and 32 bits, a `precision` for each operand.
    """

    @_signature_of(nnx.Linear)
    def __init__(self, *args: Any, dot_general: Callable[..., jax.Array] = dot_general, **kwargs: Any):
        super().__init__(*args, dot_general=dot_general, **kwargs)

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Map [..., in_features] to [..., out_features] of dtype `dtype`; None is what inputs, kernel and bias promote to."""
        if self.dot_general is not dot_general or out_sharding is not None or self.preferred_element_type is not None:
            with _layers.by_flax("Linear", "a dot_general, out_sharding or preferred_element_type of its own"):
                return super().__call__(inputs, out_sharding)
        inputs, kernel, bias = self.promote_dtype((inputs, self.kernel[...], _value(self.bias)), dtype=self.dtype)
        return _layers.linear(inputs, kernel, bias, self.precision)


class LinearGeneral(nnx.LinearGeneral):
    """``flax.nnx.LinearGeneral`` with `dot_general` by `jtops.matmul`; the bias is added by XLA.

    XLA multiplies what `dot_general` hands it: a summed `axis` that is not among the last ones, `out_sharding`, dtypes other than
    floats of 16 and 32 bits, a `precision` for each operand.
    """

    @_signature_of(nnx.LinearGeneral)
    def __init__(self, *args: Any, dot_general: Callable[..., jax.Array] | None = dot_general, **kwargs: Any):
        super().__init__(*args, dot_general=dot_general, **kwargs)


@functools.wraps(nnx.dot_product_attention, assigned=())
def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """``flax.nnx.dot_product_attention`` by `jtops.flash_attention`, with its options.

    Scores, softmax and sums are float32. `is_causal` is passed as such: no mask is made, and what it hides is not read. `bias` and
    `mask` are read as they are, however they broadcast. Flax computes: dropout that is active, a `module` to sow weights into, a
    `precision` for each operand, dtypes and head dims without a kernel.

    Args:
      query: [..., s, h, d], of any floating dtype; `dtype`, or what the three promote to, is the result's.
      key, value: [..., t, g, d] and [..., t, g, e]; g divides h, and query head i reads key head ``i // (h / g)``.
      args, options: Flax's.

    Returns:
      [..., s, h, e].
    """
    return _layers.attend(nnx.dot_product_attention, promote_dtype, query, key, value, *args, **options)


@functools.wraps(nnx.dot_product_attention, assigned=())
def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """`dot_product_attention` where query i sees keys up to ``i + t - s``, for the `attention_fn` of a layer that is always causal.

    The last query sees all keys, so that the layer decodes with a cache as well: there Flax's mask says which keys there are. With
    options that Flax computes, its mask is made and joined. `is_causal` says nothing here.
    """
    return _layers.attend(nnx.dot_product_attention, promote_dtype, query, key, value, *args, causal=True, **options)


def dot_product_attention_with_rope(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rope: nnx.RoPE,
    input_positions: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """``flax.nnx.dot_product_attention_with_rope``: `dot_product_attention` of query and key that `rope` has rotated.

    Args:
      query, key, value, options: as for `dot_product_attention`.
      rope: Flax's module.
      input_positions: [s], as far as `rope` goes; None counts from 0.

    Returns:
      [..., s, h, e].
    """
    axes = -2 if input_positions is None else (-2, None)
    rotate = jax.vmap(rope, in_axes=axes, out_axes=-2)
    positions = () if input_positions is None else (input_positions,)
    return dot_product_attention(rotate(query, *positions), rotate(key, *positions), value, **options)


class MultiHeadAttention(nnx.MultiHeadAttention):
    """``flax.nnx.MultiHeadAttention`` by `jtops.flash_attention` and, for its projections, `jtops.matmul`.

    For causal attention call it with ``is_causal=True``, or make it with ``attention_fn=jtops.nnx.causal_attention``; not with a
    mask: a dense `mask` has the square of the length's elements, and what it hides is computed all the same.

    Flax computes: dropout that is active, `sow_weights`, the norms of `normalize_qk`; XLA multiplies where there is a
    `qkv_sharding` or `out_sharding`, and adds the biases.
    """

    @_signature_of(nnx.MultiHeadAttention)
    def __init__(
        self,
        *args: Any,
        attention_fn: Callable[..., jax.Array] = dot_product_attention,
        qkv_dot_general: Callable[..., jax.Array] | None = dot_general,
        out_dot_general: Callable[..., jax.Array] | None = dot_general,
        **kwargs: Any,
    ):
        super().__init__(
            *args, attention_fn=attention_fn, qkv_dot_general=qkv_dot_general, out_dot_general=out_dot_general, **kwargs
        )
