"""Which tile a program of a persistent grid does next: drawn from a counter in global memory, handed over through shared memory.

Programs that get short tiles draw more of them. The mover draws a number before it loads a tile and reads the answer after, so
that the round trip to memory costs nothing; the users meet the place of that tile in a `Ring` of two.
"""

from jtops._compat.gluon import gl, gluon, mbarrier
from jtops.kernels._lib.hopper.pipeline import new_ring, release, tile_of, wait_empty, wait_full


@gluon.jit
def new_queue(USERS: gl.constexpr):
    """A ring of two places of tiles, three numbers each."""
    places = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return new_ring(places, 2, USERS)


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
def publish(queue, i, b, head, row, more):
    """Publish the i-th place of the queue, or that there is none if not `more`; the mover, one warp, does."""
    one_warp: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    word = gl.arange(0, 4, layout=one_warp)
    wait_empty(queue, i)
    tile_of(queue, i).store(gl.where(word == 0, gl.where(more, b, -1), gl.where(word == 1, head, row)))
    mbarrier.arrive(queue.full.index(i % 2), count=1)


@gluon.jit
def take(queue, i):
    """Take the i-th place of the queue, (b, head, row), and whether there is one; a user, four warps, does.

    The mover divides, once for all users: they are in a hurry here.
    """
    four_warps: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    word = gl.arange(0, 4, layout=four_warps)
    wait_full(queue, i)
    told = tile_of(queue, i).load(four_warps)
    release(queue, i)
    b = gl.max(gl.where(word == 0, told, -1), 0)
    head = gl.max(gl.where(word == 1, told, -1), 0)
    row = gl.max(gl.where(word == 2, told, -1), 0)
    return (b, head, row), b >= 0


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
