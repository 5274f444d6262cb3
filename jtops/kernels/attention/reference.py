"""The maths of flash attention in jax.numpy: the CPU path, and what the kernels are held against. Memory grows with s * t."""

import jax
import jax.numpy as jnp

from jtops.kernels._lib.precision import accumulator, lax_precision
from jtops.kernels.attention.mask import Mask, visible


def attention(
    q, k, v, q_ids, kv_ids, q_lengths, kv_lengths, s_index, *, scale, precision, left, right, align, q_size, deterministic=False
):
    """Attention of q [..., s, h, d], k [..., t, g, d] and v [..., t, g, e]: out [..., s, h, e] and lse [..., s, h].

    `deterministic` concerns kernels alone.
    """
    del deterministic
    (s, h, d), (t, g, _) = q.shape[-3:], k.shape[-3:]
    wide = accumulator(q.dtype)
    rule = Mask(left, right, align, q_ids, kv_ids, q_lengths, kv_lengths, s_index)
    mask = visible(rule, s, t, q_size)[..., None, None, :, :]
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
