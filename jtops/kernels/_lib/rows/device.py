"""Rows in kernels: the tiles and parts that programs have of them, and rows of any width read and written by vectors of 16 bytes.

Where a row's width is no multiple of a vector, most rows begin inside one. Lanes are then counted from the start of the vector that
the row begins in, which keeps every access aligned: the row begins at lane `begin` < VECTOR. Its first and last vector overlap the
neighbouring rows: they are read whole, and of them only this row's elements, its edges, are written, one by one.
"""

from jtops._compat.triton import tl, triton


@triton.jit
def rows_of_tile(i, pid, work, BLOCK_M: tl.constexpr):
    """The rows of a program's tile number i; `work` is its `Tiles`."""
    return (i * work.programs + pid) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def part_of_long_row(pid, n, split, VECTOR: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the row, which of its parts, the lanes of all parts but the last, this part's first lane and the one after its last,
    and its blocks; `split` is the `Split`.
    """
    part = (pid % split.splits).to(tl.int32)
    size = split.blocks * BLOCK_N
    if split.index_type is not None:
        part = part.to(tl.int64)
        size = tl.full((), split.blocks, tl.int64) * BLOCK_N
    first = part * size
    last = first + tl.minimum(size, lanes_of(n, VECTOR) - first)
    return pid // split.splits, part, size, first, last, tl.cdiv(last - first, BLOCK_N)


@triton.jit
def of_parts(ptr, row, split, SPLITS: tl.constexpr, OTHER: tl.constexpr):
    """Load what was found of each part of a long row; OTHER past the last."""
    parts = tl.arange(0, SPLITS)
    return tl.load(ptr + row * split.splits + parts, mask=parts < split.splits, other=OTHER)


@triton.jit
def lanes_of(n, VECTOR: tl.constexpr):
    """The most lanes that a row has: whole vectors, and those before its begin."""
    return (n + 2 * (VECTOR - 1)) // VECTOR * VECTOR


@triton.jit
def row_start(rows, n, VECTOR: tl.constexpr):
    """Return the offset of each row's lane 0, and the lane where the row begins."""
    base = rows * n
    start = base // VECTOR * VECTOR
    return start, (base - start).to(tl.int32)


@triton.jit
def vectors_read(lanes, begin, n, VECTOR: tl.constexpr):
    """The mask of lanes in vectors that hold any element of a row."""
    return lanes < (begin + n + VECTOR - 1) // VECTOR * VECTOR


@triton.jit
def vectors_written(lanes, begin, n, VECTOR: tl.constexpr):
    """The mask of lanes in vectors that hold one row alone."""
    return (lanes >= (begin + VECTOR - 1) // VECTOR * VECTOR) & (lanes < (begin + n) // VECTOR * VECTOR)


@triton.jit
def edges(begin, n, VECTOR: tl.constexpr):
    """Return the lanes [2 VECTOR] of a row's first and last vector, and which of them are edges."""
    i = tl.arange(0, 2 * VECTOR)
    tail = (begin + n) // VECTOR * VECTOR
    lanes = tl.where(i < VECTOR, i, tail + i - VECTOR)
    head_end = (begin + VECTOR - 1) // VECTOR * VECTOR
    return lanes, tl.where(i < VECTOR, (lanes >= begin) & (lanes < head_end), lanes < begin + n)


@triton.jit
def load_row(ptr, start, lanes, begin, mask, n, OTHER: tl.constexpr, VECTOR: tl.constexpr, EVICT: tl.constexpr):
    """Load a tile in float32, with OTHER outside of `mask` or of the row that begins at lane `begin`."""
    if VECTOR == 1:
        x = tl.load(ptr + start + lanes, mask=mask, other=OTHER, eviction_policy=EVICT).to(tl.float32)
    else:
        read = mask & vectors_read(lanes, begin, n, VECTOR)
        x = tl.load(ptr + start + lanes, mask=read, other=OTHER, eviction_policy=EVICT).to(tl.float32)
        x = tl.where((lanes >= begin) & (lanes < begin + n), x, OTHER)
    return x


@triton.jit
def store_row(ptr, start, lanes, begin, inside, x, n, VECTOR: tl.constexpr, EVICT: tl.constexpr):
    """Write a tile, less the edges of shifted rows."""
    if VECTOR > 1:
        inside = inside & vectors_written(lanes, begin, n, VECTOR)
    tl.store(ptr + start + lanes, x.to(ptr.dtype.element_ty), mask=inside, eviction_policy=EVICT)
