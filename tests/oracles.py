"""The truth about every op: NumPy, float64, written from the docstrings' maths and from nothing else.

``op(*operands, **options)`` gives the result; ``op_vjp(*operands, g=cotangent, **options)`` the gradients, in the order of its
parameters, None where an operand is absent or not floating; parameters past the last gradient are no floating operands. An op with
several results returns a tuple of them, and takes a tuple of their cotangents.
"""

import math

import numpy as np


def _sum_to(g, x):
    """Sum `g` over what `x` was broadcast along."""
    g = g.sum(tuple(range(g.ndim - x.ndim)))
    return g.sum(tuple(i for i, n in enumerate(x.shape) if n == 1 != g.shape[i]), keepdims=True)


def add(x, y):
    return x + y


def add_vjp(x, y, *, g):
    return _sum_to(g, x), _sum_to(g, y)


def _top(x, where, axis):
    """The maximum of what takes part; of nothing, and where it is infinite, what exp can take."""
    top = np.where(where, x, -np.inf).max(axis, keepdims=True, initial=-np.inf)
    return top, np.where(np.isinf(top), 0.0, top)


def softmax(x, where=None, *, axis=-1):
    where = np.broadcast_to(True if where is None else where, x.shape)
    top, _ = _top(x, where, axis)
    with np.errstate(invalid="ignore", over="ignore"):
        e = np.where(where, np.exp(np.where(where, x - top, 0.0)), 0.0)
        total = e.sum(axis, keepdims=True)
        return np.where(where, e / np.where(where.any(axis, keepdims=True), total, 1.0), 0.0)


def softmax_vjp(x, where=None, *, g, axis=-1):
    y = softmax(x, where, axis=axis)
    dx = y * (g - (y * g).sum(axis, keepdims=True))
    return dx if where is None else np.where(where, dx, 0.0), None


def logsumexp(a, where=None, *, axis=None, keepdims=False):
    where = np.broadcast_to(True if where is None else where, a.shape)
    axis = tuple(range(a.ndim)) if axis is None else axis
    _, safe = _top(a, where, axis)
    with np.errstate(divide="ignore", over="ignore"):
        y = safe + np.log(np.where(where, np.exp(np.where(where, a - safe, 0.0)), 0.0).sum(axis, keepdims=True))
    return y if keepdims else y.squeeze(axis)


def logsumexp_vjp(a, where=None, *, g, axis=None, keepdims=False):
    axis = tuple(range(a.ndim)) if axis is None else axis
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = a - _top(a, np.broadcast_to(True if where is None else where, a.shape), axis)[1]  # or the logarithm drowns in it
        p = np.exp(shifted - logsumexp(shifted, where, axis=axis, keepdims=True))
        da = p * (g if keepdims else np.expand_dims(g, axis))
    return da if where is None else np.where(where, da, 0.0), None


def log_softmax(x, where=None, *, axis=-1):
    top, _ = _top(x, np.broadcast_to(True if where is None else where, x.shape), axis)
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = x - top  # of a row with an infinite maximum NaN
        y = shifted - logsumexp(shifted, where, axis=axis, keepdims=True)
    return y if where is None else np.where(where, y, -np.inf)


def log_softmax_vjp(x, where=None, *, g, axis=-1):
    g = g if where is None else np.where(where, g, 0.0)
    dx = g - softmax(x, where, axis=axis) * g.sum(axis, keepdims=True)
    return dx if where is None else np.where(where, dx, 0.0), None


def _gate(a, b, activation, g=None):
    """Of halves apart, or of one array of both: the result, or the gradients."""
    gate, up = (a, b) if b is not None else np.split(a, 2, -1)
    value, slope = ACTIVATIONS[activation](gate)
    if g is None:
        return value * up
    da, db = g * up * slope, g * value
    return (da, db) if b is not None else (np.concatenate([da, db], -1), None)


def swiglu(a, b=None):
    return _gate(a, b, "silu")


def swiglu_vjp(a, b=None, *, g):
    return _gate(a, b, "silu", g)


def geglu(a, b=None, *, approximate=True):
    return _gate(a, b, "gelu" if approximate else "gelu_exact")


def geglu_vjp(a, b=None, *, g, approximate=True):
    return _gate(a, b, "gelu" if approximate else "gelu_exact", g)


def rope(x, positions=None, *, theta=10000.0, rotary_dim=None, inverse_frequencies=None, interleaved=False, direction=1):
    n = (x.shape[-1] if rotary_dim is None else rotary_dim) // 2
    frequencies = theta ** (-np.arange(n) / n) if inverse_frequencies is None else np.array(inverse_frequencies)
    positions = np.arange(x.shape[-3]) if positions is None else positions
    turn = np.exp(1j * direction * positions[..., None, None] * frequencies)
    pairs = (
        x[..., : 2 * n].reshape(*x.shape[:-1], n, 2)
        if interleaved
        else x[..., : 2 * n].reshape(*x.shape[:-1], 2, n).swapaxes(-1, -2)
    )
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    parts = np.stack([turned.real, turned.imag], -1 if interleaved else -2).reshape(*turned.shape[:-1], 2 * n)
    return np.concatenate([parts, np.broadcast_to(x[..., 2 * n :], (*parts.shape[:-1], x.shape[-1] - 2 * n))], -1)


def rope_vjp(x, positions=None, *, g, **options):
    return rope(g, positions, **options, direction=-1), None


def _cross_entropy_terms(logits, labels, weights, ignore_index, softcap):
    """The logits that count, their softmax, lse, each row's weight, and where its label is."""
    x = logits if softcap is None else softcap * np.tanh(logits / softcap)
    lse = logsumexp(x, axis=-1)
    counts = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    w = counts * np.broadcast_to(1.0 if weights is None else weights, labels.shape)
    return x, np.exp(x - lse[..., None]), lse, w, counts, np.arange(x.shape[-1]) == labels[..., None]


def _cross_entropy_rows(x, lse, label, label_smoothing, z_loss):
    """Each row's loss without its weight."""
    target = (1 - label_smoothing) * label + label_smoothing / x.shape[-1]
    return lse - (target * x).sum(-1) + z_loss * lse**2


def cross_entropy(
    logits, labels, weights=None, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="none"
):
    x, _, lse, w, _, label = _cross_entropy_terms(logits, labels, weights, ignore_index, softcap)
    losses = w * _cross_entropy_rows(x, lse, label, label_smoothing, z_loss)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / w.sum()}[reduction]


def cross_entropy_vjp(
    logits, labels, weights=None, *, g, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="none"
):
    x, p, lse, w, counts, label = _cross_entropy_terms(logits, labels, weights, ignore_index, softcap)
    rows = _cross_entropy_rows(x, lse, label, label_smoothing, z_loss)
    g = np.broadcast_to(g / w.sum() if reduction == "mean" else g, lse.shape)
    target = (1 - label_smoothing) * label + label_smoothing / x.shape[-1]
    dx = (g * w)[..., None] * (p * (1 + 2 * z_loss * lse)[..., None] - target)
    dx = dx if softcap is None else dx * (1 - np.tanh(logits / softcap) ** 2)
    if weights is None:
        return dx, None, None
    mean = (w * rows).sum() / w.sum() if reduction == "mean" else 0.0
    return dx, None, _sum_to(g * counts * (rows - mean), weights)


def layer_norm(x, scale=None, bias=None, *, epsilon=1e-6, scale_offset=0.0):
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    if scale is not None:
        y = y * (scale + scale_offset)
    return y if bias is None else y + bias


def layer_norm_vjp(x, scale=None, bias=None, *, g, epsilon=1e-6, scale_offset=0.0):
    centred = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    x_hat = centred * rstd
    w = g if scale is None else g * (scale + scale_offset)
    dx = rstd * (w - w.mean(-1, keepdims=True) - x_hat * (w * x_hat).mean(-1, keepdims=True))
    return dx, None if scale is None else _sum_to(g * x_hat, scale), None if bias is None else _sum_to(g, bias)


def rms_norm(x, scale=None, *, epsilon=1e-6, scale_offset=0.0):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * (1 if scale is None else scale + scale_offset)


def rms_norm_vjp(x, scale=None, *, g, epsilon=1e-6, scale_offset=0.0):
    rstd = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    w = g if scale is None else g * (scale + scale_offset)
    dx = rstd * w - x * rstd**3 * (w * x).mean(-1, keepdims=True)
    return dx, None if scale is None else _sum_to(g * x * rstd, scale)


def add_layer_norm(x, residual, scale=None, bias=None, **options):
    return layer_norm(x + residual, scale, bias, **options), x + residual


def add_layer_norm_vjp(x, residual, scale=None, bias=None, *, g, **options):
    dx, *parameters = layer_norm_vjp(x + residual, scale, bias, g=g[0], **options)
    return dx + g[1], dx + g[1], *parameters


def add_rms_norm(x, residual, scale=None, **options):
    return rms_norm(x + residual, scale, **options), x + residual


def add_rms_norm_vjp(x, residual, scale=None, *, g, **options):
    dx, dscale = rms_norm_vjp(x + residual, scale, g=g[0], **options)
    return dx + g[1], dx + g[1], dscale


def visible(q, k, *, causal=False, window=None, segment_ids=None, q_lengths=None, kv_lengths=None):
    """Which query sees which key: [..., s, t]."""
    s, t = q.shape[-3], k.shape[-3]
    length = lambda given, size: np.asarray(size if given is None else np.minimum(given, size))[..., None, None]
    q_length, kv_length = length(q_lengths, s), length(kv_lengths, t)
    i, j = np.arange(s)[:, None], np.arange(t)[None, :]
    position = i + kv_length - q_length if causal == "bottom_right" else i
    left, right = window if isinstance(window, tuple) else (window, window)
    seen = (i < q_length) & (j < kv_length)
    if causal:
        seen = seen & (j <= position)
    if left is not None:
        seen = seen & (j >= position - left)
    if right is not None:
        seen = seen & (j <= position + right)
    if segment_ids is not None:
        q_ids, kv_ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        q_ids, kv_ids = q_ids[..., :, None], kv_ids[..., None, :]
        seen = seen & (q_ids == kv_ids) & (q_ids >= 0)
    return seen


def positions(q, k, *, causal=False, q_lengths=None, kv_lengths=None):
    """Where each query stands: [..., s, 1]."""
    i = np.arange(q.shape[-3])[:, None]
    if causal != "bottom_right":
        return i
    length = lambda given, size: np.asarray(size if given is None else np.minimum(given, size))[..., None, None]
    return i + length(kv_lengths, k.shape[-3]) - length(q_lengths, q.shape[-3])


def attention_parts(
    q, k, v, bias=None, mask=None, sinks=None, *, scale=None, softcap=None, alibi_slopes=None, **masks
):  # fmt: skip
    """-> probabilities [..., h, s, t] and those of the sinks [..., h, s, 1], heads' k and v, each query head with its own, the
    scale, and the slope of the cap.
    """
    r, scale = q.shape[-2] // k.shape[-2], q.shape[-1] ** -0.5 if scale is None else scale
    seen = visible(q, k, **masks)[..., None, :, :]
    k, v = np.repeat(k, r, -2), np.repeat(v, r, -2)
    logits = np.einsum("...shd,...thd->...hst", q, k) * scale
    slope = 1.0
    if softcap is not None:
        slope = 1 / np.cosh(logits / softcap) ** 2
        logits = softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias
    if alibi_slopes is not None:
        given = {name: masks[name] for name in ("causal", "q_lengths", "kv_lengths") if name in masks}
        distance = np.abs(positions(q, k, **given) - np.arange(k.shape[-3]))
        logits = logits - np.asarray(alibi_slopes)[:, None, None] * distance[..., None, :, :]
    if mask is not None:
        seen = seen & mask
    seen = np.broadcast_to(seen & (logits > -np.inf), logits.shape)
    sink = np.broadcast_to(np.asarray(-np.inf if sinks is None else sinks[:, None, None]), (*logits.shape[:-1], 1))
    p = softmax(np.concatenate([logits, sink], -1), np.concatenate([seen, sink > -np.inf], -1))
    return p[..., :-1], p[..., -1:], k, v, scale, slope


def flash_attention(q, k, v, *scores, **options):
    p, _, _, v, _, _ = attention_parts(q, k, v, *scores, **options)
    return np.einsum("...hst,...the->...she", p, v)


def flash_attention_vjp(q, k, v, bias=None, mask=None, sinks=None, *, g, **options):
    p, p_sink, kh, vh, scale, slope = attention_parts(q, k, v, bias, mask, sinks, **options)
    dp = np.einsum("...she,...the->...hst", g, vh)
    mean = (p * dp).sum(-1, keepdims=True)
    dlogits = p * (dp - mean)
    ds = dlogits * slope * scale
    grouped = lambda x: x.reshape(*x.shape[:-2], k.shape[-2], -1, x.shape[-1]).sum(-2)
    dk, dv = np.einsum("...hst,...shd->...thd", ds, q), np.einsum("...hst,...she->...the", p, g)
    dbias = None if bias is None else _sum_to(dlogits, bias)
    dsinks = None if sinks is None else _sum_to(-(p_sink * mean).sum((-2, -1)), sinks)
    return np.einsum("...hst,...thd->...shd", ds, kh), grouped(dk), grouped(dv), dbias, None, dsinks


def _by_our_names(is_causal=False, local_window_size=None, query_seq_lengths=None, key_value_seq_lengths=None, **same):
    return {
        "causal": is_causal,
        "window": local_window_size,
        "q_lengths": query_seq_lengths,
        "kv_lengths": key_value_seq_lengths,
        **same,
    }


def dot_product_attention(query, key, value, bias=None, mask=None, **options):
    return flash_attention(query, key, value, bias, mask, **_by_our_names(**options))


def dot_product_attention_vjp(query, key, value, bias=None, mask=None, *, g, **options):
    return flash_attention_vjp(query, key, value, bias, mask, g=g, **_by_our_names(**options))[:5]


def _normal_cdf(z):
    return 0.5 * (1 + np.vectorize(math.erf, otypes=[float])(z / np.sqrt(2)))


def _gelu(z):
    t = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))
    return 0.5 * z * (1 + t), 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z**2)


def _sigmoid(z):
    return 0.5 * (1 + np.tanh(z / 2))


ACTIVATIONS = {  # -> value, derivative
    None: lambda z: (z, np.ones_like(z)),
    "relu": lambda z: (np.maximum(z, 0), (z > 0).astype(float)),
    "gelu": _gelu,
    "gelu_exact": lambda z: (z * _normal_cdf(z), _normal_cdf(z) + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)),
    "silu": lambda z: (z * _sigmoid(z), _sigmoid(z) * (1 + z * (1 - _sigmoid(z)))),
    "sigmoid": lambda z: (_sigmoid(z), _sigmoid(z) * _sigmoid(-z)),
    "tanh": lambda z: (np.tanh(z), 1 - np.tanh(z) ** 2),
}


def _affine(a, b, bias):
    z = np.einsum("...mk,...kn->...mn", a, b)
    return z if bias is None else z + bias


def matmul(a, b, bias=None, residual=None, *, activation=None):
    y = ACTIVATIONS[activation](_affine(a, b, bias))[0]
    return y if residual is None else y + residual


def matmul_vjp(a, b, bias=None, residual=None, *, g, activation=None):
    dz = g * ACTIVATIONS[activation](_affine(a, b, bias))[1]
    da, db = np.einsum("...mn,...kn->...mk", dz, b), np.einsum("...mk,...mn->...kn", a, dz)
    return _sum_to(da, a), _sum_to(db, b), None if bias is None else _sum_to(dz, bias), None if residual is None else g


def gated_linear_unit(x, w_gate, w_up, *, activation="silu"):
    return ACTIVATIONS[activation](_affine(x, w_gate, None))[0] * _affine(x, w_up, None)


def gated_linear_unit_vjp(x, w_gate, w_up, *, g, activation="silu"):
    value, slope = ACTIVATIONS[activation](_affine(x, w_gate, None))
    dgate, dup = g * _affine(x, w_up, None) * slope, g * value
    dx = np.einsum("...mn,kn->...mk", dgate, w_gate) + np.einsum("...mn,kn->...mk", dup, w_up)
    weights = lambda dz: x.reshape(-1, x.shape[-1]).T @ dz.reshape(-1, dz.shape[-1])
    return dx, weights(dgate), weights(dup)
