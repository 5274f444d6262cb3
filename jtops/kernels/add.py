"""add: x + y with broadcasting. Bound by memory: one read of each operand, one write."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from jtops._compat.jax import weakly_typed
from jtops._compat.triton import tl, triton
from jtops.config import Implementation
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib import checks
from jtops.kernels._lib.device.rows import length, row
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.op import fused_op
from jtops.kernels._lib.rows.host import index_type
from jtops.kernels._lib.spec import Case, Meshed, Spec, normal

# Core axes are the last two, m and n: rows, columns and scalars broadcast inside the kernel, whatever the batch axes do.


@triton.jit
def _load(ptr, rows, cols, r, m, n, x_rows, ROW_M: tl.constexpr, COL_N: tl.constexpr):
    """An operand's part of a tile, one column where it is broadcast. Without `x_rows` it lies in memory just as the result does."""
    if x_rows is None:
        at = rows
    elif ROW_M:
        at = row(rows // m, x_rows) * m + rows % m
    else:
        at = row(rows // m, x_rows)
    if COL_N:
        x = tl.load(ptr + at[:, None] * n + cols[None, :], mask=(rows < r)[:, None] & (cols < n)[None, :])
    else:
        x = tl.load(ptr + at, mask=rows < r)[:, None]
    return x


# Whether 16 divides a count of rows aligns no address: no kernel is compiled anew for it.
@triton.jit(do_not_specialize_on_alignment=["r", "m", "x_rows", "y_rows"])
def _forward_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    r,
    m,
    n,
    x_rows,
    y_rows,
    X_M: tl.constexpr,
    X_N: tl.constexpr,
    Y_M: tl.constexpr,
    Y_N: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: a BLOCK_M x BLOCK_N tile of the result, whose r = batch x m rows are n long."""
    pid = tl.program_id(0).to(tl.int64)
    r, m, n = length(r, 1, INDEX), length(m, 1, INDEX), length(n, 1, INDEX)
    blocks_n = tl.cdiv(n, BLOCK_N)
    rows = pid // blocks_n * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = pid % blocks_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < r)[:, None] & (cols < n)[None, :]
    dtype = out_ptr.dtype.element_ty
    x = _load(x_ptr, rows, cols, r, m, n, x_rows, X_M, X_N).to(dtype)
    y = _load(y_ptr, rows, cols, r, m, n, y_rows, Y_M, Y_N).to(dtype)
    tl.store(out_ptr + rows[:, None] * n + cols[None, :], x + y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["r", "parts", "rows_per_part"])
def _sum_kernel(
    g_ptr,
    sum_ptr,
    r,
    c,
    parts,
    rows_per_part,
    SUM_COLS: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: the float32 sum of one part's rows of one group's r x c matrix, per column of a block or over all columns."""
    pid = tl.program_id(0).to(tl.int64)
    r, c = length(r, 1, INDEX), length(c, 1, INDEX)
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
        tl.store(sum_ptr + group * parts + part, tl.sum(acc))
    else:
        offs_n = start_n + tl.arange(0, BLOCK_N)
        tl.store(sum_ptr + (group * parts + part) * c + offs_n, tl.sum(acc, 0), mask=offs_n < c)


def _config(n: int) -> Config:
    block_n = min(next_power_of_2(n), 1024)
    return Config(BLOCK_M=max(1, 1024 // block_n), BLOCK_N=block_n)


def _forward(launch: Launch, operands):
    x, y = operands
    m, n = (max(a, b) for a, b in zip(x.shape[1:], y.shape[1:], strict=True))
    shape, r = (launch.batch, m, n), launch.batch * m
    dense = [operand.shape == shape for operand in operands]
    if all(dense):  # then shapes do not matter
        r, m, n = 1, 1, r * n
    arguments = {
        "x_ptr": x,
        "y_ptr": y,
        "r": r,
        "m": m,
        "n": n,
        "x_rows": None if dense[0] else launch.rows.x,
        "y_rows": None if dense[1] else launch.rows.y,
        "X_M": x.shape[1] != 1,
        "X_N": all(dense) or x.shape[2] != 1,
        "Y_M": y.shape[1] != 1,
        "Y_N": all(dense) or y.shape[2] != 1,
        "INDEX": index_type(max(r, m, n)),
    }
    config = launch.choose(_config(n), (_forward_kernel,), arguments, name="out", rounded=("r", "m", "n"), aligned=("n",))
    out = launch(
        _forward_kernel,
        outputs={"out_ptr": jax.ShapeDtypeStruct(shape, jnp.promote_types(x.dtype, y.dtype))},
        grid=cdiv(r, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"]),
        config=config,
        flops=r * n,
        **arguments,
    )
    return (out["out_ptr"],)


def _backward(launch: Launch, operands, saved, cotangents):
    g = cotangents.out
    asked = zip(operands, launch.rows, launch.wanted, strict=True)
    return tuple(_gradient(launch, x, rows, g) if wanted else None for x, rows, wanted in asked)


def _gradient(launch: Launch, x, rows, g):
    """The sum of `g` over whatever `x` was broadcast along."""
    (_, m, n), (own, x_m, x_n) = g.shape, x.shape
    if x.shape == g.shape:
        return g
    outer = launch.batch // (own * rows.inner)
    # As matrices [groups, r, c] of neighbours in memory that one program can sum.
    if x_m == m and x_n == n:
        groups, r, c = outer * own, rows.inner, m * n
    elif x_m == 1:
        groups, r, c = outer * own, rows.inner * m, n
    else:  # a column: sum over n alone, the rest is small
        groups, r, c = outer * own * rows.inner * m, 1, n
    sum_cols = x_n == 1 != n
    arguments = {"g_ptr": g, "r": r, "c": c, "SUM_COLS": sum_cols, "INDEX": index_type(max(r, c))}
    config = launch.choose(
        _config(c), (_sum_kernel,), arguments, rounded=("r", "c"), aligned=("c",), groups=next_power_of_2(groups)
    )
    rows_per_part = max(config["BLOCK_M"], cdiv(r, 128))
    parts = cdiv(r, rows_per_part)
    out = launch(
        _sum_kernel,
        outputs={"sum_ptr": jax.ShapeDtypeStruct((groups, parts, 1 if sum_cols else c), jnp.float32)},
        grid=groups * parts * (1 if sum_cols else cdiv(c, config["BLOCK_N"])),
        config=config,
        flops=g.size,
        parts=parts,
        rows_per_part=rows_per_part,
        **arguments,
    )
    split = (outer, own, parts) if x_m == 1 or x_n == n else (outer, own, rows.inner)
    return out["sum_ptr"].reshape(*split, x_m, x_n).sum((0, 2))


def _reference(x, y):
    return (jnp.add(x, y),)


def _limits(x, y) -> str | None:
    if any(a.dtype == jnp.bool_ or jnp.issubdtype(a.dtype, jnp.complexfloating) for a in (x, y)):
        return f"no kernel for dtypes {x.dtype} and {y.dtype} (only integers, float32, bfloat16, float16)"
    return checks.kernel_floats(x, y)


_add = fused_op(
    "add",
    operands={"x": "m n", "y": "m n"},
    results={"out": "m n"},
    reference=_reference,
    forward=_forward,
    backward=_backward,
    limits=_limits,
    blocks="BLOCK_M BLOCK_N",
)


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

    >>> rows = jnp.array([[0, 10, 20], [30, 40, 50]])
    >>> jtops.add(rows, jnp.array([1, 2, 3]))  # the second operand is added to each row
    Array([[ 1, 12, 23],
           [31, 42, 53]], dtype=int32)

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
    weak = False
    if not (isinstance(x, jax.Array) and isinstance(y, jax.Array)) or jax.typeof(x).weak_type or jax.typeof(y).weak_type:
        raws = [jnp.asarray(v) for v in (x, y)]
        weak = all(jax.typeof(raw).weak_type for raw in raws)
        dtype = jnp.result_type(*raws)  # a Python number takes the other operand's type
        a, b = (v.astype(dtype) if jax.typeof(raw).weak_type else v for raw, v in zip(raws, (a, b), strict=True))
    shape = checks.broadcast("add", "shapes", x=a.shape, y=b.shape)
    out = _add(a, b, implementation=implementation, config=config)[0]
    out = out if out.shape == shape else out.reshape(shape)
    return weakly_typed(out) if weak else out


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
