"""The backward kernels: one makes dk and dv of a block of keys, one dq of a block of queries. Nothing is added atomically, so the
bits are the same every time; scores are computed twice for it.

With p = exp(s - lse), dp = do v^T and delta = rowsum(do * out) - dlse: ds = p * (dp - delta), dq = scale ds k, dk = scale ds^T q,
dv = p^T do. `lse2` is lse in base 2; it and delta lie by head, so that neighbouring queries are neighbours. With a cap, ds is
that of the capped scores, which is also the gradient of a bias; the other gradients have it times the cap's derivative.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv
from jtops.kernels._lib.frame.launch import Launch
from jtops.kernels.attention.mask import along, ids_of, key_range, narrowed, operand_row, query_range, sees, sequence_of
from jtops.kernels.attention.portable.tiles import LOG2E, arguments, backward_tiles, choose, load_rows, masked
from jtops.kernels.attention.scores import logits_of
from jtops.kernels.attention.work import tile_of_keys, tile_of_queries


@triton.jit
def dkdv_kernel(
    q,
    k,
    v,
    mask,
    shape,
    scores,
    do_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
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

    There is one loop, masked or not, because a masked and an unmasked one would spill. `dbias_ptr`, [batch, h, t], gets the sums
    over queries, for a bias that is the same for all of them.
    """
    TABLES: tl.constexpr = scores.bias is not None or scores.mask is not None
    s, t, h, g, d, e, _ = shape
    b, group, start_n = tile_of_keys(tl.program_id(0), shape, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    at = start_n + offs_n
    sequence = sequence_of(b, mask, shape)
    q_length, kv_length, shift, offset = sequence
    rows_inside = tl.minimum(s, q_length - offset)
    k_ptr = k.array + (operand_row(k, b) * t * g + group) * d
    v_ptr = v.array + (operand_row(v, b) * t * g + group) * e
    kv_ids = ids_of(mask.kv_ids, b, at, t)
    keys = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, kv_ids, not MASKED, D_INSIDE)
    values = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, kv_ids, not MASKED, E_INSIDE)
    start, stop = query_range(start_n, start_n + BLOCK_N - 1, s, sequence, mask, BLOCK_M)
    start, stop = narrowed(start, stop, kv_ids, mask.q_ids, b, s, BLOCK_M)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    scale2 = scores.scale * 1.4426950408889634
    heads = h // g
    for head in range(group * heads, group * heads + heads):
        q_head = q.array + (operand_row(q, b) * s * h + head) * d
        do_head = do_ptr + (b.to(tl.int64) * s * h + head) * e
        line = (b.to(tl.int64) * h + head) * s
        if dbias_ptr is not None:
            dbias = tl.zeros((BLOCK_N,), tl.float32)
        for start_m in range(start, stop, BLOCK_M):
            rows = start_m + offs_m
            q_ids = ids_of(mask.q_ids, b, rows, s)
            queries = load_rows(q_head, start_m, offs_m, h * d, offs_d, rows_inside, d, q_ids, not MASKED, D_INSIDE)
            do = load_rows(do_head, start_m, offs_m, h * e, offs_e, rows_inside, e, q_ids, not MASKED, E_INSIDE)
            lse2 = tl.load(lse2_ptr + line + rows, mask=rows < s, other=0.0)
            delta = tl.load(delta_ptr + line + rows, mask=rows < s, other=0.0)
            products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            position = offset + start_m + shift
            logits, slope = logits_of(
                products, scale2, scores, b, head, start_m, offs_m[None, :], start_n, offs_n[:, None], position, shape, not MASKED
            )
            p = tl.exp2(logits - lse2[None, :])
            ds = p * (tl.dot(values, tl.trans(do), input_precision=PRECISION) - delta[None, :])
            if MASKED:  # by selection, after everything: a masked score may be infinite
                seen = sees((offset + rows)[None, :], at[:, None], along(q_ids, 0), along(kv_ids, 1), sequence, mask)
                p = tl.where(seen, p, 0.0)
                ds = tl.where(seen, ds, 0.0)
            if TABLES:
                p = tl.where(logits == -float("inf"), 0.0, p)
                ds = tl.where(logits == -float("inf"), 0.0, ds)
            if dbias_ptr is not None:
                dbias += tl.sum(ds, 1)
            if scores.softcap is not None:
                ds = tl.where(ds == 0.0, 0.0, ds * slope)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            dk = tl.dot(ds.to(queries.dtype), queries, dk, input_precision=PRECISION)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + (b.to(tl.int64) * h + head) * t + at, dbias, mask=at < t)
    rows_out = ((b.to(tl.int64) * t + at) * g + group)[:, None]
    inside = (at < t)[:, None]
    dk = (dk * scores.scale).to(dk_ptr.dtype.element_ty)
    tl.store(dk_ptr + rows_out * d + offs_d[None, :], dk, mask=inside & (offs_d < d)[None, :])
    tl.store(dv_ptr + rows_out * e + offs_e[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside & (offs_e < e)[None, :])


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    mask,
    shape,
    scores,
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
    TABLES: tl.constexpr = scores.bias is not None or scores.mask is not None
    s, t, h, g, d, e, _ = shape
    b, head, start_m = tile_of_queries(tl.program_id(0), shape, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    offs_m = tl.arange(0, BLOCK_M)
    rows = start_m + offs_m
    sequence = sequence_of(b, mask, shape)
    q_length, kv_length, shift, offset = sequence
    rows_inside = tl.minimum(s, q_length - offset)
    q_ptr = q.array + (operand_row(q, b) * s * h + head) * d
    do_ptr += (b.to(tl.int64) * s * h + head) * e
    q_ids = ids_of(mask.q_ids, b, rows, s)
    queries = load_rows(q_ptr, start_m, offs_m, h * d, offs_d, rows_inside, d, q_ids, not MASKED, D_INSIDE)
    do = load_rows(do_ptr, start_m, offs_m, h * e, offs_e, rows_inside, e, q_ids, not MASKED, E_INSIDE)
    line = (b.to(tl.int64) * h + head) * s
    lse2 = tl.load(lse2_ptr + line + rows, mask=rows < s, other=0.0)
    delta = tl.load(delta_ptr + line + rows, mask=rows < s, other=0.0)
    k_ptr = k.array + (operand_row(k, b) * t * g + head // (h // g)) * d
    v_ptr = v.array + (operand_row(v, b) * t * g + head // (h // g)) * e
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    scale2 = scores.scale * 1.4426950408889634
    position = offset + start_m + shift
    start, _, _, stop = key_range(offset + start_m, offset + start_m + BLOCK_M - 1, sequence, mask, BLOCK_N)
    start, stop = narrowed(start, stop, q_ids, mask.kv_ids, b, t, BLOCK_N)
    for start_n in range(start, stop, BLOCK_N):
        at = start_n + offs_n
        kv_ids = ids_of(mask.kv_ids, b, at, t)
        keys = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, kv_ids, not MASKED, D_INSIDE)
        values = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, kv_ids, not MASKED, E_INSIDE)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        logits, slope = logits_of(
            products, scale2, scores, b, head, start_m, offs_m[:, None], start_n, offs_n[None, :], position, shape, not MASKED
        )
        p = tl.exp2(logits - lse2[:, None])
        ds = p * (tl.dot(do, tl.trans(values), input_precision=PRECISION) - delta[:, None])
        if MASKED:
            seen = sees((offset + rows)[:, None], at[None, :], along(q_ids, 1), along(kv_ids, 0), sequence, mask)
            ds = tl.where(seen, ds, 0.0)
        if TABLES:
            ds = tl.where(logits == -float("inf"), 0.0, ds)
        if scores.softcap is not None:
            ds = tl.where(ds == 0.0, 0.0, ds * slope)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    ptrs = dq_ptr + ((b.to(tl.int64) * s + rows) * h + head)[:, None] * d + offs_d[None, :]
    tl.store(ptrs, (dq * scores.scale).to(dq_ptr.dtype.element_ty), mask=(rows < s)[:, None] & (offs_d < d)[None, :])


@triton.jit
def dbias_kernel(
    q,
    k,
    v,
    mask,
    shape,
    scores,
    do_ptr,
    lse2_ptr,
    delta_ptr,
    dbias_ptr,
    members,
    D_INSIDE: tl.constexpr,
    E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: a tile of the gradient of a bias that has queries and keys, summed over the `members` that share it.

    Members are the batch elements of the bias's row and, where it has no heads of its own, the heads of each.
    """
    LENGTHS: tl.constexpr = mask.q_lengths is not None or mask.kv_lengths is not None
    s, t, h, g, d, e, _ = shape
    pid = tl.program_id(0)
    blocks_n = tl.cdiv(t, BLOCK_N)
    blocks_m = tl.cdiv(s, BLOCK_M)
    start_n = pid % blocks_n * BLOCK_N
    start_m = pid // blocks_n % blocks_m * BLOCK_M
    line = pid // blocks_n // blocks_m
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    rows = start_m + offs_m
    at = start_n + offs_n
    bias_row = line
    head = line
    heads = h
    if scores.bias_h is not None:
        bias_row = line // h
        head = line % h
        heads = 1
    inner, own = scores.bias.rows
    scale2 = scores.scale * 1.4426950408889634
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if not LENGTHS:  # with them, every member may see other tiles
        sequence = sequence_of(pid, mask, shape)
        first = sequence[3] + start_m
        start, _, _, stop = key_range(first, first + BLOCK_M - 1, sequence, mask, BLOCK_N)
        members = members if (start <= start_n) & (start_n < stop) else 0
    for i in range(members):
        element = i // heads
        if scores.bias_h is None:
            head = i % heads
        b = element // inner * (own * inner) + bias_row * inner + element % inner
        sequence = sequence_of(b, mask, shape)
        q_length, kv_length, shift, offset = sequence
        rows_inside = tl.minimum(s, q_length - offset)
        q_ptr = q.array + (operand_row(q, b) * s * h + head) * d
        k_ptr = k.array + (operand_row(k, b) * t * g + head // (h // g)) * d
        v_ptr = v.array + (operand_row(v, b) * t * g + head // (h // g)) * e
        do_head = do_ptr + (b.to(tl.int64) * s * h + head) * e
        q_ids = ids_of(mask.q_ids, b, rows, s)
        kv_ids = ids_of(mask.kv_ids, b, at, t)
        queries = load_rows(q_ptr, start_m, offs_m, h * d, offs_d, rows_inside, d, q_ids, not MASKED, D_INSIDE)
        keys = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, kv_ids, not MASKED, D_INSIDE)
        values = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, kv_ids, not MASKED, E_INSIDE)
        do = load_rows(do_head, start_m, offs_m, h * e, offs_e, rows_inside, e, q_ids, not MASKED, E_INSIDE)
        statistics = (b.to(tl.int64) * h + head) * s
        lse2 = tl.load(lse2_ptr + statistics + rows, mask=rows < s, other=0.0)
        delta = tl.load(delta_ptr + statistics + rows, mask=rows < s, other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        position = offset + start_m + shift
        logits, _slope = logits_of(
            products, scale2, scores, b, head, start_m, offs_m[:, None], start_n, offs_n[None, :], position, shape, not MASKED
        )
        p = tl.exp2(logits - lse2[:, None])
        ds = p * (tl.dot(do, tl.trans(values), input_precision=PRECISION) - delta[:, None])
        if MASKED:
            seen = sees((offset + rows)[:, None], at[None, :], along(q_ids, 1), along(kv_ids, 0), sequence, mask)
            ds = tl.where(seen, ds, 0.0)
        acc += tl.where(logits == -float("inf"), 0.0, ds)
    ptrs = dbias_ptr + (line.to(tl.int64) * s + rows)[:, None] * t + at[None, :]
    tl.store(ptrs, acc, mask=(rows < s)[:, None] & (at < t)[None, :])


def _summed_to(x, shape: tuple[int, ...]):
    """Sum over the axes, but for the batch, that have size 1 in `shape`."""
    return jnp.sum(x, [i for i in range(1, x.ndim) if shape[i] == 1], keepdims=True)


def _by_rows(launch: Launch, x, lse, delta, dlse) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of the sinks for each query, and that of all its logits together; float32 [batch, s, h].

    The softmax of a query takes a share of the sink, whose value is 0: its ds is minus that share times delta. The others' ds sum
    to what is left of dlse. Where a query sees nothing, delta is not read: its cotangent may be anything.
    """
    sinks = -jnp.inf if x.sinks is None else launch.full("sinks", x.sinks).astype(jnp.float32)[:, None, :]
    sees_none = lse == sinks
    dlse = jnp.where(lse == -jnp.inf, 0.0, jnp.zeros_like(lse) if dlse is None else dlse)
    dsinks = -jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sinks - lse)) * jnp.where(sees_none, -dlse, delta)
    return dsinks, dlse - dsinks


def backward(launch: Launch, x, saved, cotangents):
    """Launch the kernels. The gradient of lse is subtracted from delta, where it costs nothing."""
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
    dkdv, dq, dbias = backward_tiles(launch, given, x.q.dtype.itemsize)
    type_of = lambda array: jax.ShapeDtypeStruct((launch.batch, *array.shape[1:]), array.dtype)
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

    def run(kernel, name: str, heuristic, programs: Callable[[int, int], int], flops: int, outputs, **more):
        tiles = choose(launch, heuristic, kernel, given, name)
        cut = masked(given["mask"]) or s % tiles["BLOCK_M"] != 0 or t % tiles["BLOCK_N"] != 0
        return launch(
            kernel,
            outputs=outputs,
            grid=programs(cdiv(s, tiles["BLOCK_M"]), cdiv(t, tiles["BLOCK_N"])),
            config=tiles,
            name=name,
            flops=2 * launch.batch * h * s * t * flops,
            MASKED=cut,
            **given,
            **read,
            **more,
        )

    wanted, grads = launch.wanted, dict.fromkeys(name for name in x._fields if name != "s_index")
    columns = wanted.bias and x.bias.shape[2] == 1 != x.bias.shape[3]
    if wanted.k or wanted.v or columns:
        outputs = {"dk_ptr": type_of(x.k), "dv_ptr": type_of(x.v), "dbias_ptr": float32(launch.batch, h, t) if columns else None}
        got = run(dkdv_kernel, "vjp_dkdv", dkdv, lambda m, n: launch.batch * g * n, 2 * d + 2 * e, outputs)
        grads["k"], grads["v"] = got["dk_ptr"], got["dv_ptr"]
        if columns:
            grads["bias"] = _summed_to(got["dbias_ptr"][:, :, None], x.bias.shape)
    if wanted.q:
        outputs = {"dq_ptr": type_of(x.q)}
        got = run(dq_kernel, "vjp_dq", dq, lambda m, n: launch.batch * h * m, 2 * d + e, outputs)
        grads["q"] = got["dq_ptr"]
    if wanted.bias and x.bias.shape[2] != 1 != x.bias.shape[3]:
        own, heads = x.bias.shape[:2]
        outputs = {"dbias_ptr": float32(own, heads, s, t)}
        members = launch.batch // own * (h // heads)
        got = run(dbias_kernel, "vjp_dbias", dbias, lambda m, n: own * heads * m * n, d + e, outputs, members=members)
        grads["bias"] = got["dbias_ptr"]
    if wanted.sinks or (wanted.bias and x.bias.shape[3] == 1):
        dsinks, rest = _by_rows(launch, x, lse, delta, dlse)
        if wanted.sinks:
            grads["sinks"] = jnp.sum(dsinks, 1)
        if wanted.bias and x.bias.shape[3] == 1:
            grads["bias"] = _summed_to(jnp.swapaxes(rest, 1, 2)[..., None], x.bias.shape)
    return list(grads.values())
