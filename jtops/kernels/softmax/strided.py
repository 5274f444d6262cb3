"""Kernels of the softmax family along an axis whose elements are strided: x is [b, n, i], and neighbours in memory are along i."""

from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.rows import exp, length, position, row
from jtops.kernels._lib.frame.launch import Launch
from jtops.kernels._lib.rows import host
from jtops.kernels.softmax.config import strided_config
from jtops.kernels.softmax.rows import Kept, finite, gradient, result


@triton.jit
def _tile(i, first_n, base, n, inner, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the offsets and mask of a BLOCK_N x BLOCK_M tile of x, and its indices along both axes."""
    offs_n = first_n + tl.arange(0, BLOCK_N)[:, None]
    offs_i = i * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return base + offs_n.to(tl.int64) * inner + offs_i, (offs_n < n) & (offs_i < inner), offs_n, offs_i


@triton.jit
def _taking_part(where_ptr, base, offs_n, offs_i, inside, n, inner, WHERE_N: tl.constexpr, WHERE_I: tl.constexpr):
    """The mask of elements that are inside and that `where`, which may have size 1 along either axis, lets take part."""
    if where_ptr is not None:
        if WHERE_N and WHERE_I:
            where = tl.load(where_ptr + base + offs_n.to(tl.int64) * inner + offs_i, mask=inside, other=0)
        elif WHERE_N:
            where = tl.load(where_ptr + base + offs_n, mask=offs_n < n, other=0)
        elif WHERE_I:
            where = tl.load(where_ptr + base + offs_i, mask=offs_i < inner, other=0)
        else:
            where = tl.load(where_ptr + base)
        inside = inside & (where != 0)
    return inside


@triton.jit
def _columns_of(
    pid, where_rows, n, inner, WHERE_N: tl.constexpr, WHERE_I: tl.constexpr, INDEX: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return what a program of the grid has: b, its block along i, and where the matrices of x and `where` begin."""
    blocks = tl.cdiv(inner, BLOCK_M)
    b, i = pid // blocks, position(pid % blocks, INDEX)
    where_base = b * 0
    if where_rows is not None:
        where_base = row(b, where_rows) * (n if WHERE_N else 1) * (inner if WHERE_I else 1)
    return b, i, b * n * inner, where_base


@triton.jit(do_not_specialize_on_alignment=["where_rows"])
def _strided_forward_kernel(
    x_ptr,
    where_ptr,
    y_ptr,
    top_ptr,
    log_ptr,
    n,
    inner,
    where_rows,
    OP: tl.constexpr,
    WHERE_N: tl.constexpr,
    WHERE_I: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M neighbours along i, all of n.

    Loop invariant of the first pass: m and s are each column's maximum and sum of exp(x - m) so far.
    """
    n, inner = length(n, 1, INDEX), length(inner, UNIT, INDEX)
    b, i, base, where_base = _columns_of(tl.program_id(0).to(tl.int64), where_rows, n, inner, WHERE_N, WHERE_I, INDEX, BLOCK_M)
    columns = i * BLOCK_M + tl.arange(0, BLOCK_M)
    offsets, inside, offs_n, offs_i = _tile(i, 0, base, n, inner, BLOCK_M, BLOCK_N)
    if ONE_BLOCK:
        mask = _taking_part(where_ptr, where_base, offs_n, offs_i, inside, n, inner, WHERE_N, WHERE_I)
        x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
        m = tl.max(x, 0)
        s = tl.sum(exp(x - finite(m, OP)[None, :]), 0)
    else:
        m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
        s = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(0, n, BLOCK_N):
            offsets, inside, offs_n, offs_i = _tile(i, start, base, n, inner, BLOCK_M, BLOCK_N)
            mask = _taking_part(where_ptr, where_base, offs_n, offs_i, inside, n, inner, WHERE_N, WHERE_I)
            x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
            m_new = tl.maximum(m, tl.max(x, 0))
            safe = finite(m_new, OP)
            s = tl.where(m == m_new, s, s * exp(m - safe)) + tl.sum(exp(x - safe[None, :]), 0)
            m = m_new
    base_m = finite(m, OP)
    if OP == "logsumexp":
        tl.store(y_ptr + b * inner + columns, (base_m + tl.log(s)).to(y_ptr.dtype.element_ty), mask=columns < inner)
    if top_ptr is not None:
        tl.store(top_ptr + b * inner + columns, base_m, mask=columns < inner)
        tl.store(log_ptr + b * inner + columns, tl.log(s), mask=columns < inner)
    if OP != "logsumexp":
        if ONE_BLOCK:
            y = result(x, exp(x - base_m[None, :]), mask if where_ptr is not None else None, base_m[None, :], s[None, :], OP)
            tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)
        else:
            for start in range(0, n, BLOCK_N):
                offsets, inside, offs_n, offs_i = _tile(i, start, base, n, inner, BLOCK_M, BLOCK_N)
                mask = _taking_part(where_ptr, where_base, offs_n, offs_i, inside, n, inner, WHERE_N, WHERE_I)
                x = tl.load(x_ptr + offsets, mask=mask, other=-float("inf")).to(tl.float32)
                y = result(x, exp(x - base_m[None, :]), mask if where_ptr is not None else None, base_m[None, :], s[None, :], OP)
                tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["where_rows"])
def _strided_backward_kernel(
    a_ptr,
    g_ptr,
    kept,
    where_ptr,
    dx_ptr,
    n,
    inner,
    where_rows,
    OP: tl.constexpr,
    WHERE_N: tl.constexpr,
    WHERE_I: tl.constexpr,
    UNIT: tl.constexpr,
    INDEX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program as in the forward: one pass finds the sums over n, and one dx, from what is in the cache by then."""
    n, inner = length(n, 1, INDEX), length(inner, UNIT, INDEX)
    b, i, base, where_base = _columns_of(tl.program_id(0).to(tl.int64), where_rows, n, inner, WHERE_N, WHERE_I, INDEX, BLOCK_M)
    columns = i * BLOCK_M + tl.arange(0, BLOCK_M)
    if OP == "logsumexp":
        weight = tl.load(g_ptr + b * inner + columns, mask=columns < inner, other=0.0).to(tl.float32)
    else:
        totals = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        weights = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, n, BLOCK_N):
            offsets, inside, offs_n, offs_i = _tile(i, start, base, n, inner, BLOCK_M, BLOCK_N)
            mask = _taking_part(where_ptr, where_base, offs_n, offs_i, inside, n, inner, WHERE_N, WHERE_I)
            g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            if OP == "softmax":
                y = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                totals += y
                weights += y * g
            else:
                weights += g
        weight = tl.sum(weights, 0)
        if OP == "softmax":
            total = tl.sum(totals, 0)
            weight = weight / tl.where(total == 0.0, 1.0, total)
    top, log = 0.0, 0.0
    if kept is not None:
        top = tl.load(kept.top + b * inner + columns, mask=columns < inner, other=0.0)[None, :]
        log = tl.load(kept.log + b * inner + columns, mask=columns < inner, other=0.0)[None, :]
    for start in range(0, n, BLOCK_N):
        offsets, inside, offs_n, offs_i = _tile(i, start, base, n, inner, BLOCK_M, BLOCK_N)
        mask = _taking_part(where_ptr, where_base, offs_n, offs_i, inside, n, inner, WHERE_N, WHERE_I)
        a = tl.load(a_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        g = 0.0
        if OP != "logsumexp":
            g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        dx = gradient(a, g, top, log, weight[None, :], mask if where_ptr is not None else None, OP)
        tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def _masked(launch: Launch, x, where) -> dict[str, Any]:
    """The arguments that both kernels have."""
    _, n, inner = x.shape
    return {
        "where_ptr": where,
        "where_rows": launch.rows.where,
        "WHERE_N": where is not None and where.shape[1] != 1,
        "WHERE_I": where is not None and where.shape[2] != 1,
        "n": n,
        "inner": inner,
        "UNIT": host.unit(inner),
        "INDEX": host.index_type(max(n, inner)),
        "OP": launch.op,
    }


def _launch(launch: Launch, kernel, arguments: dict[str, Any], x, outputs, name: str) -> tuple:
    b, n, inner = x.shape
    heuristic = strided_config(b, n, inner, x.dtype.itemsize)
    config = launch.choose(
        heuristic,
        (_strided_forward_kernel, _strided_backward_kernel),
        arguments,
        name=name,
        rounded=("n", "inner"),
        aligned=("inner",),
        b=next_power_of_2(b),
    )
    more = {"ONE_BLOCK": n <= config["BLOCK_N"]} if kernel is _strided_forward_kernel else {}
    out = launch(
        kernel,
        outputs=outputs,
        config=config.without("PROGRAMS"),
        grid=b * cdiv(inner, config["BLOCK_M"]),
        flops=5 * x.size,
        **more,
        **arguments,
    )
    return tuple(value for value in out.values() if value is not None)


def forward(launch: Launch, x, where) -> tuple:
    """Launch on x [b, n, i] and `where`, which may have fewer rows or sizes of 1; return the result and, if wanted, maxima and
    logarithms of sums.
    """
    b, _, inner = x.shape
    keeps = launch.residuals and launch.op != "softmax"
    of_columns = jax.ShapeDtypeStruct((b, inner), jnp.float32) if keeps else None
    y = jax.ShapeDtypeStruct((b, inner) if launch.op == "logsumexp" else x.shape, x.dtype)
    outputs = {"y_ptr": y, "top_ptr": of_columns, "log_ptr": of_columns}
    arguments = {"x_ptr": x, **_masked(launch, x, where)}
    return _launch(launch, _strided_forward_kernel, arguments, x, outputs, "fwd_strided" if keeps else "out_strided")


def backward(launch: Launch, a, g, kept: Kept | None, where):
    """Launch the backward on a [b, n, i] and g, of its shape or [b, i]; return dx."""
    outputs = {"dx_ptr": jax.ShapeDtypeStruct(a.shape, a.dtype)}
    arguments = {"a_ptr": a, "g_ptr": g, "kept": kept, **_masked(launch, a, where)}
    return _launch(launch, _strided_backward_kernel, arguments, a, outputs, "vjp_strided")[0]
