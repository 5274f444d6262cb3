"""What launchers of row ops work out: the grids of whole and of long rows, and what kernels must know of them."""

import math
from typing import Any, NamedTuple

from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.frame.launch import Config


class Tiles(NamedTuple):
    """How programs, or clusters of them, share `r` whole rows: each has `tiles` tiles, which lie `programs` tiles apart."""

    r: int
    tiles: int
    programs: int


class Split(NamedTuple):
    """How programs share each long row: in `splits` parts of `blocks` blocks. `index_type` is that function of its length."""

    splits: int
    blocks: int
    index_type: str | None


def index_type(n: int) -> str | None:
    """The type that positions among n elements, and in the last block past them, need; None where 32 bits hold them."""
    largest_block = 1 << 20  # that Triton takes
    return None if n < 2**31 - 2 * largest_block else "int64"


def unit(n: int) -> int:
    """The constant UNIT for a size: the compiler knows a multiple of 16 already, other powers of two up to 8 have to be told."""
    return 1 if n % 16 == 0 else math.gcd(n, 8)


def vector(r: int, n: int, itemsize: int, room: float = math.inf) -> int:
    """The elements of a vector if rows have to be shifted, by up to one less, and `room` lanes are enough for it; else 1.

    It is 1 also where the array's end cuts a vector, which must not be read.
    """
    size = 16 // itemsize
    return size if n % size and r * n % size == 0 and 4 * size <= n <= room - size + 1 else 1


def lanes(n: int, vector: int) -> int:
    """The most lanes that a row has, as `lanes_of` says in kernels: whole vectors, and those before its begin."""
    return cdiv(n + vector - 1, vector) * vector


def launched(config: Config, *lacking: str) -> Config:
    """What kernels take of a config: no PROGRAMS, which the grid has, nor `lacking`; one tile on its way unless it says more."""
    settings = config.without("PROGRAMS", *lacking).kwargs
    return Config(**settings | {"num_stages": config["num_stages"] or 1}, source=config.source)


def room(config: Config) -> int:
    """The length of the longest row that a program, or a cluster of them, holds in its registers."""
    return config["BLOCK_N"] * config["cluster_size"]


def whole_rows(config: Config, r: int, lanes: int) -> dict[str, Any]:
    """The arguments of a kernel that holds rows of so many lanes, and the grid of its launch."""
    total = cdiv(r, config["BLOCK_M"])
    programs = min(config["PROGRAMS"] or total, total)
    return {"work": Tiles(r, cdiv(total, programs), programs), **clustered(config, lanes, programs)}


def clustered(config: Config, lanes: int, programs: int) -> dict[str, Any]:
    """The arguments that tell a kernel about its clusters, where `programs` of them share rows of so many lanes; and the grid."""
    size = config["cluster_size"]
    return {
        "part_n": cdiv(cdiv(lanes, size), 16) * 16,
        "CLUSTER": size,
        "FULL": lanes >= room(config),
        "config": launched(config),
        "grid": programs * size,
    }


def long_rows(config: Config, r: int, n: int, vector: int = 1) -> dict[str, Any]:
    """The arguments of a kernel that shares r rows of n elements, shifted if `vector` is more than 1, and the launch's grid."""
    blocks = cdiv(lanes(n, vector), config["BLOCK_N"])
    each = cdiv(blocks, max(1, (config["PROGRAMS"] or r * blocks) // r))
    splits = cdiv(blocks, each)
    return {
        "split": Split(splits, each, index_type(n)),
        "SPLITS": next_power_of_2(splits),
        "config": launched(config, "BLOCK_M"),
        "grid": r * splits,
    }
