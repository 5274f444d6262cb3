"""The maths of flash attention in jax.numpy: the CPU path, and what the kernels are held against. Memory grows with s * t."""

import jax
import jax.numpy as jnp

from jtops.kernels._lib.precision import accumulator, lax_precision
from jtops.kernels.attention.mask import Mask, distance, visible


def attention(
    q,
    k,
    v,
    q_ids,
    kv_ids,
    q_lengths,
    kv_lengths,
    bias,
    mask,
    sinks,
    alibi_slopes,
    s_index,
    *,
    scale,
    softcap,
    precision,
    left,
    right,
    align,
    q_size,
    deterministic=False,
):
    """Attention of q [..., s, h, d], k [..., t, g, d] and v [..., t, g, e]: out [..., s, h, e] and lse [..., s, h].

    `deterministic` concerns kernels alone.
    """
    del deterministic
    (s, h, d), (t, g, _) = q.shape[-3:], k.shape[-3:]
    wide = accumulator(q.dtype)
    rule = Mask(left, right, align, q_ids, kv_ids, q_lengths, kv_lengths, s_index)
    # [..., h, s, t] with its heads apart: those of a group, and groups.
    grouped = lambda x: x[..., None, :, :] if x.shape[-3] == 1 else x.reshape(*x.shape[:-3], g, h // g, *x.shape[-2:])
    seen = visible(rule, s, t, q_size)[..., None, None, :, :]
    # Rows that nobody may see do not take part at all: 0 * NaN would.
    if kv_lengths is not None or kv_ids is not None:
        of_keys = jnp.any(seen, (-4, -3, -2))[..., :, None, None]
        k, v = jnp.where(of_keys, k, 0), jnp.where(of_keys, v, 0)
    if q_lengths is not None or q_ids is not None:
        q = jnp.where(jnp.any(seen, (-4, -3, -1))[..., :, None, None], q, 0)
    product = lambda spec, a, b: jnp.einsum(spec, a, b, precision=lax_precision(precision), preferred_element_type=wide)
    logits = product("...sgrd,...tgd->...grst", q.reshape(*q.shape[:-2], g, h // g, d), k) * scale
    if mask is not None:
        seen = seen & grouped(mask)
    if softcap is not None:  # what overflows to NaN where it is hidden has a NaN for its slope
        logits = softcap * jnp.tanh(jnp.where(seen, logits, 0.0) / softcap)
    if bias is not None:
        logits = logits + grouped(bias.astype(wide))
    if alibi_slopes is not None:
        far = distance(rule, s, t, q_size)[..., None, :, :]
        logits = logits - grouped(alibi_slopes.astype(wide)[..., None, None] * far)
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True, initial=-jnp.inf))
    if sinks is not None:
        sinks = grouped(sinks.astype(wide)[..., None, None])
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    top = jnp.where(top == -jnp.inf, 0.0, top)
    p = jnp.exp(logits - top)
    total = jnp.sum(p, -1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    alive = total > 0
    total = jnp.where(alive, total, 1.0)
    lse = jnp.where(alive, top + jnp.log(total), -jnp.inf)[..., 0]
    p = jnp.where(seen, p / total, 0.0)  # for its cotangent, which may overflow where a hidden value is huge
    out = product("...grst,...tge->...sgre", p.astype(v.dtype), v)
    if sinks is not None and (q_lengths is not None or q_ids is not None):
        sees_some = jnp.moveaxis(jnp.any(logits > -jnp.inf, -1), -1, -3)
        out = jnp.where(sees_some[..., None], out, 0)  # or the sink's gradient would take what padding has as its cotangent
    heads = lambda x: jnp.moveaxis(x.reshape(*x.shape[:-3], h, s), -2, -1)
    return out.reshape(*out.shape[:-3], h, v.shape[-1]).astype(q.dtype), heads(lse)
