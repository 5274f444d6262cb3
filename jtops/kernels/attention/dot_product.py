"""``jax.nn.dot_product_attention`` by `flash_attention`."""

from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtops.config import Implementation
from jtops.kernels._lib import checks
from jtops.kernels._lib.frame.launch import Config
from jtops.kernels.attention.op import flash_attention

_OP = "dot_product_attention"


class _Options(TypedDict, total=False):
    """The options that both forms of the call take besides `return_residual`."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: Array | None
    key_value_seq_lengths: Array | None
    local_window_size: int | tuple[int, int] | None
    implementation: Implementation | Literal["cudnn"] | None
    config: Config | None


@overload
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Array, Array]: ...
@overload
def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> Array: ...
def dot_product_attention(
    query: Float[Array, "*b s h d"],
    key: Float[Array, "*b t g d"],
    value: Float[Array, "*b t g d"],
    bias: Float[Array, "#*b #h #s #t"] | None = None,
    mask: Bool[Array, "#*b #h #s #t"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " b"] | None = None,
    key_value_seq_lengths: Int[Array, " b"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | Literal["cudnn"] | None = None,
    return_residual: bool = False,
    config: Config | None = None,
):
    """``jax.nn.dot_product_attention``, argument for argument, by `jtops.flash_attention`.

    The results are jax.nn's, except: a query that may see no key gives 0, with residual -inf, where jax.nn gives the mean of
    all values; the residual is float32 and has a gradient; a negative window is an error; products of float32 are accurate to
    float32 (see `flash_attention`).

    >>> q, k = jnp.ones((1, 4, 2, 16)), jnp.ones((1, 4, 1, 16))
    >>> v = jnp.arange(4.0)[:, None, None] * k
    >>> print(jtops.dot_product_attention(q, k, v, is_causal=True)[0, :, 0, 0])
    [0.  0.5 1.  1.5]

    Args:
      query: [b, s, h, d], or [s, h, d] without a batch.
      key, value: [b, t, g, d] or [t, g, d] of query's dtype; g divides h.
      bias: floating, added to the logits; up to four axes that broadcast to [b, h, s, t].
      mask: boolean, as the bias; True: the query sees the key.
      scale: factor of the logits; None is ``1 / sqrt(d)``.
      is_causal: query i sees keys up to i.
      query_seq_lengths, key_value_seq_lengths: how many queries and keys of each batch element count, [b].
      local_window_size: keys that query i sees: i - left .. i + right, inclusive; an int is both.
      implementation: "triton", "xla", "interpret" or None as for `flash_attention`; or "cudnn", which is jax.nn's.
      return_residual: also return the log of the sum of the exponentials, [b, s, h] or [s, h].
      config: as for `flash_attention`.

    Returns:
      An array of query's shape and dtype, or (that, residual).

    Raises:
      TypeError: dtypes that differ or are not floating; a mask that is not boolean; a traced `scale`.
      ValueError: shapes that do not fit, heads that do not divide, a negative window.
      UnsupportedError: where a kernel must run, what `flash_attention` has none for.
    """
    named: dict[str, Any] = {
        "scale": scale,
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
    }
    if implementation == "cudnn":
        if config is not None:
            raise ValueError(f'{_OP}: implementation="cudnn" is jax.nn\'s, which takes no config; got {config!r}.')
        theirs: Any = jax.nn.dot_product_attention
        return theirs(query, key, value, bias, mask, **named, implementation="cudnn", return_residual=return_residual)
    query, key, value = (checks.array(_OP, name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    shape = query.shape
    if not (query.ndim == key.ndim == value.ndim and query.ndim in (3, 4)):
        raise ValueError(
            f"{_OP}: query, key and value must all be [b, length, heads, d] or all [length, heads, d]; got {shape}, {key.shape}, "
            f"{value.shape}."
        )
    if key.shape != value.shape:
        raise ValueError(f"{_OP}: key and value must have one shape; got {key.shape}, {value.shape}.")
    batched = lambda x: x.reshape((1,) * (4 - x.ndim) + x.shape)
    sizes = checks.axes(_OP, query=(batched(query), "b s h d"), key=(batched(key), "b t g d"))
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if named[name] is not None and jnp.shape(named[name]) != (sizes["b"],):
            raise ValueError(f"{_OP}: {name} must have shape [b], here ({sizes['b']},); got {jnp.shape(named[name])}.")
    ours: dict[str, Any] = {
        "bias": None if bias is None else _table("bias", checks.array(_OP, "bias", bias), sizes),
        "mask": None if mask is None else _table("mask", checks.boolean(_OP, "mask", mask), sizes),
        "causal": is_causal,
        "window": local_window_size,
        "q_lengths": query_seq_lengths,
        "kv_lengths": key_value_seq_lengths,
        "scale": scale,
        "implementation": implementation,
        "config": config,
    }
    four = [batched(x) for x in (query, key, value)]
    if not return_residual:
        return flash_attention(*four, **ours).reshape(shape)
    out, residual = flash_attention(*four, return_lse=True, **ours)
    return out.reshape(shape), residual.reshape(shape[:-1])


def _table(name: str, x: jax.Array, sizes: dict[str, int]) -> jax.Array:
    """A bias or mask, whose batch may not be larger than the call's."""
    full = tuple(sizes[axis] for axis in "bhst")
    if x.ndim > 4 or any(n not in (1, size) for n, size in zip(x.shape[::-1], full[::-1], strict=False)):
        raise ValueError(f"{_OP}: {name} must broadcast to [b, h, s, t], here {full}; got {x.shape}.")
    return x
