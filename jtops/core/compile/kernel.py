"""Compilation of a bound kernel for a target, once per process; Triton keeps the machine code on disk between processes."""

import dataclasses
import inspect
from concurrent.futures import Future
from typing import Any

from jtops._compat import triton as triton_compat
from jtops.core import cache
from jtops.core.compile.content import constant_text, distinct_helpers, key_of
from jtops.core.compile.disk import load_or_compile
from jtops.core.compile.ptx_text import in_clusters, strip_ptx
from jtops.core.target import Target
from jtops.core.types import Bound, Constexpr, Items, Parameter, Scalar, told
from jtops.errors import KernelCompileError

MAX_TENSOR_MEMORY = 512  # columns, of Blackwell's tensor memory (PTX ISA, tcgen05)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CompiledKernel:
    """Machine code and what a launch must know about it. `binary` is PTX text (CUDA) or an HSACO image (ROCm)."""

    name: str
    target: Target
    binary: str | bytes
    num_warps: int
    num_ctas: int
    shared_bytes: int
    scratch_bytes: int
    scratch_align: int
    descriptors: tuple[dict, ...]  # of the tensor descriptors, in order; empty where the GPU has no TMA
    folded: frozenset[str]  # scalars compiled in because they equal 1: the launch leaves them out
    triton_kernel: Any  # Triton's own object, for its intermediate texts


_compiled: dict[Any, Future] = cache.store({})


def compile_kernel(
    kernel, bound: Bound, parameters: tuple[Parameter, ...], options: tuple[tuple[str, Any], ...], target: Target
) -> CompiledKernel:
    """Compile `kernel` with `bound` parameters; `parameters` says all that the compiler asks about these.

    Threads that ask for one kernel at the same time compile it once and share the result, or its error.
    """
    if triton_compat.INTERPRET_MODE:
        raise KernelCompileError(
            f"kernel {kernel.__name__}: TRITON_INTERPRET was set when Triton was imported, which keeps it from compiling in this "
            "process. Unset it; interpret=True and jtops.config.interpret() need no variable."
        )
    for option in ("num_ctas", "cluster_size"):
        if (ctas := dict(options).get(option, 1)) > 1 and not target.has_clusters:
            raise ValueError(f"kernel {kernel.__name__}: {option}={ctas} needs clusters, from sm_90 on; compiling for {target}.")
    content = key_of(kernel, KernelCompileError, f"does not compile for {target}")
    asked = tuple((p.value if p.type == "constexpr" else p.type, p.name, p.aligned, p.folds) for p in parameters)
    make = lambda: _compile(kernel, bound, parameters, dict(options), target)
    return cache.once(_compiled, (content, asked, options, target), make, lambda: cache.count(memory_hits=1))


def variants(kernel) -> int:
    """The number of compiled forms of `kernel` that this process holds."""
    return sum(key[0] == triton_compat.kernel_key(kernel) for key in list(_compiled))


def _compile(kernel, bound, parameters, options, target) -> CompiledKernel:
    cluster, first = options.pop("cluster_size", 1), None
    # Triton turns an integer 1 into a constant, which lets it see contiguous strides but has no methods: a kernel that writes
    # n.to(...) compiles for every n but 1. Such a kernel gets the 1 as a number.
    for folded in dict.fromkeys((frozenset(p.name for p in parameters if p.folds), frozenset[str]())):
        try:
            compiled = _run_triton(kernel, bound, parameters, folded, options, target)
            break
        except triton_compat.CompilationError as error:
            first = first or error
    else:
        raise _compile_error(kernel, target, "front end (Python to Triton IR)", first, parameters) from first
    constants = {p.name: p.value.value for p in parameters if isinstance(p.value, Constexpr)}
    meta = compiled.metadata
    if meta.shared > target.max_shared_bytes:
        raise KernelCompileError(
            f"kernel {kernel.__name__}: needs {meta.shared} bytes of shared memory, {target} has {target.max_shared_bytes} for a "
            f"program; use smaller blocks or fewer stages. Constants: {constants}; options: {options}."
        )
    if (columns := getattr(meta, "tmem_size", None) or 0) > MAX_TENSOR_MEMORY:
        raise KernelCompileError(
            f"kernel {kernel.__name__}: needs {columns} columns of tensor memory, {target} has {MAX_TENSOR_MEMORY}; use "
            f"smaller blocks or fewer accumulators. Constants: {constants}; options: {options}."
        )
    return CompiledKernel(
        name=meta.name,
        target=target,
        binary=in_clusters(kernel, strip_ptx(compiled.asm["ptx"]), cluster) if target.platform == "cuda" else compiled.asm["hsaco"],
        num_warps=meta.num_warps,  # warp specialisation raises it above the option: the launch needs this one
        num_ctas=meta.num_ctas,
        shared_bytes=meta.shared,
        scratch_bytes=getattr(meta, "global_scratch_size", 0) or 0,
        scratch_align=getattr(meta, "global_scratch_align", 1) or 1,
        descriptors=tuple(getattr(meta, "tensordesc_meta", None) or ()),
        folded=folded,
        triton_kernel=compiled,
    )


def _run_triton(kernel, bound, parameters, folded, options, target):
    constants = {p.path: 1 if p.name in folded else p.value.value for p in parameters if p.name in folded or p.type == "constexpr"}
    types = iter(["constexpr" if p.path in constants else p.type for p in parameters])

    def same_structure(param):
        return param.of(map(same_structure, param.items)) if isinstance(param, Items) else next(types)

    # Triton's key of a constant is its str: "1" as 1, and a tuple of helpers by their names.
    told = [constant_text(v) for v in constants.values() if isinstance(v, str | tuple)]
    source = triton_compat.source_of(
        kernel,
        signature={name: same_structure(param) for name, param in bound},
        constants=constants,
        aligned=[p.path for p in parameters if p.aligned and p.name not in folded],
        key=distinct_helpers(kernel, constants.values()) + "".join(told),
    )
    try:
        return load_or_compile(source, target.gpu_target, options)
    except (triton_compat.CompilationError, KernelCompileError):
        raise
    except OSError as error:
        raise KernelCompileError(
            f"kernel {kernel.__name__}: Triton could not use a file: {error}. Compiled kernels are kept in a directory that "
            f"TRITON_CACHE_DIR names, {triton_compat.cache_directory()}: it must be one that can be made and written."
        ) from error
    except Exception as error:
        stage = "ptxas" if type(error).__name__ == "PTXASError" else "back end (Triton IR to machine code)"
        raise _compile_error(kernel, target, stage, error) from error


def _told(parameter: Parameter) -> str:
    if isinstance(parameter.value, Constexpr):
        return f"{parameter.value.value!r} (constexpr)"
    return f"{parameter.value.value!r} ({parameter.type})" if isinstance(parameter.value, Scalar) else parameter.type


def _compile_error(kernel, target, stage, error, parameters=()) -> KernelCompileError:
    file, first = inspect.getsourcefile(kernel.fn), kernel.starting_line_number
    line = getattr(getattr(error, "node", None), "lineno", None)
    where, source = f"{file}:{first}", ""
    if line is not None:  # counted by Triton from the line of `def`
        offset = next(i for i, text in enumerate(kernel.raw_src) if text.lstrip().startswith("def ")) + line - 1
        where, source = f"{file}:{first + offset}", f"\n    {kernel.raw_src[offset].strip()}"
    said = str(error)
    while isinstance(error := error.__cause__, triton_compat.CompilationError):  # in a helper: the outer error says nothing
        said += f"\nand of the helper that is called there: {error}"
    if said.endswith("PassManager::run failed"):
        said += " (its reason, with the kernel's line, is on stderr)"
    return KernelCompileError(
        f"kernel {kernel.__name__} does not compile for {target}; stage: {stage}; at {where}{source}\nTriton says: {said}"
        + (f"\n{told((p.name, _told(p)) for p in parameters)}" if parameters else "")
    )
