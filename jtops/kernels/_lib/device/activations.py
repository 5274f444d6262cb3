"""Activations by name: in jax.numpy for references, and their values and derivatives in kernels, all of float32.

Sigmoids and tanh are written so that no intermediate is inf - inf, inf / inf or 0 * inf for any finite argument, and NaN stays NaN.
"""

import difflib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton

FUNCTIONS: dict[str | None, Callable] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def check(op: str, activation: Any) -> None:
    """Raise a ValueError unless `activation` is a name we know, or None."""
    if activation is None or (isinstance(activation, str) and activation in FUNCTIONS):
        return
    names = [name for name in FUNCTIONS if name]
    near = difflib.get_close_matches(str(getattr(activation, "__name__", activation)), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{op}: activation must be None or one of {', '.join(map(repr, names))}; got {activation!r}.{hint}")


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``, and 0 where exp overflows."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """The hyperbolic tangent by exp, or near 0, where that cancels, by its series, good to 1e-8 of the value."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * size))
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))))
    return tl.where(size < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _gelu_slope(x):
    """The slope of 2 * sqrt(2 / pi) * (x + 0.044715 x^3), whose sigmoid times x is gelu."""
    return 1.5957691216057308 * (1.0 + 0.134145 * x * x)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a float32 tile."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":  # (1 + tanh(u)) / 2 = sigmoid(2 u)
        x = x * sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif ACTIVATION == "gelu_exact":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    elif ACTIVATION == "tanh":
        x = tanh(x)
    return x


@triton.jit
def derivative(x, ACTIVATION: tl.constexpr):
    """The activation's derivative at a float32 tile; that of relu at 0 is 0."""
    d = tl.full(x.shape, 1.0, tl.float32)
    if ACTIVATION == "relu":
        d = tl.where(x <= 0.0, 0.0, tl.where(x > 0.0, 1.0, x))
    elif ACTIVATION == "gelu":
        x = tl.where(x > 30.0, 30.0, tl.where(x < -30.0, -30.0, x))  # beyond, it is 1 or 0, but x^2 would overflow
        s = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        d = s + x * s * (1.0 - s) * _gelu_slope(x)
    elif ACTIVATION == "gelu_exact":
        x = tl.where(x > 30.0, 30.0, tl.where(x < -30.0, -30.0, x))
        d = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "silu":
        s = sigmoid(x)
        d = s + x * s * (1.0 - s)
    elif ACTIVATION == "sigmoid":
        s = sigmoid(x)
        d = s * (1.0 - s)
    elif ACTIVATION == "tanh":
        t = tanh(x)
        d = 1.0 - t * t
    return d
