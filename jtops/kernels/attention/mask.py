"""Who sees whom: one description for Python, Triton and Gluon, and what follows from it.

`Mask` and `Shape` travel into kernels as single parameters. A field that is None costs nothing there: what depends on it is not
compiled.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.kernels._lib.device.rows import row
from jtops.kernels._lib.frame.launch import Launch


class Operand(NamedTuple):
    """An array, as a pointer or a descriptor, and how its batch rows serve the call (see `Rows`)."""

    array: Any
    rows: Any


class Shape(NamedTuple):
    """Sizes of a call: queries and keys of this shard, query and key heads, head dims of k and v, queries of all shards."""

    s: Any
    t: Any
    h: Any
    g: Any
    d: Any
    e: Any
    q_size: Any


class Mask(NamedTuple):
    """Who sees whom. All that is given holds together; ids and lengths are arrays in the reference and `Operand`s in a kernel.

    A query at position p sees the keys ``p - left`` to ``p + right``. Its position is its index, or with `align` "bottom_right"
    so much later that the last query is on the last key. Negative ids see nothing and are seen by nothing.
    """

    left: Any = None
    right: Any = None
    align: str | None = None  # "bottom_right"
    q_ids: Any = None
    kv_ids: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_index: Any = None  # the queries' indices in the whole sequence; a kernel reads the first. None: it is 0


def _indices(mask: Mask, s: int, t: int, q_size: int):
    """Indices of queries and keys, the lengths of both, and the queries' positions; broadcastable to [..., s, t]."""
    i, j = jnp.arange(s)[:, None] if mask.q_index is None else mask.q_index[..., :, None], jnp.arange(t)[None, :]
    length = lambda given, size: jnp.asarray(size) if given is None else jnp.minimum(given, size)[..., None, None]
    q_length, kv_length = length(mask.q_lengths, q_size), length(mask.kv_lengths, t)
    return i, j, q_length, kv_length, i + kv_length - q_length if mask.align == "bottom_right" else i


def distance(mask: Mask, s: int, t: int, q_size: int):
    """How far each query's position is from each key's."""
    _, j, _, _, position = _indices(mask, s, t, q_size)
    return jnp.abs(position - j)


def visible(mask: Mask, s: int, t: int, q_size: int):
    """Which query may see which key: boolean, broadcastable to [..., s, t]."""
    i, j, q_length, kv_length, position = _indices(mask, s, t, q_size)
    seen = (i < q_length) & (j < kv_length)
    if mask.left is not None:
        seen &= j >= position - mask.left
    if mask.right is not None:
        seen &= j <= position + mask.right
    if mask.q_ids is not None:
        seen &= (mask.q_ids[..., :, None] == mask.kv_ids[..., None, :]) & (mask.kv_ids >= 0)[..., None, :]
    return seen


def operand_of(launch: Launch, x, name: str) -> Operand | None:
    """An operand of the call as a kernel takes it; None where it is absent."""
    array = getattr(x, name)
    return None if array is None else Operand(array, getattr(launch.rows, name))


def mask_of(launch: Launch, x) -> Mask:
    """The mask of a call as a kernel takes it."""
    options = launch.options
    positioned = any(given is not None for given in (options["left"], options["right"], x.q_lengths, x.alibi_slopes))
    return Mask(
        left=options["left"],
        right=options["right"],
        align=options["align"],
        q_ids=operand_of(launch, x, "q_ids"),
        kv_ids=operand_of(launch, x, "kv_ids"),
        q_lengths=operand_of(launch, x, "q_lengths"),
        kv_lengths=operand_of(launch, x, "kv_lengths"),
        q_index=x.s_index if positioned else None,
    )


# -------------------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def operand_row(operand, b):
    """The operand's row for batch element b, wide enough to multiply."""
    return row(b, operand.rows).to(tl.int64)


@triton.jit
def sequence_of(b, mask, shape):
    """Return, for batch element b, its two lengths, what turns a query's index into its position, and the index of the shard's
    first query.
    """
    q_length = shape.q_size
    kv_length = shape.t
    if mask.q_lengths is not None:
        q_length = tl.minimum(tl.load(mask.q_lengths.array + operand_row(mask.q_lengths, b)).to(tl.int32), q_length)
    if mask.kv_lengths is not None:
        kv_length = tl.minimum(tl.load(mask.kv_lengths.array + operand_row(mask.kv_lengths, b)).to(tl.int32), kv_length)
    shift = 0
    if mask.align == "bottom_right":
        shift = kv_length - q_length
    offset = 0
    if mask.q_index is not None:
        offset = tl.load(mask.q_index)
    return q_length, kv_length, shift, offset


@triton.jit
def ids_of(operand, b, index, n):
    """Segment ids of batch element b at `index`, -1 from n on; None without ids."""
    ids = None
    if operand is not None:
        ids = tl.load(operand.array + operand_row(operand, b) * n + index, mask=index < n, other=-1)
    return ids


@triton.jit
def along(ids, AXIS: tl.constexpr):
    """Ids with the other side's axis, `AXIS`; None without ids."""
    wide = None
    if ids is not None:
        wide = ids.expand_dims(AXIS)
    return wide


@triton.jit
def sees(index, keys, q_ids, kv_ids, sequence, mask):
    """Which query sees which key. Both sides come with the axis of the other, so the result has the order that the caller needs.

    `index` are the queries' indices in the whole sequence.
    """
    q_length, kv_length, shift, _ = sequence
    seen = (index < q_length) & (keys < kv_length)
    if mask.left is not None:
        seen = seen & (keys >= index + (shift - mask.left))
    if mask.right is not None:
        seen = seen & (keys <= index + (shift + mask.right))
    if mask.q_ids is not None:
        seen = seen & (q_ids == kv_ids) & (kv_ids >= 0)
    return seen


@triton.jit
def key_range(first, last, sequence, mask, BLOCK: tl.constexpr):
    """The keys that queries first..last (indices) may see: start, start of the unmasked middle, its stop, stop; in blocks."""
    q_length, kv_length, shift, _ = sequence
    start = 0
    stop = kv_length
    full_start = 0
    full_stop = kv_length
    if mask.right is not None:
        stop = tl.minimum(stop, last + shift + mask.right + 1)
        full_stop = tl.minimum(full_stop, first + shift + mask.right + 1)
    if mask.left is not None:
        start = tl.maximum(start, first + shift - mask.left)
        full_start = tl.maximum(full_start, last + shift - mask.left)
    if first >= q_length:
        stop = 0
    if last >= q_length:  # queries past the length mask every block
        full_stop = 0
    start = start // BLOCK * BLOCK
    stop = tl.maximum(stop, start)
    full_start = tl.minimum((full_start + BLOCK - 1) // BLOCK * BLOCK, (stop + BLOCK - 1) // BLOCK * BLOCK)
    full_stop = tl.maximum(tl.maximum(full_stop, 0) // BLOCK * BLOCK, full_start)
    if mask.q_ids is not None:
        full_start = start
        full_stop = start
    return start, full_start, full_stop, stop


@triton.jit
def narrowed(start, stop, ids, others, b, n, BLOCK: tl.constexpr):
    """The part of start..stop, in blocks, that may have ids of `ids`: it begins and ends where `others` has one between their least
    and their greatest. Packed sequences lie one after the other, so that is their own part; ids in any order cost no more than a
    look at each.
    """
    if others is not None:
        CHUNK: tl.constexpr = 4096
        least = tl.min(tl.where(ids >= 0, ids, 2147483647), 0)
        greatest = tl.max(ids, 0)
        first = stop
        last = start
        for chunk in range(start, stop, CHUNK):
            index = chunk + tl.arange(0, CHUNK)
            other = ids_of(others, b, index, n)
            near = (other >= least) & (other <= greatest) & (index < stop)
            first = tl.minimum(first, tl.min(tl.where(near, index, 2147483647), 0))
            last = tl.maximum(last, tl.max(tl.where(near, index + 1, 0), 0))
        start = first // BLOCK * BLOCK
        stop = tl.maximum(last, start)
    return start, stop


@triton.jit
def query_range(first, last, s, sequence, mask, BLOCK: tl.constexpr):
    """The queries of this shard that may see keys first..last: start and stop, in blocks."""
    q_length, kv_length, shift, offset = sequence
    start = 0
    stop = tl.minimum(s, q_length - offset)
    if mask.right is not None:  # query position >= key - right
        start = tl.maximum(start, first - mask.right - shift - offset)
    if mask.left is not None:  # query position <= key + left
        stop = tl.minimum(stop, last + mask.left - shift - offset + 1)
    if first >= kv_length:
        stop = 0
    return start // BLOCK * BLOCK, stop
