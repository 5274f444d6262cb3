"""Adapters for programs that compile kernels by hand with the functions of older bridges; `jtops.core.legacy` has the names."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops.core.compile.kernel import compile_kernel
from jtops.core.launch.binding import normalize_grid
from jtops.core.launch.ffi import hsaco_file, launched_kernel
from jtops.core.launch.lowering import lower_gpu
from jtops.core.launch.options import launch_options
from jtops.core.launch.record import KernelCall
from jtops.core.target import Target, requested, resolve
from jtops.core.types import Bound, Constexpr, Operand, Output, Scalar, parameters, triton_type
from jtops.errors import UnsupportedError


@dataclasses.dataclass
class CompilationResult:
    """A compiled kernel: PTX text, or the name of an HSACO file."""

    binary: str
    name: str
    shared_mem_bytes: int
    cluster_dims: tuple = (1, 1, 1)
    ttgir: str | None = None
    llir: str | None = None


def _gpu_target(platform: str, compute_capability, num_ctas: int = 1):
    target = resolve(platform, requested() if compute_capability is None else Target.parse(compute_capability))
    if num_ctas > 1 and not target.has_clusters:
        raise ValueError(f"num_ctas={num_ctas} needs clusters, from sm_90 on; the target is {target}.")
    return target.gpu_target


def make_cuda_target(compute_capability: int | None, num_ctas: int = 1):
    """Triton's record of the NVIDIA GPU to compile for; None: the one that is asked for or present."""
    return _gpu_target("cuda", compute_capability, num_ctas)


def make_hip_target(compute_capability: str | None, num_ctas: int = 1):
    """Triton's record of the AMD GPU to compile for; None: the one that is asked for or present."""
    return _gpu_target("rocm", compute_capability, num_ctas)


def get_cuda_backend(device: int, compute_capability: int | None):
    """Triton's compiler for an NVIDIA GPU."""
    del device  # GPUs of one process are alike
    return triton_compat.make_backend(make_cuda_target(compute_capability))


def get_hip_backend(device: int, compute_capability: str | None):
    """Triton's compiler for an AMD GPU."""
    del device
    return triton_compat.make_backend(make_hip_target(compute_capability))


def make_backend(make_gpu_target_func: Callable, compute_capability, num_ctas: int) -> tuple[Any, Any, Any]:
    """The triple (compiler, GPU target, compute capability); ValueError for clusters before sm_90."""
    target = make_gpu_target_func(compute_capability, num_ctas)
    return triton_compat.make_backend(target), target, target.arch


def compile_ttir_inplace(ttir, backend, options, compute_capability, platform: str) -> CompilationResult:
    """Compile a module of Triton IR for "cuda" or "rocm"; `ttir` is used up."""
    if platform == "cuda":
        return compile_ttir_to_ptx_inplace(ttir, backend, options, compute_capability)
    if platform == "rocm":
        return compile_ttir_to_hsaco_inplace(ttir, backend, options, compute_capability)
    raise ValueError(f"platform must be 'cuda' or 'rocm'; got {platform!r}.")


def compile_ttir_to_ptx_inplace(ttir, cuda_backend, cuda_options, compute_capability) -> CompilationResult:
    """Compile a module of Triton IR to PTX. ValueError, after printing the module, if a pass fails."""
    texts, metadata = _compile_ttir(ttir, cuda_backend, cuda_options, compute_capability, "ptx")
    return CompilationResult(texts["ptx"], metadata["name"], metadata["shared"], ttgir=texts["ttgir"], llir=texts["llir"])


def compile_ttir_to_hsaco_inplace(ttir, hip_backend, hip_options, compute_capability=None) -> CompilationResult:
    """Compile a module of Triton IR to an HSACO file. ValueError, after printing the module, if a pass fails."""
    texts, metadata = _compile_ttir(ttir, hip_backend, hip_options, compute_capability, "hsaco")
    file = hsaco_file(texts["hsaco"])
    return CompilationResult(file, metadata["name"], metadata["shared"], ttgir=texts["ttgir"], llir=texts["llir"])


def _compile_ttir(ttir, backend, options, compute_capability, last: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if compute_capability is not None and Target.parse(compute_capability) != Target.parse(backend.target.arch):
        raise ValueError(f"compute_capability {compute_capability} is not the backend's, {backend.target.arch}.")
    failing = {"ttir": "TTIR->TTGIR", "ttgir": "TTIR->TTGIR", "llir": "TTGIR->LLIR"}
    module, texts = ttir, {}
    metadata = {"target": backend.target, **vars(options)}  # what Triton's own driver of the passes starts with
    for stage, run in triton_compat.compiler_stages(backend, options).items():
        before = module
        try:
            module = run(module, metadata)
        except RuntimeError as error:
            if stage not in failing:
                raise
            before.dump()
            raise ValueError(f"{failing[stage]} pass failed!") from error
        texts[stage] = module if isinstance(module, bytes) else str(module)
        if options.debug and isinstance(texts[stage], str):
            print(texts[stage])
        if stage == last:
            break
    return texts, metadata


def _bound(fn, arg_dtypes, scalar_args, metaparams, operands: int) -> tuple[Bound, dict[str, str]]:
    """Parameters in order: constants by name, `scalar_args` by number among the others, the rest operands and then results."""
    scalars = {i: Scalar(value, "i1" if kind == "B" else kind) for i, kind, value in scalar_args}
    bound: list[tuple[str, Any]] = []
    types, arrays = {}, 0
    others = [p.name for p in fn.params if p.name not in metaparams]
    for p in fn.params:
        if p.name in metaparams:
            bound.append((p.name, Constexpr(metaparams[p.name])))
        elif others.index(p.name) in scalars:
            bound.append((p.name, scalars[others.index(p.name)]))
        else:
            bound.append((p.name, Operand(arrays) if arrays < operands else Output(arrays - operands)))
            types[p.name] = arg_dtypes[others.index(p.name)]
            arrays += 1
    return tuple(bound), types


def get_or_create_triton_kernel(
    backend_init_func: Callable,
    platform: str,
    fn,
    arg_dtypes: Sequence[str],
    scalar_args: Sequence[tuple[int, str, Any]],
    device: int = 0,
    *,
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_ctas: int = 1,
    compute_capability=None,
    enable_fp_fusion: bool = True,
    metaparams: Mapping[str, Any],
    dump: bool = False,
) -> tuple[Any, dict[tuple[int, ...], Any]]:
    """The pair (jaxlib's TritonKernel, Triton's attributes by parameter path) of a kernel, compiled once.

    Args:
      backend_init_func: `get_cuda_backend` or `get_hip_backend`.
      platform: "cuda" or "rocm".
      fn: a ``@triton.jit`` function.
      arg_dtypes: Triton types of the parameters that `metaparams` leaves, in order: ``*fp32``, ``i32`` ...
      scalar_args: (number among those parameters, type, value) of every one that is no array.
      device, compute_capability: arguments of `backend_init_func`.
      num_warps, num_stages, num_ctas, enable_fp_fusion: as for `triton_call`.
      metaparams: constexpr parameters by name.
      dump: print the intermediate texts.
    """
    function = triton_compat.kernel_function(fn)
    target = Target.parse(backend_init_func(device, compute_capability).target.arch)
    if target.platform != platform:
        raise ValueError(f"platform is {platform!r}, but the backend is for {target}.")
    fusion = {"enable_fp_fusion": enable_fp_fusion}
    options = launch_options(function, num_warps=num_warps, num_stages=num_stages, num_ctas=num_ctas, backend_options=fusion)
    bound, types = _bound(function, arg_dtypes, scalar_args, metaparams, len(arg_dtypes))
    made = parameters(function, bound, lambda name, _: types[name])
    compiled = compile_kernel(function, bound, made, options, target)
    if dump:
        print("\n".join(str(compiled.triton_kernel.asm[s]) for s in ("ttir", "ttgir", "llir") if s in compiled.triton_kernel.asm))
    return launched_kernel(compiled), {p.path: [["tt.divisibility", 16]] if p.aligned else [] for p in made}


def make_autotuner_configs(fn, metaparams: Mapping[str, Any], named_args: Mapping[str, Any]) -> list:
    """An autotuner's configs that agree with `metaparams`, pruned by its own rules."""
    if any(c.pre_hook is not None for c in fn.configs):
        raise UnsupportedError("a config with a pre_hook cannot be listed without its call; triton_call takes such kernels.")
    mine = copy.copy(fn)
    mine.configs = [c for c in fn.configs if all(c.kwargs.get(k, v) == v for k, v in metaparams.items())]
    mine.nargs = dict(named_args)
    return mine.prune_configs(dict(metaparams)) if mine.configs else []


def apply_heuristics(fn, configs: Sequence, kwargs: Mapping[str, Any], named_args: Mapping[str, Any]) -> list:
    """Add what the heuristics say to `configs`: constants to a config's kwargs, ``num_warps`` and the like as its options."""
    made = []
    for config in map(copy.copy, configs):
        config.kwargs = dict(config.kwargs)
        for name, rule in fn.values.items():
            value = rule({**named_args, **kwargs, **config.kwargs})
            if name in ("num_warps", "num_stages", "num_ctas", "maxnreg"):
                setattr(config, name, value)
            else:
                config.kwargs[name] = value
        made.append(config)
    return made


def make_kernel_call(name: str, kernel_calls: Sequence, configs: Sequence, input_output_aliases_with_sizes: Sequence = ()):
    """The one call there is, or jaxlib's call of several configs, which times them in every process at the first launch."""
    if len(kernel_calls) == 1:
        return kernel_calls[0]
    described = [(call, str(config)) for call, config in zip(kernel_calls, configs, strict=True)]
    return jax_compat.gpu_triton.TritonAutotunedKernelCall(name, described, tuple(input_output_aliases_with_sizes))


def triton_kernel_call_lowering(
    backend_init_func: Callable,
    ctx,
    *array_args,
    fn,
    scalar_args=(),
    name: str = "",
    custom_call_target_name: str = "",
    out_shapes,
    grid: Any,
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_ctas: int = 1,
    device: int = 0,
    compute_capability=None,
    enable_fp_fusion: bool = True,
    input_output_aliases: Any = None,
    zeroed_outputs=(),
    debug: bool = False,
    serialized_metadata: bytes = b"",
    has_side_effect: bool = False,
    **metaparams: Any,
):
    """Lowering rule of a primitive with these parameters; aliases count arrays alone, aliased outputs have no parameter."""
    del custom_call_target_name  # there is one
    function = triton_compat.kernel_function(fn)
    target = Target.parse(backend_init_func(device, compute_capability).target.arch)
    aliases = tuple(sorted(dict(input_output_aliases or {}).items()))
    kinds = [f"*{triton_type(a.dtype)}" for a in ctx.avals_in]
    for i, kind, _ in sorted(scalar_args):
        kinds.insert(i, kind)
    free = [i for i in range(len(out_shapes)) if i not in dict(aliases).values()]
    kinds += [f"*{triton_type(out_shapes[i].dtype)}" for i in free]
    bound, _ = _bound(function, kinds, scalar_args, metaparams, len(array_args))
    bound = tuple((n, Output(free[p.index]) if isinstance(p, Output) else p) for n, p in bound)
    fusion = {"enable_fp_fusion": enable_fp_fusion}
    options = launch_options(
        function, num_warps=num_warps, num_stages=num_stages, num_ctas=num_ctas, backend_options=fusion, debug=debug
    )
    call = KernelCall(
        kernel=function,
        bound=bound,
        grid=normalize_grid(grid(metaparams) if callable(grid) else grid, function.__name__),
        out_types=tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in out_shapes),
        name=name or function.__name__,
        options=options,
        target=target,
        interpret=False,
        has_side_effect=has_side_effect,
        cost=None,
        metadata=serialized_metadata,
        aliases=aliases,
        zeroed=tuple(zeroed_outputs(metaparams) if callable(zeroed_outputs) else zeroed_outputs),
    )
    return lower_gpu(ctx, *array_args, call=call, platform=target.platform)
