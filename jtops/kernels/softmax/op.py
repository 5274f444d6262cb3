"""softmax, log_softmax and logsumexp along one or several axes.

Bound by memory: one read, one write; the backward reads two arrays and writes one.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtops.config import Implementation
from jtops.kernels._lib import checks
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.launch import OuterRows as Rows
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.spec import Case, Input, Spec
from jtops.kernels.softmax import rows, strided


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
    """x as the accumulator has it, -inf where it is masked; and which rows have something left: all, if there is no mask."""
    wide = x.astype(accumulator(x.dtype))
    if where is None:
        return wide, True
    return jnp.where(where, wide, -jnp.inf), jnp.any(where, axes, keepdims=True)


_REFERENCES = {"softmax": _softmax_reference, "log_softmax": _log_softmax_reference, "logsumexp": _logsumexp_reference}


@functools.cache
def _op(name: str, reduced: int, inner: int):
    """The op over `reduced` neighbouring axes, before the last `inner` ones. All stay apart until one device has them."""
    over, after = ([f"{letter}{i}" for i in range(count)] for letter, count in (("n", reduced), ("i", inner)))
    whole, rest = " ".join(over + after), " ".join(after) or "()"
    axes = tuple(range(-reduced - inner, -inner))
    return fused_op(
        name, f"{whole}, {whole} -> {rest if name == 'logsumexp' else whole}",
        residuals="" if name == "softmax" else f"{rest}, {rest}", saves=(0,) if name == "softmax" else (), whole=" ".join(over),
        reference=functools.partial(_REFERENCES[name], axes=axes), forward=functools.partial(_forward, reduced),
        backward=functools.partial(_backward, reduced), limits=checks.kernel_floats, blocks="BLOCK_M BLOCK_N PROGRAMS",
    )  # fmt: skip


def _merged(x, reduced: int, like=None):
    """Core axes into two, [b, n, i]; of `where`, which is as large as `like` or of size 1, one of them if either has it in full."""
    groups = []
    for axes in (range(1, 1 + reduced), range(1 + reduced, x.ndim)):
        full = like is not None and any(x.shape[a] != 1 for a in axes)
        groups.append([like.shape[a] if full else x.shape[a] for a in axes])
    shape = (x.shape[0], *groups[0], *groups[1])
    return jnp.broadcast_to(x, shape).reshape(x.shape[0], math.prod(groups[0]), math.prod(groups[1]))


def _few(b: int, n: int, inner: int) -> bool:
    """Whether strided columns are so few and long that they would occupy a corner of the GPU: then a copy is cheaper."""
    return n >= 4096 and b * inner * 2 < 64 * 32


def _transposed(launch: Launch, x, where):
    """The same call over rows."""
    b, n, inner = x.shape
    turn = lambda v: v.transpose(0, 2, 1).reshape(b * inner, n)
    if where is not None:
        where = turn(jnp.broadcast_to(launch.rows[1].full(where), x.shape))
    return dataclasses.replace(launch, batch=b * inner, rows=(None, where if where is None else Rows(1, b * inner, 1))), turn, where


def _forward(reduced: int, launch: Launch, x, where):
    x = launch.rows[0].full(x)
    shape, keeps = x.shape, launch.residuals and launch.op != "softmax"
    where = None if where is None else _merged(where, reduced, x)
    x = _merged(x, reduced)
    b, n, inner = x.shape
    back = lambda v: v
    if inner == 1:
        out = rows.forward(launch, x[..., 0], where if where is None else where[..., 0], keeps)
    elif _few(b, n, inner):
        other, turn, where = _transposed(launch, x, where)
        out = rows.forward(other, turn(x), where, keeps)
        back = lambda v: v.reshape(b, inner, n).transpose(0, 2, 1) if v.ndim == 2 else v
    else:
        out = strided.forward(launch, x, where, keeps)
    small = (shape[0], *shape[1 + reduced :])
    return tuple(back(v).reshape(shape if i == 0 and launch.op != "logsumexp" else small) for i, v in enumerate(out))


def _backward(reduced: int, launch: Launch, operands, saved, cotangents):
    (x, where), (g,), kept = operands, cotangents, list(saved)
    a, *kept = kept if launch.op == "softmax" else (launch.rows[0].full(x), *kept)
    shape = a.shape
    where = None if where is None else _merged(where, reduced, a)
    a = _merged(a, reduced)
    b, n, inner = a.shape
    g = g.reshape((b, inner) if launch.op == "logsumexp" else a.shape)
    flat = lambda v: None if v is None else v.reshape(-1)
    top, log = (flat(v) for v in kept) if kept else (None, None)
    if inner == 1:
        row = lambda v: None if v is None else v[..., 0]
        dx = rows.backward(launch, row(a), row(g), top, log, row(where))
    elif _few(b, n, inner):
        other, turn, where = _transposed(launch, a, where)
        dx = rows.backward(other, turn(a), turn(g) if g.ndim == 3 else flat(g), top, log, where)
        dx = dx.reshape(b, inner, n).transpose(0, 2, 1)
    else:
        dx = strided.backward(launch, a, g, top, log, where)
    return dx.reshape(shape), None


def _call(op: str, name: str, x, axis, where, **choice):
    """Check and call. -> result, the axes as indices, whether they were moved to the end."""
    x = checks.array(op, name, x)
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

    A row of nothing but -inf, or with nothing left by `where`, is -inf, one with +inf +inf, one with a NaN NaN. The derivative is
    ``g * exp(a - logsumexp(a))``; of a row of nothing but -inf it is NaN.

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


_TILES, _BLOCKS, _SPLIT, _STRIDED = (Config(BLOCK_M=2, BLOCK_N=n, PROGRAMS=p) for n, p in ((8, 2), (64, 2), (64, 32), (8, 1)))
_SOFTMAX = Spec(
    name="softmax",
    function=softmax,
    operands=("x", "where"),
    small=Case("small", (Input((3, 4, 8)), Input((4, 8), true=0.8)), "a mask shared by the batch"),
    meshed=Case("meshed", (Input((16, 8, 32)), None), "rows on many devices"),
    cases=(
        Case("one", (Input((5, 1)), None), "a row of one element is 1, with gradient 0"),
        Case("vector", (Input((1000,)), None), "no batch axis; odd length"),
        Case("odd", (Input((3, 5, 257)), None), "rows and columns that fill no block"),
        Case("large_values", (Input((4, 100), mean=1000.0, std=3.0), None), "exp overflows unless the maximum goes first"),
        Case("axis0", (Input((33, 7)), None), "not the last axis", {"axis": 0}),
        Case("axes", (Input((4, 5, 6)), None), "two axes, not neighbours", {"axis": (0, 2)}),
        Case("inner", (Input((2, 40, 3, 5)), Input((2, 40, 1, 1), true=0.7)), "a mask by row of strided columns", {"axis": 1}),
        Case("pair", (Input((2, 4, 6, 5)), Input((6, 5), true=0.7)), "two strided neighbours", {"axis": (1, -2)}, _STRIDED),
        Case("columns", (Input((4096, 3)), Input((4096, 1), true=0.5)), "few and long columns: turned", {"axis": 0}),
        Case("where", (Input((6, 40)), Input((6, 40), true=0.5)), "each element masked by itself"),
        Case("where_row", (Input((6, 40)), Input((40,), true=0.5)), "one mask for all rows"),
        Case("where_column", (Input((6, 40)), Input((6, 1), true=0.5)), "whole rows masked: all zeros"),
        Case("where_batch", (Input((3, 4, 40)), Input((3, 1, 40), true=0.7)), "a mask per batch element"),
        Case("where_axes", (Input((4, 5, 6)), Input((4, 5, 1), true=0.7)), "a mask on moved axes", {"axis": (0, 2)}),
        Case("tiles", (Input((11, 7)), None), "several tiles a program", config=_TILES),
        Case("split", (Input((3, 300)), Input((3, 300), true=0.5)), "few long rows, several programs each", config=_SPLIT),
        Case("blocks", (Input((3, 300)), None), "rows longer than a block: two passes", config=_BLOCKS),
        Case("shifted", (Input((8, 101)), None), "rows that begin inside a vector"),
        Case("shifted_blocks", (Input((8, 301)), None), "the same, in two passes", config=_BLOCKS),
        Case("shifted_split", (Input((8, 301)), None), "the same, by several programs", config=_SPLIT),
        Case("where_blocks", (Input((3, 300)), Input((3, 300), true=0.5)), "the same, masked", config=_BLOCKS),
    ),
    compiled=(
        Case("short", (Input((65536, 256)), None), "several rows a program"),
        Case("middle", (Input((8192, 4096)), None), "a row a program"),
        Case("long", (Input((64, 131072)), None), "two passes"),
        Case("where", (Input((8192, 4096)), Input((8192, 4096), true=0.5)), "mask"),
    ),
    backward_kernels=1,
    forward_bytes=lambda y, x, where: 2 * x.nbytes + (0 if where is None else where.nbytes),
    backward_bytes=lambda y, x, where: 3 * x.nbytes + (0 if where is None else where.nbytes),
)
_MASKED = (Input((6, 40)), Input((6, 40), true=0.5))
_BATCHED = (Input((3, 300)), Input((3, 300), true=0.5))
_LOG_SOFTMAX = Spec(
    name="log_softmax",
    function=log_softmax,
    operands=("x", "where"),
    small=Case("small", (Input((3, 4, 8)), None), "no mask: what is masked is -inf, which no loss may touch"),
    meshed=_SOFTMAX.meshed,
    cases=(
        Case("one", (Input((5, 1)), None), "a row of one element is 0, with gradient 0"),
        Case("odd", (Input((3, 5, 257)), None), "rows and columns that fill no block"),
        Case("large_values", (Input((4, 100), mean=1000.0, std=3.0), None), "exp overflows unless the maximum goes first"),
        Case("axis0", (Input((33, 7)), None), "not the last axis", {"axis": 0}),
        Case("where", _MASKED, "each element masked by itself"),
        Case("split", _BATCHED, "few long rows, several programs each", config=_SPLIT),
        Case("blocks", _BATCHED, "rows longer than a block: two passes", config=_BLOCKS),
    ),
    compiled=(
        Case("middle", (Input((8192, 4096)), None), "a row a program"),
        Case("long", (Input((64, 131072)), None), "two passes"),
    ),
    backward_kernels=1,
    forward_bytes=_SOFTMAX.forward_bytes,
    backward_bytes=_SOFTMAX.backward_bytes,
)
_LOGSUMEXP = Spec(
    name="logsumexp",
    function=logsumexp,
    operands=("a", "where"),
    small=Case("small", (Input((3, 4, 8)), Input((4, 8), true=0.8)), "a mask shared by the batch", {"axis": -1, "keepdims": True}),
    meshed=Case("meshed", _SOFTMAX.meshed.inputs, "rows on many devices", {"axis": -1, "keepdims": True}),
    cases=(
        Case("all", (Input((5, 7)), None), "all axes, to a scalar"),
        Case("odd", (Input((3, 5, 257)), None), "rows and columns that fill no block", {"axis": -1}),
        Case("large_values", (Input((4, 100), mean=1000.0, std=3.0), None), "exp overflows otherwise", {"axis": 1}),
        Case("axis0", (Input((33, 7)), None), "not the last axis", {"axis": 0, "keepdims": True}),
        Case("axes", (Input((4, 5, 6)), Input((4, 5, 1), true=0.7)), "two axes, not neighbours", {"axis": (0, 2)}),
        Case("split", _BATCHED, "few long rows, several programs each", {"axis": -1}, _SPLIT),
        Case("blocks", _BATCHED, "rows longer than a block", {"axis": -1}, _BLOCKS),
    ),
    compiled=(
        Case("middle", (Input((8192, 4096)), None), "a row a program", {"axis": -1}),
        Case("long", (Input((64, 131072)), None), "long rows", {"axis": -1}),
    ),
    backward_kernels=1,
    forward_bytes=lambda y, x, where: x.nbytes + y.nbytes + (0 if where is None else where.nbytes),
    backward_bytes=lambda y, x, where: 2 * x.nbytes + y.nbytes + (0 if where is None else where.nbytes),
)
SPECS = (_SOFTMAX, _LOG_SOFTMAX, _LOGSUMEXP)
