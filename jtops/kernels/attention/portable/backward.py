"""The backward kernels: one makes dk and dv of a block of keys, one dq of a block of queries. Nothing is added atomically, so the
bits are the same every time; scores are computed twice for it.

With p = exp(s - lse), dp = do v^T and delta = rowsum(do * out) - dlse: ds = p * (dp - delta), dq = scale ds k, dk = scale ds^T q,
dv = p^T do.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels.attention.mask import batch_number, bounds_of, key_range, load_rows, query_range, sees
from jtops.kernels.attention.portable.forward import LOG2E, choice, shared_arguments


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, q_ids_ptr, kv_ids_ptr, q_lengths_ptr, kv_lengths_ptr, q_index_ptr,
    do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    s, t, h, g, d, e, q_size, scale, left, right,
    q_inner, q_own, k_inner, k_own, v_inner, v_own, qi_inner, qi_own, ki_inner, ki_own, ql_inner, ql_own, kl_inner, kl_own,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D_INSIDE: tl.constexpr, E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one key/value head, and the queries of all heads of its group. Scores are transposed.

    One loop, masked or not: a masked and an unmasked one spill.
    """
    HAS_IDS: tl.constexpr = q_ids_ptr is not None
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(t, BLOCK_N)
    b = pid // blocks_n // g
    group = pid // blocks_n % g
    start_n = pid % blocks_n * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    keys = start_n + offs_n
    offset = 0
    if q_index_ptr is not None:
        offset = tl.load(q_index_ptr)
    bounds = bounds_of(
        b, q_lengths_ptr, kv_lengths_ptr, ql_inner, ql_own, kl_inner, kl_own, q_size, t, left, right, BOTTOM_RIGHT
    )  # fmt: skip
    q_length, kv_length, _, _, _ = bounds
    rows_inside = tl.minimum(s, q_length - offset)
    k_ptr += (batch_number(b, k_inner, k_own) * t * g + group) * d
    v_ptr += (batch_number(b, v_inner, v_own) * t * g + group) * e
    k = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, not MASKED, D_INSIDE)
    v = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, not MASKED, E_INSIDE)
    kv_ids = keys
    if HAS_IDS:
        kv_ids = tl.load(kv_ids_ptr + batch_number(b, ki_inner, ki_own) * t + keys, mask=keys < t, other=-1)
        k = tl.where((kv_ids >= 0)[:, None], k, 0.0)
        v = tl.where((kv_ids >= 0)[:, None], v, 0.0)
        q_ids_ptr += batch_number(b, qi_inner, qi_own) * s
    start, stop = query_range(start_n, start_n + BLOCK_N - 1, offset, s, bounds, HAS_LEFT, HAS_RIGHT, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    scale2 = scale * 1.4426950408889634
    heads = h // g
    for head in range(group * heads, group * heads + heads):
        q_head = q_ptr + (batch_number(b, q_inner, q_own) * s * h + head) * d
        do_head = do_ptr + (b.to(tl.int64) * s * h + head) * e
        line = (b.to(tl.int64) * h + head) * s
        for start_m in range(start, stop, BLOCK_M):
            rows = start_m + offs_m
            q = load_rows(q_head, start_m, offs_m, h * d, offs_d, rows_inside, d, not MASKED, D_INSIDE)
            do = load_rows(do_head, start_m, offs_m, h * e, offs_e, rows_inside, e, not MASKED, E_INSIDE)
            q_ids = rows
            if HAS_IDS:
                q_ids = tl.load(q_ids_ptr + rows, mask=rows < s, other=-1)
                q = tl.where((q_ids >= 0)[:, None], q, 0.0)
                do = tl.where((q_ids >= 0)[:, None], do, 0.0)
            lse2 = tl.load(lse2_ptr + line + rows, mask=rows < s, other=0.0)
            delta = tl.load(delta_ptr + line + rows, mask=rows < s, other=0.0)
            p = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2 - lse2[None, :])
            ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
            if MASKED:  # by selection, after everything: a masked score may be infinite
                index = (offset + rows)[None, :]
                mask = sees(index, keys[:, None], q_ids[None, :], kv_ids[:, None], bounds, HAS_LEFT, HAS_RIGHT, HAS_IDS)
                p = tl.where(mask, p, 0.0)
                ds = tl.where(mask, ds, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    rows_out = ((b.to(tl.int64) * t + keys) * g + group)[:, None]
    inside = (keys < t)[:, None]
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + rows_out * d + offs_d[None, :], dk, mask=inside & (offs_d < d)[None, :])
    tl.store(dv_ptr + rows_out * e + offs_e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside & (offs_e < e)[None, :])


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, q_ids_ptr, kv_ids_ptr, q_lengths_ptr, kv_lengths_ptr, q_index_ptr,
    do_ptr, lse2_ptr, delta_ptr, dq_ptr,
    s, t, h, g, d, e, q_size, scale, left, right,
    q_inner, q_own, k_inner, k_own, v_inner, v_own, qi_inner, qi_own, ki_inner, ki_own, ql_inner, ql_own, kl_inner, kl_own,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D_INSIDE: tl.constexpr, E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, the latest first."""
    HAS_IDS: tl.constexpr = q_ids_ptr is not None
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(s, BLOCK_M)
    b = pid // blocks_m // h
    head = pid // blocks_m % h
    start_m = (blocks_m - 1 - pid % blocks_m) * BLOCK_M
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    rows = start_m + tl.arange(0, BLOCK_M)
    offset = 0
    if q_index_ptr is not None:
        offset = tl.load(q_index_ptr)
    bounds = bounds_of(
        b, q_lengths_ptr, kv_lengths_ptr, ql_inner, ql_own, kl_inner, kl_own, q_size, t, left, right, BOTTOM_RIGHT
    )  # fmt: skip
    q_length, kv_length, _, _, _ = bounds
    rows_inside = tl.minimum(s, q_length - offset)
    q_ptr += (batch_number(b, q_inner, q_own) * s * h + head) * d
    do_ptr += (b.to(tl.int64) * s * h + head) * e
    q = load_rows(q_ptr, start_m, tl.arange(0, BLOCK_M), h * d, offs_d, rows_inside, d, not MASKED, D_INSIDE)
    do = load_rows(do_ptr, start_m, tl.arange(0, BLOCK_M), h * e, offs_e, rows_inside, e, not MASKED, E_INSIDE)
    line = (b.to(tl.int64) * h + head) * s
    lse2 = tl.load(lse2_ptr + line + rows, mask=rows < s, other=0.0)
    delta = tl.load(delta_ptr + line + rows, mask=rows < s, other=0.0)
    q_ids = rows
    if HAS_IDS:
        q_ids = tl.load(q_ids_ptr + batch_number(b, qi_inner, qi_own) * s + rows, mask=rows < s, other=-1)
        kv_ids_ptr += batch_number(b, ki_inner, ki_own) * t
    k_ptr += (batch_number(b, k_inner, k_own) * t * g + head // (h // g)) * d
    v_ptr += (batch_number(b, v_inner, v_own) * t * g + head // (h // g)) * e
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    scale2 = scale * 1.4426950408889634
    start, _, _, stop = key_range(offset + start_m, offset + start_m + BLOCK_M - 1, bounds, HAS_LEFT, HAS_RIGHT, BLOCK_N)
    for start_n in range(start, stop, BLOCK_N):
        keys = start_n + offs_n
        kv_ids = keys
        k = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, not MASKED, D_INSIDE)
        v = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, not MASKED, E_INSIDE)
        if HAS_IDS:
            kv_ids = tl.load(kv_ids_ptr + keys, mask=keys < t, other=-1)
            k = tl.where((kv_ids >= 0)[:, None], k, 0.0)
            v = tl.where((kv_ids >= 0)[:, None], v, 0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2 - lse2[:, None])
        ds = p * (tl.dot(do, tl.trans(v), input_precision=PRECISION) - delta[:, None])
        if MASKED:
            index = (offset + rows)[:, None]
            mask = sees(index, keys[None, :], q_ids[:, None], kv_ids[None, :], bounds, HAS_LEFT, HAS_RIGHT, HAS_IDS)
            ds = tl.where(mask, ds, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    ptrs = dq_ptr + ((b.to(tl.int64) * s + rows) * h + head)[:, None] * d + offs_d[None, :]
    tl.store(ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(rows < s)[:, None] & (offs_d < d)[None, :])


def configs(d: int, itemsize: int, max_shared_bytes: int) -> tuple[Config, Config]:
    """Tiles of the two kernels: (dk and dv, dq)."""
    block_d = max(16, next_power_of_2(d))
    if itemsize == 4 or itemsize * block_d * 4 * 64 > max_shared_bytes:
        small = 32 if block_d <= 64 else 16
        return (Config(BLOCK_M=small, BLOCK_N=small, num_warps=4, num_stages=1),) * 2
    if block_d <= 128 and itemsize * block_d * (2 * 128 + 4 * 64) <= max_shared_bytes:
        shape: dict[str, Any] = {"num_warps": 8, "num_stages": 2}
        return Config(BLOCK_M=64, BLOCK_N=128, **shape), Config(BLOCK_M=128, BLOCK_N=64, **shape)
    shape = {"num_warps": 8, "num_stages": 1}
    if block_d <= 128:
        return (Config(BLOCK_M=64, BLOCK_N=64, **shape),) * 2
    return Config(BLOCK_M=32, BLOCK_N=64, **shape), Config(BLOCK_M=64, BLOCK_N=32, **shape)


def backward(launch: Launch, operands, saved, cotangents):
    """Launcher. The gradient of lse is taken off delta, where it costs nothing."""
    (q, k, v, *others), (out, lse), (do, dlse) = operands, saved, cotangents
    (_, s, h, d), (_, t, g, e) = q.shape, v.shape
    if do is None:
        do, delta = jnp.zeros_like(out), jnp.zeros_like(lse)
    else:
        delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), -1)
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0.0, dlse)
    # By head, so that neighbouring queries are neighbours; and in base 2.
    lse2, delta = jnp.swapaxes(lse * LOG2E, 1, 2), jnp.swapaxes(delta, 1, 2)
    arguments = shared_arguments(launch, q, k, v, *others) | {"do_ptr": do, "lse2_ptr": lse2, "delta_ptr": delta}
    tiles = configs(max(d, e), q.dtype.itemsize, launch.target.max_shared_bytes)
    flops = 2 * launch.batch * h * s * t

    def run(kernel, name: str, heuristic: Config, programs, types, flops: int):
        tiles = choice(launch, heuristic, kernel, name, q, k, v, others)
        masked = any(x is not None for x in others) or s % tiles["BLOCK_M"] != 0 or t % tiles["BLOCK_N"] != 0
        return launch(
            kernel, q, k, v, **arguments, MASKED=masked, config=tiles, name=name, grid=launch.batch * programs(tiles), flops=flops,
            out_type=types,
        )  # fmt: skip

    grads: list = [None] * len(operands)
    if launch.wanted[1] or launch.wanted[2]:
        types = [jax.ShapeDtypeStruct((launch.batch, t, g, x), q.dtype) for x in (d, e)]
        programs = lambda tiles: g * cdiv(t, tiles["BLOCK_N"])
        grads[1], grads[2] = run(dkdv_kernel, "vjp_dkdv", tiles[0], programs, types, flops * (2 * d + 2 * e))
    if launch.wanted[0]:
        type_ = jax.ShapeDtypeStruct((launch.batch, s, h, d), q.dtype)
        programs = lambda tiles: h * cdiv(s, tiles["BLOCK_M"])
        grads[0] = run(dq_kernel, "vjp_dq", tiles[1], programs, type_, flops * (2 * d + e))
    return grads
