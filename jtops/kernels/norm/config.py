"""How norms are tiled where the call does not say. Measured on an H200, November 2026: benchmarks/results."""

from jtops.core.sizes import next_power_of_2
from jtops.kernels._lib.launch import Config


def forward_config(r: int, n: int, itemsize: int) -> Config:
    """Blocks of the forward of r rows of n elements of that size."""
    block_n = next_power_of_2(n)
    if block_n > 16384:
        return Config(BLOCK_M=1, BLOCK_N=4096, PROGRAMS=512, num_warps=8)
    block_m = min(64, max(1, 4096 // block_n))
    warps = min(16, max(4, block_n // 1024))
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=1 << 30, num_warps=warps)


def backward_config(r: int, n: int, itemsize: int, sums: int) -> Config:
    """Blocks of the backward, which sums the gradients of so many parameters."""
    block_n = next_power_of_2(n)
    if block_n > 8192:
        return Config(BLOCK_M=4, BLOCK_N=2048, PROGRAMS=512, num_warps=8)
    block_m = min(64, max(1, 4096 // block_n))
    warps = 8 if block_n <= 4096 else 16
    return Config(BLOCK_M=block_m, BLOCK_N=block_n, PROGRAMS=256, num_warps=warps, num_stages=2)
