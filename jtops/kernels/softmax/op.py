"""softmax along one or several axes. Bound by memory: one read, one write; the backward reads two arrays and writes one."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jtops.config import Implementation
from jtops.kernels._lib import checks
from jtops.kernels._lib.fused_op import fused_op
from jtops.kernels._lib.launch import Config
from jtops.kernels._lib.precision import accumulator
from jtops.kernels._lib.spec import Case, Input, Spec
from jtops.kernels.softmax.rows import backward, forward


def _reference(x, where):
    wide = x.astype(accumulator(x.dtype))
    if where is None:
        m = jnp.max(wide, -1, keepdims=True, initial=-jnp.inf)
        e = jnp.exp(wide - jax.lax.stop_gradient(m))
        return ((e / jnp.sum(e, -1, keepdims=True)).astype(x.dtype),)
    wide = jnp.where(where, wide, -jnp.inf)
    m = jnp.max(wide, -1, keepdims=True, initial=-jnp.inf)
    some = jnp.any(where, -1, keepdims=True)  # rows with nothing left: all their elements are masked, and 0
    e = jnp.exp(wide - jax.lax.stop_gradient(jnp.where(some, m, 0.0)))
    y = e / jnp.where(some, jnp.sum(e, -1, keepdims=True), 1.0)
    return (jnp.where(where, y, 0.0).astype(x.dtype),)


_softmax = fused_op("softmax", "n, n -> n", reference=_reference, forward=forward, backward=backward, saves=(0,), whole="n",
                    limits=checks.kernel_floats, blocks="BLOCK_M BLOCK_N PROGRAMS")  # fmt: skip


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
      axis: axis or axes whose elements sum to 1; None is all of them.
      where: boolean, broadcastable to `x`: elements that take part. The others are 0, have gradient 0 and may hold anything.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (elements of a row at a time). None: chosen by size.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not floating, `where` not boolean.
      ValueError: no such axis; `where` does not broadcast to `x`.
      UnsupportedError: float64, where a kernel must run.

    Source: online maximum and sum after Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, section 3.
    """
    x = checks.array("softmax", "x", x)
    named = range(x.ndim) if axis is None else axis if isinstance(axis, Sequence) else (axis,)
    axes = tuple(checks.axis_index("softmax", a, x.ndim) for a in named)
    if len(set(axes)) != len(axes) or not axes:
        raise ValueError(f"softmax: axis must name one or more distinct axes; got {axis}.")
    if where is not None:
        where = checks.boolean("softmax", "where", where)
        if where.ndim > x.ndim or any(w not in (1, s) for w, s in zip(where.shape[::-1], x.shape[::-1], strict=False)):
            raise ValueError(f"softmax: where must broadcast to x; got where {where.shape}, x {x.shape}.")
        where = where.reshape((1,) * (x.ndim - where.ndim) + where.shape)
    if axes == (x.ndim - 1,):
        return _softmax(x, where, implementation=implementation, config=config)[0]

    last = tuple(range(x.ndim - len(axes), x.ndim))
    rows = lambda v: jnp.moveaxis(v, axes, last).reshape(*(s for i, s in enumerate(v.shape) if i not in axes), -1)
    size = math.prod(x.shape[a] for a in axes)
    if where is not None and any(where.shape[a] != x.shape[a] for a in axes) and any(where.shape[a] != 1 for a in axes):
        where = jnp.broadcast_to(where, [x.shape[i] if i in axes else s for i, s in enumerate(where.shape)])
    moved = jnp.moveaxis(x, axes, last)
    y = _softmax(
        moved.reshape(*moved.shape[: last[0]], size),
        None if where is None else rows(where),
        implementation=implementation,
        config=config,
    )
    return jnp.moveaxis(y[0].reshape(moved.shape), last, axes)


_TILES, _BLOCKS, _SPLIT = (Config(BLOCK_M=2, BLOCK_N=n, PROGRAMS=p) for n, p in ((8, 2), (64, 2), (64, 32)))
SPEC = Spec(
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
        Case("where", (Input((6, 40)), Input((6, 40), true=0.5)), "each element masked by itself"),
        Case("where_row", (Input((6, 40)), Input((40,), true=0.5)), "one mask for all rows"),
        Case("where_column", (Input((6, 40)), Input((6, 1), true=0.5)), "whole rows masked: all zeros"),
        Case("where_batch", (Input((3, 4, 40)), Input((3, 1, 40), true=0.7)), "a mask per batch element"),
        Case("where_axes", (Input((4, 5, 6)), Input((4, 5, 1), true=0.7)), "a mask on moved axes", {"axis": (0, 2)}),
        Case("tiles", (Input((11, 7)), None), "several tiles a program", config=_TILES),
        Case("split", (Input((3, 300)), Input((3, 300), true=0.5)), "few long rows, several programs each", config=_SPLIT),
        Case("blocks", (Input((3, 300)), None), "rows longer than a block: two passes", config=_BLOCKS),
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
