"""How norms are tiled where the call does not say. Measured on an H200, 30 November 2026."""

from jtops.core.sizes import cdiv, next_power_of_2
from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Config, stages_that_fit

_ALL = 1 << 30  # PROGRAMS: one for each tile


def tail(config: Config, n: int) -> int:
    """Elements of the second tile of a row that is up to half a block longer than a block; 0 where there is none."""
    block, over = config["BLOCK_N"], n - config["BLOCK_N"]
    return next_power_of_2(max(over, min(16, block // 2))) if 0 < over <= block // 2 and (config["cluster_size"] or 1) == 1 else 0


def _block(n: int) -> int:
    """The block of a row: the power of two that holds it, or, with a second tile, the one before."""
    below = max(16, next_power_of_2(n) // 2)
    return below if below < n <= below + below // 2 else next_power_of_2(n)


def forward_config(target: Target, r: int, n: int, itemsize: int, arrays: int, *, clusters: bool = False) -> Config:
    """Blocks of the forward of r rows of n elements of that size, which reads so many arrays.

    A thread holds 64 bytes of x; rows up to 1024 have a warp, which needs no barrier. Scale and bias read anew for each long row
    are more than the L2 cache delivers: there, one or two programs a multiprocessor keep them, with the next rows on their way.
    """
    block_n = _block(n)
    stages = lambda count, elements: stages_that_fit(target, count, arrays * elements * itemsize)
    if next_power_of_2(n) * itemsize > 65536:
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512 if r >= 512 else 256, num_warps=8, num_stages=stages(3, 4096))
    if r <= 128:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=max(1, min(16, block_n // 256)))
    if block_n * itemsize > 32768:
        if clusters and block_n * itemsize == 65536 and arrays == 1:
            return Config(BLOCK_M=1, BLOCK_N=block_n // 2, PROGRAMS=64, num_warps=16, num_stages=3, cluster_size=2)
        return Config(BLOCK_M=1, BLOCK_N=next_power_of_2(n), PROGRAMS=_ALL, num_warps=32)
    if n > block_n == 4096:
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=2 * itemsize)
    if block_n >= 8192:
        block_m = 1 if n > block_n else 32768 // (block_n * itemsize)
        return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=128, num_warps=16, num_stages=stages(3, block_m * block_n))
    if block_n == 4096 and itemsize == 2:
        programs, ahead = (256, 5) if arrays == 1 else (264, 3)
        return Config(BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=programs, num_warps=8, num_stages=stages(ahead, block_n))
    if block_n == 4096:
        return Config(BLOCK_M=2, BLOCK_N=block_n, PROGRAMS=132, num_warps=8, num_stages=stages(3, 2 * block_n))
    if block_n <= 1024:
        return Config(BLOCK_M=max(1, 1024 // block_n), BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=1)
    return Config(BLOCK_M=max(1, 2048 // block_n), BLOCK_N=block_n, PROGRAMS=_ALL, num_warps=2 * itemsize)


def backward_config(target: Target, r: int, n: int, itemsize: int, arrays: int, *, clusters: bool = False) -> Config:
    """Blocks of the backward, which reads so many arrays.

    Clusters fill the GPU, less the multiprocessors without enough neighbours: a cluster that comes late would double the time.
    """
    block_n = next_power_of_2(n)
    stages = lambda elements: stages_that_fit(target, 3, arrays * elements * itemsize)
    if block_n > 8192:
        if r <= 128:
            return Config(BLOCK_M=4, BLOCK_N=1024, PROGRAMS=128, num_warps=4, num_stages=stages(4096))
        if clusters and n <= 32768:
            size = cdiv(n, 4096)
            programs = {3: 72, 4: 60}.get(size, 14 * (16 // size))
            stage = stages_that_fit(target, 3, 2 * arrays * 4096 * itemsize)  # two programs a multiprocessor
            return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=programs, num_warps=2 * itemsize, num_stages=stage, cluster_size=size)
        if clusters and n <= 65536 and itemsize == 2:
            return Config(BLOCK_M=1, BLOCK_N=8192, PROGRAMS=14, num_warps=16, num_stages=stages(8192), cluster_size=cdiv(n, 8192))
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512, num_warps=8, num_stages=stages(4096))
    if block_n == 8192:
        narrow = n < 8192 and itemsize == 2
        return Config(
            BLOCK_M=1, BLOCK_N=block_n, PROGRAMS=132 if narrow else 128, num_warps=8 if narrow else 16, num_stages=stages(block_n)
        )
    if block_n <= 512:
        programs = min(1056, max(264, r * n // 16384))
        return Config(BLOCK_M=1024 // block_n, BLOCK_N=block_n, PROGRAMS=programs, num_warps=1, num_stages=3)
    if block_n == 1024:
        return Config(BLOCK_M=2, BLOCK_N=block_n, PROGRAMS=528, num_warps=2, num_stages=3)
    block_m = min(64, 4096 // block_n)
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=264, num_warps=2 * itemsize, num_stages=stages(block_m * block_n))
