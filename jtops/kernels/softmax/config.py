"""How the softmax family is tiled where the call does not say. Measured on an H200, 30 November 2026."""

from jtops.core.sizes import next_power_of_2
from jtops.core.target import Target
from jtops.kernels._lib.launch import Config, stages_that_fit

_ALL = 1 << 30  # PROGRAMS: one for each tile


def rows_config(target: Target, r: int, n: int, itemsize: int, arrays: int) -> Config:
    """Blocks for r rows of n elements of that size, of which a program reads so many arrays."""
    block_n = next_power_of_2(n)
    if block_n > 32768 or block_n * itemsize > 65536:
        if r < 512:
            return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512, num_warps=8)
        stages = stages_that_fit(target, 3, arrays * 8192 * itemsize)
        return Config(BLOCK_M=1, BLOCK_N=8192, PROGRAMS=512, num_warps=16, num_stages=stages)
    if block_n <= 4096:
        warps = 8 if block_n == 4096 or arrays == 2 else 4
        return Config(BLOCK_M=min(64, 4096 // block_n), BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=warps)
    warps = {8192: 8, 16384: 16, 32768: 32}[block_n]
    # 64 KiB at a time: one program a multiprocessor, with the next rows on their way while one is reduced.
    if block_n > 8192 and arrays * block_n * itemsize == 65536 and stages_that_fit(target, 3, 65536) == 3:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=128, num_warps=warps, num_stages=3)
    return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=warps)


def strided_config(b: int, n: int, inner: int, itemsize: int) -> Config:
    """Blocks for [b, n, inner] along n: BLOCK_M neighbours are 128 bytes, down to a sector of 32 where programs are few."""
    block_m = 128 // itemsize
    while block_m > 32 // itemsize and b * -(-inner // block_m) < 256:
        block_m //= 2
    block_m = min(block_m, next_power_of_2(inner))
    return Config(BLOCK_M=block_m, BLOCK_N=min(next_power_of_2(n), 8192 // block_m), PROGRAMS=1, num_warps=8)
