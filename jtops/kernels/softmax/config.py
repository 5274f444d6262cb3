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
