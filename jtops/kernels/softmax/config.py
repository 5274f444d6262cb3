"""The tiles of the softmax family where the call does not say. They were measured on an H200, 30 November 2026."""

from typing import Any

from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.frame.launch import Config, Launch, stages_that_fit

_KIB = 1024


def rows_config(launch: Launch, r: int, n: int, itemsize: int, *, arrays: int, writes: bool) -> Config:
    """Blocks for r rows of n elements of that size, of which a program reads so many arrays, and writes as many elements or none.

    Rows up to 1024 have a warp, which needs no barrier; longer ones have 512 to 1024 elements a warp, so that many programs share a
    multiprocessor and one's reductions hide behind another's loads. Past 64 KiB registers hold no row: two passes, or clusters.
    """
    block_n, nbytes, target = next_power_of_2(n), next_power_of_2(n) * itemsize, launch.target
    whole: dict[str, Any] = {"BLOCK_M": max(1, 1024 // block_n), "BLOCK_N": block_n, "PROGRAMS": None}
    near = target.multiprocessors // 16 * 16  # programs that fill the GPU and divide the usual numbers of rows
    twice = Config(BLOCK_M=1, BLOCK_N=8192, PROGRAMS=4 * near, num_warps=16)
    aligned = n * itemsize % 16 == 0
    clusters = launch.clusters and aligned
    if nbytes > 64 * _KIB and r < 4 * near:  # few rows: several programs each
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=4 * near, num_warps=8)
    if not writes:
        return twice if block_n > 8192 else Config(**whole, num_warps=max(1, block_n // 2048))
    if block_n <= 1024:
        return Config(**whole, num_warps=1)
    if block_n <= 8192:
        return Config(**whole, num_warps=min(8, block_n // (1024 if arrays == 1 else 512)))
    if clusters and arrays == 2 and 64 * _KIB <= nbytes <= 128 * _KIB:
        size, programs = (4, 8 * near) if nbytes == 64 * _KIB else (8, 4 * near)
        return Config(BLOCK_M=1, BLOCK_N=block_n // size, PROGRAMS=programs, num_warps=16, num_stages=3, cluster_size=size)
    if clusters and arrays == 1 and nbytes == 128 * _KIB:
        return Config(BLOCK_M=1, BLOCK_N=block_n // 8, PROGRAMS=None, num_warps=8, cluster_size=8)
    if arrays == 1 and nbytes == 32 * _KIB and r >= 4 * near:  # the second pass reads what the first left in the L1 cache
        return twice
    if nbytes < 64 * _KIB or (nbytes == 64 * _KIB and aligned):
        # 64 KiB at a time: one program a multiprocessor, with the next rows on their way while one is reduced.
        if arrays * nbytes == 64 * _KIB and stages_that_fit(target, 3, 64 * _KIB) == 3:
            return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=near, num_warps=block_n // 1024, num_stages=3)
        return Config(**whole, num_warps=block_n // 1024)
    if not aligned:
        return twice
    # Many loads on their way leave no room for other programs: so what they have read is still in the L2 cache when read again.
    ahead = 32 * _KIB
    stages = stages_that_fit(target, 5, ahead)
    return Config(BLOCK_M=1, BLOCK_N=ahead // itemsize // arrays, PROGRAMS=4 * near, num_warps=16, num_stages=stages)


def strided_config(b: int, n: int, inner: int, itemsize: int) -> Config:
    """Blocks for [b, n, inner] along n: BLOCK_M neighbours are 128 bytes, down to a sector of 32 where programs are few."""
    block_m = 128 // itemsize
    while block_m > 32 // itemsize and b * -(-inner // block_m) < 256:
        block_m //= 2
    block_m = min(block_m, next_power_of_2(inner))
    return Config(BLOCK_M=block_m, BLOCK_N=min(next_power_of_2(n), 8192 // block_m), PROGRAMS=None, num_warps=8)
