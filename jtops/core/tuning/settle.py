"""Kernels under @triton.autotune and @triton.heuristics: one config is settled while the call is traced, then bound like any other.

What is emitted is a plain launch, so a tuned kernel exports, serialises and hits JAX's caches. Where to look, in order: the
values that the caller gives, what this process already decided, the table on disk (`table`), and then a trial of all
configs on this process' GPU, or the first config that compiles where there is none. ``jtops.config.tuning`` can ask for a
trial always or never. With several processes (``jax.distributed``) process 0 decides and the others ask it.

Tuning compares times and nothing else: a config that computes something else than the others may be chosen.
"""

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import jax

from jtops import config
from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops.core import cache, target
from jtops.core.compile.content import constant_text
from jtops.core.launch import plain
from jtops.core.launch.request import Request
from jtops.core.sizes import next_power_of_2
from jtops.core.tuning import processes, timing
from jtops.core.tuning import table as tuning_table
from jtops.core.tuning.candidates import Candidate, Plan, is_array
from jtops.core.tuning.table import export_table, import_table
from jtops.core.types import is_shaped
from jtops.errors import JtopsError, KernelCompileError, UnsupportedError

__all__ = ["Decision", "decisions", "export_table", "import_table", "is_decorated", "launch"]

log = logging.getLogger("jtops.tuning")


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What was settled for a kernel. `source`: "table", "timed", "first valid" or "process 0"; `seconds` of each config timed."""

    kernel: str
    config: str
    source: str
    target: str
    seconds: dict[str, float] = dataclasses.field(default_factory=dict, hash=False)


_decisions: dict[Any, concurrent.futures.Future] = cache.store({})
_timing = threading.Lock()  # one trial at a time: two would time each other


def decisions() -> tuple[Decision, ...]:
    """What this process settled, oldest first. Calls that had no choice are not listed."""
    return tuple(f.result() for f in list(_decisions.values()) if f.done() and f.exception() is None)


def is_decorated(kernel) -> bool:
    """Whether @triton.autotune or @triton.heuristics made `kernel`."""
    return isinstance(kernel, triton_compat.Autotuner | triton_compat.Heuristics)


def launch(request: Request) -> Any:
    """Launch a kernel: with one of its configs if it is decorated, else as it is."""
    if not is_decorated(request.kernel):
        return plain.launch(request)
    options = {k: v for k in ("num_warps", "num_stages", "num_ctas") if (v := getattr(request, k)) is not None}
    given = dict(request.backend_options or {})
    if clash := [k for k in options if given.get(k, options[k]) != options[k]]:
        raise ValueError(f"triton_call: {clash[0]}={options[clash[0]]!r} but backend_options has {given[clash[0]]!r}.")
    filled = {stride for _, stride in getattr(request.vmap_method, "strides", ())}  # parameters that vmap sets
    outs = [leaf for _, leaf in _outputs(request)]
    plan = Plan(request.kernel, request.args, request.kwargs, given | options, outs, filled)
    if len(plan.candidates) == 1:
        return plain.launch(_chosen(plan, plan.candidates[0], request))
    answer = _interpretable if request.interpreted() else _settled
    return plain.launch(_chosen(plan, answer(_Question(plan, request)), request))


def _outputs(request: Request) -> list[tuple[int, Any]]:
    """Results that have a parameter of their own, with their numbers."""
    shared = set((request.input_output_aliases or {}).values())
    return [(i, leaf) for i, leaf in enumerate(request.results()[0]) if i not in shared]


def _chosen(plan: Plan, candidate: Candidate, request: Request) -> Request:
    """The request of the plain kernel that a candidate is."""
    number = {name: i for name, (i, _) in zip(plan.outputs, _outputs(request), strict=False)}
    leaves, tree = request.results()
    described = {number[n]: v for n, v in candidate.replaced.items() if n in number}
    args, kwargs = plan.arguments(candidate)
    return dataclasses.replace(
        request,
        args=args,
        kwargs=kwargs,
        kernel=plan.function,
        out_type=tree.unflatten([described.get(i, leaf) for i, leaf in enumerate(leaves)]),
        num_warps=None,
        num_stages=None,
        num_ctas=None,
        backend_options=candidate.options,
        zeroed_outputs=_zeroed(plan, candidate, request, number),
    )


def _zeroed(plan: Plan, candidate: Candidate, request: Request, number: dict[str, int]) -> Any:
    """The caller's `zeroed_outputs` and those that the config's hooks zero."""
    if not candidate.zeroed:
        return request.zeroed_outputs
    if others := sorted(candidate.zeroed - number.keys()):
        raise UnsupportedError(
            f"kernel {plan.function.__name__}: a pre_hook zeroes {others[0]!r}, an argument of the call, which JAX does not let "
            "change. Zero a result, or pass zeros."
        )
    asked, ours = request.zeroed_outputs, tuple(number[n] for n in candidate.zeroed)
    merged = lambda indices: tuple(sorted({*(indices or ()), *ours}))
    return (lambda meta: merged(asked(meta))) if callable(asked) else merged(asked)


class _Question:
    """A choice to make: the candidates, how to call them, and what the answer depends on."""

    def __init__(self, plan: Plan, request: Request):
        self.plan, self.request = plan, request
        self.labels: dict[str, Candidate] = {c.label: c for c in plan.candidates}
        self.kernel = f"{plan.function.__module__}.{plan.function.__qualname__}"
        self.device = target.present()
        asked = request.compute_capability
        wanted = target.requested() if asked is None else target.Target.parse(asked)
        own = None if self.device is None else target.of_device(self.device)
        self.target = wanted or own
        self.local = self.device is not None and self.target == own
        self.x64 = jax.config.jax_enable_x64
        self.text = f"{_described(plan)} {self.target}"
        content = f"{triton_compat.kernel_key(plan.function)} {list(self.labels)} triton {triton_compat.triton.__version__}"
        self.fingerprint = tuning_table.digest(content)

    @property
    def device_kind(self) -> str | None:
        return str(self.device.device_kind) if self.device is not None and self.local else None

    def function(self, candidate: Candidate, **changes) -> tuple[Callable, list, list[int]]:
        """A candidate as a function of its arrays alone, their types, and the numbers of those that it changes in place.

        It returns the results that are no such array, and what those arrays hold afterwards.
        """
        changes = {"interpret": False} | changes  # the worker does not see the caller's settings
        request = _chosen(self.plan, candidate, dataclasses.replace(self.request, **changes))
        leaves, tree = jax.tree.flatten((request.args, request.kwargs))
        where = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        avals = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in where]
        refs = {i for i in where if isinstance(leaves[i], jax.Ref)}
        owners = self._owners(request)
        operands = sorted(range(len(where)), key=lambda n: owners[where[n]])  # as `input_output_aliases` counts them
        aliased = {operands[i]: out for i, out in (request.input_output_aliases or {}).items() if i < len(operands)}
        updated = [n for n, i in enumerate(where) if n in aliased or i in refs]
        fixed = [None if i in where else leaf for i, leaf in enumerate(leaves)]  # no tracer may leak into another thread

        def run(*arrays):
            made: list[Any] = list(fixed)
            for i, array in zip(where, arrays, strict=True):
                made[i] = jax.new_ref(array) if i in refs else array
            args, kwargs = tree.unflatten(made)
            results = plain.launch(dataclasses.replace(request, args=args, kwargs=kwargs))
            results = jax.tree.leaves(results)
            after = [made[where[n]][...] if where[n] in refs else results[aliased[n]] for n in updated]
            return [r for out, r in enumerate(results) if out not in aliased.values()], after

        return run, avals, updated

    def _owners(self, request: Request) -> list[int]:
        """The number of the parameter of each leaf of the arguments."""
        order = {name: i for i, name in enumerate(self.plan.params)}
        slots = [name for name in self.plan.params if name not in request.kwargs]
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((request.args, request.kwargs))[0]]
        return [order.get(slots[where.idx] if part.idx == 0 else where.key, len(order)) for part, where, *_ in paths]

    @contextlib.contextmanager
    def context(self):
        """The part of the caller's context that a worker thread needs; it must not see the rest, above all the traces."""
        with jax.enable_x64(self.x64), config.target(None if self.target is None else str(self.target)), jax.debug_nans(False):
            yield

    def compile(self, label: str) -> KernelCompileError | None:
        """Compile one candidate; what is wrong with it, if it does not compile or does not fit."""
        run, avals, _ = self.function(self.labels[label])
        assert self.target is not None
        try:
            with self.context():
                jax.jit(run).trace(*avals).lower(lowering_platforms=(self.target.platform,))
            return None
        except KernelCompileError as error:
            log.warning("kernel %s: config (%s) is skipped: %s", self.kernel, label, error)
            return error

    def first_valid(self) -> Decision:
        """The author's first candidate that compiles; nothing is compiled where no target is known."""
        errors = {}
        for label in self.labels:
            if self.target is None or (error := _apart(self.compile, label)) is None:
                break
            errors[label] = error
        else:
            raise self._none_left(errors)
        if self.target is not None:
            level = logging.INFO if config.tuning.value == "never" else logging.WARNING
            log.log(level, "kernel %s: not tuned for %s: the first valid config (%s) is used.", self.kernel, self.target, label)
        return self._decision(label, "first valid")

    def timed(self) -> Decision:
        """Compile all candidates in parallel, time those that fit, remember the fastest."""
        with concurrent.futures.ThreadPoolExecutor(min(len(self.labels), os.cpu_count() or 1)) as pool:
            errors = dict(zip(self.labels, pool.map(self.compile, self.labels), strict=True))
        valid = [label for label in self.labels if errors[label] is None]
        if not valid:
            raise self._none_left(errors)
        seconds = self._measure(valid) if len(valid) > 1 else {}
        best = min(seconds, key=seconds.__getitem__) if seconds else valid[0]
        log.info("kernel %s: tuned: (%s) of %s", self.kernel, best, {k: f"{s * 1e6:.1f} us" for k, s in seconds.items()})
        entry = {"kernel": self.kernel, "problem": self.text, "fingerprint": self.fingerprint, "device": self.device_kind}
        tuning_table.store(entry | {"format": tuning_table.FORMAT, "config": best, "seconds": seconds})
        return self._decision(best, "timed", seconds)

    def _measure(self, labels: list[str]) -> dict[str, float]:
        def work():
            functions = {label: self.function(self.labels[label], has_side_effect=True) for label in labels}
            with self.context():
                _, avals, updated = functions[labels[0]]
                return timing.measure({k: f for k, (f, *_) in functions.items()}, avals, self.device, updated)

        with _timing:
            found = _apart(work)
        failed = {k: v for k, v in found.items() if isinstance(v, Exception)}
        for label, error in failed.items():
            log.warning("kernel %s: config (%s) is skipped, it does not run: %s", self.kernel, label, error)
        if len(failed) == len(labels):
            full = any("RESOURCE_EXHAUSTED" in str(error) for error in failed.values())
            raise JtopsError(
                f"kernel {self.kernel}: no config ran while tuning, on arrays made for it. The first said: {failed[labels[0]]}. "
                + (
                    "The GPU must hold these arrays beside those of the program: tune before they are made, by lowering it "
                    "with jax.ShapeDtypeStruct; what is found is remembered. "
                    if full
                    else ""
                )
                + 'Give the config by keyword, or set jtops.config.tuning("never").'
            ) from failed[labels[0]]
        return {k: v for k, v in found.items() if k not in failed}

    def _decision(self, label: str, source: str, seconds: dict[str, float] | None = None) -> Decision:
        return Decision(self.kernel, label, source, str(self.target), seconds or {})

    def _none_left(self, errors: dict) -> KernelCompileError:
        lines = [f"\n  ({label}): {error}" for label, error in errors.items()]
        return KernelCompileError(
            f"kernel {self.kernel}: none of its {len(errors)} configs is valid for {self.target}:{''.join(lines)}"
        )


def _apart(function: Callable, *args) -> Any:
    """Run ``function(*args)`` in a thread of its own, outside of the caller's trace, mesh and settings."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def _described(plan: Plan) -> str:
    """What a decision is for: the arrays' types and rounded sizes, the values of the decorator's key, and the constants."""
    arrays, constants = {}, {}
    wanted = {n for tuner in plan.tuners for n in tuner.keys}
    for name, value in sorted((plan.named | plan.outputs).items()):
        shaped = [v for v in jax.tree.leaves(value) if is_shaped(v)]
        if shaped:
            arrays[name] = [f"{v.dtype}{[next_power_of_2(d) for d in v.shape]}" for v in shaped]
        elif name in wanted or (name in plan.given and name in plan.params and plan.params[name].is_constexpr):
            constants[name] = constant_text(value)
    return f"{arrays} {constants}"


def _settled(question: _Question) -> Candidate:
    """The candidate to use; decided once per process, whoever asks and however many threads ask at once."""
    policy = config.tuning.value or "cached"
    key = (question.kernel, question.text, question.fingerprint, question.device_kind, policy)
    return question.labels[cache.once(_decisions, key, lambda: _decide(question, policy)).config]


_interpreted: dict[Any, concurrent.futures.Future] = cache.store({})


def _interpretable(question: _Question) -> Candidate:
    """The candidate that a machine without a GPU takes: the first that compiles, or else the first, which says why it does not."""
    question.target = target.assumed(question.target)

    def valid(label: str) -> bool:
        try:
            return _apart(question.compile, label) is None
        except UnsupportedError:  # by the compiler, which is not asked to run anything here
            return False

    labels = list(question.labels)
    first = lambda: next(filter(valid, labels), labels[0])
    return question.labels[cache.once(_interpreted, (question.kernel, question.text, question.fingerprint), first)]


def _decide(question: _Question, policy: str) -> Decision:
    decide = lambda: _decide_alone(question, policy)
    if (shared := jax_compat.distributed_client()) is None:
        return decide()
    name = f"jtops/tuning/{policy}/{tuning_table.digest(question.kernel + question.text)}"
    made = processes.of_process_0(shared, name, question.kernel, question.fingerprint, decide)
    return made if isinstance(made, Decision) else question._decision(made, "process 0")


def _decide_alone(question: _Question, policy: str) -> Decision:
    entry = None
    if policy != "always" and question.target is not None:
        entry = tuning_table.load(question.kernel, question.text, question.fingerprint, question.device_kind)
    if entry is not None and entry["config"] in question.labels:
        return question._decision(entry["config"], "table", entry["seconds"])
    return question.timed() if question.local and policy != "never" else question.first_valid()
