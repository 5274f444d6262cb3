"""A ring of tiles in shared memory, between the warp that moves them and the warpgroups that use them.

Slot ``i % stages`` holds the i-th tile. It has two mbarriers: `full` completes when the tile's bytes have arrived, `empty` when
every user has let go of it. Both sides count i from 0 and never have to tell each other: the i-th tile is the ``i // stages``-th in
its slot, and the parity of that number says which phase of the barrier to wait for. Before the first arrival a barrier counts as
having completed a phase of parity 1, which is why an empty ring lets the mover begin.
"""

from jtops._compat.gluon import aggregate, allocate_barriers, gl, gluon, mbarrier


@aggregate
class Ring:
    """Tiles, and the barriers of each slot."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles = tiles
        self.full = full
        self.empty = empty


@gluon.jit
def new_ring(tiles, STAGES: gl.constexpr, USERS: gl.constexpr):
    """A ring over `tiles`, [STAGES, ...] in shared memory; each tile has one arrival of bytes and is let go of by USERS."""
    full, empty = allocate_barriers(STAGES), allocate_barriers(STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=USERS)
    return Ring(tiles, full, empty)


@gluon.jit
def tile_of(ring, i):
    """The i-th tile's memory."""
    return ring.tiles.index(i % ring.tiles.shape[0])


@gluon.jit
def wait_full(ring, i, pred=True):
    """Wait until the i-th tile is there."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.full.index(i % STAGES), (i // STAGES) & 1, pred=pred)


@gluon.jit
def release(ring, i, pred=True):
    """Let go of the i-th tile, for one user."""
    mbarrier.arrive(ring.empty.index(i % ring.tiles.shape[0]), count=1, pred=pred)


@gluon.jit
def wait_empty(ring, i):
    """Wait until the i-th tile may be written: all users of the tile before it in its slot have let go."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.empty.index(i % STAGES), ((i // STAGES) & 1) ^ 1)
