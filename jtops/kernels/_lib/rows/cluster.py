"""Programs that share a row: a thread block cluster of up to 8 neighbours, whose members tell each other two numbers at a time.

Each member writes into the shared memory of all others, and a barrier there counts what has come: nobody waits for the memory of
the whole GPU. Clusters exist from sm_90 on; a kernel that uses this is launched with ``cluster_size``. PTX ISA, st.async and
mbarrier.
"""

from jtops._compat.triton import tl, triton

# The code below sees what is declared outside braces. Slots are double-buffered, because a peer may post turn i + 1 while
# a slow member still reads turn i. The wait for all members to start happens at the first exchange, so that the first loads
# overlap it.
_START: tl.constexpr = tl.constexpr("""
    .shared .align 16 .b8 told[128];
    .shared .align 8 .b8 heard[16];
    {
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [heard], 1;
    @first mbarrier.init.shared::cta.b64 [heard+8], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.release.aligned;
    mov.u32 $0, 0;
    }
""")

_TELL: tl.constexpr = tl.constexpr("""{
    .reg .pred first, sends, done, new;
    .reg .b32 thread, rank, size, bytes, turn, slots, slot, barrier, offset, peer_slot, peer_barrier;
    .reg .b64 pair, state;
    mov.u32 thread, %tid.x;
    mov.u32 rank, %cluster_ctarank;
    mov.u32 size, %cluster_nctarank;
    setp.eq.u32 first, thread, 0;
    setp.lt.u32 sends, thread, size;
    setp.eq.u32 new, $3, 0;
    @new barrier.cluster.wait.acquire;
    and.b32 turn, $3, 1;
    mov.u32 barrier, heard;
    mad.lo.u32 barrier, turn, 8, barrier;
    mov.u32 slots, told;
    mad.lo.u32 slots, turn, 64, slots;
    mad.lo.u32 slot, rank, 8, slots;
    shl.b32 bytes, size, 3;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 state, [barrier], bytes;
    @sends mapa.shared::cluster.u32 peer_slot, slot, thread;
    @sends mapa.shared::cluster.u32 peer_barrier, barrier, thread;
    mov.b64 pair, {$1, $2};
    @sends st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [peer_slot], pair, [peer_barrier];
    shr.u32 turn, $3, 1;
    and.b32 turn, turn, 1;
    WAIT:
    mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], turn;
    @!done bra WAIT;
    mov.b32 $0, slots;
}""")


@triton.jit
def part_of_row(pid, part_n, n, BLOCK_N: tl.constexpr, CLUSTER: tl.constexpr, FULL: tl.constexpr):
    """Return the cluster's number, this member's, its columns [1, BLOCK_N], and which are in the row; call it once, first of all.

    A member has `part_n` neighbouring columns, a multiple of 16; without clusters a program has all. FULL: every block is full. For
    shifted rows (see `rows.device`) n is the number of lanes.
    """
    part = 0
    cols = tl.arange(0, BLOCK_N)[None, :]
    inside = cols < n
    if CLUSTER > 1:
        tl.inline_asm_elementwise(_START, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        part = (pid % CLUSTER).to(tl.int32)
        inside = cols < part_n
        cols += part * part_n
        inside = inside & (cols < n)
        pid = pid // CLUSTER
    if FULL:
        inside = tl.full((1, BLOCK_N), 1, tl.int1)
    return pid, part, cols, inside


@triton.jit
def members(CLUSTER: tl.constexpr):
    """The mask of those results of `cluster_gather` that count."""
    return tl.arange(0, 8) < CLUSTER


@triton.jit
def cluster_gather(a, b, turn):
    """What each member has for `a` and `b`: two float32 tensors of 8, of which the `members` count.

    Args: a, b: one float32 each, the same in all threads and the last result of a reduction over them. turn: 0, 1, 2 ... in a
    program's calls.
    """
    address = tl.inline_asm_elementwise(_TELL, "=r,f,f,r", [a, b, turn], dtype=tl.int32, is_pure=False, pack=1)
    slots = address + tl.arange(0, 8) * 8
    return tl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [slots], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
    )
