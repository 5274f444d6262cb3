"""softmax, log_softmax and logsumexp along one or several axes.

Bound by memory: one read, one write; the backward reads two arrays and writes one.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtops.config import Implementation
from jtops.kernels._lib import checks
from jtops.kernels._lib.frame.launch import Config, Launch, Rows
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.precision import accumulator
from jtops.kernels.softmax import rows, strided
from jtops.kernels.softmax.rows import Kept


def _softmax_reference(x, where, *, axes):
    wide, some = _masked(x, where, axes)
    m = jnp.max(wide, axes, keepdims=True, initial=-jnp.inf)
    e = jnp.exp(wide - jax.lax.stop_gradient(jnp.where(some, m, 0.0)))
    y = e / jnp.where(some, jnp.sum(e, axes, keepdims=True), 1.0)
    return ((y if where is None else jnp.where(where, y, 0.0)).astype(x.dtype),)


def _log_softmax_reference(x, where, *, axes):
    wide, some = _masked(x, where, axes)
    m = jax.lax.stop_gradient(jnp.where(some, jnp.max(wide, axes, keepdims=True, initial=-jnp.inf), 0.0))
    log = jnp.log(jnp.where(some, jnp.sum(jnp.exp(wide - m), axes, keepdims=True), 1.0))
    y = wide - m - log
    y = y if where is None else jnp.where(where, y, -jnp.inf)
    return y.astype(x.dtype), jnp.squeeze(m, axes), jnp.squeeze(log, axes)


def _logsumexp_reference(x, where, *, axes):
    wide, some = _masked(x, where, axes)
    m = jax.lax.stop_gradient(jnp.max(wide, axes, keepdims=True, initial=-jnp.inf))
    m = jnp.where(jnp.isfinite(m), m, 0.0)
    log = jnp.log(jnp.where(some, jnp.sum(jnp.exp(wide - m), axes, keepdims=True), 1.0))
    y = jnp.squeeze(jnp.where(some, m + log, -jnp.inf), axes)
    return y.astype(x.dtype), jnp.squeeze(m, axes), jnp.squeeze(log, axes)


def _masked(x, where, axes):
    """Return x in the accumulator's dtype, -inf where it is masked; and which rows have something left: all, without a mask."""
    wide = x.astype(accumulator(x.dtype))
    if where is None:
        return wide, True
    return jnp.where(where, wide, -jnp.inf), jnp.any(where, axes, keepdims=True)


_REFERENCES = {"softmax": _softmax_reference, "log_softmax": _log_softmax_reference, "logsumexp": _logsumexp_reference}


@functools.cache
def _op(name: str, reduced: int, inner: int):
    """The op over `reduced` neighbouring axes, before the last `inner` ones. All stay apart until one device has them."""
    over, after = ([f"{letter}{i}" for i in range(count)] for letter, count in (("n", reduced), ("i", inner)))
    whole, rest = " ".join(over + after), " ".join(after)
    axes = tuple(range(-reduced - inner, -inner))
    return fused_op(
        name,
        operands={"x": whole, "where": whole},
        results={"y": rest if name == "logsumexp" else whole},
        residuals={} if name == "softmax" else {"top": rest, "log": rest},
        saves=("y",) if name == "softmax" else (),
        whole=" ".join(over),
        reference=functools.partial(_REFERENCES[name], axes=axes),
        forward=functools.partial(_forward, reduced),
        backward=functools.partial(_backward, reduced),
        limits=checks.kernel_floats,
        blocks="BLOCK_M BLOCK_N PROGRAMS",
    )


def _merged(x, reduced: int, like):
    """Merge the core axes into two, [b, n, i]. An axis of `where` has the size of `like`'s or 1; one of size 1 is spread where an
    axis that it is merged with has its full size.
    """
    if x is None:
        return None
    groups = []
    for axes in (range(1, 1 + reduced), range(1 + reduced, x.ndim)):
        full = any(x.shape[a] != 1 for a in axes)
        groups.append([like.shape[a] if full else x.shape[a] for a in axes])
    shape = (x.shape[0], *groups[0], *groups[1])
    return jnp.broadcast_to(x, shape).reshape(x.shape[0], math.prod(groups[0]), math.prod(groups[1]))


def as_rows(x):
    """Make [b, n, i] rows [b * i, n], which is a copy only where i is more than 1."""
    b, n, i = x.shape
    return (x if i == 1 else x.transpose(0, 2, 1)).reshape(b * i, n)


def _from_rows(x, shape: tuple[int, int, int]):
    """The inverse of `as_rows`."""
    b, n, i = shape
    return x.reshape(shape) if i == 1 else x.reshape(b, i, n).transpose(0, 2, 1)


def _by_rows(b: int, n: int, i: int) -> bool:
    """Whether [b, n, i] is read as rows: where it is rows, or where its strided columns are so few and long that they would occupy
    only a corner of the GPU, and a copy is cheaper.
    """
    return i == 1 or (n >= 4096 and b * i * 2 < 64 * 32)


def _masked_rows(launch: Launch, where, shape: tuple[int, int, int]) -> tuple[Launch, Any]:
    """Return the call over rows, and `where` for them: in place for rows, else copied as x is."""
    b, _, i = shape
    if where is not None and i == 1:
        return launch, where.reshape(where.shape[:2])
    rows = launch.rows._replace(where=None if where is None else Rows(1, b * i))
    where = None if where is None else as_rows(jnp.broadcast_to(launch.full("where", where), shape))
    return dataclasses.replace(launch, batch=b * i, rows=rows), where


def _forward(reduced: int, launch: Launch, operands):
    given = launch.full("x", operands.x)
    x, where = (_merged(v, reduced, given) for v in (given, operands.where))
    if _by_rows(*x.shape):
        launch, where = _masked_rows(launch, where, x.shape)
        y, *kept = rows.forward(launch, as_rows(x), where)
        y = _from_rows(y, x.shape) if y.ndim == 2 else y
    else:
        y, *kept = strided.forward(launch, x, where)
    small = (given.shape[0], *given.shape[1 + reduced :])
    return y.reshape(small if launch.op == "logsumexp" else given.shape), *(v.reshape(small) for v in kept)


def _backward(reduced: int, launch: Launch, operands, saved, cotangents):
    given = saved.y if launch.op == "softmax" else launch.full("x", operands.x)
    a, where = (_merged(v, reduced, given) for v in (given, operands.where))
    b, _, i = a.shape
    g = cotangents.y.reshape((b, i) if launch.op == "logsumexp" else a.shape)
    kept = None if launch.op == "softmax" else Kept(saved.top.reshape(b * i), saved.log.reshape(b * i))
    if _by_rows(*a.shape):
        launch, where = _masked_rows(launch, where, a.shape)
        dx = rows.backward(launch, as_rows(a), as_rows(g) if g.ndim == 3 else g.reshape(b * i), kept, where)
        dx = _from_rows(dx, a.shape)
    else:
        dx = strided.backward(launch, a, g, kept, where)
    return dx.reshape(given.shape), None


def _call(op: str, name: str, x, axis, where, **choice):
    """Check and call; return the result, the axes as indices, and whether they were moved to the end."""
    x = checks.array(op, name, x)
    if x.ndim == 0 and axis is None:  # of one element
        y, _, moved = _call(op, name, x.reshape(1), 0, where, **choice)
        return y.reshape(()), (), moved
    named = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    axes = tuple(checks.axis_index(op, a, x.ndim) for a in named)
    if len(set(axes)) != len(axes) or not axes:
        raise ValueError(f"{op}: axis must name one or more distinct axes; got {axis}.")
    if where is not None:
        where = checks.boolean(op, "where", where)
        if where.ndim > x.ndim or any(w not in (1, s) for w, s in zip(where.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(f"{op}: where must broadcast to {name}; got where {where.shape}, {name} {x.shape}.")
        where = where.reshape((1,) * (x.ndim - where.ndim) + where.shape)
    axes = tuple(sorted(axes))
    moved = axes[-1] - axes[0] >= len(axes)
    if moved:  # not neighbours: no stride serves them
        last = tuple(range(x.ndim - len(axes), x.ndim))
        x = jnp.moveaxis(x, axes, last)
        where = None if where is None else jnp.moveaxis(where, axes, last)
    f = _op(op, len(axes), 0 if moved else x.ndim - 1 - axes[-1])
    return f(x, where, **choice)[0], axes, moved


def softmax(
    x: Float[Array, "*shape"],
    axis: int | Sequence[int] | None = -1,
    where: Bool[Array, "*#shape"] | None = None,
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*shape"]:
    """``exp(x) / sum(exp(x), axis)``, computed as ``exp(x - max(x))`` in float32; as ``jax.nn.softmax``.

    A row without `where` that is all -inf, or has a NaN or +inf, is all NaN. The derivative is ``y * (g - sum(g * y))``.

    >>> jtops.softmax(jnp.array([1.0, 1.0, 7.0]), where=jnp.array([True, True, False]))  # what is masked is 0
    Array([0.5, 0.5, 0. ], dtype=float32)

    Args:
      x: floating array. Kernel dtypes: float32, bfloat16, float16; any length.
      axis: axis or axes whose elements sum to 1; None is all of them. Neighbouring axes are read in place, wherever they are;
        others are moved to the end first.
      where: boolean, broadcastable to `x`: elements that take part. The others are 0, have gradient 0 and may hold anything.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_N`` (elements along the axis) and ``BLOCK_M`` (rows; or neighbours, where the axis is not the last) of
        a tile; ``PROGRAMS``: at most so many share the rows. ``cluster_size``: so many programs share a row. None: by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating, `where` not boolean.
      ValueError: no such axis; `where` does not broadcast to `x`.
      UnsupportedError: float64, where a kernel must run.

    Source: online maximum and sum after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
    """
    y, axes, moved = _call("softmax", "x", x, axis, where, implementation=implementation, config=config)
    return _moved_back(y, axes) if moved else y


def log_softmax(
    x: Float[Array, "*shape"],
    axis: int | Sequence[int] | None = -1,
    where: Bool[Array, "*#shape"] | None = None,
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*shape"]:
    """``x - log(sum(exp(x), axis))``, computed as ``x - max(x) - log(sum(exp(x - max(x))))`` in float32; as ``jax.nn.log_softmax``.

    A row without `where` that is all -inf, or has a NaN or +inf, is all NaN. Masked elements are -inf, with gradient 0. The
    derivative is ``g - exp(y) * sum(g)``, with exp(y) found again from `x`, its maximum and the sum's logarithm in float32.

    >>> logits, label = jnp.zeros((8, 4)), 3
    >>> loss = -jtops.log_softmax(logits)[:, label].mean()  # four classes that are alike: the logarithm of 4
    >>> print(f"{loss:.4f}")
    1.3863

    Args:
      x: floating array. Kernel dtypes: float32, bfloat16, float16; any length.
      axis: axis or axes whose elements sum to 1; None is all of them. Neighbouring axes are read in place, wherever they are;
        others are moved to the end first.
      where: boolean, broadcastable to `x`: elements that take part. The others are -inf, have gradient 0 and may hold anything.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_N`` (elements along the axis) and ``BLOCK_M`` (rows; or neighbours, where the axis is not the last) of
        a tile; ``PROGRAMS``: at most so many share the rows. ``cluster_size``: so many programs share a row. None: by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating, `where` not boolean.
      ValueError: no such axis; `where` does not broadcast to `x`.
      UnsupportedError: float64, where a kernel must run.

    Source: online maximum and sum after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
    """
    y, axes, moved = _call("log_softmax", "x", x, axis, where, implementation=implementation, config=config)
    return _moved_back(y, axes) if moved else y


def logsumexp(
    a: Float[Array, "*shape"],
    axis: int | Sequence[int] | None = None,
    where: Bool[Array, "*#shape"] | None = None,
    keepdims: bool = False,
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "..."]:
    """``log(sum(exp(a), axis))``, computed as ``max(a) + log(sum(exp(a - max(a))))`` in float32; as ``jax.nn.logsumexp``.

    The result is -inf for a row of nothing but -inf or of which `where` leaves nothing, +inf for one with +inf, NaN for one with a
    NaN. The derivative is ``g * exp(a - logsumexp(a))``; it is NaN for a row of nothing but -inf.

    >>> x = jnp.array([[1000.0, 1000.0], [0.0, -jnp.inf]])  # no exp overflows
    >>> print(jtops.logsumexp(x, axis=1).round())
    [1001.    0.]

    Args:
      a: floating array. Kernel dtypes: float32, bfloat16, float16; any length.
      axis: axis or axes whose elements are summed; None is all of them. Neighbouring axes are read in place, wherever they are;
        others are moved to the end first.
      where: boolean, broadcastable to `a`: elements that take part. The others have gradient 0 and may hold anything.
      keepdims: keep the reduced axes, with size 1.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_N`` (elements along the axis) and ``BLOCK_M`` (rows; or neighbours, where the axis is not the last) of
        a tile; ``PROGRAMS``: at most so many share the rows. ``cluster_size``: so many programs share a row. None: by size.

    Returns:
      Array of the dtype of `a`, without the reduced axes.

    Raises:
      TypeError: `a` is not floating, `where` not boolean.
      ValueError: no such axis; `where` does not broadcast to `a`.
      UnsupportedError: float64, where a kernel must run.

    Source: online maximum and sum after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
    """
    y, axes, _ = _call("logsumexp", "a", a, axis, where, implementation=implementation, config=config)
    return jnp.expand_dims(y, axes) if keepdims else y


def _moved_back(y, axes):
    return jnp.moveaxis(y, tuple(range(y.ndim - len(axes), y.ndim)), axes)
