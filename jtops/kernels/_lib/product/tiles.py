"""Which tiles a product is cut into, by rule. Configs that were measured on a GPU belong in its table, which comes first."""

from typing import NamedTuple

from jtops.core.sizes import cdiv, next_power_of_2
from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Config

_BLOCKS = (256, 128, 64, 32, 16)
_LARGEST = {"half": (128, 256), "tf32": (128, 128), "tf32x3": (64, 64)}  # tile whose sums registers hold beside the operands
_SPLIT_K = 512  # elements of k that are worth a program and a line of partial sums
_READ_SHARED = {90, 100, 103, 110}  # CUDA architectures whose tensor cores read operands from shared memory, not from registers
_LINE = 128  # bytes of k to load at once: a line of the swizzled shared memory that tensor cores read


class Shape(NamedTuple):
    """What the choice of tiles depends on: sizes, `sums` of one tile at once, `terms` of each, and how elements are multiplied."""

    m: int
    n: int
    k: int
    batch: int
    sums: int
    terms: int
    itemsize: int
    arithmetic: str  # "half", "tf32" or "tf32x3"
    b_transposed: bool

    def splits(self, config: Config, target: Target) -> int:
        """The number of sums into which to split k, so that few tiles still occupy the GPU."""
        return max(1, min(target.multiprocessors // self._tiles(config), self.k // _SPLIT_K))

    def programs(self, config: Config, target: Target) -> int:
        """The number of programs that `config` makes."""
        return self._tiles(config) * self.splits(config, target)

    def _tiles(self, config: Config) -> int:
        return self.batch * cdiv(self.m, config["BLOCK_M"]) * cdiv(self.n, config["BLOCK_N"])


def heuristic(shape: Shape, target: Target) -> Config:
    """The largest tiles that fit the shape and shared memory and occupy the GPU; else those that make the most programs."""
    found = [config for blocks in _blocks(shape, target) if (config := _config(shape, *blocks, target.max_shared_bytes))]
    enough = (c for c in found if shape.programs(c, target) >= 0.75 * target.multiprocessors)
    return next(enough, None) or max(found, key=lambda c: shape.programs(c, target))


def _blocks(shape: Shape, target: Target) -> list[tuple[int, int]]:
    """BLOCK_M and BLOCK_N, largest tiles first: near squares, and strips for few rows or columns."""
    fits = lambda block, size: block <= max(16, next_power_of_2(size))
    short, long = _LARGEST[shape.arithmetic]
    room = short * long // shape.sums
    if shape.sums * shape.terms > 1 and target.platform == "cuda" and target.arch not in _READ_SHARED:
        room //= 2  # for operands, and pointers to more of them
    found = [
        (m, n)
        for m in _BLOCKS
        for n in _BLOCKS
        if fits(m, shape.m) and fits(n, shape.n)
        if m * n <= room and max(m, n) <= long
        if max(m, n) <= 2 * min(m, n) or (min(m, n) == 16 and max(m, n) <= 128)
        if not (n == 256 and shape.b_transposed)  # ptxas 12.8 then runs one wgmma at a time (C7515)
    ]
    return sorted(found, key=lambda blocks: (-blocks[0] * blocks[1], max(blocks), -blocks[1]))


def _config(shape: Shape, block_m: int, block_n: int, max_shared_bytes: int) -> Config | None:
    """The config with as much of k at once as fits, down to half a line; None if that is too much."""
    warps = 8 if block_m * block_n * shape.sums >= 128 * 128 else 4
    stages = 3 if warps == 8 or shape.itemsize == 4 else 4
    lines = 2 if min(block_m, block_n) == 16 and shape.arithmetic != "tf32x3" else 1  # what is read most is read most at once
    for block_k in (lines * _LINE // shape.itemsize, lines * _LINE // shape.itemsize // 2):
        if stages * (block_m + block_n * shape.sums) * block_k * shape.itemsize <= max_shared_bytes:
            return Config(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages)
    return None
