"""Products of arrays past 2^31 elements, by walks over single programs: offsets have 64 bits."""

import jax
import jax.numpy as jnp
import pytest

import jtops
from tests import walk
from tests.kernels.test_row_lowering import struct

TILES = jtops.Config(BLOCK_M=64, BLOCK_N=256, BLOCK_K=256, num_warps=4, num_stages=1)
CALLS = {  # b of its own, or one for all; many batch elements, or large matrices
    "many": (struct(70_000, 128, 256), struct(70_000, 256, 256)),
    "tall": (struct(2**25, 128), struct(128, 64)),
    "wide": (struct(64, 128), struct(128, 2**25)),
    "deep": (struct(64, 2**21 + 2**17), struct(2**21 + 2**17, 1024)),
    "outer": (struct(1_100_000, 2048, 1), struct(1_100_000, 1, 16)),  # more lines of all matrices than 32 bits count
    "large": (struct(3, 65536, 64), struct(3, 64, 65536)),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_last_program_reads_and_writes_the_last_elements(name):
    a, b = CALLS[name]
    f = lambda a, b: jtops.matmul(a, b, config=TILES, implementation="interpret")
    launch, *_ = walk.launches(f, a, b)
    memory = launch.walk(-1)
    loaded = {name: t.last for name, t in memory.loaded.items() if t.count}
    assert loaded == {"terms[0].a.ptr": a.size - 1, "terms[0].bs[0].ptr": b.size - 1}
    assert max(t.last for t in memory.stored.values() if t.count) == launch.outputs[0].size - 1


def test_gradients_read_transposed_matrices_to_their_end():
    a, b = CALLS["many"]
    f = lambda a, b: jtops.matmul(a, b, config=TILES, implementation="interpret").astype(jnp.float32).sum()
    made = walk.launches(jax.grad(f, (0, 1)), a, b)
    products = [launch for launch in made if launch.name == "product_kernel"]
    assert len(products) >= 2
    for launch in products:
        memory = launch.walk(-1)
        sizes = {x.size - 1 for x in launch.inputs}
        assert {t.last for t in memory.loaded.values() if t.count} <= sizes
