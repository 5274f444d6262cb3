"""Device time of a few programs, for choosing among them: no profiler, interleaved rounds, medians."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS, ROUND_SECONDS, CHAIN = 7, 2e-3, 16
GIVE_UP = 2.0  # times the fastest: slower ones are not measured further


def noise(number: int, aval) -> jax.Array:
    """An array to time with: noise for floats, True for bools, and 0 for integers, which may be indices."""
    if aval.dtype == np.bool_:
        return jnp.ones(aval.shape, aval.dtype)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        index = jax.lax.iota(jnp.uint32, aval.size).reshape(aval.shape)
        return jnp.sin((index % 2**20 + number).astype(jnp.float32) * 78.233).astype(aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


class Trial:
    """Arrays that all candidates of a choice are timed on, made once.

    An array that the calls change in place is filled anew before every call, inside the program and in one buffer that each run
    hands to the next: the candidates see the same values, and no array is there twice.
    """

    def __init__(self, avals, updated: Sequence[int] = ()):
        self.avals, self.updated = list(avals), tuple(updated)
        self.kept = {i: jax.jit(noise, static_argnums=(0, 1))(i, aval) for i, aval in enumerate(avals) if i not in updated}
        self.scratch: list[jax.Array] | None = None

    def program(self, call: Callable, length: int) -> Callable[[], Any]:
        """`call` `length` times in one program, one after the other: the host's part of a launch hides behind the device's."""

        def run(scratch, kept):
            results = None
            for _ in range(length):
                kept, _ = jax.lax.optimization_barrier((kept, (results, scratch)))
                arrays = [noise(i, aval) if i in self.updated else kept[i] for i, aval in enumerate(self.avals)]
                results, scratch = call(*arrays)
            return results, scratch

        compiled = jax.jit(run, donate_argnums=0, keep_unused=True)

        def once():
            scratch, self.scratch = self.scratch, None  # lost if the program fails
            results, self.scratch = compiled(self._scratch() if scratch is None else scratch, self.kept)
            return results, self.scratch

        return once

    def _scratch(self) -> list[jax.Array]:
        return [jnp.zeros(self.avals[i].shape, self.avals[i].dtype) for i in self.updated]


def seconds(program: Callable, arrays: list, times: int) -> float:
    """Of one run of a program, among so many."""
    start = time.perf_counter()
    for _ in range(times):
        last = program(*arrays)
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / times


def measure(calls: Mapping[str, Callable], avals, device: Any, updated: Sequence[int] = ()) -> dict[str, float | Exception]:
    """Seconds that one call takes on `device`, by name; the error of a call that fails to run.

    Args:
      calls: functions of arrays, each one launch that is never optimised away (``has_side_effect``); they return its results, and
        the list of what `updated` arrays hold afterwards.
      avals: shape and dtype of those arrays.
      device: where to run.
      updated: the numbers of arrays that the launch changes in place.
    """
    found: dict[str, float | Exception] = {}
    programs: dict[str, tuple[Callable, int]] = {}
    with jax.default_device(device):
        try:
            trial = Trial(avals, updated)
        except jax.errors.JaxRuntimeError as error:
            return dict.fromkeys(calls, error)
        for name, call in calls.items():
            single = trial.program(call, 1)
            try:
                jax.block_until_ready(single())  # compiled, loaded, and known to run
                alone = min(seconds(single, [], 1) for _ in range(2))
                program, length = (single, 1) if alone > ROUND_SECONDS / 4 else (trial.program(call, CHAIN), CHAIN)
                jax.block_until_ready(program())
                programs[name] = program, length
            except jax.errors.JaxRuntimeError as error:
                found[name] = error
        return found | race(programs, [])


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
