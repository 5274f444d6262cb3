"""The product that ops share: which tiles it is cut into, and how batch elements become rows."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Config, Rows
from jtops.kernels._lib.product import tiles
from jtops.kernels._lib.product.side import Groups, Matrix, masked

TARGETS = [Target.parse(name) for name in ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")]
SIZES = (1, 17, 1000, 16384)
BLOCKS = ("BLOCK_M", "BLOCK_N")
SMALLEST = Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)
KINDS = [("half", 2), ("tf32", 4), ("tf32x3", 4)]


def shapes(target):
    for m, n, k, batch, (arithmetic, itemsize), (sums, terms) in itertools.product(
        SIZES, SIZES, SIZES, (1, 300), KINDS, [(1, 1), (2, 1), (1, 2)]
    ):
        yield tiles.Shape(m, n, k, batch, sums, terms, itemsize, arithmetic, b_transposed=terms == 2)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_shape_has_tiles(target):
    """They fit shared memory and the registers that sums may take, are no larger than the matrix, and occupy the GPU if any do."""
    for shape in shapes(target):
        config = tiles.heuristic(shape, target)
        m, n, k = (config[f"BLOCK_{axis}"] for axis in "MNK")
        assert config["num_stages"] * (m + shape.sums * n) * k * shape.itemsize <= target.max_shared_bytes, shape
        assert m * n * shape.sums <= config["num_warps"] * 32 * 128, shape  # 128 of a thread's 255 registers
        assert m < 2 * max(16, shape.m), shape
        assert n < 2 * max(16, shape.n), shape
        if shape.programs(config, target) < 0.75 * target.multiprocessors:
            assert shape.programs(config, target) >= shape.programs(SMALLEST, target), shape


def test_tiles_grow_with_the_matrix():
    size = lambda n, target: np.prod([tiles.heuristic(tiles.Shape(n, n, n, 1, 1, 1, 2, "half", False), target)[b] for b in BLOCKS])
    for target in TARGETS:
        sizes = [size(n, target) for n in (16, 256, 1024, 4096, 16384)]
        assert sizes == sorted(sizes), (target, sizes)


def test_k_is_split_only_where_programs_are_few():
    target = Target.parse("sm_90")
    splits = lambda m, k: (s := tiles.Shape(m, m, k, 1, 1, 1, 2, "half", False)).splits(tiles.heuristic(s, target), target)
    assert splits(16, 256) == 1
    assert splits(16, 4096) == 8  # 512 of k are worth a program
    assert splits(16, 2**20) == target.multiprocessors
    assert splits(4096, 2**20) == 1


@pytest.mark.parametrize(
    ("batch", "a", "b", "bias", "size"),
    [
        (12, Rows(1, 12), Rows(1, 1), None, 12),  # a weight that all share
        (12, Rows(1, 12), Rows(4, 3), None, 4),  # four neighbours share one
        (12, Rows(1, 12), Rows(4, 3), Rows(2, 6), 2),  # and two of them a bias
        (12, Rows(1, 12), Rows(1, 1), Rows(2, 2), 2),  # a bias whose rows begin anew
        (12, Rows(1, 12), Rows(1, 12), None, 1),
        (12, Rows(3, 4), Rows(1, 1), None, 1),  # a has fewer rows: they stay apart
        (1, Rows(1, 1), Rows(1, 1), Rows(1, 1), 1),
    ],
)
def test_groups(batch, a, b, bias, size):
    """Rows of the merged products read what the call's rows read before."""
    groups = Groups.of(batch, a, b, bias)
    assert (groups.size, groups.count) == (size, batch // size)
    serves = lambda rows, i: i // rows.inner % rows.own
    for rows in filter(None, (b, bias)):
        for i in range(batch):
            assert serves(groups.shared(rows), i // size) == serves(rows, i)
        own = jnp.arange(rows.own)
        np.testing.assert_array_equal(groups.full(own, rows), [serves(rows, i) for i in range(0, batch, size)])
    merged = groups.merged(jnp.arange(a.own * 3 * 2).reshape(a.own, 3, 2), a)
    assert merged.shape == (3 * size, 2)
    for i in range(batch):
        row = merged.array[serves(merged.rows, i // size)].reshape(size, 3, 2)[i % size]
        np.testing.assert_array_equal(row, jnp.arange(6).reshape(3, 2) + 6 * serves(a, i))


def test_sides():
    """What is padded, transposed or cut, as the product sees it."""
    matrix = Matrix(jnp.ones((2, 30, 20)), Rows(1, 2))
    assert matrix.shape == (30, 20)
    assert matrix.T.shape == (20, 30)
    assert matrix.T.T.shape == (30, 20)
    padded = matrix.padded()
    assert padded.array.shape == (2, 30, 32)
    assert not padded.array[..., 20:].any()
    assert padded.side(10, 16)[2:] == (30, 32, "rows", "none")  # the mask ends with the line
    assert padded.T.side(16, 16)[2:] == (30, 32, "columns", "columns")
    assert [masked(30, 32, *blocks) for blocks in ((10, 16), (16, 16), (10, 64), (16, 64), (0, 0))] == [
        "none", "rows", "columns", "both", "both",
    ]  # fmt: skip
