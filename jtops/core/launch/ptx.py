"""The quick launch: XLA's own call of a PTX kernel, at about half the host cost of jaxlib's Triton call.

It knows only buffers: operands, then results. So the numbers of a launch become immediates of the kernel's text, and the parameters
that Triton adds for scratch memory, which most kernels never read, leave its signature. The text is a pure function of the call,
as the other path's record is.
"""

import json
import os
import re

import jax
import numpy as np

from jtops._compat import jax as jax_compat
from jtops.core.types import NUMPY_TYPES, Constexpr, Operand, Output, Parameter, Scalar
from jtops.errors import UnsupportedError

TARGET = "__gpu$xla.gpu.ptx"  # internal to XLA: `_compat` asks the XLA at hand whether it has it
# The path that is taken where neither the call's setting nor the kernel decides. H200, November 2026, us a launch with and without
# CUDA graphs: ptx 2.3 and 5.9, ffi 4.3 and 6.7, or 26 and 23 where the kernel's text is long (benchmarks/launch_cost.py; records
# were not deflated then).
AUTOMATIC = "ptx"
_FLAGS = ("JAX_TRITON_PTXAS_EXTRA_FLAGS", "JAX_TRITON_PTXAS_DEVICE_DEBUG")  # jaxlib's
_ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\(\n?(.*?)\n?\)", re.DOTALL)
_LOAD = re.compile(r"\bld\.param\.([bsuf])(8|16|32|64)(\s+)(%[a-z]+)(\d+\s*,\s*)\[\s*([\w$]+)\s*\]")


class UnfitError(Exception):
    """Why a kernel cannot be launched this way."""


def chosen(call, parameters: tuple[Parameter, ...], compiled, buffers: int) -> tuple[str | None, str | None]:
    """Return the PTX to launch by this path, or None for the other; and why this one, if it was tried, does not serve the call.

    Raises:
      UnsupportedError: this path was demanded and does not serve the call.
    """
    if (call.launch or AUTOMATIC) == "ffi":
        return None, None
    try:
        if (refused := jax_compat.ptx_call_refused(TARGET)) is not None:
            raise UnfitError(f"this process' XLA refuses the call: {refused}")
        return kernel_text(call, parameters, compiled, buffers), None
    except UnfitError as reason:
        if call.launch is None:
            return None, str(reason)
        raise UnsupportedError(
            f'kernel {call.name}: jtops.config.launch("ptx") was asked for, but {reason}. Use "ffi", or None, which chooses.'
        ) from None


def kernel_text(call, parameters: tuple[Parameter, ...], compiled, buffers: int) -> str:
    """The PTX of a compiled call with one parameter for each of its custom call's `buffers`; `UnfitError` if that cannot be."""
    if compiled.target.platform != "cuda":
        raise UnfitError("it is for ROCm")
    if compiled.num_ctas > 1:
        raise UnfitError(f"it runs in clusters of {compiled.num_ctas}")
    if flags := [name for name in _FLAGS if os.environ.get(name)]:
        raise UnfitError(f"{flags[0]} is set, which only the other path reads")
    if call.metadata:
        raise UnfitError("it carries metadata, which is read from a launch record")
    if call.zeroed:
        raise UnfitError("it has outputs to be zeroed before the launch")
    passed = [p.value for p in parameters if not isinstance(p.value, Constexpr) and p.name not in compiled.folded]
    if not all(isinstance(value, Operand | Output | Scalar) for value in passed):
        raise UnfitError("it takes tensor descriptors")
    pads = buffers - sum(not isinstance(value, Scalar) for value in passed)
    return _with_constants(compiled.binary, passed, pads)


def _with_constants(ptx: str, params: list, pads: int) -> str:
    """Make the launch's numbers constants of `ptx` and add `pads` parameters at its end, for results that have no pointer."""
    entry = _ENTRY.search(ptx)
    declared = [line.strip(" \t,") for line in entry[2].split("\n")] if entry else []
    names = [f"{entry[1]}_param_{i}" for i in range(len(declared))] if entry else []
    expected = all(line.startswith(".param") and line.split()[-1] == name for line, name in zip(declared, names, strict=True))
    if entry is None or len(names) < len(params) or not expected:
        raise UnfitError(f"its PTX does not declare the {len(params)} parameters of the launch in the expected form")
    head, body = ptx[: entry.start()], ptx[entry.end() :]
    numbers = {name: param for name, param in zip(names, params, strict=False) if isinstance(param, Scalar)}
    widths = {register: int(bits) for bits, register in re.findall(r"\.reg \.[bsuf](\d+)\s+(%[a-z]+)<", body)}

    def constant(load: re.Match) -> str:
        return _immediate(load, numbers[load[6]], widths) if load[6] in numbers else load[0]

    body = _LOAD.sub(constant, body)
    left = set(re.findall(rf"(?<![\w$]){re.escape(entry[1])}_param_\d+", body))
    if left.intersection(names[len(params) :]):
        raise UnfitError("it uses scratch memory")
    if used := [name for name in numbers if name in left]:
        raise UnfitError(f"its PTX uses the number {used[0]} in another way than loading it")
    kept = [line for line, name in zip(declared, names[: len(params)], strict=False) if name not in numbers]
    kept += [f".param .u64 {entry[1]}_result_{i}" for i in range(pads)]
    return f"{head}.visible .entry {entry[1]}(\n" + ",\n".join(kept) + f"\n){body}"


def _immediate(load: re.Match, number: Scalar, widths: dict[str, int]) -> str:
    """The load of a number as a move of its bits; as constant data, each multiprocessor would fetch it anew in every launch."""
    kind, bits, space, register, rest, _ = load.groups()
    if (width := widths.get(register)) is None:
        return load[0]
    with np.errstate(over="ignore"):
        value = np.array(number.value, NUMPY_TYPES[number.type]).tobytes()
    moved = int.from_bytes(value[: int(bits) // 8], "little", signed=kind == "s") & ((1 << width) - 1)
    return f"mov.b{width}{space}{register}{rest}{moved:#x}"


def lower(ctx, operands, call, compiled, text: str, aliases: dict[int, int]):
    """Lower to the custom call. `ctx` and `operands` are in the order of the kernel's pointers, results without one last."""
    x, y, z = call.grid
    numbers = {"grid_x": x, "grid_y": y, "grid_z": z, "block_x": 32 * compiled.num_warps, "block_y": 1, "block_z": 1}
    texts = {"name": compiled.name, "kernel_type": "ptx", "kernel_data": text, "launch_name": call.name}
    if call.cost is not None:
        texts["cost_estimate_json"] = json.dumps(dict(call.cost))
    items = [f'{k} = "{_escaped(v)}"' for k, v in texts.items()]
    items += [f"{k} = {v} : i32" for k, v in (numbers | {"shared_mem_bytes": compiled.shared_bytes}).items()]
    rule = jax.ffi.ffi_lowering(
        TARGET,
        backend_config=f"{{{', '.join(items)}}}",  # XLA reads the keys it knows; the others are for people and profilers
        api_version=2,
        has_side_effect=call.has_side_effect,
        operand_output_aliases=aliases,
    )
    return rule(ctx, *operands)  # row-major layouts by default


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", " ")
