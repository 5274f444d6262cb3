"""One device's part of a call: batch axes become one, kernels are launched; and lowering chooses between kernels and XLA."""

import functools
import math

import jax
import jax.numpy as jnp

from jtops._compat import jax as jax_compat
from jtops.core import notes, target
from jtops.core.mesh import partition
from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame.launch import Launch, Rows
from jtops.kernels._lib.frame.stages import Call, Refused, batch_shape, out_types, own_promotion, reference_stage, spread, types_of
from jtops.kernels._lib.frame.variants import settled

KERNEL_PLATFORMS = ("cuda", "rocm")


@own_promotion
def run_kernel(call: Call, platform: str, *args) -> list:
    """Make the batch axes one, launch, and give results their batch axes back. Runs on whole arrays or on a device's shards."""
    op, n, shape, types = call.op, call.n_batch, batch_shape(call, args), out_types(call, types_of(args))
    batch = math.prod(shape)
    primals, saved, linear = call.split(args)
    by_operand = op.names.operands._make
    rows = by_operand(spread((_rows(x, n, shape) for x in primals), call.present))
    wanted = by_operand(map(bool, spread(call.wrt or (False,) * call.n_in, call.present)))
    compiled = platform in KERNEL_PLATFORMS
    launch = Launch(
        op=op.name,
        stage=call.stage,
        batch=batch,
        rows=rows,
        wanted=wanted,
        options=dict(call.options),
        config=call.config,
        target=target.resolve(platform, call.target) if compiled else target.assumed(call.target),
        device=target.device_kind(platform) if compiled and call.target is None else None,
        interpret=call.implementation == "interpret",
    )
    collapsed = by_operand(spread((_collapse(x, n, shape) for x in primals), call.present))
    if call.stage in ("out", "fwd"):
        launch, forward = settled(launch, op.forward, collapsed)
        outs = forward(launch, collapsed)
        _check_results(call, "forward", "results", outs, [(((batch, *t.shape[n:]),), (t.dtype,)) for t in types])
        return [o.reshape(t.shape) for o, t in zip(outs, types, strict=True)]
    full = lambda xs: [jnp.broadcast_to(x, shape + x.shape[n:]).reshape(batch, *x.shape[n:]) for x in xs]
    kept, cotangents = op.names.saved._make(full(saved)), op.names.results._make(spread(full(linear), call.live))
    assert op.backward is not None
    assert not isinstance(op.backward, Refused)
    launch, backward = settled(launch, op.backward, collapsed)
    grads = backward(launch, collapsed, kept, cotangents)
    asked = [i for i, w in enumerate(wanted) if w]
    allowed: list = [None] * op.n_given
    for i, t in zip(asked, types, strict=True):
        own = dict.fromkeys((r, *t.shape[n:]) for r in (batch, rows[i].own))
        allowed[i] = (tuple(own), (t.dtype, jnp.dtype(jnp.float32)))
    _check_results(call, "backward", "gradients", grads, allowed)
    summed = (grads[i] if grads[i].shape[0] == rows[i].own else rows[i].sum(grads[i]) for i in asked)
    return [_restore(g, t.shape, n, shape) for g, t in zip(summed, types, strict=True)]


def _check_results(call: Call, launcher: str, what: str, got, wanted: list) -> None:
    """Check a launcher's results before a reshape fails on them. `wanted`: (shapes, dtypes) per result, None: anything."""
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
    """The first and last + 1 of the batch axes that an operand has in full; axes between them that it lacks count as its own."""
    full = [i for i, (a, b) in enumerate(zip(own, shape, strict=True)) if a == b != 1]
    return (full[0], full[-1] + 1) if full else (len(shape), len(shape))


def _rows(x, n: int, shape: tuple[int, ...]) -> Rows:
    first, last = _own_span(x.shape[:n], shape)
    return Rows(inner=math.prod(shape[last:]), own=math.prod(shape[first:last]))


def _collapse(x, n: int, shape: tuple[int, ...]) -> jax.Array:
    """Make one batch axis, of the operand's own rows. Shared axes between full ones are spread: `Rows` cannot describe them."""
    first, last = _own_span(x.shape[:n], shape)
    x = jnp.broadcast_to(x, x.shape[:first] + shape[first:last] + x.shape[last:])
    return x.reshape(math.prod(shape[first:last]), *x.shape[n:])


def _restore(gradient, wanted: tuple[int, ...], n: int, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_collapse`; for axes that were spread this is a sum."""
    first, last = _own_span(wanted[:n], shape)
    own = shape[first:last]
    parts = gradient.reshape(*own, *wanted[n:])
    shared = tuple(i for i, size in enumerate(own) if wanted[first + i] != size)
    if shared:
        parts = jnp.sum(parts, shared, dtype=jnp.promote_types(parts.dtype, jnp.float32))
    return parts.reshape(wanted)


# ---------------------------------------------------------------------------------------------------------------- lowering


def lower(ctx, *args, call, platform):
    """The MLIR rule of the primitive."""
    name = f"{call.op.name}_{call.stage}"
    if (reason := _why_reference(ctx, call, platform)) is not None:
        notes.add(f"jtops_{name}", "XLA", reason, platform)
        return partition.lower_local(ctx, *args, local=functools.partial(reference_stage, call))
    _check_lowerable(ctx, call, platform)
    if partition.is_automatic(ctx) and jax_compat.device_count(ctx) > 1:
        notes.add_partitioned(f"jtops_{name}", platform)
    local = functools.partial(run_kernel, call, platform)
    return partition.lower(ctx, *args, axes=call.mesh_axes(), name=name, local=local)


def _why_reference(ctx, call: Call, platform: str) -> str | None:
    """Why XLA runs the reference; None where a kernel runs."""
    if call.stage == "jvp":
        return "forward-mode and second derivatives are the reference's"
    if not call.has_launcher:
        return "the op's derivatives are the reference's"
    if call.implementation == "xla":
        return 'implementation="xla"'
    if platform not in KERNEL_PLATFORMS and call.implementation is None:
        return f"{platform} runs no Triton kernels"
    if any(math.prod(a.shape) == 0 for a in (*ctx.avals_in, *ctx.avals_out)):
        return "an array is empty"
    return None


def _check_lowerable(ctx, call: Call, platform: str) -> None:
    name = call.op.name
    if call.implementation == "triton" and platform not in KERNEL_PLATFORMS:
        raise UnsupportedError(
            f'{name}: implementation="triton" needs a GPU, but the program is for {platform}; use None, "xla" or "interpret".'
        )
    operands = spread(ctx.avals_in[: call.n_in], call.present)
    if (reason := call.limits(operands)) is not None:
        raise UnsupportedError(f'{name}: {reason}. Use implementation="xla" for this call.')
    partition.check_manual(ctx, name, ', or use implementation="xla"')
