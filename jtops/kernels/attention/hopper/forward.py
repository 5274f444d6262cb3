"""The forward kernel for Hopper (sm_90a), after FlashAttention-3: products by wgmma, copies by TMA, each by warps of their own.

A program has two or three warpgroups that compute, 64 queries each, and one warp, the mover, that loads. There is one program a
multiprocessor; it does tile after tile, a tile being the queries of its warpgroups for one head. Keys are walked in blocks from the
last that a query of the tile sees to the first::

    mover (1 warp)        rings in shared memory                 each warpgroup (64 queries)
    ------------------    ----------------------------------     -----------------------------------------------
    draw the next tile
    load Q  ------------> q  [2 x warpgroups, 64, D]  ---------> S = Q K^T of the first block of keys
    load K, V  ---------> k, v  [stages, BLOCK_N, D]  ---------> for each further block of keys, j:
      for each block                                                S(j) = Q K(j)^T               issued
                                                                    O *= what the maximum grew    under S(j)
                                                                    O += P(j - 1) V(j - 1)        issued
                                                                    softmax: P(j) of S(j)         under O
                                                                    give K(j), V(j - 1) back
                                                                 O += P V of the last block       issued
    publish the next  --> tiles  [2]  -------------------------> S of the next tile's first block  issued
                          q  <----------------------------------- O / l, staged where Q was, stored by TMA under it

So products and exponentials of one warpgroup overlap, and one tile's end is hidden under the next one's begin. Every ring has
barriers `full` and `empty` (`jtops.kernels._lib.hopper.pipeline`): the mover waits for empty slots, warpgroups for full ones,
a warpgroup gives a slot of q back once O has left it. Heads of 256 leave no room for a second q: there the next tile's first
product waits until O is stored.

The maximum of a row is kept until it has grown by more than 8 (base 2), so O is rarely rescaled: probabilities then are up to 256
times too large, and so is the sum that they are divided by. Row sums are kept per lane and added up once a tile.

Which keys a query sees (`Mask`): query i of this shard those from ``max(0, i + shift - left)`` to before
``min(kv_length, i + shift + right + 1)``. Blocks begin at multiples of BLOCK_N. CUT says which blocks the mask can cut: "none";
"first", only the first that a warpgroup walks, so that the loop has no masks; "any", where each block asks whether it needs one.
DEAD says whether some query may see no key: only then are rows looked through for it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jtops._compat.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jtops.core.descriptor import TensorDescriptor
from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.frame.launch import Config, Launch
from jtops.kernels._lib.hopper.accumulators import cut, rescale_rows
from jtops.kernels._lib.hopper.pipeline import Ring, new_ring, release, tile_of, wait_empty, wait_full
from jtops.kernels._lib.hopper.scheduler import draw, drawn, longest_first, new_queue, publish, take
from jtops.kernels.attention.hopper import limits
from jtops.kernels.attention.hopper.limits import head_block
from jtops.kernels.attention.mask import Mask, Operand, mask_of

LOG2E = 1.4426950408889634
ROWS = 64  # queries of a warpgroup: the rows of a wgmma
PROGRAMS = 132  # multiprocessors of an H100 or H200; on a GPU with fewer some programs begin late, and draw fewer tiles
L2_BYTES = 32 * 2**20  # of keys and values that programs may read at one time


class Sizes(NamedTuple):
    """The sizes of a call: s and q_size are the queries of this shard and of all; section is how many heads share L2 at a time."""

    batch: Any
    s: Any
    t: Any
    h: Any
    g: Any
    q_size: Any
    section: Any


# ----------------------------------------------------------------------------------------------------------------- tiles


@aggregate
class Tile:
    """The queries of one program's turn, and the keys they walk."""

    b: gl.tensor  # batch element
    head: gl.tensor
    row: gl.tensor  # first query
    top: gl.tensor  # first key of the first block, the last in memory
    blocks: gl.tensor  # of keys, at least one
    alive: gl.tensor  # queries from this one on are past q_length
    kv_length: gl.tensor
    shift: gl.tensor  # of query i's position against the keys'

    @gluon.constexpr_function
    def __init__(self, b, head, row, top, blocks, alive, kv_length, shift):
        self.b = b
        self.head = head
        self.row = row
        self.top = top
        self.blocks = blocks
        self.alive = alive
        self.kv_length = kv_length
        self.shift = shift


@gluon.jit
def row_of(operand, b):
    """The operand's row that serves batch element b."""
    return b // operand.rows.inner % operand.rows.own


@gluon.jit
def count_of_tiles(sizes, WARPGROUPS: gl.constexpr):
    """The number of tiles of the call."""
    return sizes.batch * sizes.h * gl.cdiv(sizes.s, 64 * WARPGROUPS)


@gluon.jit
def place_of(t, sizes, WARPGROUPS: gl.constexpr, DYNAMIC: gl.constexpr):
    """The batch element, head and first query of tile t; if there is no such tile, nobody uses the answer."""
    blocks_m = gl.cdiv(sizes.s, 64 * WARPGROUPS)
    if DYNAMIC:
        bh, block = longest_first(t, sizes.batch * sizes.h, blocks_m, sizes.section)
    else:
        bh = t // blocks_m
        block = t % blocks_m
    b = bh // sizes.h
    return b, bh % sizes.h, block * (64 * WARPGROUPS)


@gluon.jit
def tile_at(place, sizes, mask, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The tile at a place: a batch element, head and first query."""
    b, head, row = place
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    offset = gl.to_tensor(0)
    if mask.q_index is not None:
        offset = gl.load(mask.q_index)
    q_length = gl.to_tensor(sizes.q_size)
    if mask.q_lengths is not None:
        q_length = gl.minimum(gl.load(mask.q_lengths.array + row_of(mask.q_lengths, b)), q_length)
    kv_length = gl.to_tensor(sizes.t)
    if mask.kv_lengths is not None:
        kv_length = gl.minimum(gl.load(mask.kv_lengths.array + row_of(mask.kv_lengths, b)), kv_length)
    shift = offset
    if mask.align is not None:
        shift += kv_length - q_length
    stop = kv_length
    if mask.right is not None:
        stop = gl.minimum(stop, gl.minimum(row + BLOCK_M, sizes.s) + shift + mask.right)
    if mask.q_lengths is not None:
        stop = gl.where(offset + row < q_length, stop, 0)
    first = gl.to_tensor(0)
    if mask.left is not None:
        first = gl.maximum(row + shift - mask.left, 0) // BLOCK_N
    # A tile that sees no key walks one block all the same, which the mask cuts whole: every tile is alike to the barriers.
    blocks = gl.maximum(gl.cdiv(stop, BLOCK_N) - first, 1)
    return Tile(b, head, row, (first + blocks - 1) * BLOCK_N, blocks, q_length - offset, kv_length, shift)


# ---------------------------------------------------------------------------------------------------------------- moving


@aggregate
class Buffers:
    """The rings."""

    q: Ring
    k: Ring
    v: Ring
    tiles: Ring

    @gluon.constexpr_function
    def __init__(self, q, k, v, tiles):
        self.q = q
        self.k = k
        self.v = v
        self.tiles = tiles


@gluon.jit
def load(operand, b, row, head, ring, i):
    """Fetch rows of one head, from `row` on, into the ring as its i-th tile."""
    wait_empty(ring, i)
    slot = i % ring.tiles.shape[0]
    mbarrier.expect(ring.full.index(slot), operand.array.block_type.nbytes)
    tma_load(operand.array, [row_of(operand, b), row, head, 0], ring.full.index(slot), ring.tiles.index(slot))


@gluon.jit
def mover(
    q,
    k,
    v,
    buffers,
    mask,
    sizes,
    counter,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CUT: gl.constexpr,
    DYNAMIC: gl.constexpr,
):
    """Loads, and draws tiles."""
    count = count_of_tiles(sizes, WARPGROUPS)
    t = gl.program_id(0)
    i = 0  # tiles
    j = 0  # blocks of keys, of all tiles
    b, head, row = place_of(t, sizes, WARPGROUPS, DYNAMIC)
    while t < count:
        if DYNAMIC:
            answer = draw(counter)
        tile = tile_at((b, head, row), sizes, mask, WARPGROUPS, BLOCK_N)
        for w in gl.static_range(WARPGROUPS):
            load(q, tile.b, tile.row + 64 * w, tile.head, buffers.q, i * WARPGROUPS + w)
        kv_head = tile.head // (sizes.h // sizes.g)
        for x in range(tile.blocks):
            load(k, tile.b, tile.top - x * BLOCK_N, kv_head, buffers.k, j)
            load(v, tile.b, tile.top - x * BLOCK_N, kv_head, buffers.v, j)
            j += 1
        if DYNAMIC:
            t = drawn(answer)
        else:
            t += gl.num_programs(0)
        b, head, row = place_of(t, sizes, WARPGROUPS, DYNAMIC)
        if DYNAMIC:
            publish(buffers.tiles, i, b, head, row, t < count)
        i += 1


# ------------------------------------------------------------------------------------------------------------- computing


@gluon.jit
def product(a, b, acc, use_acc: gl.constexpr):
    """Issue acc (+)= a b."""
    return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def matrix(tile):
    """View [1, N, 1, D] in shared memory as [N, D]."""
    return tile.reshape([tile.shape[1], tile.shape[3]])


@gluon.jit
def scores(buffers, slot, j):
    """S = Q K^T of the queries in `slot` with block j of keys, in flight."""
    BLOCK_N: gl.constexpr = buffers.k.tiles.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    if buffers.q.tiles.shape[4] > 128:
        slot += j >> 30  # 0, which the compiler does not know: else it has all addresses in Q before the loop, and no registers
    q = matrix(buffers.q.tiles.index(slot))
    k = matrix(tile_of(buffers.k, j))
    return product(q, k.permute((1, 0)), gl.zeros([64, BLOCK_N], gl.float32, layout=s_layout), False)


@gluon.jit
def masked(s, tile, key, mask, CUT: gl.constexpr, W: gl.constexpr):
    """Scores of this warpgroup's queries with the block that begins at `key`, -inf where the mask says so."""
    if CUT != "none":
        row = tile.row + 64 * W
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, s.type.layout))
        stop = rows * 0 + (tile.kv_length - key)
        last = tile.kv_length  # the first query's
        if mask.right is not None:
            stop = gl.minimum(stop, rows + (row + tile.shift + mask.right + 1 - key))
            last = gl.minimum(last, row + tile.shift + mask.right + 1)
        start = None
        if mask.left is not None:
            start = rows + (row + tile.shift - mask.left - key)
        needed = None
        if CUT == "any":
            cuts = last < key + s.shape[1]
            if mask.left is not None:
                cuts = cuts | (row + 63 + tile.shift - mask.left > key)
            needed = cuts.to(gl.int32)
        s = cut(s, start, stop, needed)
    return s


@gluon.jit
def softmax(s, top, total, scale2, GUARD: gl.constexpr, dtype: gl.constexpr):
    """Return P, the new maximum and sums, and what O is to be multiplied with. GUARD: a row may have seen no key yet."""
    BLOCK_N: gl.constexpr = s.shape[1]
    new = gl.maximum(top, gl.max(s, 1) * scale2)
    new = gl.where(new - top > 8.0, new, top)
    finite = new
    if GUARD:
        finite = gl.where(new == -float("inf"), 0.0, new)
    alpha = gl.exp2(top - finite)
    p = gl.exp2(s * scale2 - finite.expand_dims(1))
    sums = gl.sum(p.reshape([64, BLOCK_N // 8, 8]), 1)
    total = total * gl.convert_layout(alpha, gl.SliceLayout(1, sums.type.layout)).expand_dims(1) + sums
    return p.to(dtype), new, total, alpha


@gluon.jit
def skipped_blocks(tile, mask, BLOCK_N: gl.constexpr, W: gl.constexpr):
    """How many blocks of keys, 0 or 1, lie beyond the queries of this warpgroup, though not beyond the tile's.

    With two the mover would wait for V to be given back that is in use until this warpgroup has their successor.
    """
    stop = gl.minimum(tile.kv_length, tile.row + 64 * (W + 1) + tile.shift + mask.right)
    return gl.minimum(gl.maximum(tile.blocks - gl.cdiv(stop, BLOCK_N), 0), tile.blocks - 1)


@gluon.jit
def give_back(buffers, j, count):
    """Let go of `count` blocks of keys, from j on, as they come; return the next one."""
    for _ in range(count):
        wait_full(buffers.k, j)
        release(buffers.k, j)
        wait_full(buffers.v, j)
        release(buffers.v, j)
        j += 1
    return j


@gluon.jit
def clear_beyond(v, rows):
    """Zero the rows of a tile from `rows` on: probabilities there are 0, but 0 * NaN is not.

    Every warpgroup does, with the same zeros, so none has to wait for another.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    index = gl.arange(0, 32, layout=gl.SliceLayout(1, layout))
    for part in gl.static_range(v.shape[0] // 32):
        if rows < 32 * (part + 1):
            tile = v.slice(32 * part, 32, 0)
            x = tile.load(layout)
            tile.store(gl.where((index + 32 * part < rows).expand_dims(1), x, 0.0))
    fence_async_shared()


@gluon.jit
def worker(
    out,
    lse_ptr,
    buffers,
    mask,
    sizes,
    scale2,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CUT: gl.constexpr,
    DEAD: gl.constexpr,
    DYNAMIC: gl.constexpr,
    W: gl.constexpr,
):
    """Warpgroup W: its 64 queries of every tile."""
    dtype: gl.constexpr = out.dtype
    E: gl.constexpr = buffers.v.tiles.shape[4]
    AHEAD: gl.constexpr = buffers.q.tiles.shape[0] > WARPGROUPS  # the next tile's q has a slot while O is staged in this one's
    SKIPS: gl.constexpr = CUT == "first" and mask.right is not None and 64 * WARPGROUPS > BLOCK_N
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, E, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    rows = gl.arange(0, 64, layout=s_rows)
    count = count_of_tiles(sizes, WARPGROUPS)
    i = 0
    j = 0
    t = gl.program_id(0)
    tile = tile_at(place_of(t, sizes, WARPGROUPS, DYNAMIC), sizes, mask, WARPGROUPS, BLOCK_N)
    more = t < count
    skipped = 0
    if SKIPS:
        skipped = skipped_blocks(tile, mask, BLOCK_N, W)
        j = give_back(buffers, j, skipped)
    slot = gl.to_tensor(W)  # of q
    wait_full(buffers.q, W)
    wait_full(buffers.k, j)
    s = scores(buffers, slot, j)
    s = warpgroup_mma_wait(0, deps=(s,))
    release(buffers.k, j)
    while more:
        key = tile.top - skipped * BLOCK_N
        top = gl.full([64], -float("inf"), gl.float32, layout=s_rows)
        total = gl.sum(gl.zeros([64, BLOCK_N], gl.float32, layout=s_layout).reshape([64, BLOCK_N // 8, 8]), 1)
        o = gl.zeros([64, E], gl.float32, layout=o_layout)
        s = masked(s, tile, key, mask, CUT, W)
        p, top, total, alpha = softmax(s, top, total, scale2, CUT == "any" or DEAD, dtype)
        if mask.kv_lengths is not None:  # noqa: SIM102 - known to the compiler, the other at run time
            if key + BLOCK_N > tile.kv_length:
                wait_full(buffers.v, j)
                clear_beyond(matrix(tile_of(buffers.v, j)), tile.kv_length - key)
        p = gl.convert_layout(p, p_layout)
        j += 1
        for x in range(skipped + 1, tile.blocks):
            wait_full(buffers.k, j)
            s = scores(buffers, slot, j)
            o = rescale_rows(o, gl.convert_layout(alpha, o_rows))
            wait_full(buffers.v, j - 1)
            o = product(p, matrix(tile_of(buffers.v, j - 1)), o, True)
            s = warpgroup_mma_wait(1, deps=(s,))
            release(buffers.k, j)
            if CUT == "any":
                s = masked(s, tile, tile.top - x * BLOCK_N, mask, CUT, W)
            p, top, total, alpha = softmax(s, top, total, scale2, CUT == "any", dtype)
            o = warpgroup_mma_wait(0, deps=(o,))
            release(buffers.v, j - 1)
            p = gl.convert_layout(p, p_layout)
            j += 1
        o = rescale_rows(o, gl.convert_layout(alpha, o_rows))
        last = j - 1
        wait_full(buffers.v, last)
        o = product(p, matrix(tile_of(buffers.v, last)), o, True)

        done = tile
        used = slot
        if DYNAMIC:
            place, more = take(buffers.tiles, i)
        else:
            t += gl.num_programs(0)
            place, more = place_of(t, sizes, WARPGROUPS, DYNAMIC), t < count
        i += 1
        slot = (i * WARPGROUPS + W) % buffers.q.tiles.shape[0]
        tile = tile_at(place, sizes, mask, WARPGROUPS, BLOCK_N)
        skipped = 0
        if SKIPS:
            skipped = skipped_blocks(tile, mask, BLOCK_N, W)
        if AHEAD and SKIPS:
            j = give_back(buffers, j, gl.where(more, skipped, 0))
        if AHEAD:  # without a next tile the product is of old data, and nobody reads it
            wait_full(buffers.q, i * WARPGROUPS + W, more)
            wait_full(buffers.k, j, more)
            s = scores(buffers, slot, j)
            o = warpgroup_mma_wait(1, deps=(o,))
        else:
            o = warpgroup_mma_wait(0, deps=(o,))
        release(buffers.v, last)
        total_of_row = gl.convert_layout(gl.sum(total, 1), s_rows)
        row = done.row + 64 * W
        alive = (total_of_row != 0) & (rows < done.alive - row)
        if DEAD:
            o = gl.where(gl.convert_layout(alive, o_rows).expand_dims(1), o, 0.0)
            total_of_row = gl.where(alive, total_of_row, 1.0)
        y = o * (1.0 / gl.convert_layout(total_of_row, o_rows)).expand_dims(1)
        staged = buffers.q.tiles.index(used)
        matrix(staged).store(y.to(dtype))
        fence_async_shared()
        tma_store(out, [done.b, row, done.head, 0], staged)
        lse = (top + gl.log2(total_of_row)) * 0.6931471805599453
        if DEAD:
            lse = gl.where(alive, lse, -float("inf"))
        first = (done.b.to(gl.int64) * sizes.s + row) * sizes.h + done.head
        gl.store(lse_ptr + first + rows * sizes.h, lse, mask=rows < sizes.s - row)
        if AHEAD:
            s = warpgroup_mma_wait(0, deps=(s,))
            release(buffers.k, j, more)
            tma_store_wait(0)
            mbarrier.arrive(buffers.q.empty.index(used), count=1)
        else:
            tma_store_wait(0)
            mbarrier.arrive(buffers.q.empty.index(used), count=1)
            if SKIPS:  # not before: the mover brings no keys of the next tile until q is free
                j = give_back(buffers, j, gl.where(more, skipped, 0))
            wait_full(buffers.q, i * WARPGROUPS + W, more)
            wait_full(buffers.k, j, more)
            s = scores(buffers, slot, j)
            s = warpgroup_mma_wait(0, deps=(s,))
            release(buffers.k, j, more)


@gluon.jit(do_not_specialize=["q", "k", "v", "mask", "sizes"])  # one kernel for all sizes
def forward_kernel(
    q,
    k,
    v,
    mask,
    sizes,
    scale2,
    out,
    lse_ptr,
    counter,
    WARPGROUPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    AHEAD: gl.constexpr,
    CUT: gl.constexpr,
    DEAD: gl.constexpr,
    DYNAMIC: gl.constexpr,
    REGISTERS: gl.constexpr,
    MOVER_REGISTERS: gl.constexpr,
    num_stages: gl.constexpr,
):
    """See the module. `scale2` turns products into exponents of 2; `counter` is zero at the start."""
    dtype: gl.constexpr = q.array.dtype
    D: gl.constexpr = q.array.block_type.shape[3]
    E: gl.constexpr = v.array.block_type.shape[3]
    Q_SLOTS: gl.constexpr = (2 if AHEAD else 1) * WARPGROUPS
    q_tiles = gl.allocate_shared_memory(dtype, [Q_SLOTS, 1, 64, 1, D], q.array.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [num_stages, 1, BLOCK_N, 1, D], k.array.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [num_stages, 1, BLOCK_N, 1, E], v.array.layout)
    buffers = Buffers(
        new_ring(q_tiles, Q_SLOTS, 1),
        new_ring(k_tiles, num_stages, WARPGROUPS),
        new_ring(v_tiles, num_stages, WARPGROUPS),
        new_queue(WARPGROUPS),
    )
    # The tuples stand in the call: in a variable their constants would become numbers in registers.
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (worker, (out, lse_ptr, buffers, mask, sizes, scale2, WARPGROUPS, BLOCK_N, CUT, DEAD, DYNAMIC, 0)),
            (worker, (out, lse_ptr, buffers, mask, sizes, scale2, WARPGROUPS, BLOCK_N, CUT, DEAD, DYNAMIC, 1)),
            (mover, (q, k, v, buffers, mask, sizes, counter, WARPGROUPS, BLOCK_N, CUT, DYNAMIC)),
        ], [4, 1], [REGISTERS, MOVER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (worker, (out, lse_ptr, buffers, mask, sizes, scale2, WARPGROUPS, BLOCK_N, CUT, DEAD, DYNAMIC, 0)),
            (worker, (out, lse_ptr, buffers, mask, sizes, scale2, WARPGROUPS, BLOCK_N, CUT, DEAD, DYNAMIC, 1)),
            (worker, (out, lse_ptr, buffers, mask, sizes, scale2, WARPGROUPS, BLOCK_N, CUT, DEAD, DYNAMIC, 2)),
            (mover, (q, k, v, buffers, mask, sizes, counter, WARPGROUPS, BLOCK_N, CUT, DYNAMIC)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, MOVER_REGISTERS])  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- launching


def unfit(launch: Launch, x) -> str | None:
    """Why this kernel does not serve the call; None if it does."""
    if (reason := limits.unfit(launch, x, 256)) is not None:
        return reason
    if min(launch.batch, *x.q.shape, *x.k.shape, *x.v.shape) < 1:
        return "there is nothing to load"
    scale = float(launch.options["scale"])
    if not 0 < scale < math.inf:
        return f"its running maximum needs a positive, finite scale; got {scale}"
    return None


def cuts(mask: Mask, s: int, t: int, q_size: int, block_n: int) -> str:
    """CUT: which blocks of keys the mask can cut."""
    if mask.left is not None:
        return "any"
    if mask.right is not None:
        # Where the diagonal runs through corners of blocks, 64 rows meet it in one block: the first that they walk.
        moved = mask.align is not None and (mask.q_lengths is not None or mask.kv_lengths is not None)
        corner = s == q_size and not moved and (mask.right + (0 if mask.align is None else t - s)) % block_n == 0
        return "first" if corner else "any"
    return "none" if mask.kv_lengths is None and t % block_n == 0 else "first"


def dead(mask: Mask, t: int, q_size: int) -> bool:
    """DEAD: whether some query may see no key."""
    if mask.q_lengths is not None or mask.kv_lengths is not None:
        return True
    shift = 0 if mask.align is None else t - q_size
    return (mask.right is not None and shift + mask.right < 0) or (mask.left is not None and q_size - 1 + shift - mask.left >= t)


def heuristic(d: int, e: int, s: int, masked: bool) -> Config:
    """Tiles by head dim: three warpgroups where registers allow it and there are enough queries to fill them."""
    block = head_block(max(d, e))
    if block == 256:
        return Config(WARPGROUPS=2, BLOCK_N=64, num_warps=4, num_stages=2)
    wide = block == 64 and not (masked and s < 2048)
    return Config(WARPGROUPS=3 if wide else 2, BLOCK_N=128, num_warps=4, num_stages=2)


def check(config: Config) -> None:
    """Raise a ValueError for tiles that this kernel does not have."""
    warpgroups, block_n, stages = config["WARPGROUPS"], config["BLOCK_N"], config["num_stages"] or 1
    if warpgroups not in (2, 3):
        raise ValueError(f"attention: WARPGROUPS must be 2 or 3; got {config!r}.")
    if block_n not in (64, 128, 256) or block_n < ROWS * (warpgroups - 1):
        raise ValueError(
            f"attention: BLOCK_N must be 64, 128 or 256, and at least {ROWS * (warpgroups - 1)} with WARPGROUPS={warpgroups}, of "
            f"which each may let go of one block of keys that it does not see; got {config!r}."
        )
    if stages < 2:
        raise ValueError(f"attention: num_stages must be at least 2, since tiles overlap; got {config!r}.")


def forward(launch: Launch, x):
    """Launch: return out [b, s, h, e] of q's dtype, lse [b, s, h] float32, natural; a query that sees no key has 0 and -inf."""
    (_, s, h, d), (_, t, g, e) = x.q.shape, x.v.shape
    batch, block, q_size = launch.batch, head_block(max(d, e)), launch.options["q_size"]
    mask = mask_of(launch, x)
    tiles = heuristic(d, e, s, mask.q_index is not None)
    if s == q_size:
        mask = mask._replace(q_index=None)
    dynamic = any(side is not None for side in (mask.left, mask.right, mask.q_lengths, mask.kv_lengths))
    heads = max(1, L2_BYTES * h // (t * (d + e) * x.q.dtype.itemsize * g))
    section = min(next_power_of_2(batch * h), next_power_of_2(heads + 1) // 2)
    given: dict[str, Any] = {
        "q": x.q,
        "k": x.k,
        "v": x.v,
        "mask": mask,
        "sizes": Sizes(batch, s, t, h, g, q_size, section),
        "scale2": float(launch.options["scale"]) * LOG2E,
        "AHEAD": block < 256,
        "DYNAMIC": dynamic,
    }
    sizes = [f"sizes.{name}" for name in Sizes._fields]
    rounded = ("mask.left", "mask.right", *sizes)
    config = launch.choose(tiles, (forward_kernel,), given, name="out", rounded=rounded, d=d, e=e)
    check(config)
    block_n, warpgroups = config["BLOCK_N"], config["WARPGROUPS"]
    described = lambda array, size: TensorDescriptor.from_array(array, (1, size, 1, block))
    given |= {
        "q": Operand(described(x.q, ROWS), launch.rows.q),
        "k": Operand(described(x.k, block_n), launch.rows.k),
        "v": Operand(described(x.v, block_n), launch.rows.v),
    }
    outputs = {
        "out": described(jax.ShapeDtypeStruct((batch, s, h, e), x.q.dtype), ROWS),
        "lse_ptr": jax.ShapeDtypeStruct((batch, s, h), jnp.float32),
        "counter": jax.ShapeDtypeStruct((1,), jnp.int32) if dynamic else None,
    }
    got = launch(
        forward_kernel,
        outputs=outputs,
        zeroed=("counter",),
        grid=min(PROGRAMS, batch * h * cdiv(s, ROWS * warpgroups)),
        config=config,
        flops=2 * batch * h * s * t * (d + e),
        CUT=cuts(mask, s, t, q_size, block_n),
        DEAD=dead(mask, t, q_size),
        REGISTERS=240 if warpgroups == 2 else 160,
        MOVER_REGISTERS=24 if warpgroups == 2 else 32,
        **given,
    )
    return got["out"], got["lse_ptr"]
