"""Tune the library's own ops: measure configs on this GPU and put those that beat the heuristics into a table.

    python -m jtops.tune softmax --dtype bfloat16 float32        # the sizes that the op's SPEC names, forward and gradients
    python -m jtops.tune rms_norm --shape 8192x5120              # a size of one's own
    python -m jtops.tune matmul --case mlp --shape 8192x5120,5120x20480,20480
    python -m jtops.tune all --budget 540 --write shipped        # sizes of models first; --first N goes on where that ended
    python -m jtops.tune all --budget 540 --write shipped --check

Whole programs are tuned by `tune`, which finds every kernel that a function such as a training step launches. What is lowered
afterwards, in other processes or by functions that JAX has not compiled yet, takes what was found: see
`jtops.kernels._lib.frame.tuned` for the tables. Nothing else ever times the library's ops.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jtops import config
from jtops.core import target
from jtops.core.mesh import partition
from jtops.core.tuning import table as tuning_table
from jtops.core.tuning import timing
from jtops.errors import JtopsError, KernelCompileError, UnsupportedError
from jtops.kernels import specs
from jtops.kernels._lib.frame import tuned
from jtops.kernels._lib.frame.config import Config
from jtops.kernels._lib.frame.local import run_kernel
from jtops.kernels._lib.frame.op import fused_p
from jtops.kernels._lib.frame.stages import Call, spread
from jtops.kernels._lib.spec import Case, Input, Spec, with_gradients

STEP, WORTH = 0.98, 0.97  # of the time of the best so far, to go on from a config; of the heuristic's, to write it down
SLOWER = 1.02  # of the heuristic's, for `check` to delete an entry
_AT_ONCE, _HELD = 4, 2**33  # choices under way at once, so that the compiler's threads have work; bytes of their operands
_PATIENCE = 60.0  # seconds after which a config that is still not built counts as one that does not work
_THREADS = "jtops-tune"


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What tuning found for one choice.

    `said` is "tuned", "heuristic", "explicit" (given by the call, not tuned), "no time", or "failed": then `error` says why.
    """

    problem: tuning_table.Problem
    said: str
    config: Config
    seconds: float = math.nan  # of the stage, with `config`
    heuristic_seconds: float = math.nan
    dropped: tuple[str, ...] = ()  # configs that were faster and computed something else
    error: Exception | None = None

    def __str__(self):
        times = f"{self.heuristic_seconds * 1e6:9.1f} -> {self.seconds * 1e6:9.1f} us" if self.seconds > 0 else " " * 25
        wrong = "".join(f"\n  DROPPED, computes something else: {config}" for config in self.dropped)
        return f"{times}  {self.said:9}  {self.problem}  {self.config}{wrong}" + (f"\n  {self.error}" if self.error else "")


# ------------------------------------------------------------------------------------------------- which choices there are


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    """A choice, the call in which it is made, and that call's operands."""

    call: Call
    avals: tuple[jax.ShapeDtypeStruct, ...]
    choice: tuned.Choice
    now: Config  # what is settled at present


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of the ops' primitive, wherever they are: below jit, scan, cond, remat, shard_map, custom rules."""
    for equation in jaxpr.eqns:
        if equation.primitive is fused_p:
            yield equation
        for leaf in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
            if isinstance(leaf, Jaxpr | ClosedJaxpr):
                yield from _equations(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf)


def _stage(call: Call, platform: str) -> Callable:
    """What a bound equation comes to on one device."""
    return partition.outside_mesh(functools.partial(run_kernel, call, platform))


def _tasks(f: Callable, args: tuple, platform: str) -> list[_Task]:
    """Every distinct choice that the kernels of ``f(*args)`` make."""
    found: dict[tuning_table.Problem, _Task] = {}
    for equation in _equations(jax.make_jaxpr(functools.partial(f))(*args).jaxpr):  # a new function: JAX remembers traces
        call = equation.params["call"]
        avals = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in equation.invars)
        kernel = call.has_launcher and call.implementation in (None, "triton") and all(math.prod(a.shape) for a in avals)
        if kernel and call.limits(spread(avals[: call.n_in], call.present)) is None:
            with tuned.choices() as choices:
                jax.eval_shape(_stage(call, platform), *avals)
            for choice, now in choices:
                if choice.problem not in found or found[choice.problem].now.source == "explicit":
                    found[choice.problem] = _Task(call, avals, choice, now)
    return list(found.values())


# ------------------------------------------------------------------------------------------------------------ candidates


def neighbours(start: Config) -> list[Config]:
    """Configs one step away: a block, the warps or the stages more or less, or two of them so that the rest fits."""
    now, groups, stages = start.kwargs, start.blocks.get("WARPGROUPS"), start["num_stages"] or 1
    tiles = [name for name in start.blocks if name not in ("PROGRAMS", "WARPGROUPS")]
    scaled = lambda **factors: now | {name: int(now[name] * factor) for name, factor in factors.items()}
    made = [scaled(**{name: factor}) for name in tiles for factor in (2, 0.5)]
    made += [scaled(**{more: 2, less: 0.5}) for more, less in itertools.permutations(tiles, 2)]
    made += [now | {"num_stages": s} for s in (stages - 1, stages + 1)]
    if groups is None:
        made += [scaled(**more, num_warps=factor) for factor in (2, 0.5) for more in ({}, *({name: factor} for name in tiles))]
    else:  # of four warps each
        for step, factor in ((1, 0.5), (-1, 2)):
            made += [now | {"WARPGROUPS": groups + step}]
            made += [scaled(**{name: factor}) | {"WARPGROUPS": groups + step} for name in tiles]
            made += [scaled(**{name: factor}) | {"num_stages": stages + step} for name in tiles]
    if "PROGRAMS" in now:
        programs = now["PROGRAMS"]
        others = (128, 256, 512, 1024) if programs is None else (programs // 2, programs * 2, None)
        made += [now | {"PROGRAMS": p} for p in others]
        made += [now | {"PROGRAMS": p, "num_stages": 3} for p in others if programs is None]  # worth little one without the other
    # A thread has some elements of the largest tile, and can hold them.
    held = lambda c: math.prod(sorted(c[name] for name in tiles)[-2:]) / (32 * max(c["num_warps"], 1))
    low, high = min(1 / 4, held(now)), max(256, held(now))
    sane = lambda c: c["num_warps"] <= 32 and (c["num_stages"] or 1) <= 7 and low <= held(c) <= high
    legal = [new for new in made if min(v for v in new.values() if v is not None) >= 1 and sane(new)]
    return list(dict.fromkeys(Config(**new) for new in legal))


# -------------------------------------------------------------------------------------------------------------- measuring


# Yields what threads are to build, is sent what is wrong with each, and returns a result. It takes times while nothing is built.
type _Steps[T] = Generator[list[Callable[[], Exception | None]], list[Exception | None], T]


def _raised(errors: Iterable[Exception | None]) -> None:
    """Raise the first error there is."""
    for error in errors:
        if error is not None:
            raise error


class _Trial(timing.Trial):
    """One choice on one GPU: its stage with other configs."""

    def __init__(self, task: _Task, device: Any):
        self.task, self.settings = task, (jax.config.jax_enable_x64, config.launch.value)
        self.texts: dict[str, Config] = {}
        super().__init__(task.avals, device=device)

    @property
    def platform(self) -> str:
        """JAX's name of what programs are for."""
        return target.Target.parse(str(self.task.choice.target)).platform

    def operands(self, seed: int) -> list[jax.Array | None]:
        """Noise for floats; of integers, one per batch element is a length: all of it; others are 0."""
        keys = jax.random.split(jax.random.key(seed), len(self.avals))
        given = [dims for dims, present in zip(self.task.call.op.rule.operands, self.task.call.present, strict=True) if present]

        def made(i, aval):
            if jnp.issubdtype(aval.dtype, jnp.floating):
                return jax.random.normal(keys[i], aval.shape, jnp.float32).astype(aval.dtype)
            length = jnp.issubdtype(aval.dtype, jnp.integer) and i < len(given) and not given[i]
            return jnp.full(aval.shape, jnp.iinfo(aval.dtype).max if length else aval.dtype == np.bool_, aval.dtype)

        with jax.default_device(self.device):
            return [made(i, aval) for i, aval in enumerate(self.avals)]

    def prepare(self) -> "_Steps[None]":
        """Build the heuristic's program; where it is quick, several calls in a row."""
        heuristic = self.task.choice.heuristic
        _raised((yield self.builds([heuristic])))
        if self.lengthened(heuristic):
            self.texts.clear()
            _raised((yield self.builds([heuristic])))

    def builds(self, candidates: Iterable[Config]) -> list[Callable[[], Exception | None]]:
        """Call `build` for each."""
        return [functools.partial(self.build, c) for c in candidates]

    def build(self, candidate: Config) -> Exception | None:
        """Compile the stage with a config and run it once, or say why not. In any thread."""
        x64, launch = self.settings
        stage = jax.jit(_stage(self.task.call, self.platform))  # a new function: the choice is made while it is traced
        with jax.enable_x64(x64), config.launch(launch), jax.debug_nans(False), jax.default_device(self.device):
            try:
                with tuned.forcing(self.task.choice.problem, candidate):
                    lowered = self.lower(lambda *arrays: (stage(*arrays), []), self.calls)
                twin = self.texts.setdefault(hashlib.sha256(lowered.as_text().encode()).hexdigest(), candidate)
                if twin != candidate:
                    return JtopsError(f"{candidate} makes the same program as {twin}")
                self.load(candidate, lowered)
            except (KernelCompileError, UnsupportedError, ValueError, jax.errors.JaxRuntimeError) as error:
                return error
        return None

    def agrees(self, candidate: Config) -> bool:
        """Whether its results are the heuristic's, up to the rounding of the dtypes at hand."""
        dtypes = [aval.dtype for aval in self.avals if jnp.issubdtype(aval.dtype, jnp.floating)]
        eps = max([2**-13, *(float(jnp.finfo(d).eps) for d in dtypes)])  # of float32: TF32 products, rounded to nearest
        return all(_close(a, b, 4 * eps) for a, b in zip(self.run(candidate), self.run(self.task.choice.heuristic), strict=True))


@functools.partial(jax.jit, static_argnums=2)
def _close(a, b, tolerance: float):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    bound = tolerance * jnp.max(jnp.where(jnp.isfinite(b), jnp.abs(b), 0))
    return jnp.all((a == b) | (jnp.abs(a - b) <= bound) | (jnp.isnan(a) & jnp.isnan(b)))


def _faster(trial: _Trial, best: Config, new: list[Config], dropped: list[str]) -> _Steps[Config]:
    """The fastest of `new` that computes the same, if it beats `best`; else that."""
    errors = yield trial.builds(new)
    built = [c for c, error in zip(new, errors, strict=True) if error is None]
    seconds = trial.race([best, *built]) if built else {}
    order = sorted((c for c in built if seconds[c] < STEP * seconds[best]), key=seconds.__getitem__)
    right = next((c for c in order if trial.agrees(c)), best)
    dropped += map(repr, order[: order.index(right)] if right in order else order)
    for c in built:
        if c != right:
            del trial.programs[c]
    return right


def _climb(task: _Task, device: Any, more: Callable[[], bool]) -> _Steps[Result]:
    """Climb from the heuristic, or from what a table has if that is faster, to a faster neighbour until there is none."""
    trial, problem, heuristic, now = _Trial(task, device), task.choice.problem, task.choice.heuristic, task.now
    yield from trial.prepare()
    dropped: list[str] = []
    tried, best = {heuristic, now}, heuristic
    if now != heuristic:
        best = yield from _faster(trial, heuristic, [now], dropped)
    while more():
        new = [c for c in neighbours(best) if c not in tried]
        tried.update(new)
        if (better := (yield from _faster(trial, best, new, dropped))) == best:
            break
        best = better
    final = trial.race([*{heuristic, best}])  # once more, alone
    ours, theirs = final[best], final[heuristic]
    if ours > WORTH * theirs:
        return Result(problem, "heuristic", heuristic, theirs, theirs, tuple(dropped))
    return Result(problem, "tuned", best, ours, theirs, tuple(dropped))


def _again(task: _Task, device: Any, entry: tuning_table.Entry) -> _Steps[Result]:
    """An entry's config and the heuristic's, timed once more."""
    trial, problem, heuristic = _Trial(task, device), task.choice.problem, task.choice.heuristic
    config = Config(**entry.config)
    yield from trial.prepare()
    (error,) = yield trial.builds([config])
    if isinstance(error, TimeoutError):
        raise error
    if error is not None or not trial.agrees(config):
        return Result(problem, "heuristic", heuristic)
    seconds = trial.race([heuristic, config])
    kept = seconds[config] <= SLOWER * seconds[heuristic]
    return Result(problem, *(("tuned", config) if kept else ("heuristic", heuristic)), seconds[config], seconds[heuristic])


def _error(future: concurrent.futures.Future) -> Exception | None:
    """What is wrong with what a future builds."""
    if not future.done():
        return TimeoutError("it takes too long")
    raised = future.exception()
    return raised if isinstance(raised, Exception) else future.result()


def _in_turns(tasks: Sequence[_Task], work: Callable[..., _Steps[Result]], end: float) -> Iterator[tuple[_Task, Result]]:
    """The results of ``work(task, more)``, as they come; the first tasks come first.

    A few are under way at once. In each turn threads build what all of these ask for; then each takes its times, while nothing else
    runs. A turn takes as long as those before: what would not be done by `end` is not begun, and none is waited for longer.
    """
    size = lambda task: sum(math.prod(a.shape) * a.dtype.itemsize for a in task.avals)
    turns, waiting = collections.deque([0.0], maxlen=3), collections.deque(tasks)
    fits = lambda n: time.monotonic() + n * max(turns) < end
    active: dict[int, tuple[_Task, _Steps[Result], Any]] = {}
    pool = concurrent.futures.ThreadPoolExecutor(min(32, os.cpu_count() or 1), _THREADS)
    try:
        while waiting or active:
            while waiting and len(active) < _AT_ONCE and (not active or sum(size(t) for t, *_ in active.values()) < _HELD):
                task = waiting.popleft()
                if task.now.source == "explicit":
                    yield task, Result(task.choice.problem, "explicit", task.now)
                elif not fits(3):  # the heuristic's program, that of several calls, and a first round
                    yield task, Result(task.choice.problem, "no time", task.choice.heuristic)
                else:
                    active[id(task)] = task, work(task, lambda: fits(1)), None
            start, wanted = time.monotonic(), dict[int, list]()
            for key, (task, steps, errors) in list(active.items()):
                try:
                    wanted[key] = steps.send(errors)
                    continue
                except StopIteration as stop:
                    result = stop.value
                except TimeoutError:
                    result = Result(task.choice.problem, "no time", task.choice.heuristic)
                except Exception as error:  # without its frames, which have the arrays
                    result = Result(task.choice.problem, "failed", task.choice.heuristic, error=error.with_traceback(None))
                del active[key], steps, errors
                yield task, result
            futures = {key: [pool.submit(build) for build in builds] for key, builds in wanted.items()}
            every = [future for some in futures.values() for future in some]
            concurrent.futures.wait(every, max(1.0, min(_PATIENCE, end - time.monotonic())))
            for key, some in futures.items():
                task, steps, _ = active[key]
                active[key] = task, steps, [_error(f) for f in some]
            turns.append(time.monotonic() - start)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def tune(
    f: Callable[..., Any],
    *args: Any,
    budget: float | None = None,
    write: str | os.PathLike = "user",
    dry_run: bool = False,
    check: bool = False,
    progress: Callable[[str], None] = print,
) -> tuple[Result, ...]:
    """Tune every kernel of the library's ops that ``f(*args)`` launches, on this process' GPU, and write the table.

    >>> jtops.tune.tune(jax.grad(loss), params, batch)

    The function is traced, never run; each distinct choice of a config is tuned on random data, by climbing from the heuristic's,
    or the table's where it is faster, to faster neighbours. A config is written if its stage takes at most 97 % of the
    heuristic's time; where none does, an entry that the table has is deleted. Configs that a call gives itself are left alone. What
    a program shares out automatically over several GPUs is tuned whole: give `tune` the part of one.

    Args:
      f: a function that `jax.jit` takes, such as a training step.
      *args: its arguments; ``jax.ShapeDtypeStruct`` will do for arrays.
      budget: seconds for all of it, of which the first choices take what they need; None: until nothing improves.
      write: "user" (the user's table for this GPU), "shipped" (the library's own), or the path of a table.
      dry_run: only find the choices; measure and write nothing.
      check: only measure the entries that the table at `write` has of these choices, and delete those that take more than 102 % of
        the heuristic's time, do not run or compute something else.
      progress: is called with a line for every choice.

    Returns:
      A `Result` per choice.

    Raises:
      UnsupportedError: this process has no GPU, or `jtops.config.target` names another one.
      JtopsError: `write` is a file that is no table, or cannot be written.
      Exception: of the first choice that could not be measured, such as one whose heuristic does not run, after all others were.
    """
    device, platform = _device(dry_run)
    tasks = _tasks(f, args, platform)
    end = math.inf if budget is None else time.monotonic() + budget
    results = _measured(tasks, device, end, write, dry_run, check, progress)
    _raised(r.error for r in results)
    return results


def _measured(tasks: list[_Task], device, end: float, write, dry_run: bool, check: bool, progress) -> tuple[Result, ...]:
    """See `tune`; `end` is of time.monotonic. What is measured is written as it comes."""
    if dry_run:
        found = tuple(Result(t.choice.problem, t.now.source, t.now) for t in tasks)
        for result in found:
            progress(str(result))
        return found
    path = _path(write, str(device.device_kind))
    entries = tuning_table.parsed(path, path.read_text()).entries if check and path.exists() else {}
    if check:
        tasks = [t for t in tasks if (e := entries.get(t.choice.problem)) and e.kernels == t.choice.fingerprint]
        work = lambda task, more: _again(task, device, entries[task.choice.problem])
    else:
        work = lambda task, more: _climb(task, device, more)
    results: list[Result] = []
    with jax.debug_nans(False):
        for task, result in _in_turns(tasks, work, end):
            if result.said in ("tuned", "heuristic"):
                try:
                    _write(path, device, task, result)
                except OSError as error:  # a disk may be full for a while
                    result = dataclasses.replace(result, said="failed", error=error)
            results.append(result)
            progress(str(result))
    return tuple(results)


def _device(dry_run: bool) -> tuple[Any, str]:
    """This process' device, and JAX's name of what to tune for."""
    device, named = target.present(), target.requested()
    on = named or (target.of_device(device) if device else None)
    if dry_run and on:
        return device, on.platform
    if device is None or on is None:
        raise UnsupportedError(
            f"tune measures, and needs the GPU it tunes for; JAX computes on {jax.default_backend()} here. Run it on that GPU"
            + ('; what it would tune is said by a dry run under jtops.config.target("sm_90").' if dry_run else ".")
        )
    if named and named != target.of_device(device):
        raise UnsupportedError(f"tune measures on this process' {device.device_kind}, but jtops.config.target asks for {named}.")
    return device, on.platform


def _path(write: str | os.PathLike, device_kind: str) -> Path:
    named = {"user": tuned.user_directory(), "shipped": tuned.SHIPPED}
    path = named[str(write)] / tuned.file_name(device_kind) if write in named else Path(write)
    try:  # before anything is measured
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise JtopsError(f"tune: {path.parent} cannot be written: {error}. Name another path, or set JTOPS_TUNING_DIR.") from error
    if path.exists() and write not in named:
        try:
            tuning_table.parsed(path, path.read_text())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise JtopsError(f"tune: {path} is there and is no table ({error!r}); name another file.") from error
    return path


def _write(path: Path, device: Any, task: _Task, result: Result) -> None:
    entries = []
    if result.said == "tuned":
        config = result.config.kwargs
        entries = [tuning_table.Entry(result.problem, config, task.choice.fingerprint, result.seconds, result.heuristic_seconds)]
    elif not path.exists():
        return
    tuning_table.update(path, str(device.device_kind), str(task.choice.target), entries, () if entries else (result.problem,))


# ------------------------------------------------------------------------------------------------------------ command line


def program(spec: Spec, case: Case, dtype: str, forward_only: bool = False) -> tuple[Callable, list[jax.ShapeDtypeStruct]]:
    """A case as a function of its operands, and their types: the result, and the gradients of all floating operands."""
    f, types = spec.call(case), case.types(dtype)
    if forward_only:
        return f, types
    return lambda *operands: (f(*operands), with_gradients(f)(*operands)), types


def shaped(spec: Spec, case: Case, text: str) -> Case:
    """The case with other shapes, such as "8192x4096,4096", "-" for an operand that is absent.

    Operands that `text` does not name keep to the first, if theirs is the end of its shape in `case`, as in norms.
    """
    given = [None if t == "-" else tuple(map(int, t.split("x"))) for t in text.split(",")]
    first, new = next(iter(case.inputs.values())), given[0]
    if new is None or len(given) > len(spec.operands):
        raise ValueError(f"{spec.name} has operands {', '.join(spec.operands)}; got the shapes {text}.")
    inputs: dict[str, Input] = {}
    shape: tuple[int, ...] | None
    for i, (name, drawer) in enumerate(spec.operands.items()):
        old = case.inputs.get(name)
        if i < len(given):
            shape = given[i]
        elif old is None or old.shape == first.shape[len(first.shape) - len(old.shape) :]:
            shape = None if old is None else new[len(new) - len(old.shape) :]
        else:
            raise ValueError(f"{spec.name}: give the shape of {name} too: the shapes of all operands, apart by commas.")
        if shape is not None:
            if not isinstance(drawer, Input):
                raise ValueError(f"{spec.name}: {name} may be a pair of arrays, whose shapes cannot be given: '-' leaves it out.")
            inputs[name] = dataclasses.replace(drawer, shape=shape)
    return dataclasses.replace(case, id=text, inputs=inputs)


def _asked(options: argparse.Namespace) -> list[tuple[Spec, Case, str]]:
    """What to tune, of the command line's words; the most valuable first."""
    known = specs.SPECS
    names = list(known) if options.op == ["all"] else options.op
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no op {unknown[0]!r}; there are {', '.join(known)}, and all.")
    asked: list[tuple[tuple, tuple[Spec, Case, str]]] = []
    for spec in (known[name] for name in names):
        cases = [c for c in spec.sizes if not options.case or c.id in options.case]
        if options.shape:
            cases = [shaped(spec, cases[0], text) for text in options.shape] if cases else []
        for (place, case), (turn, dtype) in itertools.product(enumerate(cases), enumerate(options.dtype)):
            if dtype in spec.dtypes:  # of all ops the sizes of models, then their other first cases, second cases ...
                asked.append(((turn, case not in spec.tuned, place), (spec, case, dtype)))
    if not asked:
        raise ValueError(f"no such case: {'; '.join(f'{n} has {[c.id for c in known[n].sizes]}' for n in names)}.")
    return [what for _, what in sorted(asked, key=lambda a: a[0])]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m jtops.tune", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("op", nargs="+", help="names of ops, or all")
    parser.add_argument("--case", nargs="+", default=[], metavar="ID", help="of the op's real sizes; all if not given")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], help="bfloat16 if not given")
    parser.add_argument("--shape", nargs="+", default=[], help="of the operands, as 8192x4096 or 64x512,512x256")
    parser.add_argument("--forward", action="store_true", help="not the gradients")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="for all of it")
    parser.add_argument("--first", type=int, default=1, metavar="N", help="begin with the Nth choice")
    parser.add_argument("--write", default="user", help="user (default), shipped, or the path of a table")
    parser.add_argument("--check", action="store_true", help="measure the table's entries again; delete those that are slower")
    parser.add_argument("--dry-run", action="store_true", help="list the choices")
    options = parser.parse_args(argv)
    start, numbers = time.monotonic(), itertools.count(options.first)
    said = lambda line: print(f"{next(numbers):4} {time.monotonic() - start:6.1f} s {line}", flush=True)
    try:
        asked = _asked(options)
        if options.shape and options.write == "shipped":
            raise ValueError("shipped tables are of the cases that SPECs name, which the tests compile: add a case.")
        end = math.inf if options.budget is None else start + options.budget
        device, platform = _device(options.dry_run)
        found: dict[tuning_table.Problem, _Task] = {}
        broken: list[Exception] = []
        for spec, case, dtype in asked:
            try:
                f, types = program(spec, case, dtype, options.forward)
                for task in _tasks(f, tuple(types), platform):
                    found.setdefault(task.choice.problem, task)
            except Exception as error:  # one op's must not keep the others from being tuned
                broken.append(error)
                print(f"     failed: {spec.name} {case.id} {dtype}: {error}", flush=True)
        tasks = list(found.values())[options.first - 1 :]
        results = _measured(tasks, device, end, options.write, options.dry_run, options.check, said)
    except (JtopsError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    tuned_now = [r for r in results if r.said == "tuned"]
    print(f"\n{len(results)} choices, {len(tuned_now)} tuned:" if not options.dry_run else f"\n{len(results)} choices")
    for r in sorted(tuned_now, key=lambda r: r.seconds / r.heuristic_seconds):
        print(f"{1 - r.seconds / r.heuristic_seconds:6.1%} less  {r}")
    if missed := sum(r.said == "no time" for r in results):
        print(f"{missed} not begun: --first {options.first + len(results) - missed} goes on with them")
    if failed := [*broken, *(r.error for r in results if r.error)]:
        sys.exit(f"{parser.prog}: {len(failed)} choices could not be measured, the first of them because: {failed[0]}")


def _to_the_end() -> None:
    """Run the command line and end this process, whatever threads still build."""
    code: Any = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code
    if any(t.name.startswith(_THREADS) for t in threading.enumerate()):
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(bool(code))
    sys.exit(code)


if __name__ == "__main__":
    _to_the_end()
