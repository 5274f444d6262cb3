"""Lowering of the triton_call primitive to StableHLO: a launch for the GPU, or a host call for the interpreter."""

import functools
import hashlib
import json
from typing import Any

import jax
import jax.export
import numpy as np
from jax.interpreters import mlir

from jtops._compat import jax as jax_compat
from jtops.core import notes
from jtops.core.compile import dump
from jtops.core.compile.content import constant_text, key_of
from jtops.core.compile.kernel import CompiledKernel, compile_kernel
from jtops.core.descriptor import descriptor_type
from jtops.core.interpret import host_call
from jtops.core.interpret import run as interpreter
from jtops.core.launch import ffi, ptx
from jtops.core.target import Target, resolve
from jtops.core.types import Constexpr, Descriptor, Operand, Output, Parameter, array_of, leaves, parameters, triton_type
from jtops.errors import InterpreterError, UnsupportedError

export_checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (ffi.TARGET, ptx.TARGET)]
_INTERPRETED = 'interpret=True, implementation="interpret" or jtops_implementation asks for it'


def lower_gpu(ctx, *operands, call, platform):
    """Lowering rule for cuda and rocm."""
    if call.interpret:
        notes.add(call.name, "interpreter", _INTERPRETED, platform, call)
        run = functools.partial(_interpreted, call, ctx.avals_out)
        return jax_compat.host_callback(ctx, run, *operands, has_side_effect=call.has_side_effect)
    if jax_compat.gpu_triton is None or not hasattr(jax_compat.gpu_triton, "TritonKernel"):
        raise UnsupportedError(
            f"lowering for {platform} needs jaxlib's GPU plugin: install jtops[{platform}13] or jax-{platform}13-plugin."
        )
    made, compiled = compile_for(call, ctx.avals_in, ctx.avals_out, resolve(platform, call.target))
    inner, values, aliases, order = in_buffer_order(ctx, operands, call, made)
    text, unfit = ptx.chosen(call, made, compiled, len(inner.avals_in) + len(inner.avals_out))
    path = ffi.TARGET if text is None else ptx.TARGET
    notes.add(call.name, path, _why(call, platform, unfit), platform, call, compiled)
    if text is not None:
        results = ptx.lower(inner, values, call, compiled, text, aliases)
    else:
        record = ffi.launch_record(call, made, compiled, ctx.avals_out)
        extra = {} if call.cost is None else {"cost_estimate_json": json.dumps(dict(call.cost))}
        rule = jax.ffi.ffi_lowering(ffi.TARGET, has_side_effect=call.has_side_effect, operand_output_aliases=aliases)
        results = rule(inner, *values, opaque=ffi.packed(record), **extra)  # row-major layouts by default
    return [results[order.index(i)] for i in range(len(order))]


def _why(call, platform: str, unfit: str | None) -> str:
    """Why a kernel is launched, and why by this path, for `explain`."""
    said = f"the program is for {platform}"
    if call.launch:
        return f'{said}; jtops.config.launch("{call.launch}")'
    return f"{said}; not by XLA's own call: {unfit}" if unfit else said


def lower_host(ctx, *operands, call):
    """Lowering rule for CPU and every other platform."""
    if not call.interpret:
        platform = call.target.platform if call.target else "cuda"
        raise UnsupportedError(
            f"triton_call of kernel {call.kernel.__name__}: lowering for {_platform(ctx)}, which runs no Triton kernels. "
            "Pass interpret=True (or `with jtops.config.interpret():`) to run it with NumPy, or run on a GPU; to lower for one "
            f'that is not there: jax.jit(f).trace(x).lower(lowering_platforms=("{platform}",)).'
        )
    notes.add(call.name, "interpreter", _INTERPRETED, _platform(ctx), call)
    constants = [constant_text(p.value) for _, _, p in leaves(call.bound) if isinstance(p, Constexpr)]  # helpers by content
    kernel = key_of(call.kernel, InterpreterError, "cannot be interpreted")
    content = (kernel, constants, call.bound, call.grid, call.aliases, call.zeroed, ctx.avals_in, ctx.avals_out)
    key = f"{call.name}-{hashlib.sha256(repr(content).encode()).hexdigest()[:32]}"
    run = functools.partial(interpreter.run, call.kernel, call.bound, call.grid, aliases=call.aliases, zeroed=call.zeroed)
    return host_call.lower(ctx, *operands, key=key, function=run, has_side_effect=call.has_side_effect)


def _interpreted(call, out_avals, *operands):
    outputs = [np.empty(a.shape, a.dtype) for a in out_avals]
    inputs = [np.asarray(x) for x in operands]
    interpreter.run(call.kernel, call.bound, call.grid, inputs, outputs, call.aliases, call.zeroed)
    return tuple(outputs)


def compile_for(call, in_avals, out_avals, target: Target) -> tuple[tuple[Parameter, ...], CompiledKernel]:
    """The parameters of a bound call, and its machine code."""

    def type_of_array(_, value):
        array: Any = array_of(value)
        dtype = (in_avals if isinstance(array, Operand) else out_avals)[array.index].dtype
        return descriptor_type(value, dtype) if isinstance(value, Descriptor) else f"*{triton_type(dtype)}"

    made = parameters(call.kernel, call.bound, type_of_array)
    return made, dump.noted(call, made, compile_kernel(call.kernel, call.bound, made, call.options, target))


def in_buffer_order(ctx, operands, call, parameters) -> tuple[Any, list, dict[int, int], list[int]]:
    """Order what a custom call takes and gives so that its buffers stand in the order of the kernel's pointers.

    XLA hands over the operands, then the results, and a launch gives them to the kernel's pointers one after the other. So
    results that share an operand's buffer must come last, where no pointer is left for them; and a result whose pointer comes
    before an operand's is handed in as one, an array of zeros that the result takes over. The same is done with a zeroed result
    that a kernel sees through a descriptor, which a launch cannot zero.

    Returns (lowering context of the custom call, its operands, its aliases, the output that each of its results is).
    """
    pointers = [(a, isinstance(p.value, Descriptor)) for p in parameters if (a := array_of(p.value))]
    zero = [described and ffi.bytes_to_zero(call, a, ctx.avals_out) > 0 for a, described in pointers]
    taken = max((i + 1 for i, (a, _) in enumerate(pointers) if isinstance(a, Operand) or zero[i]), default=0)
    shared = dict(call.aliases)
    fresh = [a.index for a, _ in pointers[taken:]]
    order = fresh + [i for i in range(len(ctx.avals_out)) if i not in fresh]
    avals, values, aliases = [], [], {}
    for at, (a, _) in enumerate(pointers[:taken]):
        result = a.index if isinstance(a, Output) else shared.get(a.index)
        avals.append(ctx.avals_out[a.index] if isinstance(a, Output) else ctx.avals_in[a.index])
        values.append(jax_compat.zeros(ctx, avals[-1]) if isinstance(a, Output) or zero[at] else operands[a.index])
        if result is not None:
            aliases[at] = order.index(result)
    return ctx.replace(avals_in=avals, avals_out=[ctx.avals_out[i] for i in order]), values, aliases, order


def _platform(ctx) -> str:
    return (ctx.platforms or ctx.module_context.platforms)[0]


def register(primitive) -> None:
    """Install the rules."""
    mlir.register_lowering(primitive, lower_host)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, functools.partial(lower_gpu, platform=platform), platform=platform)
