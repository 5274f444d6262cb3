"""How norms are tiled where the call does not say. Measured on an H200, 30 November 2026."""

from jtops.core.sizes import next_power_of_2
from jtops.core.target import Target
from jtops.kernels._lib.launch import Config, stages_that_fit

_ALL = 1 << 30  # PROGRAMS: one for each tile


def forward_config(target: Target, r: int, n: int, itemsize: int, arrays: int) -> Config:
    """Blocks of the forward of r rows of n elements of that size, which reads so many arrays.

    A thread holds 64 bytes of x. Scale and bias read anew for each long row are more than the L2 cache delivers: there one or two
    programs a multiprocessor keep them, and have the next rows on their way.
    """
    block_n = next_power_of_2(n)
    stages = lambda count, elements: stages_that_fit(target, count, arrays * elements * itemsize)
    if block_n * itemsize > 65536:
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512 if r >= 512 else 256, num_warps=8, num_stages=stages(3, 4096))
    if r <= 128:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=max(1, min(16, block_n // 256)))
    if block_n * itemsize > 32768:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=32)
    if block_n >= 8192:
        block_m = 32768 // (block_n * itemsize)
        return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=128, num_warps=16, num_stages=stages(3, block_m * block_n))
    if block_n == 4096 and itemsize == 2:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=256, num_warps=8, num_stages=stages(5, block_n))
    return Config(BLOCK_M=min(64, 4096 // block_n), BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=2 * itemsize)


def backward_config(target: Target, r: int, n: int, itemsize: int, arrays: int) -> Config:
    """Blocks of the backward, which reads so many arrays."""
    block_n = next_power_of_2(n)
    stages = lambda elements: stages_that_fit(target, 3, arrays * elements * itemsize)
    if block_n > 8192:
        if r <= 128:
            return Config(BLOCK_M=4, BLOCK_N=1024, PROGRAMS=128, num_warps=4, num_stages=stages(4096))
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512, num_warps=8, num_stages=stages(4096))
    if block_n == 8192:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=128, num_warps=16, num_stages=stages(block_n))
    if block_n <= 1024 and itemsize == 2:
        block_m = min(64, 2048 // block_n)
        ahead = stages_that_fit(target, 4, arrays * block_m * block_n * itemsize)
        return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=512, num_warps=2, num_stages=ahead)
    block_m = min(64, 4096 // block_n)
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=256, num_warps=2 * itemsize, num_stages=stages(block_m * block_n))
