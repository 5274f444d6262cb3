"""Device time of a few programs, for choosing among them: no profiler, interleaved rounds, medians."""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROUNDS, ROUND_SECONDS, CHAIN = 7, 2e-3, 16
COLD, RESULTS = 2**28, 2**30  # bytes: of operands that no cache holds; of results that a program may have
_running = threading.Semaphore(4)  # programs that are tried at once, for the memory of their results
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
    """Programs of several candidates on the same data, made once: so many calls in a row that the host's part of a launch hides.

    An array that the calls change in place is filled anew before every call, inside the program and in one buffer that each run
    hands to the next: the candidates see the same values, and no array is there twice.
    """

    def __init__(self, avals: Sequence[jax.ShapeDtypeStruct], updated: Sequence[int] = (), device: Any = None):
        self.avals, self.updated, self.device = list(avals), tuple(updated), device
        self.scratch: list[jax.Array] | None = None
        self.programs: dict[Any, tuple[Callable[[], Any], int]] = {}
        self.calls = 1
        self.sets = [self.operands(0)]

    def operands(self, seed: int) -> list[jax.Array | None]:
        """Arrays for a call, without those that it changes."""
        make = jax.jit(noise, static_argnums=(0, 1))
        offset = seed * len(self.avals)
        with jax.default_device(self.device):
            return [None if i in self.updated else make(offset + i, aval) for i, aval in enumerate(self.avals)]

    def lower(self, call: Callable, length: int) -> Any:
        """`call` `length` times in one program. It returns all results, and each call waits for that before: none is left out."""

        def run(scratch, sets):
            done: list = []
            for i in range(length):
                kept = sets[i % len(sets)]
                if done:
                    kept, done[-1], scratch = jax.lax.optimization_barrier((kept, done[-1], scratch))
                arrays = [noise(n, aval) if n in self.updated else kept[n] for n, aval in enumerate(self.avals)]
                results, scratch = call(*arrays)
                done.append(results)
            return done, scratch

        scratch = [jax.ShapeDtypeStruct(self.avals[i].shape, self.avals[i].dtype) for i in self.updated]
        return jax.jit(run, donate_argnums=0, keep_unused=True).lower(scratch, self.sets)

    def program(self, call: Callable, length: int) -> Callable[[], Any]:
        """What `lower` makes, to be run."""
        return self.loaded(self.lower(call, length).compile())

    def loaded(self, compiled: Callable) -> Callable[[], Any]:
        """A compiled program as a function of nothing: -> the results of each call, and the arrays that they change."""

        def once():
            scratch, self.scratch = self.scratch, None  # lost if the program fails
            results, self.scratch = compiled(self._scratch() if scratch is None else scratch, self.sets)
            return results, self.scratch

        return once

    def load(self, name: Any, lowered: Any) -> None:
        """Compile what `lower` made of `calls`, and run it once; it is known by `name` if it ran."""
        program = self.loaded(lowered.compile())
        with _running:  # the driver compiles, too, and may find that the GPU has less than is asked for
            jax.block_until_ready(program())
        self.programs[name] = program, self.calls

    def _scratch(self) -> list[jax.Array]:
        return [jnp.zeros(self.avals[i].shape, self.avals[i].dtype) for i in self.updated]

    def run(self, name: Any) -> list[jax.Array]:
        """The first call's results."""
        return jax.block_until_ready(self.programs[name][0]())[0][0]

    def lengthened(self, *names: Any) -> bool:
        """Whether the fastest of these is so quick that `calls` of it make a program from now on, on data that no cache holds."""
        alone = {name: min(seconds(self.programs[name][0], 1) for _ in range(3)) for name in names}
        if min(alone.values()) >= ROUND_SECONDS / 4:
            return False
        calls = max(1, min(CHAIN, RESULTS // max(1, sum(o.nbytes for o in jax.tree.leaves(self.run(names[0]))))))
        own = sum(x.nbytes for x in self.sets[0] if x is not None)
        self.sets += [self.operands(i) for i in range(1, min(calls, -(-COLD // max(own, 1))))]
        self.calls = calls
        return True

    def race(self, names: Iterable[Any]) -> dict[Any, float]:
        """Seconds of a call."""
        return race({name: self.programs[name] for name in names})


def seconds(program: Callable, times: int) -> float:
    """Of one run of a program, among so many."""
    start = time.perf_counter()
    for _ in range(times):
        last = program()
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
    failed: dict[str, Exception] = {}

    def build(names: list[str]) -> None:
        for name in names:
            try:
                trial.load(name, trial.lower(calls[name], trial.calls))
            except jax.errors.JaxRuntimeError as error:
                if name not in trial.programs:  # else one call's program is timed
                    failed[name] = error

    with jax.default_device(device):
        try:
            trial = Trial(avals, updated, device)
        except jax.errors.JaxRuntimeError as error:
            return dict.fromkeys(calls, error)
        build(list(calls))
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no memory for more data
            if trial.programs and trial.lengthened(*trial.programs):
                build(list(trial.programs))
        return failed | trial.race(trial.programs)


def race(programs: Mapping[Any, tuple[Callable, int]]) -> dict[Any, float]:
    """Seconds that one call takes, by name, of programs that ran before and make so many calls each."""
    samples: dict[Any, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        best = min((min(s) for s in samples.values() if s), default=math.inf)
        for name, (program, length) in programs.items():
            if samples[name] and min(samples[name]) > GIVE_UP * best:
                continue
            last = samples[name][-1] * length if samples[name] else ROUND_SECONDS / 4
            times = max(1, min(64, round(ROUND_SECONDS / max(last, 1e-7))))
            samples[name].append(seconds(program, times) / length)
    return {name: statistics.median(s) for name, s in samples.items()}
