"""Names and keywords of older bridges from Triton to JAX, as adapters over the one form; jtops itself never uses them.

It is for programs that were written against those bridges and reach below `triton_call`. `jtops.core.launch.keywords` serves older
keywords of `triton_call` itself.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops.core.compile.kernel import variants
from jtops.core.descriptor import TensorDescriptor
from jtops.core.launch.binding import normalize_grid as _normalize_grid
from jtops.core.legacy.kernels import (
    CompilationResult,
    apply_heuristics,
    compile_ttir_inplace,
    compile_ttir_to_hsaco_inplace,
    compile_ttir_to_ptx_inplace,
    get_cuda_backend,
    get_hip_backend,
    get_or_create_triton_kernel,
    make_autotuner_configs,
    make_backend,
    make_cuda_target,
    make_hip_target,
    make_kernel_call,
    triton_kernel_call_lowering,
)
from jtops.core.sizes import strides_from_shape
from jtops.core.types import TRITON_TYPES, as_scalar, triton_type
from jtops.errors import UnsupportedError

__all__ = [
    "CompilationResult",
    "Grid",
    "GridOrLambda",
    "JTJITFunction",
    "ShapeDtype",
    "TritonFunction",
    "apply_heuristics",
    "aval_size_bytes",
    "avals_to_layouts",
    "compile_ttir_inplace",
    "compile_ttir_to_hsaco_inplace",
    "compile_ttir_to_ptx_inplace",
    "get_cuda_backend",
    "get_hip_backend",
    "get_or_create_triton_kernel",
    "get_triton_type",
    "get_type_id",
    "make_autotuner_configs",
    "make_backend",
    "make_cuda_target",
    "make_hip_target",
    "make_kernel_call",
    "normalize_grid",
    "strides_from_shape",
    "triton_kernel_call_abstract_eval",
    "triton_kernel_call_lowering",
    "triton_kernel_call_raise_on_jvp",
    "triton_kernel_call_raise_on_vmap",
]

_JAX_TO_TRITON_TYPE_MAP = TRITON_TYPES

Grid = int | tuple[int] | tuple[int, int] | tuple[int, int, int]
GridOrLambda = Grid | Callable[[dict[str, Any]], Grid]


@runtime_checkable
class ShapeDtype(Protocol):
    """Anything with a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> np.dtype:
        """Type of an element."""


def get_type_id(obj: Any) -> str:
    """Triton's name of an operand's type by `triton_call`'s rules: ``*fp32``, ``i32``, ``fp64``, ``B`` of a bool, ``str``.

    Raises:
      ValueError: an integer beyond 64 bits.
      NotImplementedError: anything else.
    """
    obj = getattr(obj, "value", obj) if type(obj).__name__ == "constexpr" else obj
    if isinstance(obj, bool | np.bool_):
        return "B"
    if isinstance(obj, str):
        return "str"
    if (scalar := as_scalar(obj)) is not None:
        return scalar.type
    if isinstance(obj, ShapeDtype):
        block = f"[{','.join(map(str, obj.block_shape))}]" if isinstance(obj, TensorDescriptor) else ""
        return f"tensordesc<{triton_type(obj.dtype)}{block}>" if block else f"*{triton_type(obj.dtype)}"
    raise UnsupportedError(f"{obj!r} of type {type(obj).__name__} has no Triton type.")


get_triton_type = get_type_id


def normalize_grid(grid: GridOrLambda, metaparams: Mapping[str, Any]) -> tuple[int, int, int]:
    """`grid`, or what it returns for `metaparams`, as three ints."""
    return _normalize_grid(grid(dict(metaparams)) if callable(grid) else grid)


def aval_size_bytes(aval) -> int:
    """Bytes of an array of type `aval`."""
    return np.dtype(aval.dtype).itemsize * aval.size


def avals_to_layouts(avals) -> list[list[int]]:
    """Row-major layouts, as XLA writes them."""
    return [list(reversed(range(aval.ndim))) for aval in avals]


class JTJITFunction:
    """A kernel and what is known of it; `fn` may be under ``@triton.autotune`` and ``@triton.heuristics``."""

    def __init__(self, fn):
        while isinstance(fn, triton_compat.Autotuner | triton_compat.Heuristics):
            fn = fn.fn
        self.fn = triton_compat.kernel_function(fn)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return self.fn.__name__

    @property
    def params(self) -> list:
        """Triton's description of every parameter."""
        return list(self.fn.params)

    @property
    def arg_names(self) -> list[str]:
        """Parameters in order."""
        return [p.name for p in self.params]

    param_names = arg_names

    @property
    def arg_name_to_index(self) -> dict[str, int]:
        """The index of each parameter."""
        return {name: i for i, name in enumerate(self.arg_names)}

    @property
    def signature(self) -> inspect.Signature:
        """The kernel's signature, as Python sees it."""
        return inspect.signature(self.fn.fn)

    @property
    def constexpr_param_names(self) -> frozenset[str]:
        """Parameters annotated as constants."""
        return frozenset(p.name for p in self.params if p.is_constexpr)

    @property
    def param_defaults(self) -> dict[str, Any]:
        """Declared defaults by name."""
        return {p.name: p.default for p in self.params if p.has_default}

    @property
    def compiled_kernels_cache_size(self) -> int:
        """The number of variants of it that this process has compiled."""
        return variants(self.fn)

    @property
    def is_gluon(self) -> bool:
        """Whether it is written in Gluon."""
        return triton_compat.is_gluon(self.fn)


TritonFunction = JTJITFunction


def triton_kernel_call_abstract_eval(*_, out_shapes, **__) -> list:
    """Types of the results."""
    return [jax_compat.shaped_array(t.shape, jax.dtypes.canonicalize_dtype(t.dtype)) for t in out_shapes]


def triton_kernel_call_raise_on_jvp(*args, **kwargs):
    """Raise, always: the bridge cannot differentiate a kernel."""
    raise UnsupportedError("a kernel has no derivative of its own; wrap the call in jax.custom_jvp or jax.custom_vjp.")


def triton_kernel_call_raise_on_vmap(*args, **kwargs):
    """Raise, always: the bridge cannot batch a kernel."""
    raise UnsupportedError("a kernel has no batching rule of its own; wrap the call in jax.custom_batching.custom_vmap.")
