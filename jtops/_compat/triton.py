"""Every private or version-dependent name of Triton that jtops uses, and nothing else. Supported: triton 3.6 to 3.9.

Without Triton (macOS, Windows) the names below still exist: ``triton.jit`` keeps the Python function so that op files import,
and using a kernel raises one clear error.
"""

import contextlib
import contextvars
import hashlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

from jtops._compat.versions import parsed

MIN_TRITON = (3, 6)

__all__ = [
    "BACKEND_OPTIONS",
    "HAS_TRITON",
    "INTERPRET_MODE",
    "Autotuner",
    "CompilationError",
    "GPUTarget",
    "Heuristics",
    "JITFunction",
    "cache_directory",
    "cache_manager",
    "compile_source",
    "compiler_stages",
    "default_shared_layout",
    "descriptor_flags",
    "forget_on_disk",
    "is_gluon",
    "kernel_function",
    "kernel_key",
    "load_interpreter_module",
    "make_backend",
    "may_be_read",
    "min_dot_size",
    "ptxas",
    "require_triton",
    "source_of",
    "tl",
    "tma_data_type",
    "triton",
    "when_compiled",
]

try:
    import triton

    if parsed(triton.__version__) < MIN_TRITON:
        raise ImportError(f"jtops needs triton >= {'.'.join(map(str, MIN_TRITON))}; found triton {triton.__version__}.")
    import triton.language as tl
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.compiler import GPUTarget, Language
    from triton.backends.nvidia import compiler as nvidia_compiler
    from triton.backends.nvidia.compiler import CUDAOptions, get_ptxas
    from triton.compiler import ASTSource
    from triton.compiler.compiler import get_cache_invalidating_env_vars, make_backend
    from triton.compiler.errors import CompilationError
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.language import str_to_ty
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.cache import get_cache_key, get_cache_manager
    from triton.runtime.jit import JITCallable, JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor

    HAS_TRITON = True
    BACKEND_OPTIONS = frozenset(CUDAOptions.__dataclass_fields__) | frozenset(HIPOptions.__dataclass_fields__)
    INTERPRET_MODE = type(tl.sum).__name__ == "InterpretedFunction"  # TRITON_INTERPRET was set before Triton was imported
except ImportError as import_error:
    HAS_TRITON = INTERPRET_MODE = False
    BACKEND_OPTIONS = frozenset()
    _why = str(import_error)
    if import_error.name:  # not the refusal above
        _why = (
            "this needs Triton, which is not installed: `pip install triton` (Linux only). Elsewhere use "
            f'implementation="xla". The import said: {_why}'
        )

    class _Absent:
        """Stands for a Triton name at definition time: decorators keep their function, everything else is another of these."""

        def __getattr__(self, name):
            return _Absent()

        def __call__(self, *args, **kwargs):
            return args[0] if len(args) == 1 and isinstance(args[0], types.FunctionType) else _Absent()

    triton = tl = _Absent()
    GPUTarget = ASTSource = GluonASTSource = None
    CompilationError = type("CompilationError", (Exception,), {})
    JITFunction = GluonJITFunction = type("JITFunction", (), {})
    Autotuner = Heuristics = type("Autotuner", (), {})


def require_triton() -> None:
    """Raise unless a Triton that jtops can use is installed."""
    if not HAS_TRITON:
        raise ImportError(_why)


_NEWEST_PTX = 88  # of CUDA 12.9. Triton 3.9 has an assembler of CUDA 13.4, jaxlib 0.11 and 0.12 of 13.0.
_scalar: contextvars.ContextVar[bool] = contextvars.ContextVar("_scalar", default=False)


class _Optimizer:
    """Triton's binding of LLVM that leaves the SLP vectorizer out where `_scalar` is set."""

    def __init__(self, llvm):
        self._llvm = llvm

    def __getattr__(self, name):
        return getattr(self._llvm, name)

    def optimize_module(self, *args, disable_slp_vectorizer=False, **options):
        return self._llvm.optimize_module(*args, disable_slp_vectorizer=disable_slp_vectorizer or _scalar.get(), **options)


@contextlib.contextmanager
def _llvm_for(target):
    """Context manager that turns LLVM's SLP vectorizer off for what jtops compiles, and for nobody else's kernels. In Triton 3.9
    that vectorizer, which Triton itself turns off for sm_80, ends the process when a kernel for sm_90 sums 16 float16 or bfloat16
    numbers a thread.
    """
    crashes = target.backend == "cuda" and target.arch == 90 and (3, 9) <= parsed(triton.__version__) < (3, 10)
    if crashes and not isinstance(nvidia_compiler.llvm, _Optimizer):
        nvidia_compiler.llvm = _Optimizer(nvidia_compiler.llvm)
    token = _scalar.set(crashes)
    try:
        yield
    finally:
        _scalar.reset(token)


def _readable(target, options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a version of PTX that the driver and jaxlib's assembler read, which need not be as new as Triton's own."""
    if target.backend != "cuda" or "ptx_version" in options:
        return options
    newest = nvidia_compiler.ptx_get_version(get_ptxas(target.arch).version)
    return options if newest <= _NEWEST_PTX else options | {"ptx_version": _NEWEST_PTX}


def compile_source(source, target, options) -> Any:
    """Compile by ``triton.compile``."""
    with _llvm_for(target):
        return triton.compile(source, target=target, options=_readable(target, options))


def source_of(kernel, signature: dict[str, Any], constants: dict[tuple, Any], aligned: list[tuple], key: str) -> Any:
    """What `compile_source` compiles: a kernel for parameters of these types.

    Args:
      kernel: a kernel of Triton or Gluon.
      signature: Triton's type of each parameter, "constexpr" for a constant, a tuple of these for a tuple.
      constants: values by path of the parameter; `aligned` has the paths of those that are aligned to 16.
      key: what tells the kernel from others beside what Triton sees of it.
    """
    kind = GluonASTSource if is_gluon(kernel) else ASTSource
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = kind(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    if key:
        content = source.hash() + key
        source.hash = lambda: hashlib.sha256(content.encode()).hexdigest()
    return source


def when_compiled(source, call: Callable[[], Any]) -> None:
    """Have ``call()`` run when `source` is compiled, which happens only where Triton's disk cache has no entry for it."""
    make_ir = source.make_ir

    def noted(*args, **kwargs):
        call()
        return make_ir(*args, **kwargs)

    source.make_ir = noted


def ptxas(capability: int) -> str:
    """Path of the assembler that Triton uses for an NVIDIA GPU."""
    require_triton()
    return get_ptxas(capability).path


def kernel_function(kernel) -> Any:
    """The JITFunction of a kernel, whatever TRITON_INTERPRET made of the decorator; TypeError for anything else."""
    require_triton()
    if isinstance(kernel, JITFunction):
        return kernel
    if type(kernel).__name__ == "InterpretedFunction":  # TRITON_INTERPRET=1 was set when the kernel was decorated
        if "_jtops_jit" not in vars(kernel):
            kernel._jtops_jit = JITFunction(kernel.fn)
        return kernel._jtops_jit
    raise TypeError(f"triton_call: kernel must be a @triton.jit function; got {kernel!r} of type {type(kernel).__name__}.")


def is_gluon(kernel) -> bool:
    """Whether the kernel is written in Gluon, not in Triton."""
    return isinstance(kernel, GluonJITFunction)


def kernel_key(kernel) -> str:
    """What tells a kernel from every other by content: its source, its helpers' and the constants they see."""
    try:
        return kernel.cache_key
    except Exception as error:
        _without_placeholders(kernel)
        if not INTERPRET_MODE or not isinstance(error, RuntimeError):
            raise
        return f"{kernel.__module__}.{kernel.__qualname__}-{id(kernel)}"  # Triton finds interpreted helpers and gives up


def _without_placeholders(kernel) -> None:
    """Remove the placeholders that Triton keeps, and would take for keys, where it found no key of a kernel or its helpers."""
    if str(kernel.hash).startswith("recursion:"):
        kernel.hash = None
        for value in kernel.get_capture_scope().values():
            if isinstance(value, JITFunction):
                _without_placeholders(value)


def may_be_read(value) -> bool:
    """Whether a compiled kernel may read a global of this value: a constant, kernel, module, type, or Triton's own object."""
    ours = getattr(value, "__triton_builtin__", False) or getattr(value, "__triton_aggregate__", False)
    module = getattr(value, "__module__", None)
    of_triton = isinstance(module, str) and module.startswith(("triton.language", "triton.experimental.gluon.language"))
    record = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
    kinds = (types.ModuleType, JITCallable, tl.constexpr, tl.dtype)
    named = type(value).__name__ == "InterpretedFunction"
    allowed = triton.knobs.compilation.allow_non_constexpr_globals
    return bool(ours or of_triton or record or named or allowed or isinstance(value, kinds))


def min_dot_size(lhs, rhs) -> tuple[int, int, int]:
    """The smallest (m, n, k) of a ``tl.dot`` of these types that compiles for NVIDIA GPUs."""
    return nvidia_compiler.min_dot_size(GPUTarget("cuda", 90, 32))(lhs, rhs)


def cache_manager(key: str) -> Any:
    """Triton's reader and writer of one folder of its disk cache."""
    return get_cache_manager(key)


def cache_directory() -> str:
    """The directory of Triton's disk cache."""
    return triton.knobs.cache.dir


def forget_on_disk(source, target, options: dict[str, Any]) -> None:
    """Remove what makes Triton's disk cache hold the compilation of `source`: the list of its files."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(_readable(target, options), **source.parse_options()))
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if path := manager.get_file(f"__grp__{source.name[:150]}.json"):
        pathlib.Path(path).unlink(missing_ok=True)  # another process may be repairing the same entry


def default_shared_layout(block_shape: tuple[int, ...], triton_type: str) -> Any:
    """Gluon's shared-memory layout of a block that TMA copies."""
    return NVMMASharedLayout.get_default_for(list(block_shape), str_to_ty(triton_type, None))


def tma_data_type(elem_type: int, tf32: bool) -> int:
    """CUtensorMapDataType of the element type in Triton's record of a descriptor, which numbers those after 7 otherwise."""
    return 11 if tf32 else {8: 10, 9: 8, 10: 9}.get(elem_type, elem_type)


def compiler_stages(backend, options) -> dict[str, Any]:
    """A Triton compiler's passes by name, from Triton IR to machine code; each is ``stage(module, metadata)``."""
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    return {name: _llvm_for(backend.target)(stage) for name, stage in stages.items()}


def descriptor_flags(nan: bool, tf32: bool) -> tuple[bool, ...]:
    """What a kernel without TMA takes between a descriptor's wide and narrow sizes. The second flag came after Triton 3.6."""
    return (nan, tf32) if "round_f32_to_tf32" in TensorDescriptor.__dataclass_fields__ else (nan,)


def load_interpreter_module() -> Any:
    """A private copy of Triton's interpreter module, so that its number formats can be replaced without touching Triton's."""
    name = "triton.runtime._jtops_interpreter"
    if name not in sys.modules:
        original: Any = importlib.util.find_spec("triton.runtime.interpreter")
        spec: Any = importlib.util.spec_from_file_location(name, original.origin)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
