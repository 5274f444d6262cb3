"""Timing on a GPU: device time by CUPTI, interleaved rounds, inputs that rotate past the caches, ceilings of the same run.

All implementations of a case are measured together, round by round, so that clocks and temperature are the same for all. Each gets
the same random inputs, as several copies in turn, so that none finds its operands in the L2 cache.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler

ROUNDS, WARMUP = 7, 2
L2_BYTES = 64 * 2**20  # of the largest GPUs we know
MIN_ROTATION_BYTES = 4 * L2_BYTES


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one implementation, in seconds of device time per call."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Half of the range, relative to the median."""
        return (max(self.samples) - min(self.samples)) / 2 / self.median


def device_seconds(f: Callable, args: tuple) -> float:
    """Sum of the durations of the kernels that one call runs, as CUPTI measures them."""
    _, milliseconds = profiler.measure(f, aggregate=True)(*args)
    if not milliseconds:
        raise RuntimeError("CUPTI reported no kernel: is another profiler attached, or was the program empty?")
    return milliseconds / 1e3


def copies(make: Callable[[int], tuple]) -> list[tuple]:
    """Enough draws of a case's operands that a round of them does not fit in the L2 cache; at least two."""
    first = make(0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    return [first, *(make(i) for i in range(1, max(2, min(16, -(-MIN_ROTATION_BYTES // max(size, 1))))))]


def measure(implementations: dict[str, Callable], make: Callable[[int], tuple], rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time jitted functions of the same operands, interleaved."""
    inputs = copies(make)
    compiled = {name: jax.jit(f) for name, f in implementations.items()}
    for f in compiled.values():
        for i in range(WARMUP):
            jax.block_until_ready(f(*inputs[i % len(inputs)]))
    samples: dict[str, list[float]] = {name: [] for name in compiled}
    for turn in range(rounds):
        for name, f in compiled.items():
            samples[name].append(device_seconds(f, inputs[turn % len(inputs)]))
    return {name: Timing(tuple(s)) for name, s in samples.items()}


@functools.cache
def copy_speed(nbytes: int) -> float:
    """Bytes per second, read and written, of a copy that moves about `nbytes` in all: the ceiling of a memory-bound op."""
    n = max(nbytes // 2 // 4, 1)
    make = lambda seed: (jax.random.normal(jax.random.key(seed), (n,), jnp.float32),)
    copy = lambda: measure({"copy": lambda x: jax.lax.optimization_barrier(x) + 1.0}, make)["copy"].median
    return 2 * 4 * n / min(copy(), copy())  # a ceiling that was disturbed would flatter all that is measured against it


@functools.cache
def matmul_speed(dtype: str) -> float:
    """Floating-point operations per second of XLA's product of two large matrices: the ceiling of an op bound by arithmetic."""
    n = 8192
    make = lambda seed: tuple(jax.random.normal(key, (n, n), dtype) for key in jax.random.split(jax.random.key(seed)))
    timing = measure({"matmul": lambda a, b: jnp.matmul(a, b, precision="highest")}, make)["matmul"]
    return 2 * n**3 / timing.median
