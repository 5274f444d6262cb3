"""The maths of flash attention in jax.numpy: the CPU path, and what the kernels are held against. Memory grows with s * t."""

import jax
import jax.numpy as jnp

from jtops.kernels._lib.precision import accumulator, lax_precision


def visible(s, t, q_ids, kv_ids, q_lengths, kv_lengths, q_index, *, q_size, left, right, bottom_right):
    """Which query may see which key: boolean, broadcastable to [..., s, t]."""
    i, j = jnp.arange(s)[:, None] if q_index is None else q_index[..., :, None], jnp.arange(t)[None, :]
    length = lambda lengths, size: jnp.asarray(size) if lengths is None else jnp.minimum(lengths, size)[..., None, None]
    q_length, kv_length = length(q_lengths, q_size), length(kv_lengths, t)
    mask = (i < q_length) & (j < kv_length)
    position = i + kv_length - q_length if bottom_right else i
    if left is not None:
        mask &= j >= position - left
    if right is not None:
        mask &= j <= position + right
    if q_ids is not None:
        mask &= (q_ids[..., :, None] == kv_ids[..., None, :]) & (kv_ids >= 0)[..., None, :]
    return mask


def attention(q, k, v, q_ids, kv_ids, q_lengths, kv_lengths, q_index, *, scale, precision, **masking):
    """q [..., s, h, d], k [..., t, g, d], v [..., t, g, e] -> out [..., s, h, e], lse [..., s, h]."""
    (s, h, d), (t, g, _) = q.shape[-3:], k.shape[-3:]
    wide = accumulator(q.dtype)
    mask = visible(s, t, q_ids, kv_ids, q_lengths, kv_lengths, q_index, **masking)[..., None, None, :, :]
    # Rows that nobody may see do not take part at all: 0 * NaN would.
    if kv_lengths is not None or kv_ids is not None:
        seen = jnp.any(mask, (-4, -3, -2))[..., :, None, None]
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    if q_lengths is not None or q_ids is not None:
        q = jnp.where(jnp.any(mask, (-4, -3, -1))[..., :, None, None], q, 0)
    product = lambda spec, a, b: jnp.einsum(spec, a, b, precision=lax_precision(precision), preferred_element_type=wide)
    logits = product("...sgrd,...tgd->...grst", q.reshape(*q.shape[:-2], g, h // g, d), k) * scale
    logits = jnp.where(mask, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp(logits - top)
    total = jnp.sum(p, -1, keepdims=True)
    alive = total > 0
    total = jnp.where(alive, total, 1.0)
    lse = jnp.where(alive, top + jnp.log(total), -jnp.inf)[..., 0]
    out = product("...grst,...tge->...sgre", (p / total).astype(v.dtype), v)
    heads = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-3], h, s), -2, -1)
    return out.reshape(*out.shape[:-3], h, v.shape[-1]).astype(q.dtype), heads(lse)
