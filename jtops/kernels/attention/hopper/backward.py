"""The backward kernels for Hopper GPUs (sm_90a), after FlashAttention-3: five products a tile, each score computed once.

With p = exp(s - lse), dp = do v^T and delta = rowsum(do * out) - dlse: ds = p * (dp - delta), dq = scale ds k, dk = scale ds^T q,
dv = p^T do. A program owns BLOCK_N = 128 keys of one key/value head and walks over the tiles of BLOCK_M queries that see any of
them, of all query heads of the group one after the other; so dk and dv are sums in registers, and dq is added up in memory, in
float32. `backward_ends` has the kernels before (delta, lse in base 2, zeros) and after (dq in its own type and order).

**Head dims.** Tiles have HEAD_DIM columns, 64 or 128. Where a head has fewer, TMA fills them up with zeros, so that the products'
further columns are zero, and does not write those.

**Parts of a group.** Where blocks of keys and key/value heads are too few to fill the GPU, a program has the query heads of one
part of the group only: parts are to programs what key/value heads are otherwise, `parts` of them reading the same keys. Each writes
its dk and dv in float32, and XLA adds the parts up, always in the same order.

Three partitions of four warps::

    mover         loads by TMA, adds tiles of dq to memory by TMA; 24 registers a thread
    consumer 0    keys   0 ..  63, and one half of every tile of dq; 240 registers
    consumer 1    keys  64 .. 127, and the other half

Buffers in shared memory, who fills and reads them, and the barriers that hand them over::

    buffer            slots  filled by        read by          full           free again
    K, V              1      mover            consumers        kv_full        (at the end: staging of dk, dv)
    Q, lse            2      mover            consumers        q_full         Q_FREE + slot     after dk of the tile
    dO, delta         2      mover            consumers        do_full        DO_FREE + slot    after dv of the tile
    dS                2      both consumers   both consumers   DS_FULL        DS_FULL of the next tile
    dQ                2      consumer i: i    mover            DQ_FULL + i    DQ_FREE + i       after TMA has read it

Full barriers of loads are mbarriers, as TMA demands; all others are named barriers (bar.sync, bar.arrive), which cost a consumer
one instruction. No side arrives at a named barrier twice before the other has synchronised, which would deadlock: the consumers
free slot i & 1 of Q after tile i, and again only after tile i + 2, whose load the mover issues once it has synchronised. Of the
last two tiles that arrival is left over when the program ends. Writing dS of tile i + 2 is safe after DS_FULL of tile i + 1, since
each consumer comes there with its dQ of tile i done.

One tile, transposed (keys are rows), as one consumer sees it; what is in flight on the tensor cores stands on the right::

    wait q_full, do_full      S^T = K Q^T,  dP^T = V dO^T                       S dP
    wait for S                P^T = exp2(scale2 S^T - lse), masked                dP
    wait for dP               dS^T = P^T (dP^T - delta), to registers and shared memory
                              dV += P^T dO          (P from registers)          dV
    sync DS_FULL              dQ = dS K             (its half, over all keys)   dV dQ
    wait for dV, free dO      dK += dS^T Q          (dS from registers)            dQ dK
    wait for dQ               dQ to its slot, in register order                       dK
    wait for dK, free Q

What keeps it fast (each was measured): the mover is the default partition, since consumers there spill; slots are picked by
arithmetic on the tile's number, K and V by an opaque zero (`step >> 30`), else LLVM keeps 64 registers of addresses; masks are
comparisons with immediates, and there is one loop, masked or not, since two spill; dq is stored in register order, 16 bytes a time.

**The same bits every time** (DETERMINISTIC). dk and dv always are. Reduce-adds of TMA come in any order, so dq is not, unless the
blocks of keys take turns: `turns` counts, for each tile of queries, how many blocks have added to it; a block waits until all
before it in its order have, and counts itself once its addition is in memory.

* Where the wait sits: in the mover alone, after the loads for tile i + 2, so that nothing is loaded late, and before the addition
  of tile i, whose slot the consumers want back only at the end of tile i + 1. A turn may come almost a whole tile late at no cost.
* Why nobody deadlocks: a block waits only for programs with smaller numbers, which the GPU has started before, and which depend on
  none of the later ones.
* The order. With a bound on the right (causal) the last block goes first: each block starts at its diagonal, where it is the first
  to add, and comes to every later tile after the block before it in order, which started there; nobody waits. That gives up
  starting the longest blocks first, the order without DETERMINISTIC. Otherwise the first block goes first, and each runs one turn
  behind the one before: a lag that is paid once, since the programs that follow start in the order in which these end.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtops._compat.gluon import (
    FIRST_NAMED_BARRIER,
    aggregate,
    allocate_barriers,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    named_barrier_arrive,
    named_barrier_sync,
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jtops.core.descriptor import TensorDescriptor
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.device.rows import row
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels.attention.hopper import limits
from jtops.kernels.attention.hopper.backward_ends import postprocess_kernel, preprocess_kernel
from jtops.kernels.attention.hopper.limits import head_block
from jtops.kernels.attention.mask import mask_of

LOG2E = 1.4426950408889634

# Named barriers; `+ slot` or `+ consumer`.
Q_FREE = gl.constexpr(FIRST_NAMED_BARRIER)
DO_FREE = gl.constexpr(FIRST_NAMED_BARRIER + 2)
DQ_FREE = gl.constexpr(FIRST_NAMED_BARRIER + 4)
DQ_FULL = gl.constexpr(FIRST_NAMED_BARRIER + 6)
DS_FULL = gl.constexpr(FIRST_NAMED_BARRIER + 8)
ADDED = gl.constexpr(FIRST_NAMED_BARRIER + 9)

# Past every position: what is compared with it is masked.
NEVER = gl.constexpr(1 << 30)


class Inputs(NamedTuple):
    """Descriptors. q, do: blocks [1, BLOCK_M, 1, HEAD_DIM] of [batch, s, heads, head dim]; k, v: [1, BLOCK_N, 1, HEAD_DIM].

    lse, delta: [BLOCK_M] of a line; sums, dq in float32: [128, 32], a quarter of 16 KiB (see `backward_ends`).
    """

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    sums: Any


class InputRows(NamedTuple):
    """`Rows` of the operands that batch elements may share."""

    q: Any
    k: Any
    v: Any


class Shape(NamedTuple):
    """Sizes; `g` parts of groups, `parts` a key/value head, of `group` query heads each; `section` of them share the L2 cache."""

    s: Any
    t: Any
    g: Any
    group: Any
    parts: Any
    q_size: Any
    section: Any


class Window(NamedTuple):
    """Query r (of this shard) sees keys ``r + shift - left`` to ``r + shift + right``."""

    left: Any
    right: Any


@aggregate
class Shared:
    """Buffers and full barriers."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, do, lse, delta, ds, dq, kv_full, q_full, do_full):
        self.q = q
        self.k = k
        self.v = v
        self.do = do
        self.lse = lse
        self.delta = delta
        self.ds = ds
        self.dq = dq
        self.kv_full = kv_full
        self.q_full = q_full
        self.do_full = do_full


@aggregate
class Work:
    """A program's work: block `block` of keys, and tiles `start` to `stop` of the queries, of part `part` of batch element `b`."""

    b: gl.tensor
    part: gl.tensor
    block: gl.tensor
    start: gl.tensor
    stop: gl.tensor
    steps: gl.tensor  # tiles of all heads of the part
    shift: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, part, block, start, stop, steps, shift):
        self.b = b
        self.part = part
        self.block = block
        self.start = start
        self.stop = stop
        self.steps = steps
        self.shift = shift


@gluon.jit
def work_of(
    program,
    programs,
    shape,
    window,
    shift,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
):
    """Which block of keys, and the tiles of queries that see any of it."""
    blocks = gl.cdiv(shape.t, BLOCK_N)
    start = gl.to_tensor(0)
    stop = gl.cdiv(shape.s, BLOCK_M)
    if RIGHT:
        # Sections of parts whose queries stay in L2; within one, blocks of equal length beside each other.
        first = program // (shape.section * blocks) * shape.section
        width = gl.minimum(shape.section, programs // blocks - first)
        within = program - first * blocks
        part = first + within % width
        block = within // width
        if DETERMINISTIC:
            block = blocks - 1 - block
        start = gl.maximum(block * BLOCK_N - shift - window.right, 0) // BLOCK_M
    else:
        part = program // blocks
        block = program % blocks
    if LEFT:
        stop = gl.cdiv(gl.maximum(gl.minimum(shape.s, block * BLOCK_N + BLOCK_N + window.left - shift), 0), BLOCK_M)
    tiles = gl.maximum(stop - start, 0)
    return Work(part // shape.g, part % shape.g, block, start, stop, tiles * shape.group, shift)


@gluon.jit
def following(head, tile, work):
    """The (head, tile) after this one: the next head of the part comes after the last tile."""
    wraps = tile + 1 >= work.stop
    return gl.where(wraps, head + 1, head), gl.where(wraps, work.start, tile + 1)


# ------------------------------------------------------------------------------------------------------------------ the mover


@aggregate
class Source:
    """Where a program's queries lie."""

    q_row: gl.tensor
    b: gl.tensor
    first_head: gl.tensor
    first_line: gl.tensor  # number of the first head's first tile among all tiles
    tiles: gl.tensor  # of a head

    @gluon.constexpr_function
    def __init__(self, q_row, b, first_head, first_line, tiles):
        self.q_row = q_row
        self.b = b
        self.first_head = first_head
        self.first_line = first_line
        self.tiles = tiles


@gluon.jit
def load_tile(x_desc, x, line_desc, x_line, full, slot, batch, source, head, tile):
    """A tile of q or do with its lse or delta, of the part's head `head`."""
    BLOCK_M: gl.constexpr = x.shape[2]
    HEAD_DIM: gl.constexpr = x.shape[4]
    line = source.first_line + head * source.tiles + tile
    mbarrier.expect(full.index(slot), BLOCK_M * HEAD_DIM * 2 + BLOCK_M * 4)
    tma_load(x_desc, [batch, tile * BLOCK_M, source.first_head + head, 0], full.index(slot), x.index(slot))
    tma_load(line_desc, [line * BLOCK_M], full.index(slot), x_line.index(slot))


@gluon.jit
def load_q(inputs, m, slot, source, head, tile):
    """A tile of q, and its lse."""
    load_tile(inputs.q, m.q, inputs.lse, m.lse, m.q_full, slot, source.q_row, source, head, tile)


@gluon.jit
def load_do(inputs, m, slot, source, head, tile):
    """A tile of do, and its delta."""
    load_tile(inputs.do, m.do, inputs.delta, m.delta, m.do_full, slot, source.b, source, head, tile)


@gluon.jit
def await_turn(turns_ptr, turn):
    """Wait until `turn` blocks have added to the tile; what they added is then there for TMA, too."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ptrs = (turns_ptr + gl.zeros([128], gl.int32, layout=layout)).to(gl.int64)
    turns = gl.full([128], turn, gl.int32, layout=layout)
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 x; again: ld.acquire.gpu.global.b32 x, [$1]; setp.ne.s32 p, x, $2; @p bra again; "
        "fence.proxy.async.global; mov.u32 $0, 0; }",
        "=r,l,r,~{memory}",
        [ptrs, turns],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def end_turn(turns_ptr):
    """Let the next block add, once the additions that the mover has issued are in memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    thread = gl.arange(0, 128, layout=layout)
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r,r,~{memory}", [thread], dtype=gl.int32, is_pure=False, pack=1
    )
    named_barrier_sync(ADDED, 128)  # the thread that issued them is any
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p red.release.gpu.global.add.s32 [$1], 1; mov.u32 $0, 0; }",
        "=r,l,r,~{memory}",
        [(turns_ptr + thread * 0).to(gl.int64), thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def turn_of(tile, work, t, window, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """How many blocks of keys add to a tile of queries before this one: the later ones that it sees, or the earlier ones."""
    turn = work.block
    if RIGHT:
        last = ((tile + 1) * BLOCK_M + work.shift + window.right - 1) // BLOCK_N
        turn = gl.minimum(gl.cdiv(t, BLOCK_N) - 1, last) - work.block
    elif LEFT:
        turn = work.block - gl.maximum(tile * BLOCK_M + work.shift - window.left, 0) // BLOCK_N
    return turn


@gluon.jit
def mover(inputs, turns_ptr, m, work, shape, rows, window, LEFT: gl.constexpr, RIGHT: gl.constexpr, DETERMINISTIC: gl.constexpr):
    """Loads two tiles ahead of the consumers, and adds to memory what they have made of dq."""
    BLOCK_M: gl.constexpr = m.q.shape[2]
    BLOCK_N: gl.constexpr = m.k.shape[2]
    HEAD_DIM: gl.constexpr = m.q.shape[4]
    tiles = gl.cdiv(shape.s, BLOCK_M)
    first_head = work.part * shape.group
    kv_head = work.part // shape.parts
    first_line = (work.b * shape.g * shape.group + first_head) * tiles
    source = Source(row(work.b, rows.q), work.b, first_head, first_line, tiles)
    head = gl.to_tensor(0)
    tile = work.start
    if work.steps > 0:
        load_q(inputs, m, 0, source, head, tile)
    at_k = [row(work.b, rows.k), work.block * BLOCK_N, kv_head, 0]
    at_v = [row(work.b, rows.v), work.block * BLOCK_N, kv_head, 0]
    mbarrier.expect(m.kv_full.index(0), 2 * BLOCK_N * HEAD_DIM * 2)
    tma_load(inputs.k, at_k, m.kv_full.index(0), m.k.index(0))
    tma_load(inputs.v, at_v, m.kv_full.index(0), m.v.index(0))
    if work.steps > 0:
        load_do(inputs, m, 0, source, head, tile)
        for i in gl.static_range(2):
            named_barrier_arrive(DQ_FREE + i, 256)
    next_head, next_tile = following(head, tile, work)
    if work.steps > 1:
        load_q(inputs, m, 1, source, next_head, next_tile)
        load_do(inputs, m, 1, source, next_head, next_tile)
    for step in range(work.steps):
        slot = step & 1
        line = first_line + head * tiles + tile
        next_head, next_tile = following(next_head, next_tile, work)
        more = step + 2 < work.steps
        if more:
            named_barrier_sync(DO_FREE + slot, 384)
            load_do(inputs, m, slot, source, next_head, next_tile)
        if DETERMINISTIC:  # q may not wait for a turn
            if more:
                named_barrier_sync(Q_FREE + slot, 384)
                load_q(inputs, m, slot, source, next_head, next_tile)
            await_turn(turns_ptr + line, turn_of(tile, work, shape.t, window, BLOCK_M, BLOCK_N, LEFT, RIGHT))
        for i in gl.static_range(2):
            named_barrier_sync(DQ_FULL + i, 256)
            tma_reduce_add(inputs.sums, [(line * 2 + i) * 128, 0], m.dq.index(i))
        if more and not DETERMINISTIC:
            named_barrier_sync(Q_FREE + slot, 384)
            load_q(inputs, m, slot, source, next_head, next_tile)
        for i in gl.static_range(2):
            tma_store_wait(1 - i)
            if step + 1 < work.steps:
                named_barrier_arrive(DQ_FREE + i, 256)
        if DETERMINISTIC:
            end_turn(turns_ptr + line)
        head, tile = following(head, tile, work)


# -------------------------------------------------------------------------------------------------------------- the consumers


@gluon.constexpr_function
def mask_assembly(n, left, right):
    """The assembly by which those of a thread's n scores that lie outside of its query's window become -inf.

    Score e is of query ``8 (e // 4) + e % 2`` past the thread's first, and of the key 8 further if ``e & 2``. Operands: the scores,
    then for each score its key minus the last, or the first, or both, that the first query sees. Only two numbers of either differ:
    what the query adds is an immediate.
    """
    text = "{ .reg .pred p; "
    for e in range(n):
        query, key = 8 * (e // 4) + e % 2, e & 2
        if right:
            text += f"setp.le.s32 p, ${2 * n + key}, {query}; "
        if left:
            text += f"setp.ge{'.and' * right}.s32 p, ${(3 if right else 2) * n + key}, {query}{', p' * right}; "
        text += f"selp.f32 ${e}, ${n + e}, 0fFF800000, p; "
    return text + "}"


@gluon.constexpr_function
def mask_constraints(n, left, right):
    """The registers of `mask_assembly`."""
    return ",".join(["=f"] * n + ["f"] * n + ["r"] * (n * (left + right)))


@gluon.jit
def masked(scores, past_last, past_first, first_query, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """`scores` (transposed), -inf where a query does not see the key.

    `past_last`, `past_first`: the keys minus the last, and minus the first, that query 0 sees.
    """
    n: gl.constexpr = scores.shape[1] // 2
    queries = first_query + (gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout)) & 6)
    last = past_last.expand_dims(1) - queries.expand_dims(0)
    first = past_first.expand_dims(1) - queries.expand_dims(0)
    text: gl.constexpr = mask_assembly(n, LEFT, RIGHT)
    constraints: gl.constexpr = mask_constraints(n, LEFT, RIGHT)
    if LEFT and RIGHT:
        scores = gl.inline_asm_elementwise(text, constraints, [scores, last, first], dtype=gl.float32, is_pure=True, pack=n)
    elif RIGHT:
        scores = gl.inline_asm_elementwise(text, constraints, [scores, last], dtype=gl.float32, is_pure=True, pack=n)
    else:
        scores = gl.inline_asm_elementwise(text, constraints, [scores, first], dtype=gl.float32, is_pure=True, pack=n)
    return scores


@gluon.jit
def add_tile(
    dk,
    dv,
    step,
    tile,
    m,
    past_last,
    past_first,
    inside,
    scale2,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    EDGE: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Adds what a tile of queries gives to dk and dv of the consumer's 64 keys; hands its half of the tile's dq to the mover."""
    BLOCK_M: gl.constexpr = m.q.shape[2]
    BLOCK_N: gl.constexpr = m.k.shape[2]
    HEAD_DIM: gl.constexpr = m.q.shape[4]
    dtype: gl.constexpr = m.q.dtype
    scores_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    keys_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    dq_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    left_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=keys_l, k_width=2)
    queries_l: gl.constexpr = gl.SliceLayout(0, scores_l)
    slot = step & 1
    phase = (step >> 1) & 1
    zero = step >> 30  # opaque, or LLVM computes every address of K and V ahead of the loop, and spills
    keys = m.k.index(zero).reshape([BLOCK_N, HEAD_DIM])
    k = keys.slice(CONSUMER * 64, 64, 0)
    v = m.v.index(zero).reshape([BLOCK_N, HEAD_DIM]).slice(CONSUMER * 64, 64, 0)
    q = m.q.index(slot).reshape([BLOCK_M, HEAD_DIM])
    do = m.do.index(slot).reshape([BLOCK_M, HEAD_DIM])
    nothing = gl.zeros([64, BLOCK_M], gl.float32, layout=scores_l)

    mbarrier.wait(m.q_full.index(slot), phase)
    st = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(m.do_full.index(slot), phase)
    dpt = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)

    late: gl.constexpr = BLOCK_M == 128 and (LEFT or RIGHT)  # 32 registers too many, else
    if not late:
        lse = m.lse.index(slot).load(queries_l)
    st = warpgroup_mma_wait(1, deps=(st,))
    if late:
        lse = m.lse.index(slot).load(queries_l)
    st = st * scale2 - lse.expand_dims(0)
    if LEFT or RIGHT:  # after scaling: scale may be 0 or negative
        st = masked(st, past_last, past_first, tile * BLOCK_M, LEFT, RIGHT)
    pt = gl.exp2(st)
    p = gl.convert_layout(pt.to(dtype), left_l)

    dpt = warpgroup_mma_wait(0, deps=(dpt,))
    dst = (pt * (dpt - m.delta.index(slot).load(queries_l).expand_dims(0))).to(dtype)
    if EDGE:  # keys that are not there have scores of 0, so that p overflows where lse is far below
        pairs = [dst.to(gl.int16, bitcast=True), inside]
        dst = gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", pairs, dtype=gl.int16, is_pure=True, pack=2)
        dst = dst.to(dtype, bitcast=True)
    m.ds.index(slot).slice(CONSUMER * 64, 64, 1).permute((1, 0)).store(dst)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    fence_async_shared()
    ds = gl.convert_layout(dst, left_l)

    named_barrier_sync(DS_FULL, 256)
    if HEAD_DIM == 128:  # the left or right half of the columns
        all_ds = m.ds.index(slot)
        some_k = keys.slice(CONSUMER * 64, 64, 1)
    else:  # the upper or lower half of the queries
        all_ds = m.ds.index(slot).slice(CONSUMER * 64, 64, 0)
        some_k = keys
    dq = warpgroup_mma(all_ds, some_k, gl.zeros([64, 64], gl.float32, layout=dq_l), use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=(dv,))
    named_barrier_arrive(DO_FREE + slot, 384)
    dk = warpgroup_mma(ds, q, dk, is_async=True)

    dq = warpgroup_mma_wait(1, deps=(dq,))
    # A thread's 32 numbers become a row, so that it stores 16 bytes at a time, without bank conflicts.
    dq = dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 2, 4, 3, 1, 5)).reshape([128, 32])
    named_barrier_sync(DQ_FREE + CONSUMER, 256)
    m.dq.index(CONSUMER).store(dq)
    fence_async_shared()
    named_barrier_arrive(DQ_FULL + CONSUMER, 256)

    dk = warpgroup_mma_wait(0, deps=(dk,))
    named_barrier_arrive(Q_FREE + slot, 384)
    return dk, dv


@gluon.jit
def store(dk, dv, dk_desc, dv_desc, m, work, CONSUMER: gl.constexpr):
    """Round dk and dv of a consumer's keys, and write them."""
    BLOCK_N: gl.constexpr = m.k.shape[2]
    HEAD_DIM: gl.constexpr = m.q.shape[4]
    dtype: gl.constexpr = m.q.dtype
    first_key = work.block * BLOCK_N + CONSUMER * 64
    m.k.index(0).reshape([BLOCK_N, HEAD_DIM]).slice(CONSUMER * 64, 64, 0).store(dk.to(dtype))
    m.v.index(0).reshape([BLOCK_N, HEAD_DIM]).slice(CONSUMER * 64, 64, 0).store(dv.to(dtype))
    fence_async_shared()
    tma_store(dk_desc, [work.b, first_key, work.part, 0], m.k.index(0).slice(CONSUMER * 64, 64, 1))
    tma_store(dv_desc, [work.b, first_key, work.part, 0], m.v.index(0).slice(CONSUMER * 64, 64, 1))
    tma_store_wait(0)


@gluon.jit
def store_part(x, desc, m, work, CONSUMER: gl.constexpr):
    """Write the dk or dv of a part: in float32 it fills all of K's memory, or V's."""
    first_key = work.block * m.k.shape[2] + CONSUMER * 64
    staged = m.k.index(0)
    if CONSUMER == 1:
        staged = m.v.index(0)
    staged = reinterpret(staged, gl.float32, desc.block_type.shape, desc.layout)
    staged.reshape(x.shape).store(x)
    fence_async_shared()
    tma_store(desc, [work.b, first_key, work.part, 0], staged)
    tma_store_wait(0)


@gluon.jit
def consumer(
    dk_desc,
    dv_desc,
    m,
    work,
    t,
    window,
    scale,
    scale2,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    EDGE: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """Compute dk and dv of 64 keys: zero where no query sees any."""
    BLOCK_M: gl.constexpr = m.q.shape[2]
    BLOCK_N: gl.constexpr = m.k.shape[2]
    HEAD_DIM: gl.constexpr = m.q.shape[4]
    scores_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    keys_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_DIM, 16])
    first_key = work.block * BLOCK_N + CONSUMER * 64
    keys = first_key + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_l))
    inside = keys < t
    past_last = gl.where(inside, keys - work.shift - window.right, NEVER)
    past_first = gl.where(inside, keys - work.shift + window.left, -NEVER)
    bits = gl.where(inside, -1, 0).to(gl.int16).expand_dims(1)
    dk = gl.zeros([64, HEAD_DIM], gl.float32, layout=keys_l)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, layout=keys_l)
    tile = work.start
    mbarrier.wait(m.kv_full.index(0), 0)
    for step in range(work.steps):
        dk, dv = add_tile(dk, dv, step, tile, m, past_last, past_first, bits, scale2, LEFT, RIGHT, EDGE, CONSUMER)
        _, tile = following(0, tile, work)
    named_barrier_sync(DS_FULL, 256)  # both have read K and V to the end: they become staging
    if dk_desc.dtype == gl.float32:
        store_part(dk * scale, dk_desc, m, work, CONSUMER)
        store_part(dv, dv_desc, m, work, CONSUMER)
    else:
        store(dk * scale, dv, dk_desc, dv_desc, m, work, CONSUMER)


# ----------------------------------------------------------------------------------------------------------------- the kernel


@gluon.jit(do_not_specialize=["shape", "rows", "window"])  # one kernel for all sizes
def backward_kernel(
    inputs,
    turns_ptr,
    offset_ptr,
    dk_desc,
    dv_desc,
    shape,
    rows,
    window,
    scale,
    scale2,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr,
    EDGE: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
):
    """One program: dk and dv of a block of keys, and what it adds to dq.

    Blocks of dk and dv: [1, 64, 1, HEAD_DIM], of [batch, t, parts of groups, head dim]; in float32 where parts are to be added up.
    """
    shift = gl.to_tensor(0)
    if offset_ptr is not None:
        shift = gl.load(offset_ptr)
    if BOTTOM_RIGHT:
        shift = shift + (shape.t - shape.q_size)
    work = work_of(gl.program_id(0), gl.num_programs(0), shape, window, shift, BLOCK_M, BLOCK_N, LEFT, RIGHT, DETERMINISTIC)
    dtype: gl.constexpr = inputs.q.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, 1, HEAD_DIM], inputs.q.layout)
    do = gl.allocate_shared_memory(dtype, [2, 1, BLOCK_M, 1, HEAD_DIM], inputs.do.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, 1, HEAD_DIM], inputs.k.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, BLOCK_N, 1, HEAD_DIM], inputs.v.layout)
    ds = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N], gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype))
    dq = gl.allocate_shared_memory(gl.float32, [2, 128, 32], inputs.sums.layout)
    lse = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], inputs.lse.layout)
    delta = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], inputs.delta.layout)
    kv_full = allocate_barriers(1)
    q_full = allocate_barriers(2)
    do_full = allocate_barriers(2)
    mbarrier.init(kv_full.index(0), count=1)
    for slot in gl.static_range(2):
        mbarrier.init(q_full.index(slot), count=1)
        mbarrier.init(do_full.index(slot), count=1)
    m = Shared(q, k, v, do, lse, delta, ds, dq, kv_full, q_full, do_full)
    gl.warp_specialize([
        (mover, (inputs, turns_ptr, m, work, shape, rows, window, LEFT, RIGHT, DETERMINISTIC)),
        (consumer, (dk_desc, dv_desc, m, work, shape.t, window, scale, scale2, LEFT, RIGHT, EDGE, 0)),
        (consumer, (dk_desc, dv_desc, m, work, shape.t, window, scale, scale2, LEFT, RIGHT, EDGE, 1)),
    ], [4, 4], [240, 240])  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- the launcher

MULTIPROCESSORS = 132  # of an H100 or H200, where programs should be several times as many
_L2_BYTES = 40 << 20  # of an H100's or H200's 50 MiB


def heuristic(head_dim: int) -> Config:
    """The tiles: as many numbers of q a tile for either block of a head. There are no others."""
    return Config(BLOCK_M=8192 // head_block(head_dim), BLOCK_N=128, num_warps=4)


def unfit(launch: Launch, x) -> str | None:
    """Why a call is not for these kernels; None if it is."""
    if (reason := limits.unfit(launch, x, 128)) is not None:
        return reason
    _, s, h, d = x.q.shape
    lines = launch.batch * h * cdiv(s, 128) * 128
    if x.q_lengths is not None or x.kv_lengths is not None:
        return "it has no lengths"
    if lines * head_block(d) * 4 >= 1 << 38:
        return f"it counts in 32 bits; got {s} queries of {launch.batch} x {h} heads"
    if launch.config is not None and launch.config != heuristic(d):
        return f"its tiles are {heuristic(d)}; the call asks for {launch.config}"
    return None


def parts_of(group: int, programs: int) -> int:
    """The number of parts, alike, into which a group of heads is cut: the fewest that fill the GPU.

    `programs` have one part each.
    """
    sizes = [n for n in range(1, group) if group % n == 0]
    return next((n for n in sizes if n * programs >= 4 * MULTIPROCESSORS), group)


def backward(launch: Launch, x, saved, cotangents):
    """Launch the three kernels. The gradient of lse is subtracted from delta, where it costs nothing."""
    q, k, v = x.q, x.k, x.v
    (out, lse), (do, dlse), mask = saved, cotangents, mask_of(launch, x)
    (_, s, h, d), (_, t, g, e) = q.shape, v.shape
    do = jnp.zeros_like(out) if do is None else do
    options, batch, block = launch.options, launch.batch, head_block(d)
    config = heuristic(d) if launch.config is None else launch.config.said_by("explicit")  # the same tiles, says `unfit`
    deterministic = options["deterministic"]
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    tiles = batch * h * cdiv(s, block_m)  # of queries
    parts = parts_of(h // g, batch * g * cdiv(t, block_n))
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    ends: dict[str, Any] = {"config": Config(BLOCK_M=block_m, num_warps=4), "grid": tiles, "s": s, "h": h, "BLOCK_D": block}
    before = launch(
        preprocess_kernel,
        out_ptr=out,
        do_ptr=do,
        lse_ptr=lse,
        dlse_ptr=dlse,
        E=e,
        **ends,
        name="vjp_preprocess",
        outputs={
            "lse2_ptr": f32(tiles * block_m),
            "delta_ptr": f32(tiles * block_m),
            "sums_ptr": f32(tiles * 256, 32),
            "turns_ptr": jax.ShapeDtypeStruct((tiles,), jnp.int32) if deterministic else None,
        },
    )
    sums, turns = before["sums_ptr"], before["turns_ptr"]

    over = lambda x, rows: TensorDescriptor.from_array(x, (1, rows, 1, block))
    inputs = Inputs(
        q=over(q, block_m),
        k=over(k, block_n),
        v=over(v, block_n),
        do=over(do, block_m),
        lse=TensorDescriptor.from_array(before["lse2_ptr"], (block_m,)),
        delta=TensorDescriptor.from_array(before["delta_ptr"], (block_m,)),
        sums=TensorDescriptor.from_array(sums, (128, 32)),
    )
    most = t + options["q_size"]  # a bound beyond it is none
    heads = h // (g * parts)  # of a part
    section = max(1, _L2_BYTES // (heads * s * block * 8))
    if not deterministic:  # as many as run at one time are read in any case; programs that take turns want fewer beside them
        section = max(section, cdiv(MULTIPROCESSORS, cdiv(t, block_n)))
    section = min(batch * g * parts, section)
    gradient = lambda n: over(jax.ShapeDtypeStruct((batch, t, g * parts, n), q.dtype if parts == 1 else jnp.float32), 64)
    got = launch(
        backward_kernel,
        inputs=inputs,
        turns_ptr=turns,
        offset_ptr=mask.q_index,
        shape=Shape(s, t, g * parts, heads, parts, options["q_size"], next_power_of_2(section + 1) // 2),
        rows=InputRows(*launch.rows[:3]),
        window=Window(min(mask.left or 0, most), min(mask.right or 0, most)),
        scale=np.float32(options["scale"]),
        scale2=np.float32(options["scale"] * LOG2E),
        HEAD_DIM=block,
        LEFT=mask.left is not None,
        RIGHT=mask.right is not None,
        BOTTOM_RIGHT=mask.align is not None,
        EDGE=t % block_n != 0 and mask.left is None and mask.right is None,
        DETERMINISTIC=deterministic,
        config=config,
        name="vjp",
        grid=batch * g * parts * cdiv(t, block_n),
        flops=2 * batch * h * s * t * (3 * d + 2 * e),
        in_place=("inputs.sums", "turns_ptr") if deterministic else ("inputs.sums",),
        outputs={"dk_desc": gradient(d), "dv_desc": gradient(e)},
    )
    dq = None
    if launch.wanted.q:
        after = launch(
            postprocess_kernel,
            sums_ptr=got["inputs.sums"],
            scale=np.float32(options["scale"]),
            D=d,
            **ends,
            name="vjp_postprocess",
            outputs={"dq_ptr": jax.ShapeDtypeStruct((batch, s, h, d), q.dtype)},
        )
        dq = after["dq_ptr"]
    whole = lambda x: x.reshape(batch, t, g, parts, -1).sum(3).astype(q.dtype) if parts > 1 else x
    return dq, whole(got["dk_desc"]), whole(got["dv_desc"]), *[None] * (len(x) - 4)  # ids, lengths, what `limits` refuses
