"""The tiles of norms where the call does not say. They were measured on an H200, 30 November 2026."""

from typing import Any

from jtops.core.sizes import cdiv, next_power_of_2
from jtops.kernels._lib.frame.launch import Config, Launch, stages_that_fit

_KIB = 1024


def tail(config: Config, n: int) -> int:
    """Elements of the second tile of a row that is up to half a block longer than a block; 0 where there is none."""
    block, over = config["BLOCK_N"], n - config["BLOCK_N"]
    return next_power_of_2(max(over, min(16, block // 2))) if 0 < over <= block // 2 and config["cluster_size"] == 1 else 0


def _block(n: int) -> int:
    """The block of a row: the power of two that holds it, or, with a second tile, the one before."""
    below = max(16, next_power_of_2(n) // 2)
    return below if below < n <= below + below // 2 else next_power_of_2(n)


def _near(launch: Launch) -> int:
    """Programs that fill the GPU, one a multiprocessor, and divide the usual numbers of rows."""
    return launch.target.multiprocessors // 16 * 16


def forward_config(launch: Launch, r: int, n: int, itemsize: int, *, arrays: int) -> Config:
    """Blocks of the forward of r rows of n elements of that size, which reads so many arrays.

    A thread holds 64 bytes of x; rows up to 1024 have a warp, which needs no barrier. Scale and bias read anew for each long row
    are more than the L2 cache delivers: there, one or two programs a multiprocessor keep them, and the next rows are on their way.
    """
    block_n, near, every = _block(n), _near(launch), launch.target.multiprocessors
    stages = lambda count, elements: stages_that_fit(launch.target, count, arrays * elements * itemsize)
    whole: dict[str, Any] = {"BLOCK_M": 1, "BLOCK_N": block_n, "PROGRAMS": None}
    if next_power_of_2(n) * itemsize > 64 * _KIB:
        programs = 4 * near if r >= 4 * near else 2 * near
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=programs, num_warps=8, num_stages=stages(3, 4096))
    if r <= near:
        return Config(**whole, num_warps=max(1, min(16, block_n // 256)))
    if block_n * itemsize > 32 * _KIB:
        if launch.clusters and n * itemsize % 16 == 0 and block_n * itemsize == 64 * _KIB and arrays == 1:
            # Half as many clusters as programs of one multiprocessor.
            return Config(BLOCK_M=1, BLOCK_N=block_n // 2, PROGRAMS=near // 2, num_warps=16, num_stages=3, cluster_size=2)
        return Config(**whole | {"BLOCK_N": next_power_of_2(n)}, num_warps=32)
    if block_n < 4096 or n > block_n == 4096:
        block_m, warps = (1024, 1) if block_n <= 1024 else (2048, 2 * itemsize)
        return Config(**whole | {"BLOCK_M": max(1, block_m // block_n)}, num_warps=warps)
    # What a program holds of scale and bias serves many rows, of which it has 16 or 32 KiB at a time.
    if block_n >= 8192:
        block_m, programs, warps, ahead = 1 if n > block_n else 32 * _KIB // (block_n * itemsize), near, 16, 3
    elif itemsize == 2:
        block_m, warps = 1, 8
        programs, ahead = (2 * near, 5) if arrays == 1 else (2 * every, 3)
    else:
        block_m, programs, warps, ahead = 2, every, 8, 3
    held: dict[str, Any] = {"BLOCK_M": block_m, "BLOCK_N": block_n, "PROGRAMS": programs}
    return Config(**held, num_warps=warps, num_stages=stages(ahead, block_m * block_n))


def backward_config(launch: Launch, r: int, n: int, itemsize: int, *, arrays: int) -> Config:
    """Blocks of the backward, which reads so many arrays. Programs are few, because each leaves a row of partial sums."""
    block_n, near, every = next_power_of_2(n), _near(launch), launch.target.multiprocessors
    stages = lambda elements: stages_that_fit(launch.target, 3, arrays * elements * itemsize)
    tile: dict[str, Any]
    if block_n > 8192:
        size = _cluster(launch, n, itemsize)
        if r <= near:
            return Config(BLOCK_M=4, BLOCK_N=1024, PROGRAMS=near, num_warps=4, num_stages=stages(4096))
        if size and n <= 32768:
            tile = {"BLOCK_M": 1, "BLOCK_N": 4096, "PROGRAMS": _clusters(launch, size), "num_warps": 2 * itemsize}
            return Config(**tile, num_stages=stages(2 * 4096), cluster_size=size)  # two programs share a multiprocessor
        if size:  # one has a multiprocessor: then there are as many as of 16 with two
            tile = {"BLOCK_M": 1, "BLOCK_N": 8192, "PROGRAMS": _clusters(launch, 16), "num_warps": 16}
            return Config(**tile, num_stages=stages(8192), cluster_size=size)
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=4 * near, num_warps=8, num_stages=stages(4096))
    if block_n == 8192:
        programs, warps = (every, 8) if n < 8192 and itemsize == 2 else (near, 16)
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=programs, num_warps=warps, num_stages=stages(block_n))
    if block_n <= 512:
        programs = min(8 * every, max(2 * every, r * n // 16384))
        return Config(BLOCK_M=1024 // block_n, BLOCK_N=block_n, PROGRAMS=programs, num_warps=1, num_stages=3)
    if block_n == 1024:
        return Config(BLOCK_M=2, BLOCK_N=block_n, PROGRAMS=4 * every, num_warps=2, num_stages=3)
    block_m = min(64, 4096 // block_n)
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "PROGRAMS": 2 * every}
    return Config(**tile, num_warps=2 * itemsize, num_stages=stages(block_m * block_n))


def _cluster(launch: Launch, n: int, itemsize: int) -> int:
    """The number of programs of a cluster that holds a row of n elements, with 4096 each or else 8192; 0 where there is none."""
    if not launch.clusters or n * itemsize % 16 or n > (65536 if itemsize == 2 else 32768):
        return 0
    return cdiv(n, 4096 if n <= 32768 else 8192)


# Clusters of 3 and 4 programs for which an H200 has room at once, two programs a multiprocessor, found by trying.
_ROOM = {3: 72, 4: 60}


def _clusters(launch: Launch, size: int) -> int:
    """The number of clusters of `size` programs, two programs a multiprocessor, that fill the GPU less the multiprocessors without
    enough neighbours: a cluster that comes late would double the time. A GPU's multiprocessors are in groups of 16 or 18, two of
    eight of which lack some.
    """
    return _ROOM.get(size, (launch.target.multiprocessors * 2 // 16 - 2) * (16 // size))
