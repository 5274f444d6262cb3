"""The launch by jaxlib: a record of the kernel and its parameters, which serves every kernel on every GPU."""

import functools
import hashlib
import itertools
import tempfile
import zlib
from pathlib import Path

from jtops._compat import jax as jax_compat
from jtops.core.compile.kernel import CompiledKernel
from jtops.core.descriptor import launch_parameters
from jtops.core.files import written_whole
from jtops.core.types import Descriptor, Operand, Output, Parameter, Scalar

TARGET = "triton_kernel_call_ffi"  # jaxlib's; XLA may capture it into CUDA graphs


def bytes_to_zero(call, array: Operand | Output, out_avals) -> int:
    """The number of bytes that a launch sets to zero before the kernel runs, where it is given `array`."""
    result = array.index if isinstance(array, Output) else dict(call.aliases).get(array.index)
    return out_avals[result].size * out_avals[result].dtype.itemsize if result in call.zeroed else 0


def launched_kernel(compiled: CompiledKernel):
    """The machine code in jaxlib's record, without IR and line tables, because every launch parses all of it."""
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


def launch_record(call, parameters: tuple[Parameter, ...], compiled: CompiledKernel, out_avals) -> bytes:
    """The launch as jaxlib serializes it: machine code, grid and parameters."""
    lib = jax_compat.gpu_triton
    descriptors = iter(compiled.descriptors or itertools.repeat(None))
    made: list = []
    for p in parameters:
        if isinstance(p.value, Descriptor):
            made += launch_parameters(lib, p.value, next(descriptors))
        elif isinstance(p.value, Operand | Output):
            made.append(lib.create_array_parameter(bytes_to_zero(call, p.value, out_avals), 16 if p.aligned else 0))
        elif isinstance(p.value, Scalar) and p.name not in compiled.folded:
            made.append(lib.create_scalar_parameter(p.value.value, p.value.type))
    return lib.TritonKernelCall(launched_kernel(compiled), *call.grid, made).to_proto(call.name, call.metadata)


def packed(record: bytes) -> bytes:
    """The form in which a program holds a record: deflated, because a launch costs more the longer it is.

    One build of zlib makes the same bytes of it everywhere, different builds may not. Programs, and with them the keys of JAX's
    persistent cache, then differ between processes with different builds.
    """
    return zlib.compress(record, 6)


@functools.cache
def _hsaco_directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="jtops-hsaco-")


def hsaco_file(image) -> str:
    """The name of a file with the HSACO, which is how jaxlib takes it: the hash of its content."""
    path = Path(_hsaco_directory().name, hashlib.sha256(image).hexdigest() + ".hsaco")
    if not path.exists():
        written_whole(path, bytes(image))
    return str(path)
