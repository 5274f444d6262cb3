"""fused_op: makes launchers, a reference and one axis rule into a function that every JAX transform works on.

An op file says what is its own: a kernel launcher forward and one backward, the same maths in jax.numpy (the reference), and which
axes are which. Derivatives of any order and mode, vmap, sharding, rematerialisation, platform choice and empty arrays are here,
once. There is ONE primitive, with a static, hashable `Call` as its parameter and four stages:

    out   primals                       -> outs                plain forward kernel
    fwd   primals                       -> outs + residuals    forward kernel that also writes what the backward wants
    jvp   primals, saved, tangents      -> tangents of outs    linear; always XLA, by differentiating the reference
    vjp   primals, saved, cotangents    -> gradients           linear; the backward kernel

`saved` is what the backward kernel reads besides the primals: the residuals and those outs named in `saves`. An op without a
backward kernel has a vjp stage all the same: XLA's, from the reference.

Here are the public side, the primitive and its derivatives; `stages` has what a stage means, `local` one device's launch and the
lowering.

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

import functools
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jtops import config
from jtops._compat import jax as jax_compat
from jtops.core import target
from jtops.core.mesh import partition
from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame.axes import AxisRule
from jtops.kernels._lib.frame.launch import Config
from jtops.kernels._lib.frame.local import KERNEL_PLATFORMS, lower
from jtops.kernels._lib.frame.stages import (
    Call,
    Names,
    Op,
    Refused,
    out_types,
    own_promotion,
    picked,
    reference_stage,
    replaced,
    spread,
    types_of,
)
from jtops.kernels._lib.frame.variants import Variant

__all__ = ["Variant", "fused_op", "refused"]


def refused(reason: str) -> Refused:
    """A value for `backward` by which the op has no derivative: users who ask for one are told why, at trace time."""
    return Refused(reason)


def fused_op(
    name: str,
    *,
    operands: Mapping[str, str],
    results: Mapping[str, str],
    residuals: Mapping[str, str] | None = None,
    saves: Iterable[str] = (),
    whole: str = "",
    positions: tuple[str, ...] = (),
    reference: Callable[..., tuple],
    forward: Callable[..., tuple] | tuple[Variant, ...],
    backward: Callable[..., tuple] | tuple[Variant, ...] | Refused | None,
    limits: Callable[..., str | None] = lambda *operands, **options: None,
    blocks: str = "",
) -> Callable[..., tuple]:
    """Make an op of a reference and two launchers.

    Args:
      name: the op's public name; launches are called ``jtops_{name}_{stage}``, saved values ``{name}_residual``.
      operands, results: the core axes by name, without batch axes: ``{"q": "s (g r) d", "k": "t g d", "lengths": ""}``. A
        compound axis is one array axis made of two, the first outermost. Any core axis of an operand may have size 1, or
        be missing at the front, where the reference broadcasts.
      residuals: the core axes, by name, of what only the residual forward writes.
      saves: names of the results that the backward reads.
      whole: axes that one device must hold in full. All others, and all batch axes, may be sharded.
      positions: axes whose positions a kernel needs. Each appends an operand ``{axis}_index``, the iota along that axis, which is
        sharded as the axis is: its first element is a shard's offset.
      reference: ``(*operands, **options) -> (*results, *residuals)`` in jax.numpy; leading batch axes broadcast; absent operands
        are None. It defines shapes, dtypes and every derivative beyond the first reverse one.
      forward: launcher ``(launch, x) -> results``, plus residuals if ``launch.residuals``.
      backward: launcher ``(launch, x, saved, cotangents) -> gradients``, one per operand of the caller's; None where not
        ``launch.wanted``. A cotangent is None where that result has none. A gradient may be float32 and may have the call's batch
        rows in place of its operand's own: casting and summing come after, also over devices. In place of a launcher stands None,
        if the derivative is the reference's, or `refused`. Either stage may have several `Variant`s in place of one launcher: each
        call takes the first that fits.
      limits: ``(*operands, **options) -> reason | None``: why this legal call has no kernel. It may look at dtypes and the last
        axes alone: it is asked again when the program is lowered, of types with more batch axes.
      blocks: names of the block sizes that a `Config` of this op must have; variants have their own.

    Launchers see one leading batch axis and NamedTuples: ``x.q`` (None where absent) has ``launch.rows.q.own`` rows (see `Rows`),
    ``saved.lse`` and ``cotangents.out`` have ``launch.batch``.

    Returns:
      ``f(*operands, implementation=None, config=None, results=all, **options) -> tuple of the first so many results``; options must
      be hashable.
    """
    kept, saves = dict(residuals or {}), tuple(saves)
    given = dict(operands) | {f"{axis}_index": axis for axis in positions}
    rule = AxisRule.of(given.values(), results.values(), kept.values(), whole)
    names = Names(
        namedtuple(f"{name}_operands", given),
        namedtuple(f"{name}_saved", [*saves, *kept]),
        namedtuple(f"{name}_results", results),
    )
    op = Op(
        name=name,
        rule=rule,
        reference=own_promotion(reference),
        forward=forward,
        backward=backward,
        saves=tuple(list(results).index(result) for result in saves),
        limits=limits,
        blocks=frozenset(blocks.split()),
        names=names,
        positions=positions,
    )
    cores = [len(dims) for dims in rule.operands]

    def bind_op(static: Call, results: int, *given):
        """Give every operand the same number of batch axes; inside jit, where reshapes and iotas are free."""
        given += _iotas(op, spread(given, static.present[: op.n_given]))
        core = picked(cores, static.present)
        padded = [x.reshape((1,) * (static.n_batch + n - x.ndim) + x.shape) for x, n in zip(given, core, strict=True)]
        return tuple(bind(static, *padded))[:results]

    bind_op.__name__ = bind_op.__qualname__ = name
    jitted = jax.jit(bind_op, static_argnums=(0, 1))  # eager calls cost an eighth of an unjitted bind's

    def plain_op(results: int, options, *operands):
        with jax.named_scope(f"jtops_{name}_xla"):
            return tuple(op.reference(*operands, *_iotas(op, operands), **dict(options)))[:results]

    plain_op.__name__ = plain_op.__qualname__ = f"{name}_xla"
    plain = jax.jit(plain_op, static_argnums=(0, 1))

    def call(*operands, implementation: str | None = None, config: Any = None, results: int = len(rule.outs), **options):
        if len(operands) != op.n_given:
            raise TypeError(f"{name}: the op has {op.n_given} operands; got {len(operands)}.")
        implementation = _resolve_implementation(name, implementation)
        _check_config(op, config)
        if implementation == "xla" and not _explicit(operands):
            return plain(results, tuple(sorted(options.items())), *operands)
        reason = None if implementation == "xla" else limits(*operands, **options)
        if reason is not None and implementation is not None:
            raise UnsupportedError(f'{name}: {reason}; implementation={implementation!r} needs a kernel. Use implementation="xla".')
        given = [x for x in operands if x is not None]
        present = (*(x is not None for x in operands), *(True for _ in positions))
        n_batch = max(0, *(x.ndim - n for x, n in zip(operands, cores, strict=False) if x is not None))
        static = Call(op, "out", n_batch, present, tuple(sorted(options.items())), implementation, target.requested(), config)
        return jitted(static, results, *given)

    return call


def _explicit(operands) -> bool:
    """Whether some operand's type is sharded: jax.numpy would ask where the reference's reshapes shall be, the primitive knows."""
    types = (jax.typeof(x) for x in operands if x is not None)
    return any(axis is not None for t in types for axis in t.sharding.spec)


def _iotas(op: Op, operands) -> tuple[jax.Array, ...]:
    """The operands that `positions` appends to these."""

    def size(axis: str) -> int:
        given = [(x.shape, dims) for x, dims in zip(operands, op.rule.operands, strict=False) if x is not None]
        return max(n for shape, dims in given for n, d in zip(shape[::-1], dims[::-1], strict=False) if d == (axis,))

    return tuple(jnp.arange(size(axis), dtype=jnp.int32) for axis in op.positions)


def _resolve_implementation(name: str, implementation: str | None) -> str | None:
    """The implementation a call asks for, or the configured one; None leaves the choice to the platform."""
    if implementation is None:
        return config.implementation.value
    if implementation not in ("triton", "xla", "interpret"):
        raise ValueError(f'{name}: implementation must be "triton", "xla", "interpret" or None; got {implementation!r}.')
    return implementation


def _check_config(op: Op, config: Any) -> None:
    if config is None:
        return
    if not isinstance(config, Config):
        raise TypeError(f"{op.name}: config must be a jtops.Config or None; got {config!r} of type {type(config).__name__}.")
    names = dict.fromkeys(v.name for v in op.variants)
    if config["variant"] not in (None, *names):
        has = f"has the variants {', '.join(names)}" if names else "has no variants"
        raise ValueError(f"{op.name} {has}; got {config!r}.")
    legal = [v.blocks for v in op.variants if config["variant"] in (None, v.name)] or [op.blocks]
    if config.blocks.keys() not in legal and not config.names_only:
        texts = dict.fromkeys(", ".join(sorted(blocks)) for blocks in legal)
        raise ValueError(f"{op.name}: config must give the blocks {'; or '.join(texts)}; got {config!r}.")


# ------------------------------------------------------------------------------------------- the primitive and its meaning

fused_p = Primitive("fused_op")
fused_p.multiple_results = True
fused_p.def_impl(functools.partial(jax_compat.apply_primitive, fused_p))
jax_compat.needs_devices_to_lower(fused_p)


def bind(call: Call, *args):
    """Bind the primitive; operands of a shard_map body first vary together, or a shared operand's gradient misses its sum."""
    return fused_p.bind(*jax_compat.vary_together(args), call=call)


@fused_p.def_abstract_eval
def _abstract_eval(*avals, call):
    primals = call.split(avals)[0]

    def specs(mesh):
        if call.stage == "vjp":  # JAX demands that a gradient has its primal's sharding
            return [p.sharding.spec for p in picked(primals, call.wrt)]
        plain = call.to("fwd" if call.stage == "fwd" else "out", wrt=(), live=())
        shapes = [a.shape for a in (*primals, *out_types(plain, types_of(primals)))]
        outs = partition.decide(plain.mesh_axes(), shapes, mesh.shape, [p.sharding.spec for p in primals]).outs
        return picked(outs, call.live) if call.stage == "jvp" else outs

    return partition.typed(out_types(call, types_of(avals)), avals, specs)


# ------------------------------------------------------------------------------------------------------------- derivatives


def _jvp(args, tangents, *, call):
    primals, saved, linear = call.split(args)
    t_primals, _, t_linear = call.split(tangents)
    moved = tuple(type(t) is not ad.Zero for t in t_primals)
    if isinstance(call.op.backward, Refused) and any(moved):
        raise UnsupportedError(
            f'{call.op.name} has no derivative: {call.op.backward.reason}. Use jax.lax.stop_gradient, or implementation="xla".'
        )
    if call.stage in ("out", "fwd"):
        full = [checkpoint_name(x, f"{call.op.name}_residual") for x in bind(call.to("fwd"), *primals)]
        live = tuple(jnp.issubdtype(x.dtype, jnp.floating) for x in full[: call.n_out])
        given = picked(t_primals, moved)
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
            return reference_stage(call, *replaced(primals, moved, changed), *saved, *linear)

        t_out = add(jax.jvp(f, picked(primals, moved), picked(t_primals, moved))[1])
    return out, t_out


def _transpose(cts, *args, call):
    """The jvp stage becomes the vjp stage and back, both masks narrowed to what is given and what is asked for."""
    primals, saved, linear = call.split(args)
    here, there = ("live", "wrt") if call.stage == "jvp" else ("wrt", "live")  # mask of my results; of my linear operands
    given = [type(ct) is not ad.Zero for ct in cts]
    asked = [ad.is_undefined_primal(x) for x in linear]

    def narrow(mask, keep):
        return tuple(map(bool, spread(keep, mask)))

    masks = {here: narrow(getattr(call, here), given), there: narrow(getattr(call, there), asked)}
    new = call.to("vjp" if call.stage == "jvp" else "jvp", **masks)
    return [None] * (len(primals) + len(saved)) + spread(bind(new, *primals, *saved, *picked(cts, given)), asked)


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


mlir.register_lowering(fused_p, functools.partial(lower, platform="cpu"))
for _platform in KERNEL_PLATFORMS:
    mlir.register_lowering(fused_p, functools.partial(lower, platform=_platform), platform=_platform)
