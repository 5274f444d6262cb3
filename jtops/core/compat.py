"""Every private or version-dependent name of jax, jaxlib and triton that jtops uses, and nothing else.

Supported: jax 0.11.2 to 0.12, triton 3.6 to 3.9. Without Triton (macOS, Windows) the names below still exist: ``triton.jit``
keeps the Python function so that op files import, and using a kernel raises one clear error.
"""

import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
import sys
import types
from typing import Any

import jax
import numpy as np

try:
    from jax._src import config as jax_config
    from jax._src import core, dispatch, distributed, effects
    from jax._src.callback import emit_python_callback
    from jax._src.interpreters import partial_eval
    from jax._src.interpreters.mlir import full_like_aval
    from jax._src.lib import gpu_triton
    from jax._src.state.discharge import register_discharge_rule
    from jax._src.state.types import AbstractRef, ReadEffect, TransformedRef, WriteEffect
    from jax.interpreters import ad, mlir
except ImportError as error:
    raise ImportError(f"jtops works with jax 0.11.2 to 0.12; found jax {jax.__version__} ({error}).") from error

MIN_JAX, MIN_TRITON = (0, 11, 2), (3, 6)

__all__ = [
    "BACKEND_OPTIONS",
    "HAS_TRITON",
    "INTERPRET_MODE",
    "AbstractRef",
    "Autotuner",
    "Heuristics",
    "TransformedRef",
    "ad",
    "apply_primitive",
    "cache_manager",
    "compile_source",
    "compiler_stages",
    "config_state",
    "descriptor_flags",
    "device_count",
    "discharge",
    "distributed_client",
    "effects_of",
    "forget_on_disk",
    "gpu_triton",
    "host_callback",
    "keep_unused",
    "kernel_function",
    "kernel_key",
    "load_interpreter_module",
    "make_backend",
    "manual_axes",
    "needs_devices_to_lower",
    "ptx_call_refused",
    "ptxas",
    "require_triton",
    "settings",
    "shaped_array",
    "symbolic_zero",
    "tl",
    "triton",
    "vary_together",
    "varying_axes",
    "with_settings",
    "zeros",
]


def _version(text: str) -> tuple[int, ...]:
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in text.split(".")[:3])


if _version(jax.__version__) < MIN_JAX:
    raise ImportError(f"jtops needs jax >= {'.'.join(map(str, MIN_JAX))}; found jax {jax.__version__}. Upgrade jax and jaxlib.")


# ------------------------------------------------------------------------------------------------------------------- jax

apply_primitive = dispatch.apply_primitive


def config_state(name: str, doc: str, values: tuple[str, ...] | None = None, pattern: str = "") -> Any:
    """A setting that JAX itself tracks: context manager, ``jax.config`` option, environment variable ``NAME``.

    Its value is None, or one of `values`, or a string of the form `pattern`.
    """
    rule = f"None or one of {', '.join(map(repr, values))}" if values else f"None or a string like {pattern}"

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
    """(key-value client, number of this process) of a program of several processes, else None."""
    state = distributed.global_state
    several = state.client is not None and (state.num_processes or 1) > 1
    return (state.client, state.process_id) if several else None


def needs_devices_to_lower(primitive) -> None:
    """Lowering of `primitive` may build a custom_partitioning: without this mark JAX lowers it with no devices and asserts."""
    dispatch.prim_requires_devices_during_lowering.add(primitive)


def varying_axes(x) -> frozenset[str]:
    """Mesh axes over which `x`, a value or its type, differs from device to device inside shard_map."""
    return (x if isinstance(x, core.AbstractValue) else jax.typeof(x)).manual_axis_type.varying


def vary_together(arrays):
    """Inside shard_map, mark every array as varying over the axes any of them varies over. The transpose of that mark is the
    sum over devices that the gradient of a shared operand needs; without it, it would silently be missing."""
    varying = frozenset().union(*map(varying_axes, arrays))
    if any(isinstance(x, jax.Ref) and varying_axes(x) != varying for x in arrays):
        raise ValueError(f"a Ref that is the same along mesh axes {tuple(varying)} cannot take what differs along them.")
    return [jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if (missing := varying - varying_axes(x)) else x for x in arrays]


def shaped_array(shape, dtype, varying: frozenset[str] = frozenset()):
    """The abstract value of a result that varies over `varying` mesh axes, in the mesh of the context."""
    sharding = jax.sharding.NamedSharding(jax.sharding.get_abstract_mesh(), jax.sharding.PartitionSpec())
    return core.ShapedArray(shape, dtype, sharding=sharding, manual_axis_type=core.ManualAxisType(varying=varying))


def symbolic_zero(x):
    """The zero tangent of `x`, never materialised."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


@dataclasses.dataclass(frozen=True)
class _SideEffect(effects.Effect):
    """Keeps a call whose results nobody uses, through every transformation."""


for _kinds in ("lowerable", "control_flow_allowed", "remat_allowed", "custom_derivatives_allowed", "partial_eval_kept"):
    getattr(effects, f"{_kinds}_effects").add_type(_SideEffect)


def effects_of(args, has_side_effect: bool) -> set:
    """The effects of a call with operands of types `args`: Refs are read and written, one cannot know which."""
    refs = [i for i, a in enumerate(args) if isinstance(a, AbstractRef)]
    return {kind(i) for i in refs for kind in (ReadEffect, WriteEffect)} | ({_SideEffect()} if has_side_effect else set())


def keep_unused(primitive) -> None:
    """Keep calls of `primitive`, and all that they take, where nothing uses their results."""
    # jax 0.11 calls it with (used results, equation), 0.12 with (used results, live operands, equation)
    partial_eval.dce_rules[primitive] = lambda *args: ([True] * len(args[-1].invars), args[-1])


def discharge(primitive, rule) -> None:
    """``rule(refs, *args, **params)`` gives (values of the Refs, results) of a call on values in place of Refs.

    `refs` maps the place of each Ref among `args` to its type.
    """

    def discharged(ctx, *args, **params):
        chosen = zip(ctx.in_avals, ctx.should_discharge, strict=True)
        refs = {i: a.inner_aval for i, (a, wanted) in enumerate(chosen) if wanted and isinstance(a, AbstractRef)}
        values, results = rule(refs, *args, **params)
        return [values.get(i) for i in range(len(args))], results

    register_discharge_rule(primitive)(discharged)


def manual_axes(ctx) -> tuple[frozenset[str], tuple[str, ...]] | None:
    """(manual axes, all axes) when `ctx` lowers the body of a shard_map, else None."""
    axes = ctx.module_context.axis_context
    return (frozenset(axes.manual_axes), tuple(axes.mesh.axis_names)) if isinstance(axes, mlir.SPMDAxisContext) else None


def device_count(ctx) -> int:
    """How many devices the program being lowered is for."""
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


# ---------------------------------------------------------------------------------------------------------------- triton

try:
    import triton

    if _version(triton.__version__) < MIN_TRITON:
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
    from triton.runtime.jit import JITFunction
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
    """In Triton 3.9 LLVM's SLP vectorizer, which Triton itself turns off for sm_80, ends the process when a kernel for sm_90 sums
    16 float16 or bfloat16 numbers a thread: off for what jtops compiles, for nobody else's kernels."""
    crashes = target.backend == "cuda" and target.arch == 90 and (3, 9) <= _version(triton.__version__) < (3, 10)
    if crashes and not isinstance(nvidia_compiler.llvm, _Optimizer):
        nvidia_compiler.llvm = _Optimizer(nvidia_compiler.llvm)
    token = _scalar.set(crashes)
    try:
        yield
    finally:
        _scalar.reset(token)


def compile_source(source, target, options) -> Any:
    """``triton.compile``."""
    with _llvm_for(target):
        return triton.compile(source, target=target, options=options)


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
    """Is the kernel written in Gluon, not in Triton?"""
    return isinstance(kernel, GluonJITFunction)


def kernel_key(kernel) -> str:
    """What tells a kernel from every other by content: its source, its helpers' and the constants they see."""
    try:
        return kernel.cache_key
    except RuntimeError:
        if not INTERPRET_MODE:
            raise
        return f"{kernel.__module__}.{kernel.__qualname__}-{id(kernel)}"  # Triton finds interpreted helpers and gives up


def cache_manager(key: str) -> Any:
    """Triton's reader and writer of one folder of its disk cache."""
    return get_cache_manager(key)


def forget_on_disk(source, target, options: dict[str, Any]) -> None:
    """Remove what makes Triton's disk cache hold the compilation of `source`: the list of its files."""
    backend = make_backend(target)
    parsed = backend.parse_options(dict(options, **source.parse_options()))
    key = get_cache_key(source, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    manager = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if path := manager.get_file(f"__grp__{source.name[:150]}.json"):
        os.unlink(path)


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
