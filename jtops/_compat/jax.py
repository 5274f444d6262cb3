"""Every private or version-dependent name of jax and jaxlib that jtops uses, and nothing else. Supported: jax 0.11.2 to 0.12."""

import contextlib
import dataclasses
import functools
import os
import re
from typing import Any

import jax
import numpy as np

from jtops._compat.versions import parsed

try:
    from jax._src import config as jax_config
    from jax._src import core, dispatch, distributed, effects
    from jax._src.callback import emit_python_callback
    from jax._src.interpreters import partial_eval
    from jax._src.interpreters.mlir import full_like_aval
    from jax._src.lax import lax as lax_internal
    from jax._src.lib import gpu_triton
    from jax._src.state.discharge import register_discharge_rule
    from jax._src.state.types import AbstractRef, ReadEffect, TransformedRef, WriteEffect
    from jax.interpreters import ad, mlir
except ImportError as error:
    raise ImportError(f"jtops works with jax 0.11.2 to 0.12; found jax {jax.__version__} ({error}).") from error

MIN_JAX = (0, 11, 2)

__all__ = [
    "AbstractRef",
    "TransformedRef",
    "apply_primitive",
    "config_state",
    "device_count",
    "discharge",
    "distributed_client",
    "effects_of",
    "gpu_triton",
    "host_callback",
    "keep_unused",
    "manual_axes",
    "needs_devices_to_lower",
    "ptx_call_refused",
    "settings",
    "shaped_array",
    "symbolic_zero",
    "vary_together",
    "varying_axes",
    "weakly_typed",
    "with_settings",
    "zeros",
]

if parsed(jax.__version__) < MIN_JAX:
    raise ImportError(f"jtops needs jax >= {'.'.join(map(str, MIN_JAX))}; found jax {jax.__version__}. Upgrade jax and jaxlib.")

apply_primitive = dispatch.apply_primitive


def config_state(name: str, doc: str, values: tuple[str, ...] | None = None, pattern: str = "", pattern_means: str = "") -> Any:
    """A setting that JAX itself tracks: context manager, ``jax.config`` option, environment variable ``NAME``.

    Its value is None, or one of `values`, or a string of the form `pattern`, which errors call `pattern_means`.
    """
    rule = f"None or one of {', '.join(map(repr, values))}" if values else f"None or {pattern_means}"

    def check(value):
        legal = value in values if values else isinstance(value, str) and re.fullmatch(pattern, value)
        if value is not None and not legal:
            raise ValueError(f"{name} (environment: {name.upper()}) must be {rule}; got {value!r}.")

    check(os.environ.get(name.upper()))
    keyed = {"include_in_jit_key": True, "include_in_trace_context": True}
    state = jax_config.string_or_object_state(name, None, doc, validator=check, **keyed)
    _states.append(state)
    return state


_states: list[Any] = []


def settings() -> tuple:
    """The values in force of all of our settings, for code that is traced again later."""
    return tuple(state.value for state in _states)


@contextlib.contextmanager
def with_settings(values: tuple):
    """Context in which our settings have the `values` that `settings` gave."""
    with contextlib.ExitStack() as stack:
        for state, value in zip(_states, values, strict=True):
            stack.enter_context(state(value))
        yield


def distributed_client() -> tuple[Any, int] | None:
    """The pair (key-value client, number of this process) in a program of several processes, else None."""
    state = distributed.global_state
    several = state.client is not None and (state.num_processes or 1) > 1
    return (state.client, state.process_id) if several else None


def needs_devices_to_lower(primitive) -> None:
    """Mark `primitive` as one whose lowering may build a custom_partitioning, which JAX else lowers with no devices and asserts."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def varying_axes(x) -> frozenset[str]:
    """Mesh axes over which `x`, a value or its type, differs from device to device inside shard_map."""
    return (x if isinstance(x, core.AbstractValue) else jax.typeof(x)).manual_axis_type.varying


def vary_together(arrays):
    """Mark every array as varying over the axes that any of them varies over, inside shard_map. The transpose of that mark is the
    sum over devices that the gradient of a shared operand needs; without it, it would silently be missing."""
    varying = frozenset().union(*map(varying_axes, arrays))
    if any(isinstance(x, jax.Ref) and varying_axes(x) != varying for x in arrays):
        raise ValueError(f"a Ref that is the same along mesh axes {tuple(varying)} cannot take what differs along them.")
    return [jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if (missing := varying - varying_axes(x)) else x for x in arrays]


def shaped_array(shape, dtype, varying: frozenset[str] = frozenset(), sharding: jax.sharding.NamedSharding | None = None):
    """The abstract value of a result that varies over `varying` mesh axes; None: replicated in the mesh of the context."""
    if sharding is None:
        sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=core.ManualAxisType(varying=varying))


def weakly_typed(x):
    """`x` as the result of arithmetic on Python's numbers: its dtype gives way to another operand's."""
    return lax_internal._convert_element_type(x, weak_type=True)


def symbolic_zero(x):
    """The zero tangent of `x`, never materialised."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


@dataclasses.dataclass(frozen=True)
class _SideEffect(effects.Effect):
    """Keeps a call whose results nobody uses, through every transformation."""


for _kinds in ("lowerable", "control_flow_allowed", "remat_allowed", "custom_derivatives_allowed", "partial_eval_kept"):
    getattr(effects, f"{_kinds}_effects").add_type(_SideEffect)


def effects_of(args, has_side_effect: bool) -> set:
    """The effects of a call with operands of types `args`: a Ref counts as read and written, since one cannot know which."""
    refs = [i for i, a in enumerate(args) if isinstance(a, AbstractRef)]
    return {kind(i) for i in refs for kind in (ReadEffect, WriteEffect)} | ({_SideEffect()} if has_side_effect else set())


def keep_unused(primitive) -> None:
    """Keep calls of `primitive`, and all that they take, where nothing uses their results."""
    # jax 0.11 calls it with (used results, equation), 0.12 with (used results, live operands, equation)
    partial_eval.dce_rules[primitive] = lambda *args: ([True] * len(args[-1].invars), args[-1])


def discharge(primitive, rule) -> None:
    """Register a rule: ``rule(refs, *args, **params)`` gives (values of the Refs, results) of a call on values in place of Refs.

    `refs` maps the place of each Ref among `args` to its type.
    """

    def discharged(ctx, *args, **params):
        chosen = zip(ctx.in_avals, ctx.should_discharge, strict=True)
        refs = {i: a.inner_aval for i, (a, wanted) in enumerate(chosen) if wanted and isinstance(a, AbstractRef)}
        values, results = rule(refs, *args, **params)
        return [values.get(i) for i in range(len(args))], results

    register_discharge_rule(primitive)(discharged)


def manual_axes(ctx) -> tuple[frozenset[str], tuple[str, ...]] | None:
    """The pair (manual axes, all axes) when `ctx` lowers the body of a shard_map, else None."""
    axes = ctx.module_context.axis_context
    return (frozenset(axes.manual_axes), tuple(axes.mesh.axis_names)) if isinstance(axes, mlir.SPMDAxisContext) else None


def device_count(ctx) -> int:
    """The number of devices that the program being lowered is for."""
    return getattr(ctx.module_context.axis_context, "num_devices", None) or 1


def zeros(ctx, aval):
    """An array of zeros of type `aval`, in the program being lowered."""
    return full_like_aval(ctx, 0, aval)


@functools.cache
def ptx_call_refused(target: str) -> str | None:
    """Why the XLA of this process' NVIDIA GPU has no custom call `target`; None if it has it, or if there is no such GPU.

    The name is internal to XLA, so a program that does nothing is compiled to see.
    """
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None  # a program for elsewhere
    ptx = r".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry probe(.param .u64 a)\n{ ret; }\n"
    sizes = "".join(f", {n} = 1 : i32" for n in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"))
    text = f'{{name = "probe", kernel_type = "ptx", kernel_data = "{ptx}"{sizes}, shared_mem_bytes = 0 : i32}}'
    one = jax.ShapeDtypeStruct((1,), np.float32)
    probe = jax.ffi.ffi_call(target, one, custom_call_api_version=2, legacy_backend_config=text)
    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), jax.default_device(device):
            jax.jit(probe).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).split("\n", 1)[0]
    return None


def host_callback(ctx, fn, *operands, has_side_effect: bool = False):
    """Lower a call of the NumPy function `fn` on the host, on a platform whose buffers the host cannot address."""
    results, _, _ = emit_python_callback(
        ctx, fn, None, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=has_side_effect, returns_token=False
    )
    return results
