"""From the triton_call primitive to StableHLO: a launch record for the GPU, or a host call for the interpreter."""

import functools
import hashlib
import itertools
import json
import os
import tempfile
import zlib

import jax
import jax.export
import numpy as np
from jax.interpreters import mlir

from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops.core import notes
from jtops.core.cache import constant_text
from jtops.core.compile import dump
from jtops.core.compile.kernel import CompiledKernel, compile_kernel
from jtops.core.descriptor import descriptor_type, launch_parameters
from jtops.core.interpret import host_call
from jtops.core.interpret import run as interpreter
from jtops.core.launch import inplace
from jtops.core.launch import ptx as ptx_launch
from jtops.core.target import Target, resolve
from jtops.core.types import Constexpr, Descriptor, Operand, Result, Scalar, array_of, leaves, specialization, triton_type
from jtops.errors import UnsupportedError

LAUNCH_TARGET = "triton_kernel_call_ffi"  # jaxlib's; XLA may capture it into CUDA graphs
export_checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in (LAUNCH_TARGET, ptx_launch.TARGET)]
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
    compiled = compile_for(call, ctx.avals_in, ctx.avals_out, resolve(platform, call.target))
    inner, values, aliases, order = inplace.in_buffer_order(ctx, operands, call)
    buffers = len(inner.avals_in) + len(inner.avals_out)
    text = ptx_launch.chosen_text(call, compiled, buffers)
    path = LAUNCH_TARGET if text is None else ptx_launch.TARGET
    notes.add(call.name, path, functools.partial(_why, call, compiled, platform, buffers), platform, call, compiled)
    if text is not None:
        results = ptx_launch.lower(inner, values, call, compiled, text, aliases)
    else:
        record = launch_record(call, compiled, ctx.avals_out)
        extra = {} if call.cost is None else {"cost_estimate_json": json.dumps(dict(call.cost))}
        rule = jax.ffi.ffi_lowering(LAUNCH_TARGET, has_side_effect=call.has_side_effect, operand_output_aliases=aliases)
        results = rule(inner, *values, opaque=stored_zlib(record), **extra)  # row-major layouts by default
    return [results[order.index(i)] for i in range(len(order))]


def _why(call, compiled, platform, buffers) -> str:
    """Why a kernel is launched, and by the path that it is, for `explain`."""
    said = f"the program is for {platform}"
    if call.launch:
        return f'{said}; jtops.config.launch("{call.launch}")'
    reason = ptx_launch.unfit(call, compiled, buffers)
    return f"{said}; not by XLA's own call: {reason}" if reason else said


def lower_host(ctx, *operands, call):
    """Lowering rule for CPU and every other platform."""
    if not call.interpret:
        platform = Target.parse(call.target).platform if call.target else "cuda"
        raise UnsupportedError(
            f"triton_call of kernel {call.kernel.__name__}: lowering for {_platform(ctx)}, which runs no Triton kernels. "
            "Pass interpret=True (or `with jtops.config.interpret():`) to run it with NumPy, or run on a GPU; to lower for one "
            f'that is not there: jax.jit(f).trace(x).lower(lowering_platforms=("{platform}",)).'
        )
    notes.add(call.name, "interpreter", _INTERPRETED, _platform(ctx), call)
    constants = [constant_text(p.value) for _, _, p in leaves(call.bound) if isinstance(p, Constexpr)]  # helpers by content
    kernel = triton_compat.kernel_key(call.kernel)
    content = (kernel, constants, call.bound, call.grid, call.aliases, call.zeroed, ctx.avals_in, ctx.avals_out)
    key = f"{call.name}-{hashlib.sha256(repr(content).encode()).hexdigest()[:32]}"
    run = functools.partial(interpreter.run, call.kernel, call.bound, call.grid, aliases=call.aliases, zeroed=call.zeroed)
    return host_call.lower(ctx, *operands, key=key, function=run, has_side_effect=call.has_side_effect)


def _interpreted(call, out_avals, *operands):
    outputs = [np.empty(a.shape, a.dtype) for a in out_avals]
    inputs = [np.asarray(x) for x in operands]
    interpreter.run(call.kernel, call.bound, call.grid, inputs, outputs, call.aliases, call.zeroed)
    return tuple(outputs)


def compile_for(call, in_avals, out_avals, target: Target) -> CompiledKernel:
    """The machine code of a bound call."""
    types = {}
    for _, name, param in leaves(call.bound):
        if array := array_of(param):
            dtype = (in_avals if isinstance(array, Operand) else out_avals)[array.index].dtype
            types[name] = descriptor_type(param, dtype) if isinstance(param, Descriptor) else f"*{triton_type(dtype)}"
    return dump.noted(call, types, compile_kernel(call.kernel, call.bound, types, call.options, target))


def launched_kernel(compiled: CompiledKernel):
    """jaxlib's record of the machine code. Neither IR nor line tables: every launch parses it all."""
    rocm = compiled.target.platform == "rocm"
    return jax_compat.gpu_triton.TritonKernel(
        compiled.name,
        compiled.num_warps,
        compiled.num_ctas,
        compiled.shared_bytes,
        hsaco_file(compiled.binary) if rocm else compiled.binary,
        "",
        0 if rocm else compiled.target.arch,
        *((compiled.scratch_bytes, compiled.scratch_align) if compiled.scratch_bytes else ()),
    )


def launch_record(call, compiled: CompiledKernel, out_avals) -> bytes:
    """jaxlib's serialized launch: machine code, grid and parameters."""
    lib = jax_compat.gpu_triton
    descriptors = iter(compiled.descriptors or itertools.repeat(None))
    parameters: list = []
    for path, name, param in leaves(call.bound):
        if isinstance(param, Descriptor):
            parameters += launch_parameters(lib, param, next(descriptors))
        elif isinstance(param, Operand | Result):
            aligned = specialization(param, call.kernel.params[path[0]]) is not None
            parameters.append(lib.create_array_parameter(inplace.bytes_to_zero(call, param, out_avals), 16 if aligned else 0))
        elif isinstance(param, Scalar) and name not in compiled.folded:
            parameters.append(lib.create_scalar_parameter(param.value, param.type))
    return lib.TritonKernelCall(launched_kernel(compiled), *call.grid, parameters).to_proto(call.name, call.metadata)


def stored_zlib(data: bytes) -> bytes:
    """`data` as an uncompressed zlib stream: the same bytes whatever zlib Python has, and nothing to inflate at a launch."""
    blocks = [data[i : i + 65535] for i in range(0, len(data), 65535)] or [b""]
    body = b"".join(
        bytes([i == len(blocks) - 1]) + len(b).to_bytes(2, "little") + (65535 - len(b)).to_bytes(2, "little") + b
        for i, b in enumerate(blocks)
    )
    return b"\x78\x01" + body + zlib.adler32(data).to_bytes(4, "big")


@functools.cache
def _hsaco_directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="jtops-hsaco-")


def hsaco_file(image) -> str:
    """jaxlib takes an HSACO by file name; the name is its content's hash."""
    path = os.path.join(_hsaco_directory().name, hashlib.sha256(image).hexdigest() + ".hsaco")
    if not os.path.exists(path):
        part = f"{path}.{os.getpid()}"
        with open(part, "wb") as f:
            f.write(image)
        os.replace(part, path)
    return path


def _platform(ctx) -> str:
    return (ctx.platforms or ctx.module_context.platforms)[0]


def register(primitive) -> None:
    """Install the rules."""
    mlir.register_lowering(primitive, lower_host)
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, functools.partial(lower_gpu, platform=platform), platform=platform)
