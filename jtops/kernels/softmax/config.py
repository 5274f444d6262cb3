"""How the softmax family is tiled where the call does not say. Measured on an H200, November 2026: benchmarks/results."""

from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.launch import Config


def rows_config(r: int, n: int, itemsize: int, arrays: int) -> Config:
    """Blocks for r rows of n elements of that size, of which a program reads so many arrays."""
    block_n = next_power_of_2(n)
    if block_n > 32768 // arrays:
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512, num_warps=8)
    block_m = min(64, max(1, 4096 // block_n))
    warps = 4 if block_n <= 2048 else 8 if block_n <= 8192 else 16
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=1 << 30, num_warps=warps)


def strided_config(b: int, n: int, inner: int, itemsize: int) -> Config:
    """Blocks for [b, n, inner] along n: BLOCK_M neighbours are 128 bytes, down to a sector of 32 where programs are few."""
    block_m = 128 // itemsize
    while block_m > 32 // itemsize and b * -(-inner // block_m) < 256:
        block_m //= 2
    block_m = min(block_m, next_power_of_2(inner))
    return Config(BLOCK_M=block_m, BLOCK_N=min(next_power_of_2(n), 8192 // block_m), PROGRAMS=1, num_warps=8)
