"""Checking what a caller gives, and binding it to a kernel's parameters and grid."""

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops.core.descriptor import TensorDescriptor, bound_descriptor
from jtops.core.launch.inplace import alias_pairs
from jtops.core.launch.options import check_hashable, nearest
from jtops.core.types import Bound, Constexpr, Descriptor, Items, Operand, Output, as_scalar, is_shaped, triton_type

GRID_LIMITS = (2**31 - 1, 65535, 65535)


def normalize_grid(grid: Any, kernel_name: str = "kernel") -> tuple[int, int, int]:
    """`grid` as three ints; TypeError or ValueError for what cannot be one."""
    dims = tuple(grid) if isinstance(grid, Sequence | np.ndarray) and not isinstance(grid, str) else (grid,)
    if not all(isinstance(d, numbers.Integral) and not isinstance(d, bool) for d in dims):
        raise TypeError(f"kernel {kernel_name}: grid must be an int or a sequence of up to three ints; got {grid!r}.")
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"kernel {kernel_name}: grid must have one to three dimensions; got {len(dims)}: {grid!r}.")
    if any(not 0 <= d <= limit for d, limit in zip(dims, GRID_LIMITS, strict=False)):
        raise ValueError(f"kernel {kernel_name}: grid dimensions must lie in 0..2^31-1, 0..65535, 0..65535; got {grid!r}.")
    x, y, z = (*map(int, dims), 1, 1)[:3]
    return x, y, z


def out_array(kernel, leaf) -> jax.ShapeDtypeStruct:
    """The type of the array that a leaf of `out_type` asks for; TypeError if it asks for none."""
    leaf = leaf.base if isinstance(leaf, TensorDescriptor) else leaf
    if not is_shaped(leaf):
        raise TypeError(f"kernel {kernel.__name__}: out_type leaves need .shape and .dtype (jax.ShapeDtypeStruct); got {leaf!r}.")
    triton_type(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _signature(kernel) -> str:
    return f"{kernel.__name__}({', '.join(p.name for p in kernel.params)})"


def check_keywords(kernel, kwargs, keywords, **needed) -> None:
    """Raise a TypeError for a keyword that neither the kernel nor triton_call (`keywords`) has, or a `needed` one left out."""
    params = [p.name for p in kernel.params]
    for key in kwargs:
        if key not in params:
            raise TypeError(
                f"triton_call: {key!r} is neither a parameter of {_signature(kernel)} nor an option of triton_call."
                f"{nearest(key, [*params, *keywords])}"
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
            f"{nearest(str(error.args[0]), map(str, meta))}"
        ) from None


def bind(kernel, args, kwargs, options, outs, aliases: dict[int, int]) -> tuple[Bound, list, tuple[tuple[int, int], ...]]:
    """Give every parameter its value; return (bound parameters, array operands, aliased (operand, output) pairs).

    `aliases` maps operands, counted over the parameters that are not constexpr, tuples flattened, to outputs; those outputs have no
    parameter of their own.
    """
    params, signature = {p.name: p for p in kernel.params}, _signature(kernel)
    positional = [p for n, p in params.items() if n not in kwargs]
    if len(args) > len(positional):
        raise TypeError(
            f"triton_call: {len(args)} positional arguments for {signature}, which has {len(positional)} parameters left for them."
            f"{_given_twice(params, args, kwargs)}"
        )
    given = {p.name: a for p, a in zip(positional, args, strict=False)} | kwargs
    arrays: list = []
    bound: dict[str, Any] = {}
    free: list[str] = []
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
    own = [i for i in range(len(outs)) if i not in aliases.values()]
    if len(free) < len(own) and (twice := _given_twice(params, args, kwargs)):
        raise TypeError(f"triton_call: {signature} has {len(free)} parameters left for {len(own)} outputs.{twice}")
    if len(free) != len(own):
        raise ValueError(
            f"triton_call: out_type has {len(own)} {'unaliased ' if aliases else ''}outputs, but the arguments leave {len(free)} "
            f"parameters of {signature} unbound{': ' + ', '.join(free) if free else ''}. Each output needs one pointer parameter, "
            "each other parameter an argument."
            + (" An aliased output has none: the kernel writes through its operand's pointer." if aliases else "")
        )
    for i, n in zip(own, free, strict=True):
        bound[n] = _described(kernel, n, outs[i], Output(i)) if isinstance(outs[i], TensorDescriptor) else Output(i)
    operands = tuple((n, bound[n]) for n, p in params.items() if n in given and not p.is_constexpr)
    types = [out_array(kernel, out) for out in outs]
    return tuple((n, bound[n]) for n in params), arrays, alias_pairs(kernel, aliases, operands, arrays, types)


def _given_twice(params, args, kwargs) -> str:
    """The end of an error message: parameters in the place of a positional argument that have a keyword, too."""
    twice = [name for name in list(params)[: len(args)] if name in kwargs]
    return f" Given by position and by keyword: {', '.join(twice)}." if twice else ""


def _described(kernel, name, given, array) -> Descriptor:
    return bound_descriptor(given, array, triton_compat.is_gluon(kernel), f"kernel {kernel.__name__}: parameter {name!r}")


def _bind_one(kernel, param, value, arrays, inside=False):
    """The record of a value. A ``tl.constexpr`` and a boolean `inside` a tuple, where nothing is declared, are constants."""
    wrapped = type(value).__name__ == "constexpr"
    value = getattr(value, "value", value) if wrapped else value
    value = bool(value) if isinstance(value, np.bool_) else value
    constant = param.is_constexpr or (inside and (wrapped or isinstance(value, bool)))
    if isinstance(value, jax_compat.TransformedRef):
        raise TypeError(f"kernel {kernel.__name__}: parameter {param.name!r} takes a whole Ref; got a part of one, {value}.")
    if isinstance(value, tuple | list) and value and not constant:
        items = tuple(_bind_one(kernel, param, item, arrays, inside=True) for item in value)
        return Items(items, type(value) if hasattr(value, "_fields") else tuple)
    if isinstance(value, TensorDescriptor):
        arrays.append(value.base)
        return _described(kernel, param.name, value, Operand(len(arrays) - 1))
    if isinstance(value, jax.Array | jax.Ref) or (isinstance(value, np.ndarray) and not constant):
        if constant:
            raise TypeError(
                f"kernel {kernel.__name__}: parameter {param.name!r} is a compile-time constant, but got an array or traced value "
                f"{value!r}; pass a Python number, or make the parameter a pointer."
            )
        triton_type(value.dtype)
        arrays.append(value)
        return Operand(len(arrays) - 1)
    if constant or value is None or isinstance(value, str):
        check_hashable(kernel, f"parameter {param.name!r}", value)
        return Constexpr(value)
    scalar = as_scalar(value, param.annotation_type)
    if scalar is None:
        raise TypeError(
            f"kernel {kernel.__name__}: parameter {param.name!r} takes an array, a number, None or a tuple of these; got {value!r} "
            f"of type {type(value).__name__}."
        )
    return scalar
