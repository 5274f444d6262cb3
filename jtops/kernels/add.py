"""add: x + y with broadcasting. Bound by memory: one read of each operand, one write."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib.device.rows import counted, own_row
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.spec import Case, Meshed, Spec, normal

# Core axes are the last two, m and n: rows, columns and scalars broadcast inside the kernel, whatever the batch axes do.


@triton.jit
def _load(ptr, rows, cols, r, m, n, inner, own, ROW_M: tl.constexpr, COL_N: tl.constexpr, DENSE: tl.constexpr):
    """An operand's part of a tile, of one column where it is broadcast along them. DENSE: it is kept just as the result is."""
    if DENSE:
        row = rows
    elif ROW_M:
        row = own_row(rows // m, inner, own) * m + rows % m
    else:
        row = own_row(rows // m, inner, own)
    if COL_N:
        x = tl.load(ptr + row[:, None] * n + cols[None, :], mask=(rows < r)[:, None] & (cols < n)[None, :])
    else:
        x = tl.load(ptr + row, mask=rows < r)[:, None]
    return x


@counted
def _forward_kernel(
    x_ptr, y_ptr, o_ptr, r, m, n, x_inner, x_own, y_inner, y_own,
    X_M: tl.constexpr, X_N: tl.constexpr, X_DENSE: tl.constexpr,
    Y_M: tl.constexpr, Y_N: tl.constexpr, Y_DENSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: a BLOCK_M x BLOCK_N tile of the result, whose r = batch x m rows are n long."""
    pid = tl.program_id(0).to(tl.int64)
    blocks_n = tl.cdiv(n, BLOCK_N)
    rows = pid // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < r)[:, None] & (cols < n)[None, :]
    dtype = o_ptr.dtype.element_ty
    x = _load(x_ptr, rows, cols, r, m, n, x_inner, x_own, X_M, X_N, X_DENSE).to(dtype)
    y = _load(y_ptr, rows, cols, r, m, n, y_inner, y_own, Y_M, Y_N, Y_DENSE).to(dtype)
    tl.store(o_ptr + rows[:, None] * n + cols[None, :], x + y, mask=mask)


@counted
def _sum_kernel(
    g_ptr, o_ptr, r, c, parts, rows_per_part,
    SUM_COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: the float32 sum of one part's rows of one group's r x c matrix, per column of a block or over all columns."""
    pid = tl.program_id(0).to(tl.int64)
    blocks_n = 1 if SUM_COLS else tl.cdiv(c, BLOCK_N)
    group, part = pid // blocks_n // parts, pid // blocks_n % parts
    first = part * rows_per_part
    last = tl.minimum(first + rows_per_part, r)
    start_n = pid % blocks_n * BLOCK_N
    stop_n = c if SUM_COLS else start_n + BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start_m in range(first, last, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        for start in range(start_n, stop_n, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask = (offs_m < last)[:, None] & (offs_n < c)[None, :]
            acc += tl.load(g_ptr + (group * r + offs_m)[:, None] * c + offs_n[None, :], mask=mask, other=0.0).to(tl.float32)
    if SUM_COLS:
        tl.store(o_ptr + group * parts + part, tl.sum(acc))
    else:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        tl.store(o_ptr + (group * parts + part) * c + offs_n, tl.sum(acc, 0), mask=offs_n < c)


def _config(n: int) -> Config:
    block_n = min(next_power_of_2(n), 1024)
    return Config(BLOCK_M=max(1, 1024 // block_n), BLOCK_N=block_n)


def _forward(launch: Launch, x, y):
    m, n = (max(a, b) for a, b in zip(x.shape[1:], y.shape[1:], strict=True))
    shape, rows = (launch.batch, m, n), launch.batch * m
    dense = [operand.shape == shape for operand in (x, y)]
    if all(dense):  # then shapes do not matter
        rows, m, n = 1, 1, rows * n
    ones = {name: tuple(size == 1 for size in operand.shape[1:]) for name, operand in (("x", x), ("y", y))}
    flags = {"unit": math.gcd(n, 16), "dense": tuple(dense), **({} if all(dense) else ones)}
    config = launch.choose(_config(n), (_forward_kernel,), (x, y), {"r": rows, "n": n}, "out", **flags)
    per_operand: dict[str, Any] = {}
    for name, operand, own, is_dense in zip("xy", (x, y), launch.rows, dense, strict=True):
        per_operand |= {f"{name}_inner": own.inner, f"{name}_own": own.own, f"{name.upper()}_DENSE": is_dense}
        per_operand |= {f"{name.upper()}_M": operand.shape[1] != 1, f"{name.upper()}_N": all(dense) or operand.shape[2] != 1}
    return (
        launch(
            _forward_kernel, x, y, r=rows, m=m, n=n, **per_operand, config=config, flops=rows * n,
            out_type=jax.ShapeDtypeStruct(shape, jnp.promote_types(x.dtype, y.dtype)),
            grid=cdiv(rows, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),
        ),
    )  # fmt: skip


def _backward(launch: Launch, operands, saved, cotangents):
    (g,) = cotangents
    return tuple(_gradient(launch, x, r, g) if w else None for x, r, w in zip(operands, launch.rows, launch.wanted, strict=True))


def _gradient(launch: Launch, x, rows, g):
    """The sum of `g` over whatever `x` was broadcast along."""
    (_, m, n), (own, x_m, x_n) = g.shape, x.shape
    if x.shape == g.shape:
        return g
    # As matrices [groups, r, c] of neighbours in memory that one program can sum.
    if x_m == m and x_n == n:
        groups, r, c = rows.outer * own, rows.inner, m * n
    elif x_m == 1:
        groups, r, c = rows.outer * own, rows.inner * m, n
    else:  # a column: sum over n alone, the rest is small
        groups, r, c = rows.outer * own * rows.inner * m, 1, n
    sum_cols = x_n == 1 != n
    sizes = {"groups": groups, "r": r, "c": c}
    config = launch.choose(_config(c), (_sum_kernel,), (g,), sizes, unit=math.gcd(c, 16), sum_cols=sum_cols)
    rows_per_part = max(config["BLOCK_M"], cdiv(r, 128))
    parts = cdiv(r, rows_per_part)
    partial = launch(
        _sum_kernel, g, r=r, c=c, parts=parts, rows_per_part=rows_per_part, SUM_COLS=sum_cols, config=config, flops=g.size,
        out_type=jax.ShapeDtypeStruct((groups, parts, 1 if sum_cols else c), jnp.float32),
        grid=groups * parts * (1 if sum_cols else cdiv(c, config["BLOCK_N"])),
    )  # fmt: skip
    split = (rows.outer, own, parts) if x_m == 1 or x_n == n else (rows.outer, own, rows.inner)
    return partial.reshape(*split, x_m, x_n).sum((0, 2))


def _reference(x, y):
    return (jnp.add(x, y),)


def _limits(x, y) -> str | None:
    if any(a.dtype == jnp.bool_ or jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (x, y)):
        return f"no kernel for dtypes {x.dtype} and {y.dtype} (only integers, float32, bfloat16, float16)"
    return checks.kernel_floats(x, y)


_add = fused_op("add", "m n, m n -> m n", reference=_reference, forward=_forward, backward=_backward, limits=_limits,
                blocks="BLOCK_M BLOCK_N")  # fmt: skip


def add(
    x: Shaped[Array, "*#shape"],
    y: Shaped[Array, "*#shape"],
    *,
    implementation: Implementation | None = None,
    config: Config | None = None,
) -> Shaped[Array, "*shape"]:
    """``x + y`` with NumPy broadcasting and JAX's type promotion, as ``jax.numpy.add``.

    Gradients are the cotangent summed over broadcast axes, accumulated in float32 and cast to each operand's own dtype; the sum is
    two-staged and gives the same bits every time.

    Args:
      x, y: arrays of any shapes that broadcast together, or numbers. Kernel dtypes: integers, float32, bfloat16, float16.
      implementation: "triton", "xla" (``jax.numpy.add``), "interpret", or None: Triton on GPUs, XLA elsewhere.
      config: blocks ``BLOCK_M`` (rows) and ``BLOCK_N`` (columns) of a tile. None: chosen by size.

    Returns:
      Array of the broadcast shape and promoted dtype.

    Raises:
      TypeError: an operand is no array or number.
      ValueError: the shapes do not broadcast.
      UnsupportedError: a dtype without kernel (bool, complex, float64), where a kernel must run.
    """
    a, b = (checks.array("add", name, v, floating=False) for name, v in (("x", x), ("y", y)))
    if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)) or jax.typeof(x).weak_type or jax.typeof(y).weak_type:
        raws = [jnp.asarray(v) for v in (x, y)]
        dtype = jnp.result_type(*raws)  # a Python number takes the other operand's type
        a, b = (v.astype(dtype) if jax.typeof(raw).weak_type else v for raw, v in zip(raws, (a, b), strict=True))
    shape = checks.broadcast("add", "shapes", x=a.shape, y=b.shape)
    out = _add(a, b, implementation=implementation, config=config)[0]
    return out if out.shape == shape else out.reshape(shape)


def _xy(x, y):
    return {"x": normal(x), "y": normal(y)}


SPEC = Spec(
    name="add",
    function=add,
    small=(Case("small", _xy((2, 3, 5), (5,)), "a row of y shared by all rows of x", axes="b m n, n -> b m n"),),
    meshed=(Meshed("meshed", _xy((16, 8, 32), (32,)), "x on many devices, y on all", axes="b m n, n -> b m n", split="b m n"),),
    cases=(
        Case("same", _xy((7, 33), (7, 33)), "no broadcasting: flat kernel, odd tail"),
        Case("thin", _xy((7, 1), (7, 1)), "no broadcasting, though the last axis has size 1"),
        Case("vector", _xy((1000,), (1000,)), "rank below the kernel's"),
        Case("row", _xy((3, 5, 257), (257,)), "bias row; its gradient sums all rows"),
        Case("column", _xy((6, 70), (6, 1)), "column; its gradient sums along the row"),
        Case("scalar", _xy((5, 9), ()), "scalar; its gradient sums everything"),
        Case("outer", _xy((6, 1), (1, 70)), "both broadcast"),
        Case("batch", _xy((4, 3, 17), (3, 17)), "shared by the batch: sum over matrices"),
        Case("middle", _xy((2, 3, 4, 5), (1, 3, 1, 5)), "shared before and after its own batch axis"),
        Case("sandwich", _xy((2, 1, 3, 4, 5), (1, 6, 1, 4, 1)), "each has what the other lacks"),
        Case("gap", _xy((2, 1, 3, 4, 5), (2, 6, 3, 4, 5)), "a shared axis between full ones"),
        Case("long_sum", _xy((700, 3), (1, 3)), "gradient summed in several parts"),
    ),
    compiled=(
        Case("same", _xy((4096, 4096), (4096, 4096)), "flat"),
        Case("row", _xy((8192, 4096), (4096,)), "row and its gradient"),
        Case("column", _xy((8192, 4096), (8192, 1)), "column and its gradient"),
    ),
    backward_kernels=1,
    kept=0,
    forward_bytes=lambda out, x, y: out.nbytes + x.nbytes + y.nbytes,
    # An operand of the result's shape gets the cotangent itself; the others a sum of it.
    backward_bytes=lambda out, **xs: sum(out.nbytes + x.nbytes for x in xs.values() if x.shape != out.shape),
    model=True,
)
