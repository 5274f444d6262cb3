"""Device time of a few programs, for choosing among them: no profiler, interleaved rounds, medians."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS, ROUND_SECONDS, CHAIN = 7, 2e-3, 16
GIVE_UP = 2.0  # times the fastest: slower ones are not measured further


def operands(avals) -> list[jax.Array]:
    """Arrays to time with, noise for floats, True for bools, and 0 for integers, which may be indices."""

    def make(i, aval):
        if aval.dtype == np.bool_:
            return jnp.ones(aval.shape, aval.dtype)
        if jnp.issubdtype(aval.dtype, jnp.floating):
            index = jax.lax.iota(jnp.uint32, aval.size).reshape(aval.shape)
            return jnp.sin((index % 2**20 + i).astype(jnp.float32) * 78.233).astype(aval.dtype)
        return jnp.zeros(aval.shape, aval.dtype)

    return [jax.jit(make, static_argnums=(0, 1))(i, aval) for i, aval in enumerate(avals)]


def _chain(call: Callable, length: int) -> Callable:
    """`call` `length` times in one program, one after the other: the host's part of a launch hides behind the device's."""

    def run(*arrays):
        results = call(*arrays)
        for _ in range(length - 1):
            arrays, results = jax.lax.optimization_barrier((arrays, results))
            results = call(*arrays)
        return results

    return jax.jit(run)


def seconds(program: Callable, arrays: list, times: int) -> float:
    """Of one run of a program, among so many."""
    start = time.perf_counter()
    for _ in range(times):
        last = program(*arrays)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / times


def measure(calls: Mapping[str, Callable], avals, device: Any) -> dict[str, float | Exception]:
    """Seconds that one call takes on `device`, by name; the error of a call that fails to run.

    Args:
      calls: functions of arrays, each one launch that is never optimised away (``has_side_effect``).
      avals: shape and dtype of those arrays.
      device: where to run.
    """
    with jax.default_device(device):
        return _measure(calls, operands(avals))


def _measure(calls: Mapping[str, Callable], arrays: list) -> dict[str, float | Exception]:
    found: dict[str, float | Exception] = {}
    programs: dict[str, tuple[Callable, int]] = {}
    for name, call in calls.items():
        single = _chain(call, 1)
        try:
            jax.block_until_ready(single(*arrays))  # compiled, loaded, and known to run
            alone = min(seconds(single, arrays, 1) for _ in range(2))
            program, length = (single, 1) if alone > ROUND_SECONDS / 4 else (_chain(call, CHAIN), CHAIN)
            jax.block_until_ready(program(*arrays))
            programs[name] = program, length
        except jax.errors.JaxRuntimeError as error:
            found[name] = error
    return found | race(programs, arrays)


def race(programs: Mapping[str, tuple[Callable, int]], arrays: list) -> dict[str, float]:
    """Seconds that one call takes, by name, of programs that ran before and make so many calls each."""
    samples: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        best = min((min(s) for s in samples.values() if s), default=math.inf)
        for name, (program, length) in programs.items():
            if samples[name] and min(samples[name]) > GIVE_UP * best:
                continue
            last = samples[name][-1] * length if samples[name] else ROUND_SECONDS / 4
            times = max(1, min(64, round(ROUND_SECONDS / max(last, 1e-7))))
            samples[name].append(seconds(program, arrays, times) / length)
    return {name: statistics.median(s) for name, s in samples.items()}
