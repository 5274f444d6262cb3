"""The backward kernels: one makes dk and dv of a block of keys, one dq of a block of queries. Nothing is added atomically, so the
bits are the same every time; scores are computed twice for it.

With p = exp(s - lse), dp = do v^T and delta = rowsum(do * out) - dlse: ds = p * (dp - delta), dq = scale ds k, dk = scale ds^T q,
dv = p^T do. `lse2` is lse in base 2; it and delta lie by head, so that neighbouring queries are neighbours.
"""

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv
from jtops.kernels._lib.frame.launch import Launch
from jtops.kernels.attention.mask import ids_of, key_range, operand_row, query_range, sees, sequence_of
from jtops.kernels.attention.portable.tiles import LOG2E, arguments, backward_tiles, choose, load_rows, masked
from jtops.kernels.attention.work import tile_of_keys, tile_of_queries


@triton.jit
def dkdv_kernel(
    q,
    k,
    v,
    mask,
    shape,
    scale,
    do_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    D_INSIDE: tl.constexpr,
    E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: BLOCK_N keys of one key/value head, and the queries of all heads of its group. Scores are transposed.

    There is one loop, masked or not, because a masked and an unmasked one would spill.
    """
    HAS_IDS: tl.constexpr = mask.q_ids is not None
    s, t, h, g, d, e, _ = shape
    b, group, start_n = tile_of_keys(tl.program_id(0), shape, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    at = start_n + offs_n
    sequence = sequence_of(b, mask, shape)
    q_length, kv_length, _, offset = sequence
    rows_inside = tl.minimum(s, q_length - offset)
    k_ptr = k.array + (operand_row(k, b) * t * g + group) * d
    v_ptr = v.array + (operand_row(v, b) * t * g + group) * e
    keys = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, not MASKED, D_INSIDE)
    values = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, not MASKED, E_INSIDE)
    kv_ids = ids_of(mask.kv_ids, b, at, t)
    if HAS_IDS:
        keys = tl.where((kv_ids >= 0)[:, None], keys, 0.0)
        values = tl.where((kv_ids >= 0)[:, None], values, 0.0)
    start, stop = query_range(start_n, start_n + BLOCK_N - 1, s, sequence, mask, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    scale2 = scale * 1.4426950408889634
    heads = h // g
    for head in range(group * heads, group * heads + heads):
        q_head = q.array + (operand_row(q, b) * s * h + head) * d
        do_head = do_ptr + (b.to(tl.int64) * s * h + head) * e
        line = (b.to(tl.int64) * h + head) * s
        for start_m in range(start, stop, BLOCK_M):
            rows = start_m + offs_m
            queries = load_rows(q_head, start_m, offs_m, h * d, offs_d, rows_inside, d, not MASKED, D_INSIDE)
            do = load_rows(do_head, start_m, offs_m, h * e, offs_e, rows_inside, e, not MASKED, E_INSIDE)
            q_ids = ids_of(mask.q_ids, b, rows, s)
            if HAS_IDS:
                queries = tl.where((q_ids >= 0)[:, None], queries, 0.0)
                do = tl.where((q_ids >= 0)[:, None], do, 0.0)
            lse2 = tl.load(lse2_ptr + line + rows, mask=rows < s, other=0.0)
            delta = tl.load(delta_ptr + line + rows, mask=rows < s, other=0.0)
            p = tl.exp2(tl.dot(keys, tl.trans(queries), input_precision=PRECISION) * scale2 - lse2[None, :])
            ds = p * (tl.dot(values, tl.trans(do), input_precision=PRECISION) - delta[None, :])
            if MASKED:  # by selection, after everything: a masked score may be infinite
                seen = sees((offset + rows)[None, :], at[:, None], q_ids[None, :], kv_ids[:, None], sequence, mask)
                p = tl.where(seen, p, 0.0)
                ds = tl.where(seen, ds, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
    rows_out = ((b.to(tl.int64) * t + at) * g + group)[:, None]
    inside = (at < t)[:, None]
    dk = (dk * scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + rows_out * d + offs_d[None, :], dk, mask=inside & (offs_d < d)[None, :])
    tl.store(dv_ptr + rows_out * e + offs_e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside & (offs_e < e)[None, :])


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    mask,
    shape,
    scale,
    do_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    D_INSIDE: tl.constexpr,
    E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: BLOCK_M queries of one head."""
    HAS_IDS: tl.constexpr = mask.q_ids is not None
    s, t, h, g, d, e, _ = shape
    b, head, start_m = tile_of_queries(tl.program_id(0), shape, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    rows = start_m + tl.arange(0, BLOCK_M)
    sequence = sequence_of(b, mask, shape)
    q_length, kv_length, _, offset = sequence
    rows_inside = tl.minimum(s, q_length - offset)
    q_ptr = q.array + (operand_row(q, b) * s * h + head) * d
    do_ptr += (b.to(tl.int64) * s * h + head) * e
    queries = load_rows(q_ptr, start_m, tl.arange(0, BLOCK_M), h * d, offs_d, rows_inside, d, not MASKED, D_INSIDE)
    do = load_rows(do_ptr, start_m, tl.arange(0, BLOCK_M), h * e, offs_e, rows_inside, e, not MASKED, E_INSIDE)
    line = (b.to(tl.int64) * h + head) * s
    lse2 = tl.load(lse2_ptr + line + rows, mask=rows < s, other=0.0)
    delta = tl.load(delta_ptr + line + rows, mask=rows < s, other=0.0)
    q_ids = ids_of(mask.q_ids, b, rows, s)
    k_ptr = k.array + (operand_row(k, b) * t * g + head // (h // g)) * d
    v_ptr = v.array + (operand_row(v, b) * t * g + head // (h // g)) * e
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    scale2 = scale * 1.4426950408889634
    start, _, _, stop = key_range(offset + start_m, offset + start_m + BLOCK_M - 1, sequence, mask, BLOCK_N)
    for start_n in range(start, stop, BLOCK_N):
        at = start_n + offs_n
        keys = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, not MASKED, D_INSIDE)
        values = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, not MASKED, E_INSIDE)
        kv_ids = ids_of(mask.kv_ids, b, at, t)
        if HAS_IDS:
            keys = tl.where((kv_ids >= 0)[:, None], keys, 0.0)
            values = tl.where((kv_ids >= 0)[:, None], values, 0.0)
        p = tl.exp2(tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale2 - lse2[:, None])
        ds = p * (tl.dot(do, tl.trans(values), input_precision=PRECISION) - delta[:, None])
        if MASKED:
            seen = sees((offset + rows)[:, None], at[None, :], q_ids[:, None], kv_ids[None, :], sequence, mask)
            ds = tl.where(seen, ds, 0.0)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    ptrs = dq_ptr + ((b.to(tl.int64) * s + rows) * h + head)[:, None] * d + offs_d[None, :]
    tl.store(ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=(rows < s)[:, None] & (offs_d < d)[None, :])


def backward(launch: Launch, x, saved, cotangents):
    """Launch both kernels. The gradient of lse is subtracted from delta, where it costs nothing."""
    out, lse = saved
    do, dlse = cotangents
    if do is None:
        do, delta = jnp.zeros_like(out), jnp.zeros_like(lse)
    else:
        delta = jnp.sum(do.astype(jnp.float32) * out.astype(jnp.float32), -1)
    if dlse is not None:
        delta = delta - jnp.where(lse == -jnp.inf, 0.0, dlse)
    given = arguments(launch, x)
    s, t, h, g, d, e, _ = given["shape"]
    read = {"do_ptr": do, "lse2_ptr": jnp.swapaxes(lse * LOG2E, 1, 2), "delta_ptr": jnp.swapaxes(delta, 1, 2)}
    dkdv, dq = backward_tiles(launch, given["shape"], x.q.dtype.itemsize)
    type_of = lambda array: jax.ShapeDtypeStruct((launch.batch, *array.shape[1:]), array.dtype)

    def run(kernel, name: str, heuristic, heads: int, size: int, block: str, flops: int, outputs):
        tiles = choose(launch, heuristic, kernel, given, name)
        cut = masked(given["mask"]) or s % tiles["BLOCK_M"] != 0 or t % tiles["BLOCK_N"] != 0
        return launch(
            kernel,
            outputs=outputs,
            grid=launch.batch * heads * cdiv(size, tiles[block]),
            config=tiles,
            name=name,
            flops=2 * launch.batch * h * s * t * flops,
            MASKED=cut,
            **given,
            **read,
        )

    grads: list = [None] * 7
    if launch.wanted.k or launch.wanted.v:
        outputs = {"dk_ptr": type_of(x.k), "dv_ptr": type_of(x.v)}
        got = run(dkdv_kernel, "vjp_dkdv", dkdv, g, t, "BLOCK_N", 2 * d + 2 * e, outputs)
        grads[1:3] = got["dk_ptr"], got["dv_ptr"]
    if launch.wanted.q:
        outputs = {"dq_ptr": type_of(x.q)}
        grads[0] = run(dq_kernel, "vjp_dq", dq, h, s, "BLOCK_M", 2 * d + e, outputs)["dq_ptr"]
    return grads
