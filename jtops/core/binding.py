"""What a caller gives, checked and bound to a kernel's parameters, launch options and grid."""

import difflib
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtops.core import compat
from jtops.core.types import Bound, Constexpr, Operand, Result, as_scalar, triton_type


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


def launch_options(kernel, num_warps, num_stages, num_ctas, backend_options) -> tuple[tuple[str, Any], ...]:
    """The compiler options that a call names, checked, sorted by name."""
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


def checked_out_type(kernel):
    """A function that returns a leaf of `out_type` if it is one, and raises TypeError otherwise."""

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


def check_keywords(kernel, kwargs, keywords, **needed) -> None:
    """TypeError for a keyword that neither the kernel nor triton_call (`keywords`) has, or a `needed` one left out."""
    params = [p.name for p in kernel.params]
    for key in kwargs:
        if key not in params:
            raise TypeError(
                f"triton_call: {key!r} is neither a parameter of {_signature(kernel)} nor an option of triton_call."
                f"{_nearest(key, [*params, *keywords])}"
            )
    for name, value in needed.items():
        if value is None:
            raise TypeError(f"triton_call of kernel {kernel.__name__}: {name} is missing.")


def called_grid(grid, meta, kernel):
    """The grid that the caller's function returns for `meta`."""
    try:
        return grid(meta)
    except KeyError as error:
        raise KeyError(
            f"kernel {kernel.__name__}: the grid function asks for {error}, but is given {', '.join(map(repr, meta))}."
            f"{_nearest(str(error.args[0]), map(str, meta))}"
        ) from None


def bind(kernel, args, kwargs, options, outs) -> tuple[Bound, list]:
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
