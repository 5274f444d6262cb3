"""The forward kernel. One pass over the keys with a running maximum and sum, in base 2: exp2 is what the hardware has."""

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv
from jtops.kernels._lib.frame.launch import Launch
from jtops.kernels.attention.mask import along, ids_of, key_range, narrowed, operand_row, sees, sequence_of
from jtops.kernels.attention.portable.tiles import arguments, choose, forward_tiles, load_rows
from jtops.kernels.attention.scores import logits_of, of_head
from jtops.kernels.attention.work import tile_of_queries


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    mask,
    shape,
    scores,
    out_ptr,
    lse_ptr,
    D_INSIDE: tl.constexpr,
    E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One program: BLOCK_M queries of one head.

    Invariant of the loop: `top` is each query's largest score so far (base 2), `total` the sum of exp2(score - top) over the keys
    so far, `acc` that of its values. A sink is there from the start.
    """
    HAS_IDS: tl.constexpr = mask.q_ids is not None
    TABLES: tl.constexpr = scores.bias is not None or scores.mask is not None
    FIRST: tl.constexpr = 2 if HAS_IDS else (0 if mask.left is not None else 1)
    s, t, h, g, d, e, _ = shape
    b, head, start_m = tile_of_queries(tl.program_id(0), shape, BLOCK_M)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    sequence = sequence_of(b, mask, shape)
    q_length, kv_length, shift, offset = sequence
    index = offset + offs_m
    q_ids = ids_of(mask.q_ids, b, offs_m, s)
    q_ptr = q.array + (operand_row(q, b) * s * h + head) * d
    k_ptr = k.array + (operand_row(k, b) * t * g + head // (h // g)) * d
    v_ptr = v.array + (operand_row(v, b) * t * g + head // (h // g)) * e

    rows = tl.arange(0, BLOCK_M)
    position = offset + start_m + shift
    rows_inside = tl.minimum(s, q_length - offset)
    queries = load_rows(q_ptr, start_m, rows, h * d, offs_d, rows_inside, d, None, False, D_INSIDE)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if scores.sinks is not None:
        sink2 = of_head(scores.sinks, b, head, shape) * 1.4426950408889634
        top = tl.full((BLOCK_M,), 0.0, tl.float32) + sink2
        total = tl.full((BLOCK_M,), 1.0, tl.float32)  # of a sink of -inf alpha takes it away, or its logarithm is nothing
    scale2 = scores.scale * 1.4426950408889634
    start, full_start, full_stop, stop = key_range(offset + start_m, offset + start_m + BLOCK_M - 1, sequence, mask, BLOCK_N)
    if HAS_IDS:
        full_stop, stop = narrowed(start, stop, q_ids, mask.kv_ids, b, t, BLOCK_N)
    # Keys before, in and after the middle, where no mask cuts. With ids there is no middle.
    for PHASE in tl.static_range(FIRST, 3):
        low = start if PHASE == 0 else (full_start if PHASE == 1 else full_stop)
        high = full_start if PHASE == 0 else (full_stop if PHASE == 1 else stop)
        for start_n in range(low, high, BLOCK_N):
            # Nothing of a key at or past kv_length or of a negative id is ever used: not even as 0 * NaN.
            at = start_n + offs_n
            kv_ids = ids_of(mask.kv_ids, b, at, t)
            keys = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, kv_ids, PHASE == 1, D_INSIDE)
            values = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, kv_ids, PHASE == 1, E_INSIDE)
            products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            logits, _slope = logits_of(
                products, scale2, scores, b, head, start_m, rows[:, None], start_n, offs_n[None, :], position, shape, PHASE == 1
            )
            if PHASE != 1:
                seen = sees(index[:, None], at[None, :], along(q_ids, 1), along(kv_ids, 0), sequence, mask)
                logits = tl.where(seen, logits, -float("inf"))
            new_top = tl.maximum(top, tl.max(logits, 1))
            finite_top = new_top
            if PHASE != 1 or TABLES:
                finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
            p = tl.exp2(logits - finite_top[:, None])
            alpha = tl.exp2(top - finite_top)
            total = total * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
            top = new_top

    alive = total > 0.0
    lse = tl.where(alive, (top + tl.log2(tl.where(alive, total, 1.0))) * 0.6931471805599453, -float("inf"))
    out = acc / tl.where(alive, total, 1.0)[:, None]
    lines = (b.to(tl.int64) * s + offs_m) * h + head
    inside = (offs_m < s)[:, None] & (offs_e < e)[None, :]
    tl.store(out_ptr + lines[:, None] * e + offs_e[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + lines, lse, mask=offs_m < s)


def forward(launch: Launch, x):
    """Launch the forward kernel."""
    given = arguments(launch, x)
    shape = given["shape"]
    tiles = choose(launch, forward_tiles(launch, given, x.q.dtype.itemsize), forward_kernel, given, "out")
    outputs = {
        "out_ptr": jax.ShapeDtypeStruct((launch.batch, shape.s, shape.h, shape.e), x.q.dtype),
        "lse_ptr": jax.ShapeDtypeStruct((launch.batch, shape.s, shape.h), jnp.float32),
    }
    out = launch(
        forward_kernel,
        outputs=outputs,
        grid=launch.batch * shape.h * cdiv(shape.s, tiles["BLOCK_M"]),
        config=tiles,
        flops=2 * launch.batch * shape.h * shape.s * shape.t * (shape.d + shape.e),
        **given,
    )
    return out["out_ptr"], out["lse_ptr"]
