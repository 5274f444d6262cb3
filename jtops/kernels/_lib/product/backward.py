"""The backward of a product: cotangents of its sums, and from them the gradients of both operands, which are products again."""

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.activations import derivative
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.product.portable import Term, product
from jtops.kernels._lib.product.side import Groups, Matrix


@triton.jit
def _dz_kernel(
    g_ptr,
    z_ptr,
    dz_ptr,
    dbias_ptr,
    m,
    n,
    parts,
    rows_per_part,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
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


def cotangent_dtype(operands, g) -> jnp.dtype:
    """The dtype that a backward's products read: the operands', for tensor cores, but float16 is too narrow for a float32
    cotangent.
    """
    return jnp.dtype(g if operands == jnp.float16 and g == jnp.float32 else operands)


def cotangent(
    launch: Launch, g: jax.Array, z: jax.Array | None, activation: str | None, dtype, *, wants_dz: bool, wants_sums: bool
) -> tuple[jax.Array, jax.Array | None]:
    """The cotangent ``dz = g * activation'(z)`` in `dtype`, [batch, m, n], and its float32 sums over rows, [batch, n]; z is None
    without an activation.
    """
    batch, m, n = g.shape
    makes_dz = wants_dz and (activation is not None or g.dtype != dtype)
    if not (makes_dz or wants_sums):
        return g, None
    block_m, block_n = min(16, next_power_of_2(m)), min(128, next_power_of_2(n))
    parts = min(cdiv(m, block_m), cdiv(4 * launch.target.multiprocessors, batch * cdiv(n, block_n)))
    rows_per_part = cdiv(cdiv(m, parts), block_m) * block_m
    parts = cdiv(m, rows_per_part)
    out = launch(
        _dz_kernel,
        config=Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4),
        name="vjp_dz",
        flops=8 * g.size,
        grid=batch * parts * cdiv(n, block_n),
        outputs={
            "dz_ptr": jax.ShapeDtypeStruct(g.shape, dtype) if makes_dz else None,
            "dbias_ptr": jax.ShapeDtypeStruct((batch, parts, n), jnp.float32) if wants_sums else None,
        },
        g_ptr=g,
        z_ptr=z,
        m=m,
        n=n,
        parts=parts,
        rows_per_part=rows_per_part,
        ACTIVATION=activation,
    )
    return out["dz_ptr"] if makes_dz else g, out["dbias_ptr"].sum(1) if wants_sums else None


def gradient_of_a(
    launch: Launch, groups: Groups, name: str, a: jax.Array, dzs: tuple[jax.Array, ...], bs: tuple[Matrix, ...]
) -> jax.Array:
    """The gradient of `a`, the operand `name`: the sum of dz b^T over what reads it. The frame sums over rows that share it."""
    dtype = a.dtype if getattr(launch.rows, name).own == launch.batch else jnp.float32
    terms = tuple(Term(groups.each(dz), (b.T,)) for dz, b in zip(dzs, bs, strict=True))
    (da,) = product(launch, terms, groups.count, (dtype,), name=f"vjp_d{name}")
    return da.reshape(launch.batch, *a.shape[1:])


def gradients_of_bs(launch: Launch, groups: Groups, a: Matrix, bs: dict[str, tuple[jax.Array, jax.Array]]) -> dict[str, jax.Array]:
    """The gradients a^T dz of one or two operands b, by name, each given with its dz: all in one product."""
    rows = {name: groups.shared(getattr(launch.rows, name)) for name in bs}
    alone = {name: rows[name].own == groups.count for name in bs}
    dtypes = tuple(b.dtype if alone[name] else jnp.float32 for name, (b, _) in bs.items())
    term = Term(a.T, tuple(groups.each(dz) for _, dz in bs.values()))
    got = product(launch, (term,), groups.count, dtypes, name="_".join(["vjp", *(f"d{name}" for name in bs)]))
    return {name: db if alone[name] else rows[name].sum(db) for name, db in zip(bs, got, strict=True)}
