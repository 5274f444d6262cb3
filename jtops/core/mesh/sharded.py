"""A user's own kernel on a mesh, without a rule to write: the call is made again on each device, of that device's part."""

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.interpreters.batching import primitive_batchers

from jtops._compat import jax as jax_compat
from jtops._compat import triton as triton_compat
from jtops.core import notes
from jtops.core.descriptor import TensorDescriptor
from jtops.core.launch.request import Request
from jtops.core.mesh import partition
from jtops.core.tuning import settle
from jtops.core.types import Constexpr
from jtops.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """Which dims of operands and results are one axis, and which axes devices may share out.

    ``ShardingRule("b n, n -> b n", split="b")``: rows may lie on different devices, each row whole; the second operand lies on
    every device that has rows. Axes that are not in `split` are gathered, so a kernel that reduces over them stays right.

    Args:
      axes: per array a name for each dim, arrays apart by commas, operands and results apart by ``->``; ``()`` is an array
        without dims, ``(g r)`` a dim made of two axes of which only the first can be split.
      split: names, apart by blanks, of the axes that may be split. Each must be in every result and in some operand: what a
        device computes must be its own part of each result.
    """

    axes: str
    split: str

    def __post_init__(self):
        ins, outs = self.arrays()
        split = self.split.split()
        heads = [{names[0] for names in dims} for dims in (*ins, *outs)]
        if not ins or not outs or not re.fullmatch(r"[\w\s,()]*->[\w\s,()]*", self.axes):
            raise ValueError(f'ShardingRule: axes {self.axes!r} must be like "b n, n -> b n".')
        for name in split:
            if not all(name in dims for dims in heads[len(ins) :]) or not any(name in dims for dims in heads[: len(ins)]):
                raise ValueError(
                    f"ShardingRule: axis {name!r} of split must be in every result and in some operand of {self.axes!r}; a kernel "
                    "that reduces over an axis needs it whole."
                )

    def arrays(self):
        """The names of the dims of each operand, and of each result."""
        ins, _, outs = self.axes.partition("->")
        return partition.parse_arrays(ins), partition.parse_arrays(outs)

    def sizes(self, shapes) -> dict[str, int]:
        """Sizes of the axes for operands of these shapes; ValueError where they do not fit the rule."""
        sizes: dict[tuple[str, ...], int] = {}
        ins, _ = self.arrays()
        if [len(dims) for dims in ins] != [len(shape) for shape in shapes]:
            raise ValueError(f"sharding rule {self.axes!r} does not fit operands of shapes {', '.join(map(str, shapes))}.")
        for dims, shape in zip(ins, shapes, strict=True):
            for names, size in zip(dims, shape, strict=True):
                if size != sizes.setdefault(names, size) and 1 not in (size, sizes[names]):
                    raise ValueError(
                        f"sharding rule {self.axes!r}: axis {' '.join(names)} has sizes {sizes[names]} and {size} in operands of "
                        f"shapes {', '.join(map(str, shapes))}."
                    )
                sizes[names] = max(size, sizes[names])
        return {" ".join(names): size for names, size in sizes.items()}


@dataclasses.dataclass(frozen=True, slots=True)
class _ShardedCall:
    """Static description of one bound call."""

    function: Callable
    rule: ShardingRule
    name: str
    settings: tuple
    batched: tuple[tuple[bool, ...], ...] = ()  # per vmap, the first applied first: which operands it maps

    def local(self, *args):
        """Compute one device's part; also the whole call."""
        f = self.function
        for mapped in self.batched:
            f = jax.vmap(f, [0 if m else None for m in mapped])
        with jax_compat.with_settings(self.settings):  # those of the call, not of whoever compiles it
            return jax.tree.leaves(f(*args))

    def axes(self) -> partition.Axes:
        """Axes of operands and results; those of vmap come first and may be split."""
        ins, outs = self.rule.arrays()
        for i, mapped in enumerate(self.batched):
            ins = tuple(((f"vmap{i}",), *dims) if m else dims for m, dims in zip(mapped, ins, strict=True))
            outs = tuple(((f"vmap{i}",), *dims) for dims in outs)
        names = {name for dims in (*ins, *outs) for part in dims for name in part}
        free = {*self.rule.split.split(), *(f"vmap{i}" for i in range(len(self.batched)))}
        return partition.Axes(ins, outs, frozenset(names - free))


def sharded_call(function: Callable, rule: ShardingRule) -> Callable:
    """`function`, made of kernels for arrays of one device, as a function of arrays that lie on any mesh.

    It works on automatic and explicit mesh axes and in shard_map, under ``jax.jit`` and ``jax.vmap`` (of `function`, so its kernels
    need a `vmap_method`), and moves data only to make whole what `rule` does not split. A program for several devices with
    automatic axes holds an address: it does not export, and JAX's persistent cache finds it only with
    ``jax_remove_custom_partitioning_ptr_from_cache_key``.

    Args:
      function: ``f(*arrays) -> pytree of arrays``. It is traced anew for the shapes of a device's part, so whatever depends
        on a shape must be computed inside, and every array be an argument. Define it once: the same function is compiled once.
      rule: dims of the operands of `function` and of its results, in order.

    Returns:
      A function of as many arrays.

    Raises:
      ValueError: arrays that do not fit the rule.
      UnsupportedError: differentiated; or in a shard_map that leaves some mesh axes automatic.
    """
    _check_rule(rule)
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def call(*arrays):
        if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays):
            raise TypeError(f"{name}: a sharded call takes arrays; got {', '.join(type(x).__name__ for x in arrays)}.")
        rule.sizes([x.shape for x in arrays])
        whole = jax.eval_shape(partition.outside_mesh(function), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays))
        _check_results(name, rule, arrays, jax.tree.leaves(whole))
        outs = sharded_p.bind(*jax_compat.vary_together(arrays), call=_ShardedCall(function, rule, name, jax_compat.settings()))
        return jax.tree.structure(whole).unflatten(outs)

    return call


def _check_rule(rule) -> None:
    if not isinstance(rule, ShardingRule):
        raise TypeError(
            f'sharding_rule must be a jtops.ShardingRule, such as ShardingRule("b n, n -> b n", split="b"); got {rule!r}.'
        )


def _check_results(name, rule, arrays, outs) -> None:
    sizes = rule.sizes([x.shape for x in arrays])
    _, wanted = rule.arrays()
    fits = len(outs) == len(wanted) and all(
        len(o.shape) == len(dims) and all(sizes.get(" ".join(n), s) == s for n, s in zip(dims, o.shape, strict=True))
        for o, dims in zip(outs, wanted, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{name}: sharding rule {rule.axes!r} does not fit results of shapes {', '.join(str(o.shape) for o in outs)} for "
            f"operands of shapes {', '.join(str(x.shape) for x in arrays)}."
        )


# ----------------------------------------------------------------------------------------------------------- the primitive

sharded_p = Primitive("sharded_call")
sharded_p.multiple_results = True
sharded_p.def_impl(functools.partial(jax_compat.apply_primitive, sharded_p))
jax_compat.needs_devices_to_lower(sharded_p)


@functools.lru_cache(4096)
def _out_types(call: _ShardedCall, types):
    return jax.eval_shape(partition.outside_mesh(call.local), *types)


@sharded_p.def_abstract_eval
def _abstract_eval(*avals, call):
    types = _out_types(call, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
    shapes, specs = [a.shape for a in (*avals, *types)], [a.sharding.spec for a in avals]
    return partition.typed(types, avals, lambda mesh: partition.decide(call.axes(), shapes, mesh.shape, specs).outs)


def _batch(args, dims, *, call):
    args = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    mapped = tuple(d is not None for d in dims)
    outs = sharded_p.bind(*args, call=dataclasses.replace(call, batched=(*call.batched, mapped)))
    return outs, [0] * len(outs)


def _no_derivative(primals, tangents, *, call):
    raise UnsupportedError(
        f"{call.name}: a sharded call of kernels has no derivative. Wrap it in jax.custom_vjp (or custom_jvp) with your backward "
        "kernel, sharded likewise."
    )


def _lower(ctx, *args, call):
    partition.check_manual(ctx, call.name)
    if jax_compat.manual_axes(ctx) is None and jax_compat.device_count(ctx) > 1:  # within XLA's partitioner an error loses its type
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ctx.avals_in]
        platforms = ctx.platforms or ctx.module_context.platforms
        with notes.listening():  # nobody is told of the whole call's launches
            jax.jit(partition.outside_mesh(call.local)).trace(*types).lower(lowering_platforms=tuple(platforms))
        if partition.is_automatic(ctx):
            notes.add_partitioned(call.name, platforms[0])
    return partition.lower(ctx, *args, axes=call.axes(), name=call.name, local=call.local)


ad.primitive_jvps[sharded_p] = _no_derivative
primitive_batchers[sharded_p] = _batch
mlir.register_lowering(sharded_p, _lower)


# ------------------------------------------------------------------------------------------------- triton_call(sharding_rule=)


class _Slot:
    """The stand-in for an array among arguments."""


def _is_none(value) -> bool:
    return value is None


@dataclasses.dataclass(frozen=True, slots=True)
class _Function:
    """A function that is equal to every other of the same code and with the same values around it.

    Callers write ``lambda axes: axes["n"]`` in the call itself, where each call makes another function of it.
    """

    function: Callable = dataclasses.field(compare=False)
    code: types.CodeType
    around: Constexpr


def _plain(value):
    return value.function if isinstance(value, _Function) else value


def _by_content(value):
    """A function by its content if all that it sees is constant, so that equal ones do the same; anything else as it is."""
    if not inspect.isfunction(value):
        return value
    names = sorted(_global_names(value.__code__) & value.__globals__.keys())
    seen = [*names, *(value.__globals__[name] for name in names)]
    try:
        seen += [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # a cell that is empty yet
        return value
    around = (*seen, *(value.__defaults__ or ()), *(item for pair in (value.__kwdefaults__ or {}).items() for item in pair))
    return _Function(value, value.__code__, Constexpr(around)) if all(map(_is_constant, around)) else value


def _global_names(code: types.CodeType) -> set[str]:
    inner = (_global_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


def _is_constant(value) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, _CONSTANTS)


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, triton_compat.JITFunction)
_CONSTANTS = (bool, int, float, str, np.generic, type, types.ModuleType, *_FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class _ByRule:
    """A request of a device's part: numbers that are functions, grid and result shapes follow from that part's sizes."""

    rule: ShardingRule
    name: str
    values: tuple[Constexpr, ...]  # the request's, but for grid and results; `_Slot` for an array
    structure: Any
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    results: Any
    grid: "_Function | Callable"

    @property
    def __name__(self):
        return self.name

    def __call__(self, *arrays):
        sizes, own = self.rule.sizes([x.shape for x in arrays]), iter(arrays)

        def argument(v):
            return next(own) if v is _Slot else v(sizes) if inspect.isfunction(v) else v

        def part(dims, whole):
            return jax.ShapeDtypeStruct([sizes.get(" ".join(n), s) for n, s in zip(dims, whole.shape, strict=True)], whole.dtype)

        request = self.structure.unflatten(_plain(v.value) for v in self.values)
        args, kwargs = jax.tree.map(argument, (request.args, request.kwargs), is_leaf=_is_none)
        outs = self.results.unflatten([part(d, t) for d, t in zip(self.rule.arrays()[1], self.out_types, strict=True)])
        grid = lambda meta: _plain(self.grid)(sizes | meta)
        return settle.launch(dataclasses.replace(request, args=args, kwargs=kwargs, out_type=outs, grid=grid))


def launch(request: Request) -> Any:
    """Launch a kernel, for each device's part of the arrays if the request has a sharding rule."""
    rule, grid, name = request.sharding_rule, request.grid, request.name
    if rule is None:
        return settle.launch(request)
    _check_rule(rule)
    if not callable(grid):
        raise TypeError(
            "triton_call: with sharding_rule, grid must be a function, so that each device has a grid for its part: it is given "
            f"the sizes of the rule's axes beside the kernel's numbers and constants; got {grid!r}."
        )
    outs, tree = request.results()
    described = lambda v: isinstance(v, TensorDescriptor)
    if any(map(described, [*outs, *jax.tree.leaves((request.args, request.kwargs), is_leaf=described)])):
        raise UnsupportedError(
            "triton_call: a TensorDescriptor has the shape of the whole array, and sharding_rule launches for parts of it. Make "
            "the descriptor in a function of arrays and wrap that in jtops.sharded_call: there it is one of the device's part."
        )
    whole = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in outs)
    if [len(t.shape) for t in whole] != [len(dims) for dims in rule.arrays()[1]]:
        raise ValueError(f"triton_call: sharding rule {rule.axes!r} does not fit out_type {request.out_type!r}.")
    local = dataclasses.replace(request, out_type=None, grid=None, sharding_rule=None)
    values, structure = jax.tree.flatten(local, is_leaf=_is_none)
    is_array = [isinstance(v, jax.Array | np.ndarray) for v in values]
    kept = tuple(Constexpr(_Slot if a else _by_content(v)) for v, a in zip(values, is_array, strict=True))
    arrays = [v for v, a in zip(values, is_array, strict=True) if a]
    name = name or str(getattr(getattr(request.kernel, "base_fn", request.kernel), "__name__", "kernel"))
    _check_results(name, rule, arrays, whole)
    return sharded_call(_ByRule(rule, name, kept, structure, whole, tree, _by_content(grid)), rule)(*arrays)
