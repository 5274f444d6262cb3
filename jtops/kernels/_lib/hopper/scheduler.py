"""Which tile a program of a persistent grid does next: drawn from a counter in global memory, handed over through shared memory.

Programs that get short tiles draw more of them. The mover draws a number before it loads a tile and reads the answer after, so
that the round trip to memory costs nothing; the users meet it in a `Ring` of two numbers.
"""

from jtops._compat.gluon import gl, gluon, mbarrier
from jtops.kernels._lib.hopper.pipeline import new_ring, release, tile_of, wait_empty, wait_full


@gluon.jit
def new_queue(USERS: gl.constexpr):
    """A ring of two tile numbers."""
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return new_ring(numbers, 2, USERS)


@gluon.jit
def draw(counter):
    """Ask for the next number of `counter`, for one warp; `drawn` reads the answer. One lane adds, the others have 0."""
    one_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.u32 $0, 0;"
        " @first atom.global.add.u32 $0, [$1], 1; }",
        "=r,l",
        [counter + gl.zeros([32], gl.int32, layout=one_warp)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def drawn(answer):
    """The number that `draw` asked for. The first tile of each program is that of its own number, so drawing begins after those."""
    return gl.max(answer, 0) + gl.num_programs(0)


@gluon.jit
def publish(queue, i, tile):
    """Publish `tile` as the i-th number of the queue; the mover, one warp, does."""
    one_warp: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    wait_empty(queue, i)
    tile_of(queue, i).store(gl.full([1], tile, gl.int32, layout=one_warp))
    mbarrier.arrive(queue.full.index(i % 2), count=1)


@gluon.jit
def take(queue, i):
    """Take the i-th number of the queue; a user, four warps, does."""
    wait_full(queue, i)
    tile = gl.max(tile_of(queue, i).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    release(queue, i)
    return tile


@gluon.jit
def longest_first(t, heads, blocks, section):
    """The pair (head, block) of tile t, for blocks of which the last take longest.

    Heads go in sections, so that what the programs read at one time stays in L2; in a section the last blocks of all its
    heads come first. The last section may be narrower, and t lie beyond the last tile.
    """
    t_of_section = t % (section * blocks)
    first = t // (section * blocks) * section
    width = gl.maximum(gl.minimum(section, heads - first), 1)
    return first + t_of_section % width, blocks - 1 - t_of_section // width
