"""matmul: activation(a @ b + bias) + residual, all of it in the registers of the product.

Bound by the tensor cores for large shapes, by reading b for few rows. The backward is two products of the same kernel, which reads
either operand transposed, and one pass over the cotangent that applies the activation's derivative and sums it for the bias.

What the backward needs of the forward is z = a @ b + bias, and only if there is an activation. It is saved, in the dtype of the
result: computing it again would add half of the backward's products to save what plain JAX code keeps as well. Who wants that,
rematerialises: under ``jax.checkpoint`` the saved value is ``matmul_residual``.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib import precision as precisions
from jtops.kernels._lib.device import activations
from jtops.kernels._lib.device.activations import activate, derivative
from jtops.kernels._lib.device.rows import own_row
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.launch import OuterRows as Rows
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.spec import Case, Input, Spec


@triton.jit
def _offsets(rows, cols, length, TRANSPOSED: tl.constexpr):
    """Of a tile of a matrix whose lines in memory, columns if it is transposed, have `length` elements."""
    if TRANSPOSED:
        offsets = rows[:, None] + cols[None, :] * length
    else:
        offsets = rows[:, None] * length + cols[None, :]
    return offsets


@triton.jit
def _load(ptrs, rows, cols, row_count, col_count, EVEN_ROWS: tl.constexpr, EVEN_COLS: tl.constexpr):
    """A tile, 0 outside of the counts. What is even needs no mask."""
    if EVEN_ROWS and EVEN_COLS:
        tile = tl.load(ptrs)
    elif EVEN_ROWS:
        tile = tl.load(ptrs, mask=(cols < col_count)[None, :], other=0.0)
    elif EVEN_COLS:
        tile = tl.load(ptrs, mask=(rows < row_count)[:, None], other=0.0)
    else:
        tile = tl.load(ptrs, mask=(rows < row_count)[:, None] & (cols < col_count)[None, :], other=0.0)
    return tile


@triton.jit
def _finish(
    acc, bias_ptr, residual_ptr, c_ptr, z_ptr, m, n, c_offset, bias_row, offs_m, offs_n,
    ACTIVATION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """From sums to what is stored: c = activation(z) + residual, and z = acc + bias."""
    if EVEN_M and EVEN_N:
        inside = tl.full(acc.shape, True, tl.int1)
    else:
        inside = (offs_m < m)[:, None] & (offs_n < n)[None, :]
    offsets = c_offset + offs_m[:, None] * n + offs_n[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + bias_row * n + offs_n, mask=offs_n < n, other=0.0).to(tl.float32)[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + offsets, acc.to(z_ptr.dtype.element_ty), mask=inside)
    acc = activate(acc, ACTIVATION)
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(c_ptr + offsets, acc.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, bias_ptr, residual_ptr, c_ptr, z_ptr,
    m, n, k, a_length, b_length, splits, k_per_split, a_inner, a_own, b_inner, b_own, bias_inner, bias_own,
    A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, DOT_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, A_EVEN_M: tl.constexpr, A_EVEN_K: tl.constexpr,
    B_EVEN_K: tl.constexpr, B_EVEN_N: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a tile of c = activation(a @ b + bias) + residual of one batch element, over one split of k.

    Tiles go down columns of GROUP_M, so that programs that run together share lines of a and b in the L2 cache. Loop invariant:
    acc is the product over the k before. In memory a is [m, k] or, transposed, [k, m], b likewise; lines have a_length and b_length
    elements, of which those past the matrix are 0. c is [batch, splits, m, n].
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    tile = pid % (tiles_m * tiles_n)
    line = pid // (tiles_m * tiles_n)
    batch = (line // splits).to(tl.int64)
    first_m = tile // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    pid_m = first_m + tile % (GROUP_M * tiles_n) % group_m
    pid_n = tile % (GROUP_M * tiles_n) // group_m

    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_line = tl.full((), 1, tl.int64) * a_length
    b_line = tl.full((), 1, tl.int64) * b_length
    # Masks along lines end with the line: where that is aligned, loads stay wide.
    a_m, a_k = (a_line, k) if A_TRANSPOSED else (m, a_length)
    b_k, b_n = (b_length, n) if B_TRANSPOSED else (k, b_line)
    a_ptr += own_row(batch, a_inner, a_own) * (k if A_TRANSPOSED else m) * a_line
    b_ptr += own_row(batch, b_inner, b_own) * (n if B_TRANSPOSED else k) * b_line
    first_k = line % splits * k_per_split
    a_ptrs = a_ptr + _offsets(offs_m, first_k + offs_k, a_line, A_TRANSPOSED)
    b_ptrs = b_ptr + _offsets(first_k + offs_k, offs_n, b_line, B_TRANSPOSED)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(first_k, tl.minimum(first_k + k_per_split, k), BLOCK_K):
        a = _load(a_ptrs, offs_m, offs_k, a_m, a_k - start, A_EVEN_M, A_EVEN_K)
        b = _load(b_ptrs, offs_k, offs_n, b_k - start, b_n, B_EVEN_K, B_EVEN_N)
        acc = tl.dot(a.to(DOT_DTYPE), b.to(DOT_DTYPE), acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * (a_line if A_TRANSPOSED else 1)
        b_ptrs += BLOCK_K * (1 if B_TRANSPOSED else b_line)

    c_offset = line.to(tl.int64) * m * n
    bias_row = own_row(batch, bias_inner, bias_own)
    # In halves where there is more to hold than the sums: with both at once the largest tile spills.
    if BLOCK_N >= 128 and (ACTIVATION is not None or residual_ptr is not None):
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        _finish(left, bias_ptr, residual_ptr, c_ptr, z_ptr, m, n, c_offset, bias_row, offs_m, offs_n, ACTIVATION, EVEN_M, EVEN_N)
        offs_n += BLOCK_N // 2
        _finish(right, bias_ptr, residual_ptr, c_ptr, z_ptr, m, n, c_offset, bias_row, offs_m, offs_n, ACTIVATION, EVEN_M, EVEN_N)
    else:
        _finish(acc, bias_ptr, residual_ptr, c_ptr, z_ptr, m, n, c_offset, bias_row, offs_m, offs_n, ACTIVATION, EVEN_M, EVEN_N)


@triton.jit
def _dz_kernel(
    g_ptr, z_ptr, dz_ptr, dbias_ptr, m, n, parts, rows_per_part,
    ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N columns of a part of one batch element's rows; dz = g * activation'(z) and its sums down the columns."""
    blocks_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    line = (pid // blocks_n).to(tl.int64)
    first = line % parts * rows_per_part
    last = tl.minimum(first + rows_per_part, m)
    cols = pid % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    start_of_batch = line // parts * m
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # of every BLOCK_M-th row: summing across threads waits for the end
    for start in range(first, last, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < last)[:, None] & (cols < n)[None, :]
        offsets = (start_of_batch + rows)[:, None] * n + cols[None, :]
        dz = tl.load(g_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        if z_ptr is not None:
            dz *= derivative(tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
        if dz_ptr is not None:
            tl.store(dz_ptr + offsets, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        sums += dz
    if dbias_ptr is not None:
        tl.store(dbias_ptr + line * n + cols, tl.sum(sums, 0), mask=cols < n)


# ------------------------------------------------------------------------------------------------------------------- tiling

_PROGRAMS = 128  # that keep the multiprocessors of the largest GPUs (132 on an H200) busy
_SPLIT_K = 512  # elements of k that are worth a program and a line of partial sums
_GROUP_M = 8
_WORTH_PADDING = 64  # least size in every direction
_TILES = {  # of tensor-core work, largest first: BLOCK_M, BLOCK_N, BLOCK_K, warps, stages
    "half": (
        (128, 256, 64, 8, 3), (256, 128, 64, 8, 3), (128, 256, 32, 8, 3), (128, 128, 64, 8, 3), (128, 128, 32, 8, 3),
        (128, 64, 64, 4, 4), (64, 128, 64, 4, 4), (64, 64, 64, 4, 4), (64, 64, 32, 4, 3), (64, 32, 64, 4, 4), (32, 64, 64, 4, 4),
        (16, 128, 128, 4, 4), (128, 16, 128, 4, 4), (16, 64, 128, 4, 4), (64, 16, 64, 4, 4), (16, 32, 128, 4, 4),
        (16, 16, 64, 4, 3),
    ),
    "tf32": (
        (128, 128, 32, 8, 3), (128, 64, 32, 4, 3), (64, 128, 32, 4, 3), (64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (64, 32, 32, 4, 3),
        (16, 64, 64, 4, 3), (64, 16, 64, 4, 3), (16, 32, 64, 4, 3), (16, 16, 32, 4, 3),
    ),
    "tf32x3": (
        (64, 64, 32, 4, 3), (32, 64, 32, 4, 3), (64, 32, 32, 4, 3),
        (16, 64, 32, 4, 3), (64, 16, 32, 4, 3), (16, 32, 32, 4, 3), (16, 16, 32, 4, 3),
    ),
}  # fmt: skip


def _splits(m: int, n: int, k: int, batch: int, config: Config) -> int:
    """Into how many sums to split k, so that few tiles still occupy the GPU."""
    tiles = batch * cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    return max(1, min(_PROGRAMS // tiles, k // _SPLIT_K))


def _config(m: int, n: int, k: int, batch: int, kind: str, itemsize: int, max_shared_bytes: int, b_transposed: bool) -> Config:
    """The largest tiles that fit the shape and shared memory, and occupy the GPU; else those that make the most programs."""
    best, most = None, 0
    for block_m, block_n, block_k, warps, stages in _TILES[kind]:
        small = (block_m, block_n) == (16, 16)
        wide = block_m > max(16, next_power_of_2(m)) or block_n > max(16, next_power_of_2(n))
        wide |= block_n == 256 and b_transposed  # ptxas 12.8 then runs one wgmma at a time (C7515)
        if not small and (wide or stages * (block_m + block_n) * block_k * itemsize > max_shared_bytes):
            continue
        config = Config(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
        programs = batch * cdiv(m, block_m) * cdiv(n, block_n) * _splits(m, n, k, batch, config)
        if programs >= _PROGRAMS * 0.75:
            return config
        if programs > most:
            best, most = config, programs
    assert best is not None  # the smallest tile fits everything
    return best


@dataclasses.dataclass(frozen=True, slots=True)
class _Side:
    """An operand of a product: [rows, *matrix], how its rows serve the batch, and whether its matrices are to be transposed."""

    array: jax.Array
    rows: Rows
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix, as the product sees it."""
        first, last = self.array.shape[1:]
        return (last, first) if self.transposed else (first, last)


def _product(launch: Launch, a: _Side, b: _Side, batch: int, dtype, *, bias=None, residual=None, activation=None, z=False, name=""):
    """-> activation(a @ b + bias) + residual [batch, m, n] of `dtype`, and z if asked for. `bias` is (array, rows) or None.

    Split sums are completed, and what follows the product is applied, by XLA: two stages, and the same order every time.
    """
    (m, k), (_, n) = a.shape, b.shape
    dot_dtype = jnp.promote_types(a.array.dtype, b.array.dtype)
    precision = precisions.dot_precision(launch.options["precision"], launch.target)
    kind = "half" if dot_dtype.itemsize == 2 else "tf32" if precision == "tf32" else "tf32x3"
    x, y = (_pad_lines(s.array) if min(m, n, k) >= _WORTH_PADDING else s.array for s in (a, b))
    arrays = (a.array, b.array, bias[0] if bias else None, residual)
    config = launch.choose(
        _config(m, n, k, batch, kind, dot_dtype.itemsize, launch.target.max_shared_bytes, b.transposed), (_product_kernel,), arrays,
        {"m": m, "n": n, "k": k, "batch": batch}, name or ("fwd" if z else "out"), to=jnp.dtype(dtype), precision=precision,
        activation=activation, transposed=(a.transposed, b.transposed),
        lines=tuple(math.gcd(size, 64) for size in (x.shape[2], y.shape[2], n)),  # in memory: how wide they load
    )  # fmt: skip
    block_m, block_n, block_k = (config[f"BLOCK_{x}"] for x in "MNK")
    k_per_split = cdiv(cdiv(k, _splits(m, n, k, batch, config)), block_k) * block_k
    splits = cdiv(k, k_per_split)
    a_length, b_length = x.shape[2], y.shape[2]
    fused = splits == 1
    shape, partial = (batch, m, n), jax.ShapeDtypeStruct((batch, splits, m, n), jnp.float32)
    bias_rows = bias[1] if bias else Rows(1, 1, 1)
    outs = launch(
        _product_kernel, x, y, config=config, name=name, flops=2 * batch * m * n * k,
        bias_ptr=bias[0] if bias and fused else None, residual_ptr=residual if fused else None,
        out_type=[jax.ShapeDtypeStruct(shape, dtype)] * (1 + z) if fused else [partial],
        **({} if z and fused else {"z_ptr": None}),
        m=m, n=n, k=k, a_length=a_length, b_length=b_length, splits=splits, k_per_split=k_per_split,
        a_inner=a.rows.inner, a_own=a.rows.own,
        b_inner=b.rows.inner, b_own=b.rows.own, bias_inner=bias_rows.inner, bias_own=bias_rows.own,
        A_TRANSPOSED=a.transposed, B_TRANSPOSED=b.transposed, DOT_DTYPE=_TL_DTYPES[str(dot_dtype)], PRECISION=precision,
        ACTIVATION=activation if fused else None, GROUP_M=_GROUP_M,
        EVEN_M=m % block_m == 0, EVEN_N=n % block_n == 0,
        A_EVEN_M=(a_length if a.transposed else m) % block_m == 0, A_EVEN_K=(k if a.transposed else a_length) % block_k == 0,
        B_EVEN_K=(b_length if b.transposed else k) % block_k == 0, B_EVEN_N=(n if b.transposed else b_length) % block_n == 0,
        grid=batch * splits * cdiv(m, block_m) * cdiv(n, block_n),
    )  # fmt: skip
    if not fused:
        full = bias[1].full(bias[0]) if bias else None
        outs = _epilogue(outs[0].sum(1), full, residual, activation, dtype)[: 1 + z]
    return tuple(outs)


def _pad_lines(x: jax.Array) -> jax.Array:
    """With lines of a multiple of 16 elements, which load in 16 bytes at a time; one by one they cost more than this copy."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 16)))


_TL_DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """The call's batch after `group` neighbours that share b and bias have become rows of one product."""

    group: int
    size: int
    rows: tuple[Any, ...]  # of the operands, as Launch has them

    @classmethod
    def of(cls, launch: Launch) -> "_Batch":
        a, b, bias, _ = launch.rows
        shared = [r.inner if r.own > 1 else launch.batch for r in (b, bias) if r]  # each divides the next larger
        group = min(shared) if a.own == launch.batch else 1
        divide = lambda r: Rows(r.outer, r.own, r.inner // group) if r.own > 1 else Rows(launch.batch // group, 1, 1)
        rows = (Rows(1, launch.batch // group, 1) if group > 1 else a, *(r and divide(r) for r in launch.rows[1:3]))
        return cls(group, launch.batch // group, rows)

    def merge(self, x):
        """[batch, m, ...] -> [batch / group, group * m, ...]; what is shared stays as it is."""
        return x if self.group == 1 or x is None else x.reshape(self.size, self.group * x.shape[1], *x.shape[2:])


def _forward(launch: Launch, a, b, bias, residual):
    grouped, o = _Batch.of(launch), launch.options
    full = None if residual is None else grouped.merge(launch.rows[3].full(residual))
    outs = _product(
        launch,
        _Side(grouped.merge(a), grouped.rows[0]),
        _Side(b, grouped.rows[1]),
        grouped.size,
        jnp.dtype(o["dtype"]),
        bias=None if bias is None else (bias, grouped.rows[2]),
        residual=full,
        activation=o["activation"],
        z=launch.residuals and o["activation"] is not None,
    )
    return tuple(x.reshape(launch.batch, a.shape[1], b.shape[2]) for x in outs)


def _backward(launch: Launch, operands, saved, cotangents):
    (a, b, _, residual), (g,), grouped = operands, cotangents, _Batch.of(launch)
    wants_a, wants_b, wants_bias, wants_residual = launch.wanted
    dz, dbias = _dz(launch, grouped, a.dtype, g, saved, wants_a or wants_b, wants_bias)
    each = Rows(1, grouped.size, 1)
    da = db = None
    if wants_a:  # summed over what shares a, if any, by the frame
        dtype = a.dtype if launch.rows[0].own == launch.batch else jnp.float32
        turned = _Side(b, grouped.rows[1], transposed=True)
        (da,) = _product(launch, _Side(dz, each), turned, grouped.size, dtype, name="vjp_da")
        da = da.reshape(launch.batch, *a.shape[1:])
    if wants_b:
        dtype = b.dtype if b.shape[0] == grouped.size else jnp.float32
        turned = _Side(grouped.merge(a), grouped.rows[0], transposed=True)
        (db,) = _product(launch, turned, _Side(dz, each), grouped.size, dtype, name="vjp_db")
        db = db if b.shape[0] == grouped.size else grouped.rows[1].sum(db)
    if wants_bias:
        dbias = grouped.rows[2].sum(dbias)
    dresidual = None
    if wants_residual:
        dresidual = g.astype(residual.dtype if residual.shape[0] == launch.batch else jnp.float32)
    return da, db, dbias, dresidual


def _dz(launch: Launch, grouped: _Batch, dtype, g, saved, wants_dz: bool, wants_bias: bool):
    """-> the cotangent of a @ b + bias, and its sums over rows, float32 [batch, n].

    dz has the operands' dtype, as tensor cores want; beside a float32 cotangent float16 lacks the range, and dz is float32.
    """
    if dtype == jnp.float16 and g.dtype == jnp.float32:
        dtype = g.dtype
    g, activation = grouped.merge(g), launch.options["activation"]
    batch, m, n = g.shape
    makes_dz = wants_dz and (activation is not None or g.dtype != dtype)
    if not (makes_dz or wants_bias):
        return g, None
    block_m, block_n = min(16, next_power_of_2(m)), min(128, next_power_of_2(n))
    parts = min(cdiv(m, block_m), cdiv(4 * _PROGRAMS, batch * cdiv(n, block_n)))
    rows_per_part = cdiv(cdiv(m, parts), block_m) * block_m
    parts = cdiv(m, rows_per_part)
    types = {"dz_ptr": (g.shape, dtype, makes_dz), "dbias_ptr": ((batch, parts, n), jnp.float32, wants_bias)}
    outs = launch(
        _dz_kernel, g, config=Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4), name="vjp_dz", flops=8 * g.size,
        out_type=[jax.ShapeDtypeStruct(shape, t) for shape, t, there in types.values() if there],
        **{name: None for name, (*_, there) in types.items() if not there},
        z_ptr=grouped.merge(saved[0]) if activation is not None else None, m=m, n=n, parts=parts, rows_per_part=rows_per_part,
        ACTIVATION=activation, grid=batch * parts * cdiv(n, block_n),
    )  # fmt: skip
    return outs[0] if makes_dz else g, outs[-1].sum(1) if wants_bias else None


# ---------------------------------------------------------------------------------------------------------------- reference


def _epilogue(z, bias, residual, activation, dtype):
    """-> activation(z + bias) + residual, and z + bias: computed in the dtype of z, rounded once."""
    if bias is not None:
        z = z + bias[..., None, :].astype(z.dtype)
    y = activations.FUNCTIONS[activation](z)
    if residual is not None:
        y = y + residual.astype(z.dtype)
    return y.astype(dtype), z.astype(dtype)


def _reference(a, b, bias, residual, *, activation, precision, dtype):
    wide = precisions.accumulator(jnp.promote_types(a.dtype, dtype))
    z = jnp.matmul(a, b, precision=precisions.lax_precision(precision), preferred_element_type=wide)
    y, z = _epilogue(z, bias, residual, activation, dtype)
    return (y,) if activation is None else (y, z)


def _limits(a, b, bias, residual, *, dtype, **_) -> str | None:
    return checks.kernel_floats(a, b, bias, residual, jax.ShapeDtypeStruct((), dtype))


_OP = "matmul"
_shared: dict[str, Any] = {
    "reference": _reference,
    "forward": _forward,
    "backward": _backward,
    "whole": "k",  # sums over devices would have to come before the activation
    "limits": _limits,
    "blocks": "BLOCK_M BLOCK_N BLOCK_K",
}
_linear = fused_op(_OP, "m k, k n, n, m n -> m n", **_shared)
_activated = fused_op(_OP, "m k, k n, n, m n -> m n", residuals="m n", **_shared)


def matmul(
    a: Float[Array, "*batch m k"],
    b: Float[Array, "*batch k n"],
    *,
    bias: Float[Array, " n"] | None = None,
    activation: str | None = None,
    residual: Float[Array, "*batch m n"] | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Float[Array, "*batch m n"]:
    """``activation(a @ b + bias) + residual``, rounded once.

    Sums, bias, activation and residual are float32 (float64 for float64 inputs). Batch axes broadcast as in `jnp.matmul`; a `b`
    without any, or that is mapped with fewer, makes one large product of all rows that share it. Gradients have the same bits every
    time, and their operand's dtype: ``dz = g * activation'(z)``, ``da = dz b^T``, ``db = a^T dz``, ``dbias`` the sum of dz over
    rows, ``dresidual = g``. With an activation ``z = a @ b + bias`` is saved for it in the result's dtype. dz is rounded to the
    operands' dtype; beside a float32 cotangent of float16 operands it stays float32. Fastest where k and n are multiples of 16.

    Args:
      a: [..., m, k], or [k], which is one row whose axis the result lacks. Kernel dtypes: float32, bfloat16, float16.
      b: [..., k, n], or [k], one column. If its dtype differs from that of `a`, both are promoted as jnp.matmul does.
      bias: [n], of any floating dtype.
      activation: None, "relu", "gelu" (by tanh, as jax.nn.gelu), "gelu_exact" (by erf), "silu", "sigmoid" or "tanh".
      residual: of the result's shape and any floating dtype; added after the activation.
      precision: of products of float32; None is what ``jax_default_matmul_precision`` says, else float32 accuracy.
      preferred_element_type: floating dtype of the result. None: the (promoted) dtype of `a` and `b`.
      implementation: "triton", "xla" (plain jax.numpy), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M``, ``BLOCK_N`` and ``BLOCK_K`` of all products, also of the gradients. None: chosen by size, dtype
        and device.

    Returns:
      Array of the shape of ``jnp.matmul(a, b)``.

    Raises:
      TypeError: operands or `preferred_element_type` not floating.
      ValueError: shapes that do not fit, an unknown `activation` or `precision`, a `bias` where `b` has no axis n.
      UnsupportedError: float64, where a kernel must run.

    Source: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008, section 4; gelu: Hendrycks and Gimpel,
    "Gaussian Error Linear Units", 2016, section 2.
    """
    a, b = checks.array(_OP, "a", a), checks.array(_OP, "b", b)
    bias, residual = (None if x is None else checks.array(_OP, name, x) for name, x in (("bias", bias), ("residual", residual)))
    activations.check(_OP, activation)
    row, column = a.ndim == 1, b.ndim == 1
    checks.axes(_OP, a=(a, "k" if row else "... m k"), b=(b, "k" if column else "... k n"))
    if column and bias is not None:
        raise ValueError(f"{_OP}: bias goes along axis n, which a one-dimensional b lacks; got b {b.shape}, bias {bias.shape}.")
    checks.axes(_OP, b=(b, "..." if column else "... n"), bias=(bias, "n"))
    batch = checks.broadcast(_OP, "batch axes", a=a.shape[:-2], b=b.shape[:-2])
    shape = (*batch, *a.shape[:-1][-1:], *b.shape[1:][-1:])
    if residual is not None:
        if residual.shape != shape:
            raise ValueError(
                f"{_OP}: residual must have the result's shape {shape}; got {residual.shape}. Broadcast it, e.g. "
                f"jnp.broadcast_to(residual, {shape})."
            )
        residual = jnp.expand_dims(residual, -1) if column else residual
        residual = jnp.expand_dims(residual, -2) if row else residual
    common = jnp.promote_types(a.dtype, b.dtype)
    a, b = a.astype(common), b.astype(common)
    resolved = precisions.resolve(_OP, precision)
    (y,) = (_linear if activation is None else _activated)(
        jnp.expand_dims(a, 0) if row else a,
        jnp.expand_dims(b, 1) if column else b,
        bias,
        residual,
        implementation=implementation,
        config=config,
        activation=activation,
        precision=resolved if common.itemsize >= 4 else "tf32",  # of shorter floats every product is exact
        dtype=str(common if preferred_element_type is None else _result_dtype(preferred_element_type)),
    )
    return jnp.squeeze(y, [axis for axis, gone in ((-2, row), (-1, column)) if gone])


def _result_dtype(asked) -> jnp.dtype:
    try:
        dtype = jax.dtypes.canonicalize_dtype(asked)
    except TypeError:
        raise TypeError(f"{_OP}: preferred_element_type must be a dtype or None; got {asked!r}.") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{_OP}: preferred_element_type must be a floating dtype; got {dtype}. Cast the result.")
    return dtype


def _bytes(c, a, b, bias, residual) -> int:
    return sum(x.nbytes for x in (c, a, b, bias, residual) if x is not None)


def _flops(_, a, b, *__) -> int:
    return 2 * a.size * b.shape[-1]


def _inputs(m, k, n, *batch, bias=False, residual=False):
    weights = Input((k, n), std=k**-0.5)  # as in a layer at rest: z of size 1, where activations bend
    return Input((*batch, m, k)), weights, Input((n,)) if bias else None, Input((*batch, m, n)) if residual else None


_FULL: dict[str, Any] = {"bias": True, "residual": True}
_MLP = _inputs(16384, 1024, 4096, bias=True)
SPEC = Spec(
    name=_OP,
    function=matmul,
    operands=("a", "b", "bias", "residual"),
    small=Case("small", _inputs(3, 8, 8, 2, **_FULL), "all operands", {"activation": "gelu"}),
    meshed=Case("meshed", _inputs(8, 8, 8, 8, **_FULL), "rows on many devices, b and bias on all", {"activation": "gelu"}),
    cases=(
        Case("full", _inputs(33, 40, 17, **_FULL), "tails everywhere, all operands", {"activation": "gelu"}),
        Case("plain", _inputs(20, 24, 36), "the product alone"),
        Case("bias", _inputs(20, 24, 36, bias=True), "a bias whose gradient needs no dz"),
        Case("residual", _inputs(5, 7, 9, residual=True), "odd sizes"),
        Case(
            "blocks",
            _inputs(50, 70, 40, **_FULL),
            "several tiles a way, the last of each partly filled",
            {"activation": "silu"},
            Config(BLOCK_M=16, BLOCK_N=32, BLOCK_K=16),
        ),
        Case(
            "even",
            _inputs(32, 64, 32, **_FULL),
            "sizes that blocks divide: no masks",
            {"activation": "tanh"},
            Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32),
        ),
        Case("relu", _inputs(9, 16, 8, 3), "b shared by batch elements: one product", {"activation": "relu"}),
        Case("gelu_exact", _inputs(8, 16, 8, bias=True), "erf", {"activation": "gelu_exact"}),
        Case("sigmoid", _inputs(8, 16, 8, bias=True), "saturating both ways", {"activation": "sigmoid"}),
        Case("batched", (Input((2, 5, 12)), Input((2, 12, 7), std=0.3), Input((7,)), None), "a matrix b for each batch element"),
        Case("broadcast", (Input((2, 1, 5, 6)), Input((1, 3, 6, 4)), None, None), "either operand shared along an axis of its own"),
        Case("split", _inputs(3, 1300, 5, **_FULL), "k in several sums", {"activation": "gelu"}),
        Case("rows", _inputs(1100, 4, 6, bias=True), "sums over rows, in parts, for b and bias"),
        Case("row", _inputs(1, 40, 24, bias=True), "a single row"),
        Case("one", _inputs(1, 1, 1, **_FULL), "one element"),
    ),
    compiled=(
        Case("4096", _inputs(4096, 4096, 4096), "square"),
        Case("8192", _inputs(8192, 8192, 8192), "square, large"),
        Case("mlp", _MLP, "a transformer's first feed-forward layer", {"activation": "gelu"}),
        Case("residual", _inputs(16384, 4096, 1024, **_FULL), "and its second"),
        Case("skinny", _inputs(16, 4096, 4096, bias=True), "few rows, k split", {"activation": "silu"}),
        Case("odd", _inputs(1000, 1001, 999, **_FULL), "masks on every side", {"activation": "gelu"}),
    ),
    backward_kernels=3,
    forward_bytes=_bytes,
    backward_bytes=lambda *arrays: 2 * _bytes(*arrays),
    forward_flops=_flops,
    backward_flops=lambda *given: 2 * _flops(*given),
)
