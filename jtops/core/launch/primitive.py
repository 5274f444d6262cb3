"""The primitive of a kernel launch and its rules."""

import functools

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.interpreters.batching import primitive_batchers

from jtops._compat import jax as jax_compat
from jtops.core.launch import inplace, lowering, vmap
from jtops.errors import UnsupportedError

triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True


@triton_call_p.def_impl
def _run_eagerly(*args, call):
    if any(isinstance(x, jax.Ref) for x in args):
        with jax.disable_jit(False):  # a Ref is turned into values where a jitted function is compiled
            return _jitted(call)(*args)
    return jax_compat.apply_primitive(triton_call_p, *args, call=call)


@functools.lru_cache(maxsize=1024)
def _jitted(call):
    return jax.jit(functools.partial(triton_call_p.bind, call=call))


@triton_call_p.def_effectful_abstract_eval
def _abstract_eval(*args, call):
    _refuse_sharded(call.name, args)
    varying = frozenset().union(*map(jax_compat.varying_axes, args))
    types = [jax_compat.shaped_array(t.shape, t.dtype, varying) for t in call.out_types]
    return types, jax_compat.effects_of(args, call.has_side_effect)


def _refuse_sharded(name: str, avals) -> None:
    """Raise an UnsupportedError for operands whose types are sharded: a kernel without a rule sees only whole arrays."""
    for i, aval in enumerate(avals):
        if not isinstance(aval, jax_compat.AbstractRef) and any(axis is not None for axis in aval.sharding.spec):
            raise UnsupportedError(
                f"kernel {name}: operand {i} is sharded over explicit mesh axes, {aval.str_short(mesh_axis_types=True)}, and the "
                "call has no rule for that. Give triton_call sharding_rule=jtops.ShardingRule(...), wrap your function in "
                "jtops.sharded_call, call it in jax.shard_map, or jax.sharding.reshard the operand to be whole on every device."
            )


def _no_derivative(primals, tangents, *, call):
    raise UnsupportedError(
        f"kernel {call.name}: triton_call has no derivative. Wrap it in jax.custom_vjp (or custom_jvp) with your backward kernel, "
        "or use a jtops op, which has one."
    )


def bind_call(arrays, call):
    """Launch a bound call on arrays."""
    return triton_call_p.bind(*jax_compat.vary_together(arrays), call=call)


ad.primitive_jvps[triton_call_p] = _no_derivative
primitive_batchers[triton_call_p] = functools.partial(vmap.batch, bind_call)
jax_compat.keep_unused(triton_call_p)
jax_compat.discharge(triton_call_p, functools.partial(inplace.discharged, triton_call_p))
lowering.register(triton_call_p)
