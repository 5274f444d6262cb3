"""The forward kernel. One pass over the keys with a running maximum and sum, in base 2: exp2 is what the hardware has."""

from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.frame.launch import OuterRows as Rows
from jtops.kernels._lib.precision import dot_precision
from jtops.kernels.attention.mask import batch_number, bounds_of, key_range, load_rows, sees

LOG2E = 1.4426950408889634


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, q_ids_ptr, kv_ids_ptr, q_lengths_ptr, kv_lengths_ptr, q_index_ptr, out_ptr, lse_ptr,
    s, t, h, g, d, e, q_size, scale, left, right,
    q_inner, q_own, k_inner, k_own, v_inner, v_own, qi_inner, qi_own, ki_inner, ki_own, ql_inner, ql_own, kl_inner, kl_own,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, D_INSIDE: tl.constexpr, E_INSIDE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, with the latest queries, which under causality see most keys, first.

    Invariant of the loop: `top` is each query's largest score so far (base 2), `total` the sum of exp2(score - top) over the keys
    so far, `acc` that of its values.
    """
    HAS_IDS: tl.constexpr = q_ids_ptr is not None
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(s, BLOCK_M)
    b = pid // blocks_m // h
    head = pid // blocks_m % h
    start_m = (blocks_m - 1 - pid % blocks_m) * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_e = tl.arange(0, BLOCK_E)
    offset = 0
    if q_index_ptr is not None:
        offset = tl.load(q_index_ptr)
    index = offset + offs_m
    bounds = bounds_of(
        b, q_lengths_ptr, kv_lengths_ptr, ql_inner, ql_own, kl_inner, kl_own, q_size, t, left, right, BOTTOM_RIGHT
    )  # fmt: skip
    q_length, kv_length, _, _, _ = bounds
    q_ids = offs_m
    if HAS_IDS:
        q_ids = tl.load(q_ids_ptr + batch_number(b, qi_inner, qi_own) * s + offs_m, mask=offs_m < s, other=-1)
        kv_ids_ptr += batch_number(b, ki_inner, ki_own) * t
    q_ptr += (batch_number(b, q_inner, q_own) * s * h + head) * d
    k_ptr += (batch_number(b, k_inner, k_own) * t * g + head // (h // g)) * d
    v_ptr += (batch_number(b, v_inner, v_own) * t * g + head // (h // g)) * e

    rows_inside = tl.minimum(s, q_length - offset)
    q = load_rows(q_ptr, start_m, tl.arange(0, BLOCK_M), h * d, offs_d, rows_inside, d, False, D_INSIDE)
    acc = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    scale2 = scale * 1.4426950408889634
    start, full_start, full_stop, stop = key_range(offset + start_m, offset + start_m + BLOCK_M - 1, bounds,
                                                   HAS_LEFT, HAS_RIGHT, BLOCK_N)  # fmt: skip
    if HAS_IDS:
        full_stop = start
    # Keys before, in and after the middle, where no mask cuts. With ids there is no middle.
    for PHASE in tl.static_range(2 if HAS_IDS else (0 if HAS_LEFT else 1), 3):
        low = start if PHASE == 0 else (full_start if PHASE == 1 else full_stop)
        high = full_start if PHASE == 0 else (full_stop if PHASE == 1 else stop)
        for start_n in range(low, high, BLOCK_N):
            # Nothing of a key at or past kv_length or of a negative id is ever used: not even as 0 * NaN.
            k = load_rows(k_ptr, start_n, offs_n, g * d, offs_d, kv_length, d, PHASE == 1, D_INSIDE)
            v = load_rows(v_ptr, start_n, offs_n, g * e, offs_e, kv_length, e, PHASE == 1, E_INSIDE)
            keys = start_n + offs_n
            kv_ids = keys
            if HAS_IDS:
                kv_ids = tl.load(kv_ids_ptr + keys, mask=keys < t, other=-1)
                k = tl.where((kv_ids >= 0)[:, None], k, 0.0)
                v = tl.where((kv_ids >= 0)[:, None], v, 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
            if PHASE != 1:
                mask = sees(index[:, None], keys[None, :], q_ids[:, None], kv_ids[None, :], bounds, HAS_LEFT, HAS_RIGHT, HAS_IDS)
                scores = tl.where(mask, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            finite_top = new_top
            if PHASE != 1:
                finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
            p = tl.exp2(scores - finite_top[:, None])
            alpha = tl.exp2(top - finite_top)
            total = total * alpha + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
            top = new_top

    alive = total > 0.0
    lse = tl.where(alive, (top + tl.log2(tl.where(alive, total, 1.0))) * 0.6931471805599453, -float("inf"))
    out = acc / tl.where(alive, total, 1.0)[:, None]
    rows = (b.to(tl.int64) * s + offs_m) * h + head
    inside = (offs_m < s)[:, None] & (offs_e < e)[None, :]
    tl.store(out_ptr + rows[:, None] * e + offs_e[None, :], out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + rows, lse, mask=offs_m < s)


def config(d: int, itemsize: int, max_shared_bytes: int) -> Config:
    """The largest tiles whose operands fit in shared memory: queries once, keys and values as often as there are stages."""
    block_d = max(16, next_power_of_2(d))
    wide = [] if block_d <= 64 else [(128, 128, 8, 3), (128, 128, 8, 2)]  # with short heads, wide tiles only cost registers
    for block_m, block_n, warps, stages in (
        *wide,
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 32, 8, 2),
        (64, 32, 4, 2),
        (64, 32, 4, 1),
        (32, 16, 4, 1),
        (16, 16, 4, 1),
    ):
        if itemsize == 4 and block_m * block_n > 64 * 32:  # and need registers
            continue
        rows = block_m * (2 if itemsize == 4 else 1) + 2 * stages * block_n  # three TF32 products take q in two parts
        if itemsize * block_d * rows <= max_shared_bytes:
            return Config(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages)
    return Config(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)


def shared_arguments(launch: Launch, q, k, v, q_ids, kv_ids, q_lengths, kv_lengths, q_index) -> dict:
    """Sizes, rows of the operands and flags, the same for every kernel."""
    (_, s, h, d), (_, t, g, e) = q.shape, v.shape
    o = launch.options
    rows = [r or Rows(1, 1, 1) for r in launch.rows]
    numbers: dict = {"s": s, "t": t, "h": h, "g": g, "d": d, "e": e, "q_size": o["q_size"], "scale": float(o["scale"])}
    numbers |= {"left": o["left"] or 0, "right": o["right"] or 0}
    for name, r in zip(("q", "k", "v", "qi", "ki", "ql", "kl"), rows, strict=False):
        numbers |= {f"{name}_inner": r.inner, f"{name}_own": r.own}
    block_d, block_e = (max(16, next_power_of_2(x)) for x in (d, e))
    return numbers | {
        "HAS_LEFT": o["left"] is not None,
        "HAS_RIGHT": o["right"] is not None,
        "BOTTOM_RIGHT": o["bottom_right"],
        "D_INSIDE": d == block_d,
        "E_INSIDE": e == block_e,
        "PRECISION": dot_precision(o["precision"], launch.target),
        "BLOCK_D": block_d,
        "BLOCK_E": block_e,
        "q_ids_ptr": q_ids,
        "kv_ids_ptr": kv_ids,
        "q_lengths_ptr": q_lengths,
        "kv_lengths_ptr": kv_lengths,
        "q_index_ptr": q_index,
    }


def choice(launch: Launch, heuristic: Config, kernel, name: str, q, k, v, others) -> Config:
    """The tiles of one kernel; where blocks up to 256 divide both lengths, kernels have less to mask."""
    (_, s, h, d), (_, t, g, e) = q.shape, v.shape
    o = launch.options
    sizes = {"heads": launch.batch * h, "group": h // g, "s": s, "t": t}
    masks: dict[str, Any] = {side: o[side] and next_power_of_2(o[side]) for side in ("left", "right")} | {
        "bottom_right": o["bottom_right"]
    }
    even = s % 256 == t % 256 == 0
    return launch.choose(heuristic, (kernel,), (q, *others), sizes, name, d=d, e=e, precision=o["precision"], even=even, **masks)


def forward(launch: Launch, q, k, v, *others):
    """Launcher."""
    (_, s, h, d), (_, t, _, e) = q.shape, v.shape
    heuristic = config(max(d, e), q.dtype.itemsize, launch.target.max_shared_bytes)
    if q.dtype.itemsize == 4 and max(d, e) > 128 and launch.target.arch in (100, 101, 103):
        heuristic = Config(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=1)  # q in two parts, and the sum, fill no tensor memory
    tiles = choice(launch, heuristic, forward_kernel, "out", q, k, v, others)
    shape = (launch.batch, s, h)
    return tuple(
        launch(
            forward_kernel,
            q,
            k,
            v,
            **shared_arguments(launch, q, k, v, *others),
            config=tiles,
            out_type=[jax.ShapeDtypeStruct((*shape, e), q.dtype), jax.ShapeDtypeStruct(shape, jnp.float32)],
            grid=launch.batch * h * cdiv(s, tiles["BLOCK_M"]),
            flops=2 * launch.batch * h * s * t * (d + e),
        )
    )
