"""A compiled kernel's texts, kept in files or printed.

With the environment variable ``JTOPS_DUMP_DIR`` (or ``JAX_TRITON_DUMP_DIR``) every kernel that is lowered leaves a folder there,
named by a hash of its content: the same kernel has the same folder in every process. It holds ``kernel.ttir``, ``kernel.ttgir``,
``kernel.llir`` and ``kernel.ptx`` (CUDA) or ``kernel.amdgcn`` and ``kernel.hsaco`` (ROCm), ``kernel.compile_info`` (what a launch
needs to know) and ``config`` (what it was compiled from). ``triton_call(debug=True)`` prints the texts as well, and where neither
variable is set writes to ``jtops_debug`` in the system's folder for temporary files.

``JAX_TRITON_PTXAS_EXTRA_FLAGS`` (flags, separated by spaces) and ``JAX_TRITON_PTXAS_DEVICE_DEBUG=1`` are jaxlib's own: it reads
them when it assembles a kernel's PTX, at the first launch in a process.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from jtops.core.compile.kernel import CompiledKernel
from jtops.core.files import written_whole
from jtops.core.types import Parameter

_TEXTS = ("ttir", "ttgir", "llir", "ptx", "amdgcn")


def noted(call, parameters: tuple[Parameter, ...], compiled: CompiledKernel) -> CompiledKernel:
    """Keep or print the texts of `compiled` if the call or the environment asks for it; return `compiled`."""
    debug = bool(dict(call.options).get("debug"))
    directory = os.environ.get("JTOPS_DUMP_DIR") or os.environ.get("JAX_TRITON_DUMP_DIR")
    if debug and not directory:
        directory = os.path.join(tempfile.gettempdir(), "jtops_debug")
    if directory:
        folder = Path(directory, compiled.triton_kernel.hash)
        _write(folder, call, parameters, compiled)
        if debug:
            _print(folder, compiled)
    return compiled


def _write(folder: Path, call, parameters, compiled: CompiledKernel) -> None:
    asm = compiled.triton_kernel.asm
    files: dict[str, Any] = {f"kernel.{stage}": asm[stage] for stage in (*_TEXTS, "hsaco") if stage in asm}
    launch = ("name", "num_warps", "num_ctas", "shared_bytes", "scratch_bytes", "scratch_align")
    files["kernel.compile_info"] = "".join(f"{field}: {getattr(compiled, field)}\n" for field in launch)
    said = [f"  {p.name}: {p.value if p.type == 'constexpr' else p.type}\n" for p in parameters]
    options = [f"  {key}: {value!r}\n" for key, value in call.options]
    files["config"] = "".join(
        [f"kernel: {call.kernel.__name__}\ntarget: {compiled.target}\nparameters:\n", *said, "options:\n", *options]
    )
    for name, content in files.items():
        written_whole(folder / name, content)  # another process may be writing the same


def _print(folder: Path, compiled: CompiledKernel) -> None:
    for stage in _TEXTS:
        if stage in compiled.triton_kernel.asm:
            print(f"// {compiled.name} for {compiled.target}: {stage}, {folder / f'kernel.{stage}'}")
            print(compiled.triton_kernel.asm[stage])
