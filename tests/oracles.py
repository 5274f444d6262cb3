"""The truth about every op: NumPy, float64, written from the docstrings' maths and from nothing else.

``op(*operands, **options)`` gives the result; ``op_vjp(*operands, g=cotangent, **options)`` the gradient of each operand, None
where it is absent or not floating.
"""

import numpy as np


def _sum_to(g, x):
    """Sum `g` over what `x` was broadcast along."""
    g = g.sum(tuple(range(g.ndim - x.ndim)))
    return g.sum(tuple(i for i, n in enumerate(x.shape) if n == 1 != g.shape[i]), keepdims=True)


def add(x, y):
    return x + y


def add_vjp(x, y, *, g):
    return _sum_to(g, x), _sum_to(g, y)


def softmax(x, where=None, *, axis=-1):
    where = np.broadcast_to(True if where is None else where, x.shape)
    with np.errstate(invalid="ignore"):
        top = np.where(where, x, -np.inf).max(axis, keepdims=True)
        e = np.where(where, np.exp(np.where(where, x - top, 0.0)), 0.0)
    total = e.sum(axis, keepdims=True)
    return e / np.where(where.any(axis, keepdims=True), total, 1.0)


def softmax_vjp(x, where=None, *, g, axis=-1):
    y = softmax(x, where, axis=axis)
    return y * (g - (y * g).sum(axis, keepdims=True)), None


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
