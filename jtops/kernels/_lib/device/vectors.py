"""Rows of any width, read and written by whole vectors of 16 bytes.

Where a row's width is no multiple of a vector, most rows begin inside one. Their lanes are then counted from that vector's begin,
so that every vector is aligned: a row begins at lane `begin` < VECTOR, and what its first and last vector hold of neighbours is
read, too, but not written. Elements of vectors that are not the row's alone are its edges, written one by one.
"""

from jtops._compat.triton import tl, triton


def vector(r: int, n: int, itemsize: int, room: int) -> int:
    """Elements of a vector if rows have to be shifted, by up to one less, and `room` lanes are enough for it; else 1.

    Not where the array's end cuts a vector, which must not be read.
    """
    size = 16 // itemsize
    return size if n % size and r * n % size == 0 and 4 * size <= n <= room - size + 1 else 1


@triton.jit
def row_start(rows, n, VECTOR: tl.constexpr):
    """-> offset of each row's lane 0, and the lane where the row begins."""
    base = rows * n
    start = base // VECTOR * VECTOR
    return start, (base - start).to(tl.int32)


@triton.jit
def vectors_read(lanes, begin, n, VECTOR: tl.constexpr):
    """Lanes of vectors that hold any of a row."""
    return lanes < (begin + n + VECTOR - 1) // VECTOR * VECTOR


@triton.jit
def vectors_written(lanes, begin, n, VECTOR: tl.constexpr):
    """Lanes of vectors that are a row's alone."""
    return (lanes >= (begin + VECTOR - 1) // VECTOR * VECTOR) & (lanes < (begin + n) // VECTOR * VECTOR)


@triton.jit
def edges(begin, n, VECTOR: tl.constexpr):
    """-> lanes [2 VECTOR] of a row's first and last vector, and which of them are edges."""
    i = tl.arange(0, 2 * VECTOR)
    tail = (begin + n) // VECTOR * VECTOR
    lanes = tl.where(i < VECTOR, i, tail + i - VECTOR)
    head_end = (begin + VECTOR - 1) // VECTOR * VECTOR
    return lanes, tl.where(i < VECTOR, (lanes >= begin) & (lanes < head_end), lanes < begin + n)
