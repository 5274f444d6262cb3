"""What an op file gives, one bound call of the op, and what each stage of such a call means in jax.numpy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jtops.core.mesh import partition
from jtops.core.target import Target
from jtops.kernels._lib.frame.axes import AxisRule
from jtops.kernels._lib.frame.variants import Variant


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """The stand-in for a backward launcher that says why the op has no derivative."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """NamedTuple classes that launchers are given: of operands, of what the backward reads besides, of cotangents."""

    operands: Any
    saved: Any
    results: Any


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Op:
    """What an op file gives to `fused_op`. It is hashed by identity, since it travels as a static parameter."""

    name: str
    rule: AxisRule
    reference: Callable
    forward: Callable | tuple[Variant, ...]
    backward: Callable | tuple[Variant, ...] | Refused | None
    saves: tuple[int, ...]
    limits: Callable
    blocks: frozenset[str]
    names: Names
    positions: tuple[str, ...]  # axes along which the last operands are iotas

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants of all stages."""
        return tuple(v for stage in (self.forward, self.backward) if isinstance(stage, tuple) for v in stage)

    @property
    def n_given(self) -> int:
        """The number of operands that a caller gives or leaves out; the positions come after."""
        return len(self.rule.operands) - len(self.positions)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Call:
    """Static description of one bound call."""

    op: Op
    stage: str
    n_batch: int
    present: tuple[bool, ...]  # which operands were given
    options: tuple[tuple[str, Any], ...]
    implementation: str | None
    target: Target | None
    config: Any
    wrt: tuple[bool, ...] = ()  # over given operands: which are differentiated
    live: tuple[bool, ...] = ()  # over outs: which have a tangent or cotangent

    def __repr__(self):
        return f"{self.op.name}.{self.stage}"

    def to(self, stage: str, **changes) -> "Call":
        """The same call at another stage."""
        return dataclasses.replace(self, stage=stage, **changes)

    @property
    def n_in(self) -> int:
        """The number of operands given."""
        return sum(self.present)

    @property
    def n_out(self) -> int:
        """The number of results of the plain forward."""
        return len(self.op.rule.outs)

    @property
    def has_launcher(self) -> bool:
        """Whether the op has a kernel for this stage."""
        return self.stage in ("out", "fwd") or (
            self.stage == "vjp" and self.op.backward is not None and not isinstance(self.op.backward, Refused)
        )

    def split(self, args):
        """Split `args` into primals, saved values and linear operands."""
        linear = self.stage in ("jvp", "vjp")
        n_saved = len(self.op.saves) + len(self.op.rule.residuals) if linear else 0
        return list(args[: self.n_in]), list(args[self.n_in : self.n_in + n_saved]), list(args[self.n_in + n_saved :])

    def saved_of(self, full):
        """The values the backward reads, of all that the residual forward gives."""
        return [full[i] for i in self.op.saves] + list(full[self.n_out :])

    def limits(self, operands) -> str | None:
        """Why these operands, of which some may be None, have no kernel."""
        return self.op.limits(*operands[: self.op.n_given], **dict(self.options))

    def mesh_axes(self) -> partition.Axes:
        """Axes of every operand and result, batch axes first."""
        batch = tuple((f"batch{i}",) for i in range(self.n_batch))
        ins, outs = (tuple((*batch, *dims) for dims in side) for side in self.axes())
        return partition.Axes(ins, outs, self.op.rule.whole)

    def axes(self):
        """The core axes of every operand, and of every result."""
        rule = self.op.rule
        ins, outs = picked(rule.operands, self.present), list(rule.outs)
        residuals = list(rule.residuals)
        if self.stage == "out":
            return ins, outs
        if self.stage == "fwd":
            return ins, outs + residuals
        moved, live = picked(ins, self.wrt), picked(outs, self.live)
        saved = self.saved_of(outs + residuals)
        return (ins + saved + moved, live) if self.stage == "jvp" else (ins + saved + live, moved)


def own_promotion(f: Callable) -> Callable:
    """`f`, in which arrays promote as jax.numpy does by default: the caller's settings are about what the caller writes."""

    @functools.wraps(f)
    def g(*args, **options):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return f(*args, **options)

    return g


def picked(xs, mask) -> list:
    """The elements of `xs` where `mask` is true."""
    return [x for x, m in zip(xs, mask, strict=True) if m]


def spread(xs, mask) -> list:
    """The inverse of `picked`: None where `mask` is false."""
    left = iter(xs)
    return [next(left) if m else None for m in mask]


def replaced(xs, mask, new) -> list:
    """`xs`, with the next of `new` where `mask` is true."""
    left = iter(new)
    return [next(left) if m else x for x, m in zip(xs, mask, strict=True)]


def types_of(xs) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The shapes and dtypes of arrays."""
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs)


def batch_shape(call: Call, arrays) -> tuple[int, ...]:
    """The batch shape that the arrays broadcast to."""
    return jnp.broadcast_shapes(*(x.shape[: call.n_batch] for x in arrays))


def reference_stage(call: Call, *args) -> list:
    """Compute what a stage means, in jax.numpy."""
    primals, _, linear = call.split(args)
    shape = batch_shape(call, args)

    def forward(*moved):
        given = replaced(primals, call.wrt or (False,) * call.n_in, moved)
        outs = call.op.reference(*spread(given, call.present), **dict(call.options))
        if not isinstance(outs, tuple) or len(outs) != call.n_out + len(call.op.rule.residuals):
            got = f"{len(outs)} results" if isinstance(outs, tuple) else f"{type(outs).__name__}, no tuple"
            raise TypeError(
                f"{call.op.name}: the reference must return a tuple of {call.n_out} outs and {len(call.op.rule.residuals)} "
                f"residuals; got {got}."
            )
        return [jnp.broadcast_to(o, shape + o.shape[call.n_batch :]) for o in outs]

    if call.stage == "out":
        return forward()[: call.n_out]
    if call.stage == "fwd":
        return forward()
    moved = picked(primals, call.wrt)
    live = lambda *d: picked(forward(*d)[: call.n_out], call.live)
    if call.stage == "jvp":
        return jax.jvp(live, moved, linear)[1]
    return list(jax.vjp(live, *moved)[1](linear))


@functools.lru_cache(4096)
def out_types(call: Call, operand_types: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of a stage's results, as its reference has them."""
    outs = partition.outside_mesh(functools.partial(jax.eval_shape, functools.partial(reference_stage, call)))(*operand_types)
    return types_of(outs)
