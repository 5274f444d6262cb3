"""Flax Linen layers that compute by jtops ops: import ``jtops.linen`` in place of ``flax.linen``.

Each class is a subclass of Flax's class of the same name and changes the computation alone. Fields, parameters, their initial
values and metadata, and automatic names are Flax's, and so are checkpoints. Flax's own code computes what an op lacks; the classes
say what that is. Biases and dtypes follow Flax: parameters have `param_dtype`, results `dtype`, and None is the dtype that inputs
and parameters promote to.

    import jtops.linen as nn  # was: import flax.linen as nn

    y = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=nn.causal_attention)(y)

Everything that is not defined here, such as ``nn.Module``, is Flax's.
"""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

try:
    import flax.linen as nn
    from flax.linen.dtypes import canonicalize_dtype, promote_dtype
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'jtops.linen needs Flax 0.12: pip install "flax==0.12.*". ({error})', name=error.name) from error

from jtops import _layers
from jtops._layers import dot_general
from jtops.kernels.norm import layer_norm, rms_norm

__all__ = [
    "Dense",
    "DenseGeneral",
    "LayerNorm",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "RMSNorm",
    "SelfAttention",
    "causal_attention",
    "dot_general",
    "dot_product_attention",
]


if TYPE_CHECKING:  # so that type checkers know everything else as Flax's own
    from flax.linen import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Flax's name for everything that is not defined here, so that this module stands in for ``flax.linen``."""
        return _layers.of_flax(nn, name, __name__)


def __dir__() -> list[str]:
    return _layers.names_of(globals(), nn)


def _flax(layer: type[nn.Module]) -> Callable:
    """Flax's own `__call__`, bare: as a method it would be captured, tabulated and intercepted a second time."""
    return inspect.unwrap(layer.__call__)


def _unserved_norm(layer: Any, x: Any, mask: Any, parameters: bool) -> str | None:
    if not layer.force_float32_reductions:
        return "force_float32_reductions is False"
    return _layers.unserved_norm(layer, x, mask, *([layer.param_dtype] if parameters else ()))


class LayerNorm(nn.LayerNorm):
    """``flax.linen.LayerNorm`` by `jtops.layer_norm`.

    Statistics and arithmetic are float32. The variance is the mean of squared deviations, in two passes,
    whatever `use_fast_variance` says: more accurate than Flax's default.

    Flax computes: reduction or feature axes other than the last, `axis_name`, a `mask`, ``force_float32_reductions=False``, a
    traced `epsilon`, dtypes without a kernel (float64, complex numbers).
    """

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise [..., n] to dtype `dtype`; None is what x, scale and bias promote to."""
        if (reason := _unserved_norm(self, x, mask, self.use_scale or self.use_bias)) is not None:
            with _layers.by_flax("LayerNorm", reason):
                return _flax(nn.LayerNorm)(self, x, mask=mask)
        n = (x.shape[-1],)
        scale = self.param("scale", self.scale_init, n, self.param_dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, n, self.param_dtype) if self.use_bias else None
        dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        return _layers.normalize(layer_norm, x, scale, bias, epsilon=self.epsilon, dtype=dtype)


class RMSNorm(nn.RMSNorm):
    """``flax.linen.RMSNorm`` by `jtops.rms_norm`. Flax computes the same options as of `LayerNorm`."""

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """Normalise [..., n] to dtype `dtype`; None is what x and scale promote to."""
        if (reason := _unserved_norm(self, x, mask, self.use_scale)) is not None:
            with _layers.by_flax("RMSNorm", reason):
                return _flax(nn.RMSNorm)(self, x, mask=mask)
        scale = self.param("scale", self.scale_init, (x.shape[-1],), self.param_dtype) if self.use_scale else None
        dtype = canonicalize_dtype(x, scale, dtype=self.dtype)
        return _layers.normalize(rms_norm, x, scale, epsilon=self.epsilon, dtype=dtype)


class Dense(nn.Dense):
    """``flax.linen.Dense`` by `jtops.matmul`, which adds the bias before it rounds.

    Sums are float32. ``precision=None`` is what ``jax_default_matmul_precision`` says, else float32 accuracy.

    Flax computes: a `dot_general` or `dot_general_cls` of one's own. XLA multiplies what `dot_general` hands it: dtypes other than
    floats of 16 and 32 bits, a `precision` for each operand.
    """

    dot_general: Any = dot_general

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Map [..., k] to [..., features] of dtype `dtype`; None is what inputs, kernel and bias promote to."""
        if self.dot_general is not dot_general or self.dot_general_cls is not None:
            with _layers.by_flax("Dense", "a dot_general of its own"):
                return _flax(nn.Dense)(self, inputs)
        kernel = self.param("kernel", self.kernel_init, (jnp.shape(inputs)[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        inputs, kernel, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        return _layers.linear(inputs, kernel, bias, self.precision)


class DenseGeneral(nn.DenseGeneral):
    """``flax.linen.DenseGeneral`` with `dot_general` by `jtops.matmul`; the bias is added by XLA.

    XLA multiplies what `dot_general` hands it: a summed `axis` that is not among the last ones, dtypes other than floats of 16 and
    32 bits, a `precision` for each operand.
    """

    dot_general: Any = dot_general


@functools.wraps(nn.dot_product_attention, assigned=())
def dot_product_attention(query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """``flax.linen.dot_product_attention`` by `jtops.flash_attention`, with its options.

    Scores, softmax and sums are float32, whatever `force_fp32_for_softmax` says. `bias` and `mask` are read as they are, however
    they broadcast. Flax computes: dropout that is active, a `module` to sow weights into, einsums of one's own, a `precision` for
    each operand, dtypes and head dims without a kernel.

    Args:
      query: [..., s, h, d], of any floating dtype; `dtype`, or what the three promote to, is the result's.
      key, value: [..., t, h, d] and [..., t, h, e].
      args, options: Flax's.

    Returns:
      [..., s, h, e].
    """
    return _layers.attend(nn.dot_product_attention, _promote, query, key, value, *args, **options)


@functools.wraps(nn.dot_product_attention, assigned=())
def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """`dot_product_attention` where query i sees keys up to ``i + t - s``, for the `attention_fn` of a layer.

    No mask is made, and keys that no query of a block sees are not read. The last query sees all keys, so that the layer decodes
    with a cache as well: there Flax's mask says which keys there are. With options that Flax computes, its mask is made and joined.
    """
    return _layers.attend(nn.dot_product_attention, _promote, query, key, value, *args, causal=True, **options)


def _promote(arrays: tuple, *, dtype: Any) -> list:
    return promote_dtype(*arrays, dtype=dtype)


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """``flax.linen.MultiHeadDotProductAttention`` by `jtops.flash_attention` and, for its projections, `jtops.matmul`.

    For causal attention give ``attention_fn=jtops.linen.causal_attention``, not a mask: a dense `mask` has the square of the
    length's elements, and what it hides is computed all the same.

    Flax computes: dropout that is active, `sow_weights`, einsums of one's own, the norms of `normalize_qk`; XLA adds the biases.
    """

    attention_fn: Callable[..., jax.Array] = dot_product_attention
    qkv_dot_general: Any = dot_general
    out_dot_general: Any = dot_general


class MultiHeadAttention(MultiHeadDotProductAttention, nn.MultiHeadAttention):
    """``flax.linen.MultiHeadAttention``: `MultiHeadDotProductAttention` by another name."""


class SelfAttention(MultiHeadDotProductAttention, nn.SelfAttention):
    """``flax.linen.SelfAttention``, which Flax deprecates: `MultiHeadDotProductAttention` of one input."""
