"""How the softmax family is tiled where the call does not say. Measured on an H200, 30 November 2026."""

from jtops.core.sizes import next_power_of_2
from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Config, stages_that_fit

_ALL = 1 << 30  # PROGRAMS: one for each tile


def rows_config(
    target: Target, r: int, n: int, itemsize: int, arrays: int, *, writes: bool = True, clusters: bool = False
) -> Config:
    """Blocks for r rows of n elements of that size, of which a program reads so many arrays, and writes as many elements or none.

    Rows up to 1024 have a warp, which needs no barrier; longer ones have 512 to 1024 elements a warp, so that many programs share a
    multiprocessor and one's reductions hide behind another's loads. Past 64 KiB registers hold no row: two passes, or clusters.
    """
    block_n, nbytes = next_power_of_2(n), next_power_of_2(n) * itemsize
    aligned = n * itemsize % 16 == 0
    clusters = clusters and aligned
    if r < 512 and nbytes > 65536:
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512, num_warps=8)
    if not writes:
        if block_n > 8192:
            return Config(BLOCK_M=1, BLOCK_N=8192, PROGRAMS=512, num_warps=16)
        return Config(BLOCK_M=max(1, 1024 // block_n), BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=max(1, block_n // 2048))
    if block_n <= 8192:
        warps = max(1, min(8, block_n // (1024 if arrays == 1 else 512)))
        return Config(BLOCK_M=max(1, 1024 // block_n), BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=1 if block_n <= 1024 else warps)
    if clusters and arrays == 2 and 65536 <= nbytes <= 131072:
        block = block_n // 4 if nbytes == 65536 else block_n // 8
        programs = 1024 if nbytes == 65536 else 512
        return Config(BLOCK_M=1, BLOCK_N=block, PROGRAMS=programs, num_warps=16, num_stages=3, cluster_size=block_n // block)
    if clusters and arrays == 1 and nbytes == 131072:
        return Config(BLOCK_M=1, BLOCK_N=block_n // 8, PROGRAMS=_ALL, num_warps=8, cluster_size=8)
    if arrays == 1 and block_n == 16384 and itemsize == 2 and r >= 512:  # the second pass reads what the first left in the L1 cache
        return Config(BLOCK_M=1, BLOCK_N=8192, PROGRAMS=512, num_warps=16)
    if nbytes <= 65536 and (aligned or nbytes < 65536):
        warps = block_n // 1024
        # 64 KiB at a time: one program a multiprocessor, with the next rows on their way while one is reduced.
        if arrays * nbytes == 65536 and stages_that_fit(target, 3, 65536) == 3:
            return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=128, num_warps=warps, num_stages=3)
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=warps)
    if not aligned:
        return Config(BLOCK_M=1, BLOCK_N=8192, PROGRAMS=512, num_warps=16)
    block = 32768 // itemsize // arrays
    # Many loads on their way leave no room for other programs: so what they have read is still in the L2 cache when read again.
    stages = stages_that_fit(target, 5, arrays * block * itemsize)
    return Config(BLOCK_M=1, BLOCK_N=block, PROGRAMS=512, num_warps=16, num_stages=stages)


def strided_config(b: int, n: int, inner: int, itemsize: int) -> Config:
    """Blocks for [b, n, inner] along n: BLOCK_M neighbours are 128 bytes, down to a sector of 32 where programs are few."""
    block_m = 128 // itemsize
    while block_m > 32 // itemsize and b * -(-inner // block_m) < 256:
        block_m //= 2
    block_m = min(block_m, next_power_of_2(inner))
    return Config(BLOCK_M=block_m, BLOCK_N=min(next_power_of_2(n), 8192 // block_m), PROGRAMS=1, num_warps=8)
