"""fused_op: from launchers, a reference and one axis rule to a function that every JAX transform works on.

An op file says what is its own: a kernel launcher forward and one backward, the same maths in jax.numpy (the reference), and which
axes are which. Derivatives of any order and mode, vmap, sharding, rematerialisation, platform choice and empty arrays are here,
once. There is ONE primitive, with a static, hashable `Call` as its parameter and four stages:

    out   primals                       -> outs                plain forward kernel
    fwd   primals                       -> outs + residuals    forward kernel that also writes what the backward wants
    jvp   primals, saved, tangents      -> tangents of outs    linear; always XLA, by differentiating the reference
    vjp   primals, saved, cotangents    -> gradients           linear; the backward kernel

`saved` is what the backward kernel reads besides the primals: the residuals and those outs named in `saves`.

What was hard, and why it is as it is:

* No custom_vjp, custom_jvp, custom_vmap, linear_call. custom_vjp has no forward mode, custom_vmap no reverse mode, linear_call no
  batching; stacked on each other they still lack Hessians. A primitive of our own has all rules, and they are short because the
  jvp and vjp stages are each other's transpose and everything of higher order follows from the reference.
* `saved` is a function of the primals, so tangents of it are dropped and second derivatives go through the primals alone. Hence
  the primals stay operands of the vjp stage even where its kernel reads none of them; XLA deletes what nobody reads.
* Batch axes stay separate and leading until the code of one device (`run_kernel`), which makes them one. Collapsing earlier
  would reshape an axis that is sharded. An operand's batch axis may have size 1: shared, never copied.
* vmap of the vjp stage must give a gradient per example, so it broadcasts the operands that are differentiated. Summing over the
  mapped axis there would be right for grad(vmap) and silently wrong for vmap(grad).
* Gradients of operands that devices share are partial sums: see `jtops.core.mesh.partition`. Inside shard_map that is JAX's
  business, and works only if all operands vary over the same mesh axes when the primitive is bound.
* Launchers run when the program is lowered, maybe on a shard and maybe inside XLA's partitioner, where an error loses its type.
  Whatever can be said of a call must be said before: `limits` sees the whole, unsharded call.
* Abstract evaluation traces the reference, so shapes and dtypes are written down once, and a reference need not know meshes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jtops import config
from jtops._compat import jax as jax_compat
from jtops.core import notes, target
from jtops.core.mesh import partition
from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame.axes import AxisRule
from jtops.kernels._lib.frame.launch import Config, Launch, Rows

KERNEL_PLATFORMS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Op:
    """What an op file gives to `fused_op`. Hashed by identity: it travels as a static parameter."""

    name: str
    rule: AxisRule
    reference: Callable
    forward: Callable
    backward: Callable
    saves: tuple[int, ...]
    limits: Callable
    blocks: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Call:
    """Static description of one bound call."""

    op: _Op
    stage: str
    n_batch: int
    present: tuple[bool, ...]  # which operands were given
    options: tuple[tuple[str, Any], ...]
    implementation: str | None
    target: target.Target | None
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
        """Operands given."""
        return sum(self.present)

    @property
    def n_out(self) -> int:
        """Results of the plain forward."""
        return len(self.op.rule.outs)

    def split(self, args):
        """-> primals, saved, linear operands."""
        linear = self.stage in ("jvp", "vjp")
        n_saved = len(self.op.saves) + len(self.op.rule.residuals) if linear else 0
        return list(args[: self.n_in]), list(args[self.n_in : self.n_in + n_saved]), list(args[self.n_in + n_saved :])

    def saved_of(self, full):
        """The values the backward reads, of all that the residual forward gives."""
        return [full[i] for i in self.op.saves] + list(full[self.n_out :])

    def mesh_axes(self) -> partition.Axes:
        """Axes of every operand and result, batch axes first."""
        batch = tuple((f"batch{i}",) for i in range(self.n_batch))
        ins, outs = (tuple((*batch, *dims) for dims in side) for side in self.axes())
        return partition.Axes(ins, outs, self.op.rule.whole)

    def axes(self):
        """-> core axes of every operand, of every result."""
        rule = self.op.rule
        ins, outs = [a for a, p in zip(rule.operands, self.present, strict=True) if p], list(rule.outs)
        residuals = list(rule.residuals)
        if self.stage == "out":
            return ins, outs
        if self.stage == "fwd":
            return ins, outs + residuals
        moved, live = _picked(ins, self.wrt), _picked(outs, self.live)
        saved = self.saved_of(outs + residuals)
        return (ins + saved + moved, live) if self.stage == "jvp" else (ins + saved + live, moved)


def fused_op(
    name: str,
    axes: str,
    *,
    reference: Callable[..., tuple],
    forward: Callable[..., tuple],
    backward: Callable[..., tuple],
    residuals: str = "",
    saves: tuple[int, ...] = (),
    whole: str = "",
    limits: Callable[..., str | None] = lambda *operands, **options: None,
    blocks: str = "",
) -> Callable[..., tuple]:
    """Make an op of a reference and two launchers.

    Args:
      name: the op's public name; launches are called ``jtops_{name}_{stage}``, saved values ``{name}_residual``.
      axes: core axes of operands and results, batch axes left out: ``"n, n, n -> n"``, ``"s (g r) d, t g d -> s (g r) d"``. A
        compound axis is one array axis made of two, the first outermost; ``()`` is an array with no core axis. Any core axis of
        an operand may have size 1, or be missing at the front, where the reference broadcasts.
      reference: ``(*operands, **options) -> (*outs, *residuals)`` in jax.numpy; leading batch axes broadcast; absent operands are
        None. It defines shapes, dtypes and every derivative beyond the first reverse one.
      forward: launcher ``(launch, *operands) -> (*outs)``, plus residuals if ``launch.residuals``.
      backward: launcher ``(launch, operands, saved, cotangents) -> gradients``, one per operand; None where not ``launch.wanted``.
        A cotangent is None where that out has none. A gradient may be float32 and may have the call's batch rows in place of its
        operand's own: casting and summing come after, also over devices.
      residuals: core axes of what only the residual forward writes.
      saves: which outs the backward reads.
      whole: axes that one device must hold in full. All others, and all batch axes, may be sharded.
      limits: ``(*operands, **options) -> reason | None``: why this legal call has no kernel. It may look at dtypes and the last
        axes alone: it is asked again when the program is lowered, of types with more batch axes.
      blocks: names of the block sizes that a `Config` of this op must have.

    Launchers see one leading batch axis: operand i has ``launch.rows[i].own`` rows (see `Rows`), saved values and cotangents have
    ``launch.batch``. A kernel that needs the logical position of its shard along an axis takes it as an operand: pass
    ``jnp.arange(n)`` with that axis; it is sharded like any other operand, and its first element is the offset.

    Returns:
      ``f(*operands, implementation=None, config=None, **options) -> tuple of outs``; options must be hashable.
    """
    op = _Op(
        name=name,
        rule=AxisRule.parse(axes, residuals, whole),
        reference=reference,
        forward=forward,
        backward=backward,
        saves=saves,
        limits=limits,
        blocks=frozenset(blocks.split()),
    )

    cores = [len(a) for a in op.rule.operands]

    def bind_op(static: Call, *given):
        """Give every operand the same number of batch axes; inside jit, where reshapes are free."""
        core = [n for n, p in zip(cores, static.present, strict=True) if p]
        padded = [x.reshape((1,) * (static.n_batch + n - x.ndim) + x.shape) for x, n in zip(given, core, strict=True)]
        return tuple(bind(static, *padded))

    bind_op.__name__ = bind_op.__qualname__ = name
    jitted = jax.jit(bind_op, static_argnums=0)  # eager calls cost an eighth of an unjitted bind's

    def call(*operands, implementation: str | None = None, config: Any = None, **options):
        if len(operands) != len(cores):
            raise TypeError(f"{name}: the axis rule {axes!r} has {len(cores)} operands; got {len(operands)}.")
        implementation = _resolve_implementation(name, implementation)
        _check_config(op, config)
        if implementation == "xla":
            with jax.named_scope(f"jtops_{name}_xla"):
                return tuple(reference(*operands, **options))[: len(op.rule.outs)]
        reason = limits(*operands, **options)
        if reason is not None and implementation is not None:
            raise UnsupportedError(f'{name}: {reason}; implementation={implementation!r} needs a kernel. Use implementation="xla".')
        given = [x for x in operands if x is not None]
        present = tuple(x is not None for x in operands)
        n_batch = max(0, *(x.ndim - n for x, n in zip(operands, cores, strict=True) if x is not None))
        static = Call(op, "out", n_batch, present, tuple(sorted(options.items())), implementation, target.requested(), config)
        return jitted(static, *given)

    return call


def _resolve_implementation(name: str, implementation: str | None) -> str | None:
    """The implementation a call asks for, or the configured one; None leaves the choice to the platform."""
    if implementation is None:
        return config.implementation.value
    if implementation not in ("triton", "xla", "interpret"):
        raise ValueError(f'{name}: implementation must be "triton", "xla", "interpret" or None; got {implementation!r}.')
    return implementation


def _check_config(op: _Op, config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, Config):
        raise TypeError(f"{op.name}: config must be a jtops.Config or None; got {config!r} of type {type(config).__name__}.")
    if set(config.blocks) != op.blocks:
        raise ValueError(f"{op.name}: config must give the blocks {', '.join(sorted(op.blocks))}; got {config!r}.")


# ------------------------------------------------------------------------------------------- the primitive and its meaning

fused_p = Primitive("fused_op")
fused_p.multiple_results = True
fused_p.def_impl(functools.partial(jax_compat.apply_primitive, fused_p))
jax_compat.needs_devices_to_lower(fused_p)


def bind(call: Call, *args):
    """Bind the primitive; operands of a shard_map body first vary together, or a shared operand's gradient misses its sum."""
    return fused_p.bind(*jax_compat.vary_together(args), call=call)


def batch_shape(call: Call, arrays) -> tuple[int, ...]:
    """The batch shape that the arrays broadcast to."""
    return jnp.broadcast_shapes(*(x.shape[: call.n_batch] for x in arrays))


def reference_stage(call: Call, *args) -> list:
    """What a stage means, in jax.numpy."""
    primals, _, linear = call.split(args)
    shape = batch_shape(call, args)

    def forward(*moved):
        new = iter(moved)
        full = iter([next(new) if w else p for w, p in zip(call.wrt or (False,) * call.n_in, primals, strict=True)])
        outs = call.op.reference(*(next(full) if p else None for p in call.present), **dict(call.options))
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
    moved = _picked(primals, call.wrt)
    live = lambda *d: _picked(forward(*d)[: call.n_out], call.live)
    if call.stage == "jvp":
        return jax.jvp(live, moved, linear)[1]
    return list(jax.vjp(live, *moved)[1](linear))


@functools.lru_cache(4096)
def out_types(call: Call, operand_types: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and dtypes of a stage's results, as its reference has them."""
    outs = partition.outside_mesh(functools.partial(jax.eval_shape, functools.partial(reference_stage, call)))(*operand_types)
    return tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outs)


def _picked(xs, mask) -> list:
    return [x for x, m in zip(xs, mask, strict=True) if m]


def _types(xs) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs)


@fused_p.def_abstract_eval
def _abstract_eval(*avals, call):
    primals = call.split(avals)[0]

    def specs(mesh):
        if call.stage == "vjp":  # JAX demands that a gradient has its primal's sharding
            return [p.sharding.spec for p in _picked(primals, call.wrt)]
        plain = call.to("fwd" if call.stage == "fwd" else "out", wrt=(), live=())
        shapes = [a.shape for a in (*primals, *out_types(plain, _types(primals)))]
        outs = partition.decide(plain.mesh_axes(), shapes, mesh.shape, [p.sharding.spec for p in primals]).outs
        return _picked(outs, call.live) if call.stage == "jvp" else outs

    return partition.typed(out_types(call, _types(avals)), avals[0], specs)


# ------------------------------------------------------------------------------------------------------------- derivatives


def _jvp(args, tangents, *, call):
    primals, saved, linear = call.split(args)
    t_primals, _, t_linear = call.split(tangents)
    moved = tuple(type(t) is not ad.Zero for t in t_primals)
    if call.stage in ("out", "fwd"):
        full = [checkpoint_name(x, f"{call.op.name}_residual") for x in bind(call.to("fwd"), *primals)]
        live = tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in full[: call.n_out])
        given = _picked(t_primals, moved)
        got = iter(bind(call.to("jvp", wrt=moved, live=live), *primals, *call.saved_of(full), *given) if any(live) else ())
        t_full = [next(got) if i < call.n_out and live[i] else jax_compat.symbolic_zero(x) for i, x in enumerate(full)]
        n = call.n_out if call.stage == "out" else len(full)
        return full[:n], t_full[:n]
    out = bind(call, *args)
    t_out = [jax_compat.symbolic_zero(x) for x in out]
    add = lambda more: [ad.add_tangents(a, b) for a, b in zip(t_out, more, strict=True)]
    if any(type(t) is not ad.Zero for t in t_linear):  # linear in these: the same stage again, hence still the kernel
        t_out = add(bind(call, *primals, *saved, *map(ad.instantiate_zeros, t_linear)))
    if any(moved):  # second order: differentiate the reference in the primals

        def f(*changed):
            new = iter(changed)
            return reference_stage(call, *(next(new) if m else p for m, p in zip(moved, primals, strict=True)), *saved, *linear)

        t_out = add(jax.jvp(f, _picked(primals, moved), _picked(t_primals, moved))[1])
    return out, t_out


def _transpose(cts, *args, call):
    """The jvp stage becomes the vjp stage and back, both masks narrowed to what is given and what is asked for."""
    primals, saved, linear = call.split(args)
    here, there = ("live", "wrt") if call.stage == "jvp" else ("wrt", "live")  # mask of my results; of my linear operands
    given = [type(ct) is not ad.Zero for ct in cts]
    asked = [ad.is_undefined_primal(x) for x in linear]

    def narrow(mask, keep):
        left = iter(keep)
        return tuple(m and next(left) for m in mask)

    masks = {here: narrow(getattr(call, here), given), there: narrow(getattr(call, there), asked)}
    new = call.to("vjp" if call.stage == "jvp" else "jvp", **masks)
    got = iter(bind(new, *primals, *saved, *_picked(cts, given)))
    return [None] * (len(primals) + len(saved)) + [next(got) if a else None for a in asked]


def _batch(args, dims, *, call):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [jnp.expand_dims(x, 0) if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    full = lambda x: jnp.broadcast_to(x, (size, *x.shape[1:]))
    moved = [i for i, w in enumerate(call.wrt) if w]
    linear = range(len(args) - len(call.split(args)[2]), len(args))
    if call.stage == "vjp":  # a gradient per example
        for i in (*moved, *linear):
            args[i] = full(args[i])
    if call.stage == "jvp":  # a tangent has its primal's shape
        for i, t in zip(moved, linear, strict=True):
            if len(args[i]) != len(args[t]):
                args[i], args[t] = full(args[i]), full(args[t])
    outs = bind(call.to(call.stage, n_batch=call.n_batch + 1), *args)
    return outs, [0] * len(outs)


ad.primitive_jvps[fused_p] = _jvp
ad.primitive_transposes[fused_p] = _transpose
batching.primitive_batchers[fused_p] = _batch


# ---------------------------------------------------------------------------------------------------- one device's launch


def run_kernel(call: Call, platform: str, *args) -> list:
    """Make the batch axes one, launch, and give results their batch axes back. Runs on whole arrays or on a device's shards."""
    n, shape, types = call.n_batch, batch_shape(call, args), out_types(call, _types(args))
    batch = math.prod(shape)
    primals, saved, linear = call.split(args)
    spread = lambda xs, mask: [next(xs) if m else None for m in mask]
    rows: list[Any] = spread((_rows(x, n, shape) for x in primals), call.present)
    wanted = tuple(bool(w) for w in spread(iter(call.wrt), call.present)) if call.wrt else ()
    launch = Launch(
        op=call.op.name,
        stage=call.stage,
        batch=batch,
        rows=tuple(rows),
        wanted=wanted,
        options=dict(call.options),
        config=call.config,
        target=target.resolve(platform, call.target) if platform in KERNEL_PLATFORMS else target.assumed(call.target),
        device=target.device_kind(platform) if platform in KERNEL_PLATFORMS and call.target is None else None,
        interpret=call.implementation == "interpret",
    )
    collapsed = spread((_collapse(x, n, shape) for x in primals), call.present)
    if call.stage in ("out", "fwd"):
        outs = call.op.forward(launch, *collapsed)
        _check_results(call, "forward", "results", outs, [(((batch, *t.shape[n:]),), (t.dtype,)) for t in types])
        return [o.reshape(t.shape) for o, t in zip(outs, types, strict=True)]
    full = lambda x: jnp.broadcast_to(x, shape + x.shape[n:]).reshape(batch, *x.shape[n:])
    grads = call.op.backward(launch, collapsed, [full(x) for x in saved], spread((full(x) for x in linear), call.live))
    allowed: list = [None] * len(rows)
    for i, t in zip([i for i, w in enumerate(wanted) if w], types, strict=True):
        own = {r: (r, *t.shape[n:]) for r in (batch, rows[i].own)}
        allowed[i] = (tuple(own.values()), (t.dtype, jnp.dtype(jnp.float32)))
    _check_results(call, "backward", "gradients", grads, allowed)
    grads = [g if g.shape[0] == r.own else r.sum(g) for g, r in _picked(zip(grads, rows, strict=True), wanted)]
    return [_restore(g, t.shape, n, shape) for g, t in zip(grads, types, strict=True)]


def _check_results(call: Call, launcher: str, what: str, got, wanted: list) -> None:
    """A launcher's mistake should not surface as a failed reshape. `wanted`: (shapes, dtypes) per result, None: anything."""
    where = f"{call.op.name}: the {launcher} launcher"
    if not isinstance(got, tuple | list) or len(got) != len(wanted):
        count = f"{len(got)}" if isinstance(got, tuple | list) else f"a {type(got).__name__}"
        raise TypeError(f"{where} must return {len(wanted)} {what}, in a tuple; got {count}.")
    for i, (x, rule) in enumerate(zip(got, wanted, strict=True)):
        if rule is None:
            continue
        shapes, dtypes = rule
        if x is None or x.shape not in shapes or x.dtype not in dtypes:
            have = "None" if x is None else f"{x.dtype} {x.shape}"
            raise TypeError(
                f"{where} must return {what}[{i}] as {' or '.join(map(str, dict.fromkeys(dtypes)))} of shape "
                f"{' or '.join(map(str, dict.fromkeys(shapes)))}, as the reference has it; got {have}."
            )


def _own_span(own: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """First and last + 1 of the batch axes that an operand has in full; those between that it lacks count as its own."""
    full = [i for i, (a, b) in enumerate(zip(own, shape, strict=True)) if a == b != 1]
    return (full[0], full[-1] + 1) if full else (len(shape), len(shape))


def _rows(x, n: int, shape: tuple[int, ...]) -> Rows:
    first, last = _own_span(x.shape[:n], shape)
    return Rows(math.prod(shape[:first]), math.prod(shape[first:last]), math.prod(shape[last:]))


def _collapse(x, n: int, shape: tuple[int, ...]) -> jax.Array:
    """Batch axes into one, of the operand's own rows. Shared axes between full ones are spread: `Rows` cannot tell them."""
    first, last = _own_span(x.shape[:n], shape)
    x = jnp.broadcast_to(x, x.shape[:first] + shape[first:last] + x.shape[last:])
    return x.reshape(math.prod(shape[first:last]), *x.shape[n:])


def _restore(gradient, wanted: tuple[int, ...], n: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_collapse`, which for what was spread is a sum."""
    first, last = _own_span(wanted[:n], shape)
    own = shape[first:last]
    parts = gradient.reshape(*own, *wanted[n:])
    spread = tuple(i for i, size in enumerate(own) if wanted[first + i] != size)
    if spread:
        parts = jnp.sum(parts, spread, dtype=jnp.promote_types(parts.dtype, jnp.float32))
    return parts.reshape(wanted)


# ---------------------------------------------------------------------------------------------------------------- lowering


def _lower(ctx, *args, call, platform):
    name = f"{call.op.name}_{call.stage}"
    if (reason := _why_reference(ctx, call, platform)) is not None:
        notes.add(f"jtops_{name}", "XLA", reason, platform)
        return partition.lower_local(ctx, *args, local=functools.partial(reference_stage, call))
    _check_lowerable(ctx, call, platform)
    if partition.is_automatic(ctx) and jax_compat.device_count(ctx) > 1:
        notes.add_partitioned(f"jtops_{name}", platform)
    local = functools.partial(run_kernel, call, platform)
    return partition.lower(ctx, *args, axes=call.mesh_axes(), name=name, local=local)


def _why_reference(ctx, call, platform) -> str | None:
    """Why XLA runs the reference; None where a kernel runs."""
    if call.stage == "jvp":
        return "forward-mode and second derivatives are the reference's"
    if call.implementation == "xla":
        return 'implementation="xla"'
    if platform not in KERNEL_PLATFORMS and call.implementation is None:
        return f"{platform} runs no Triton kernels"
    if any(math.prod(a.shape) == 0 for a in (*ctx.avals_in, *ctx.avals_out)):
        return "an array is empty"
    return None


def _check_lowerable(ctx, call, platform):
    name = call.op.name
    if call.implementation == "triton" and platform not in KERNEL_PLATFORMS:
        raise UnsupportedError(
            f'{name}: implementation="triton" needs a GPU, but the program is for {platform}; use None, "xla" or "interpret".'
        )
    given = iter(ctx.avals_in)
    operands = [next(given) if p else None for p in call.present]
    if (reason := call.op.limits(*operands, **dict(call.options))) is not None:
        raise UnsupportedError(f'{name}: {reason}. Use implementation="xla" for this call.')
    partition.check_manual(ctx, name, ', or use implementation="xla"')


mlir.register_lowering(fused_p, functools.partial(_lower, platform="cpu"))
for _platform in KERNEL_PLATFORMS:
    mlir.register_lowering(fused_p, functools.partial(_lower, platform=_platform), platform=_platform)
