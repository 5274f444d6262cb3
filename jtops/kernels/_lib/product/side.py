"""An operand of a product: its matrices in memory, which of them serves a row of the call, and how tiles of them are read."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.kernels._lib.device.rows import row
from jtops.kernels._lib.frame.launch import Rows


class Side(NamedTuple):
    """What a kernel is told of an operand. It never reads between lines: elements of a line past the matrix are 0.

    `lines` of a matrix follow each other, each of `length` elements. `layout` says what a line is of the matrix that the product
    sees: "rows" or "columns". `masked` says which ends of it cut a tile: "rows", "columns", "both" or "none".
    """

    ptr: Any
    rows: Any
    lines: Any
    length: Any
    layout: str
    masked: str


class Matrix(NamedTuple):
    """An operand [own rows, *matrix] on the host, and whether the product sees its matrices transposed."""

    array: jax.Array
    rows: Rows
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one matrix, as the product sees it."""
        first, last = self.array.shape[1:]
        return (last, first) if self.transposed else (first, last)

    @property
    def T(self) -> "Matrix":  # noqa: N802
        """The operand with each of its matrices transposed."""
        return self._replace(transposed=not self.transposed)

    def padded(self) -> "Matrix":
        """The operand with lines of a multiple of 16 elements, which load 16 bytes at a time; loads one by one cost more than this
        copy.
        """
        return self._replace(array=jnp.pad(self.array, ((0, 0), (0, 0), (0, -self.array.shape[2] % 16))))

    def side(self, block_rows: int = 0, block_columns: int = 0) -> Side:
        """The operand for a kernel that reads tiles of so many rows and columns."""
        _, lines, length = self.array.shape
        layout, (rows, columns) = ("columns", (length, lines)) if self.transposed else ("rows", (lines, length))
        return Side(self.array, self.rows, lines, length, layout, masked(rows, columns, block_rows, block_columns))


def masked(rows: int, columns: int, block_rows: int, block_columns: int) -> str:
    """Which ends of a matrix cut a tile; "both" where the tile is not known."""
    rows_cut = block_rows == 0 or rows % block_rows != 0
    columns_cut = block_columns == 0 or columns % block_columns != 0
    if rows_cut and columns_cut:
        return "both"
    return "rows" if rows_cut else "columns" if columns_cut else "none"


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """The batch of a call as `count` groups, in each of which `size` neighbours that share operands are rows of one product."""

    size: int
    count: int

    @classmethod
    def of(cls, batch: int, a: Rows, *shared: Rows | None) -> "Groups":
        """The largest groups that the `shared` operands allow, if `a` has a row for each of the call's."""
        neighbours = [rows.inner if rows.own > 1 else batch for rows in shared if rows]  # each divides the next larger
        size = min(neighbours) if a.own == batch else 1
        return cls(size, batch // size)

    def merge(self, x: jax.Array) -> jax.Array:
        """Merge [batch, m, ...] into [count, size * m, ...]."""
        return x if self.size == 1 else x.reshape(self.count, self.size * x.shape[1], *x.shape[2:])

    def shared(self, rows: Rows) -> Rows:
        """The `Rows` by which an operand that serves all of a group serves the groups."""
        return Rows(rows.inner // self.size, rows.own) if rows.own > 1 else Rows(1, 1)

    def full(self, x: jax.Array, rows: Rows) -> jax.Array:
        """An operand that serves all of a group, with a row for each group."""
        inner, own = self.shared(rows)
        parts = jnp.broadcast_to(x[None, :, None], (self.count // (own * inner), own, inner, *x.shape[1:]))
        return parts.reshape(self.count, *x.shape[1:])

    def merged(self, a: jax.Array, rows: Rows) -> Matrix:
        """The operand whose neighbours become rows of one matrix."""
        return Matrix(a, rows) if self.size == 1 else self.each(self.merge(a))

    def sharing(self, b: jax.Array, rows: Rows) -> Matrix:
        """An operand that serves all of a group."""
        return Matrix(b, self.shared(rows))

    def each(self, x: jax.Array) -> Matrix:
        """An array with a matrix for each group."""
        return Matrix(x, Rows(1, self.count))


@triton.jit
def pointers(side, batch, rows, columns):
    """Pointers to a tile of the matrix that serves row `batch` of the call."""
    length = tl.full((), 1, tl.int64) * side.length
    if side.layout == "columns":
        offsets = rows[:, None] + columns[None, :] * length
    else:
        offsets = rows[:, None] * length + columns[None, :]
    return side.ptr + row(batch, side.rows) * side.lines * length + offsets


@triton.jit
def step_down(side, ROWS: tl.constexpr):
    """Step from a tile's pointers to those of the tile below it."""
    return ROWS * (1 if side.layout == "columns" else tl.full((), 1, tl.int64) * side.length)


@triton.jit
def step_right(side, COLUMNS: tl.constexpr):
    """Step from a tile's pointers to those of the tile on its right."""
    return COLUMNS * (tl.full((), 1, tl.int64) * side.length if side.layout == "columns" else 1)


@triton.jit
def load(side, ptrs, rows, columns, rows_before, columns_before):
    """Load a tile, 0 outside of the matrix; `rows` and `columns` count from `rows_before` and `columns_before` on.

    A mask along lines ends with the line, not with the matrix: where lines are aligned, loads stay wide.
    """
    row_end = (side.length if side.layout == "columns" else side.lines) - rows_before
    column_end = (side.lines if side.layout == "columns" else side.length) - columns_before
    if side.masked == "none":
        tile = tl.load(ptrs)
    elif side.masked == "columns":
        tile = tl.load(ptrs, mask=(columns < column_end)[None, :], other=0.0)
    elif side.masked == "rows":
        tile = tl.load(ptrs, mask=(rows < row_end)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs, mask=(rows < row_end)[:, None] & (columns < column_end)[None, :], other=0.0)
    return tile
