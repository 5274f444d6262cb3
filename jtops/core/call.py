"""triton_call: a Triton kernel as a JAX operation."""

import dataclasses
import difflib
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from jtops import config
from jtops.core import compat, lowering, target
from jtops.core.types import Bound, Constexpr, Operand, Result, Scalar, as_scalar, triton_type
from jtops.errors import UnsupportedError

Grid = int | Sequence[int]
GridOrFn = Grid | Callable[[dict[str, Any]], Grid]


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """Everything about a call but its arrays. Hashable: it is the primitive's one parameter, and part of JAX's cache keys."""

    kernel: Any = dataclasses.field(hash=False)  # compared by identity; Triton's hash of it would parse its source each time
    bound: Bound
    grid: tuple[int, int, int]
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    name: str
    options: tuple[tuple[str, Any], ...]
    target: str | None
    interpret: bool
    has_side_effect: bool
    cost: tuple[tuple[str, int], ...] | None
    metadata: bytes


triton_call_p = Primitive("triton_call")
triton_call_p.multiple_results = True
triton_call_p.def_impl(lambda *args, call: compat.apply_primitive(triton_call_p, *args, call=call))


@triton_call_p.def_abstract_eval
def _abstract_eval(*args, call):
    varying = frozenset().union(*map(compat.varying_axes, args))
    return [compat.shaped_array(t.shape, t.dtype, varying) for t in call.out_types]


def _no_derivative(primals, tangents, *, call):
    raise UnsupportedError(
        f"kernel {call.name}: triton_call has no derivative. Wrap it in jax.custom_vjp (or custom_jvp) with your backward kernel, "
        "or use a jtops op, which has one."
    )


def _no_batching(args, dims, *, call):
    raise UnsupportedError(
        f"kernel {call.name}: triton_call has no vmap rule, because only its author knows what a program of the grid does. Wrap it "
        "in jax.custom_batching.custom_vmap with a rule that adds a grid axis, or loop with jax.lax.map."
    )


ad.primitive_jvps[triton_call_p] = _no_derivative
batching.primitive_batchers[triton_call_p] = _no_batching
lowering.register(triton_call_p)


def triton_call(
    *args: Any,
    kernel: Any,
    out_type: Any = None,
    grid: GridOrFn | None = None,
    name: str = "",
    num_warps: int | None = None,
    num_stages: int | None = None,
    num_ctas: int | None = None,
    compute_capability: int | str | None = None,
    backend_options: Mapping[str, Any] | None = None,
    interpret: bool | None = None,
    has_side_effect: bool = False,
    cost_estimate: Mapping[str, int] | None = None,
    serialized_metadata: bytes = b"",
    **kwargs: Any,
) -> Any:
    """Call a Triton kernel with JAX arrays; works under ``jax.jit``, in ``shard_map`` and in scans.

    Positional arguments bind to the kernel's parameters in order, skipping those given by keyword. The pointer parameters
    that remain are the outputs, one per leaf of `out_type`, in order; constexpr parameters that remain take their defaults.

    Args:
      *args: arrays (passed as pointers, row-major, 16-byte aligned), numbers (baked into the launch), constexpr values.
      kernel: a ``@triton.jit`` or ``@gluon.jit`` function.
      out_type: pytree whose leaves have ``.shape`` and ``.dtype``; the result has the same structure.
      grid: number of programs: an int, up to three ints, or a function from a dict of the kernel's numbers and constants
        to those. A grid with a zero launches nothing and returns zeros.
      name: name of the launch in profiles. Default: the kernel's.
      num_warps, num_stages, num_ctas: as for ``triton.jit`` launches; None takes Triton's default for the target.
      compute_capability: GPU to compile for where it is not the device itself: 90, "sm_90", "gfx942".
      backend_options: further options of Triton's compiler by name, such as ``enable_fp_fusion`` or ``maxnreg``.
      interpret: run the kernel with NumPy on the host. None: if ``jtops.config.implementation`` says so.
      has_side_effect: keep the call even if its results are unused.
      cost_estimate: ``{"flops": ..., "bytes_accessed": ...}`` for profilers.
      serialized_metadata: opaque bytes kept in the launch record.
      **kwargs: arguments by parameter name.

    Returns:
      Arrays in the structure of `out_type`.

    Raises:
      TypeError: unknown, missing or surplus argument; a dtype Triton lacks; an unhashable constant; not a kernel.
      ValueError: malformed grid; `out_type` does not match the kernel's remaining pointers; integer beyond 64 bits.
      KernelCompileError: the kernel does not compile for the target, or needs more shared memory than it has.
      UnsupportedError: lowered for a platform without Triton kernels; differentiated or vmapped without a rule of its own.
    """
    function = compat.kernel_function(kernel)
    _check_keywords(function, kwargs, out_type=out_type, grid=grid)
    options = _launch_options(function, num_warps, num_stages, num_ctas, backend_options)
    leaves, tree = jax.tree.flatten(out_type, is_leaf=lambda t: hasattr(t, "shape") and hasattr(t, "dtype"))
    outs = tuple(
        jax.ShapeDtypeStruct(t.shape, jax.dtypes.canonicalize_dtype(t.dtype)) for t in map(_check_out_type(function), leaves)
    )
    bound, arrays = _bind(function, args, kwargs, options, outs)
    meta = {n: p.value for n, p in bound if isinstance(p, Scalar | Constexpr)} | dict(options)
    grid3 = normalize_grid(_called_grid(grid, meta, function) if callable(grid) else grid, function.__name__)
    if 0 in grid3:
        return tree.unflatten([jnp.zeros(t.shape, t.dtype) for t in outs])
    call = KernelCall(
        kernel=function,
        bound=bound,
        grid=grid3,
        out_types=outs,
        name=name or function.__name__,
        options=options,
        target=target.requested() if compute_capability is None else str(target.Target.parse(compute_capability)),
        interpret=config.implementation.value == "interpret" if interpret is None else bool(interpret),
        has_side_effect=has_side_effect,
        cost=None if cost_estimate is None else tuple(sorted(cost_estimate.items())),
        metadata=serialized_metadata,
    )
    return tree.unflatten(triton_call_p.bind(*compat.vary_together(arrays), call=call))


def normalize_grid(grid: Any, kernel_name: str = "kernel") -> tuple[int, int, int]:
    """`grid` as three ints; TypeError or ValueError for what cannot be one."""
    dims = tuple(grid) if isinstance(grid, Sequence | np.ndarray) and not isinstance(grid, str) else (grid,)
    if not all(isinstance(d, numbers.Integral) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"kernel {kernel_name}: grid must be an int or a sequence of up to three ints; got {grid!r}.")
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"kernel {kernel_name}: grid must have one to three dimensions; got {len(dims)}: {grid!r}.")
    limits = (2**31 - 1, 65535, 65535)
    if any(not 0 <= d <= limit for d, limit in zip(dims, limits, strict=False)):
        raise ValueError(f"kernel {kernel_name}: grid dimensions must lie in 0..2^31-1, 0..65535, 0..65535; got {grid!r}.")
    x, y, z = (*map(int, dims), 1, 1)[:3]
    return x, y, z


def _launch_options(kernel, num_warps, num_stages, num_ctas, backend_options) -> tuple[tuple[str, Any], ...]:
    named = {"num_warps": num_warps, "num_stages": num_stages, "num_ctas": num_ctas}
    options = {k: v for k, v in named.items() if v is not None}
    for key, value in options.items():
        power = key == "num_warps"
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1 or (power and value & (value - 1)):
            raise ValueError(
                f"kernel {kernel.__name__}: {key} must be a positive {'power of two' if power else 'int'}; got {value!r}."
            )
        options[key] = int(value)
    for key, value in (backend_options or {}).items():
        if key not in compat.BACKEND_OPTIONS:
            raise TypeError(
                f"kernel {kernel.__name__}: backend_options has {key!r}, which Triton's compilers do not know."
                f"{_nearest(key, compat.BACKEND_OPTIONS)}"
            )
        if options.get(key, value) != value:
            raise ValueError(f"kernel {kernel.__name__}: {key}={options[key]!r} but backend_options has {key}={value!r}.")
        _check_hashable(kernel, f"backend_options[{key!r}]", value)
        options[key] = value
    options.setdefault("enable_fp_fusion", True)  # said, not left to Triton, whose default depends on version and environment
    return tuple(sorted(options.items()))


def _check_out_type(kernel):
    def check(leaf):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise TypeError(
                f"kernel {kernel.__name__}: out_type leaves need .shape and .dtype (jax.ShapeDtypeStruct); got {leaf!r}."
            )
        triton_type(leaf.dtype)
        return leaf

    return check


def _check_hashable(kernel, what, value):
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"kernel {kernel.__name__}: {what} is a compile-time constant and must be hashable; got {value!r} of type "
            f"{type(value).__name__}. Pass a tuple for a list, a number for a 0-d array."
        ) from None


def _signature(kernel) -> str:
    return f"{kernel.__name__}({', '.join(p.name for p in kernel.params)})"


def _nearest(key: str, known) -> str:
    near = difflib.get_close_matches(key, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _check_keywords(kernel, kwargs, **needed) -> None:
    params = [p.name for p in kernel.params]
    for key in kwargs:
        if key not in params:
            raise TypeError(
                f"triton_call: {key!r} is neither a parameter of {_signature(kernel)} nor an option of triton_call."
                f"{_nearest(key, [*params, *_KEYWORDS])}"
            )
    for name, value in needed.items():
        if value is None:
            raise TypeError(f"triton_call of kernel {kernel.__name__}: {name} is missing.")


def _called_grid(grid, meta, kernel):
    try:
        return grid(meta)
    except KeyError as error:
        raise KeyError(
            f"kernel {kernel.__name__}: the grid function asks for {error}, but is given {', '.join(map(repr, meta))}."
            f"{_nearest(str(error.args[0]), map(str, meta))}"
        ) from None


def _bind(kernel, args, kwargs, options, outs) -> tuple[Bound, list]:
    """Give every parameter of the kernel its value; -> (bound parameters, array operands)."""
    params, signature = {p.name: p for p in kernel.params}, _signature(kernel)
    positional = [p for n, p in params.items() if n not in kwargs]
    if len(args) > len(positional):
        raise TypeError(
            f"triton_call: {len(args)} positional arguments for {signature}, which has {len(positional)} parameters left for them."
        )
    given = {p.name: a for p, a in zip(positional, args, strict=False)} | kwargs
    arrays: list = []
    bound: dict = {}
    free = []
    for n, p in params.items():
        if n in given:
            bound[n] = _bind_one(kernel, p, given[n], arrays)
        elif p.is_constexpr and n in dict(options):
            bound[n] = Constexpr(dict(options)[n])  # a kernel may ask for its own num_warps
        elif p.has_default:
            bound[n] = _bind_one(kernel, p, p.default, arrays)
        elif p.is_constexpr:
            raise TypeError(f"triton_call: constexpr parameter {n!r} of {signature} has neither a value nor a default.")
        else:
            bound[n] = None
            free.append(n)
    if len(free) != len(outs):
        raise ValueError(
            f"triton_call: out_type has {len(outs)} outputs, but the arguments leave {len(free)} parameters of {signature} unbound"
            f"{': ' + ', '.join(free) if free else ''}. Each output needs one pointer parameter, each other parameter an argument."
        )
    bound |= {n: Result(i) for i, n in enumerate(free)}
    return tuple((n, bound[n]) for n in params), arrays


def _bind_one(kernel, param, value, arrays):
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if isinstance(value, jax.Array) or (isinstance(value, np.ndarray) and not param.is_constexpr):
        if param.is_constexpr:
            raise TypeError(
                f"kernel {kernel.__name__}: parameter {param.name!r} is a compile-time constant, but got an array or traced value "
                f"{value!r}; pass a Python number, or make the parameter a pointer."
            )
        triton_type(value.dtype)
        arrays.append(value)
        return Operand(len(arrays) - 1)
    if param.is_constexpr or value is None or isinstance(value, str):
        _check_hashable(kernel, f"parameter {param.name!r}", value)
        return Constexpr(value)
    scalar = as_scalar(value)
    if scalar is None:
        raise TypeError(
            f"kernel {kernel.__name__}: parameter {param.name!r} takes an array, a number or None; got {value!r} of type "
            f"{type(value).__name__}."
        )
    return scalar


_KEYWORDS = tuple(name for name, p in inspect.signature(triton_call).parameters.items() if p.kind is p.KEYWORD_ONLY)
