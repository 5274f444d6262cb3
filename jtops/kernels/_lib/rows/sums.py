"""The second stage of sums over many rows: partial sums in float32, of each program of the first stage a row, into their total."""

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.rows import length, position
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.rows.host import index_type


@triton.jit
def _column_sum(parts_ptr, total_ptr, group, parts, n, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, parts, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        mask = (rows < parts)[:, None] & (cols < n)[None, :]
        acc += tl.load(parts_ptr + (group * parts + rows)[:, None] * n + cols[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + group * n + cols, tl.sum(acc, 0).to(total_ptr.dtype.element_ty), mask=cols < n)


@triton.jit(do_not_specialize_on_alignment=["parts"])
def _sum_parts_kernel(
    a_ptr, b_ptr, a_total_ptr, b_total_ptr, parts, n, INDEX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program: BLOCK_N columns of one group, of a or of b."""
    pid = tl.program_id(0).to(tl.int64)
    n = length(n, 1, INDEX)
    if b_ptr is not None:
        which, pid = pid % 2, pid // 2
    blocks = tl.cdiv(n, BLOCK_N)
    group, cols = pid // blocks, position(pid % blocks, INDEX) * BLOCK_N + tl.arange(0, BLOCK_N)
    if b_ptr is not None:
        if which == 0:
            _column_sum(a_ptr, a_total_ptr, group, parts, n, cols, BLOCK_M, BLOCK_N)
        else:
            _column_sum(b_ptr, b_total_ptr, group, parts, n, cols, BLOCK_M, BLOCK_N)
    else:
        _column_sum(a_ptr, a_total_ptr, group, parts, n, cols, BLOCK_M, BLOCK_N)


def sum_parts(launch: Launch, parts: list[jax.Array], dtypes: list) -> list[jax.Array]:
    """One or two float32 arrays [groups, parts, n], each summed over parts: [groups, n] of its dtype, in one launch."""
    groups, count, n = parts[0].shape
    if count == 1:
        return [a[:, 0].astype(dtype) for a, dtype in zip(parts, dtypes, strict=True)]
    block_n = 32 if n >= 2048 else 16
    types = [jax.ShapeDtypeStruct((groups, n), jnp.dtype(dtype)) for dtype in dtypes]
    a, b = (*parts, None)[:2]
    a_type, b_type = (*types, None)[:2]
    out = launch(
        _sum_parts_kernel,
        outputs={"a_total_ptr": a_type, "b_total_ptr": b_type},
        config=Config(BLOCK_M=min(next_power_of_2(count), 256), BLOCK_N=block_n, num_warps=8),
        grid=len(parts) * groups * cdiv(n, block_n),
        name=f"{launch.stage}_sum",
        flops=sum(x.size for x in parts),
        a_ptr=a,
        b_ptr=b,
        parts=count,
        n=n,
        INDEX=index_type(n),
    )
    return [x for x in out.values() if x is not None]
