"""explain: which kernels a function launches, how each is configured, by which path it goes, and why."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jtops.core import notes, target
from jtops.core.compile import resources
from jtops.core.target import Target
from jtops.core.types import Constexpr, is_shaped, leaves

_SCOPE = re.compile(r"jtops_(\w+?)_xla\b")  # the name scope in which an op runs its reference because it was told to
_FLAX = re.compile(r"jtops_(\w+?)_flax__(\w+)")  # the one in which a layer leaves a call to Flax, and why


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """One kernel launch of a program, or one op that runs as XLA code instead."""

    name: str  # as profiles show it
    path: str  # custom call that launches it; "interpreter"; "XLA" for an op's reference
    reason: str
    target: str  # "sm_90"; the platform where nothing is compiled
    kernel: str | None = None  # Python name of the Triton function
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # its compile-time constants
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # num_warps, num_stages, ... in force
    config: str = ""  # where an op's config is from: "explicit", "tuned table (user)", "tuned table (shipped)", "heuristic"
    variant: str = ""  # which of a stage's several kernels runs, and why those before it did not fit
    grid: tuple[int, int, int] | None = None
    shared_bytes: int | None = None  # per program
    registers: int | None = None  # per thread
    spill_bytes: int | None = None  # per thread


class Explanation(tuple[Launched, ...]):
    """The launches of a program, in the order in which they were lowered; prints as a table."""

    __slots__ = ()

    def __repr__(self):
        if not self:
            return "This call launches no kernel of jtops and uses no op of jtops."
        head = (
            "name",
            "kernel",
            "blocks",
            "options",
            "config",
            "variant",
            "grid",
            "target",
            "path",
            "shared",
            "registers",
            "reason",
        )
        rows = [head, *(_row(launch) for launch in self)]
        filled = [i for i in range(len(head)) if any(row[i] for row in rows[1:])]
        widths = {i: max(len(row[i]) for row in rows) for i in filled}
        lines = ["  ".join(row[i].ljust(widths[i]) for i in filled).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    __str__ = __repr__


def _row(launch: Launched) -> tuple[str, ...]:
    said = lambda items: " ".join(f"{k}={v}" for k, v in items.items())
    number = lambda n: "" if n is None else str(n)
    spilled = f" (spills {launch.spill_bytes} B)" if launch.spill_bytes else ""
    sizes = {k: v for k, v in launch.constants.items() if isinstance(v, int) and not isinstance(v, bool)}
    grid = "" if launch.grid is None else "x".join(map(str, launch.grid))
    return (
        launch.name, launch.kernel or "", said(sizes), said(launch.options), launch.config, launch.variant, grid, launch.target,
        launch.path, number(launch.shared_bytes), number(launch.registers) + spilled, launch.reason,
    )  # fmt: skip


def explain(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Tell which kernels ``f(*args, **kwargs)`` launches, with what configuration, by which path, and why, without running any.

    The call is traced and lowered, for this process' default device or for the GPU that ``jtops.config.target`` names, and each
    decision is noted where it is made: whatever jit, scan, cond, vmap or grad makes of the call is seen as XLA will get it.
    Launches that are equal in everything share code and are listed once.

    >>> with jtops.config.target("sm_90"):
    ...     print(jtops.explain(jax.grad(loss), params, batch))

    Args:
      f: a function that `jax.jit` takes, jitted or not.
      *args, **kwargs: its arguments; ``jax.ShapeDtypeStruct`` will do for arrays.

    Returns:
      A tuple of `Launched` records (name, path, reason, target, kernel, constants, options, config, variant, grid and, compiled
      for a GPU, shared_bytes, registers, spill_bytes) that prints as a table. Where several devices share a program automatically,
      XLA decides about an op's kernels while it splits the program, and one record says that.

    Raises:
      UnsupportedError, KernelCompileError: where lowering the call raises it.
    """
    named = target.requested()
    platforms = {} if named is None else {"lowering_platforms": (named.platform,)}
    given, tree = jax.tree.flatten((args, kwargs))
    traced = [is_shaped(x) and not isinstance(x, np.generic) for x in given]

    def whole(*arrays):  # a new function each time, or JAX remembers the program; numbers may be static arguments of `f`
        new = iter(arrays)
        a, k = tree.unflatten([next(new) if t else x for x, t in zip(given, traced, strict=True)])
        return [x for x in jax.tree.leaves(f(*a, **k)) if isinstance(x, jax.Array)]

    with notes.listening() as noted:
        lowered = jax.jit(whole).trace(*(x for x, t in zip(given, traced, strict=True) if t)).lower(**platforms)
    text = lowered.as_text(debug_info=True)
    told, flax = dict.fromkeys(_SCOPE.findall(text)), dict.fromkeys(_FLAX.findall(text))
    why = 'implementation="xla", or jtops_implementation, asks for the reference'
    by_xla = [(f"jtops_{op}", why) for op in told] + [
        (layer, f"Flax's own code: {reason.replace('_', ' ').strip()}") for layer, reason in flax
    ]
    return Explanation((*map(_launch, noted), *(Launched(name, "XLA", reason, _platform(named)) for name, reason in by_xla)))


def _platform(named: Target | None) -> str:
    return jax.default_backend() if named is None else named.platform


def _launch(note: notes.Note) -> Launched:
    call, compiled = note.call, note.compiled
    if call is None:
        return Launched(note.name, note.path, note.reason, note.platform)
    options = dict(call.options)
    if compiled is not None:
        options |= {"num_warps": compiled.num_warps, "num_stages": compiled.triton_kernel.metadata.num_stages}
        options["num_ctas"] = compiled.num_ctas
    usual = {"enable_fp_fusion": True, "num_ctas": 1}
    return Launched(
        name=note.name,
        path=note.path,
        reason=note.reason,
        target=note.platform if compiled is None else str(compiled.target),
        kernel=call.kernel.__name__,
        constants={name: p.value for _, name, p in leaves(call.bound) if isinstance(p, Constexpr)},
        options={k: v for k, v in sorted(options.items(), reverse=True) if usual.get(k) != v},
        config=call.origin[0],
        variant=call.origin[1],
        grid=call.grid,
        **({} if compiled is None else resources.used(compiled)),
    )
