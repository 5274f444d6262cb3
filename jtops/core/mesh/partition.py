"""How a call whose code is one device's runs on a mesh: one decision, and two ways to carry it out.

Manual axes (the body of a shard_map) need nothing: the call is local. On a mesh whose axes are all explicit, shardings are part of
the types, so a plain shard_map does: its text is deterministic, exportable and cacheable. On automatic axes only XLA's partitioner
knows the shardings, so it must call back; that is custom_partitioning, which writes an address into the program.

Traps on the way, each of which has a test:

* `decide` never echoes a sharding that it is shown: it keeps what is legal, and the partitioner moves the rest. Telling Shardy that
  a factor needs replication does not make the callback's shardings free of it.
* Shardy gets ONE plain factor for a compound dim ``(g r)``. Given two, it may split a mesh axis between them when the first is
  smaller than the mesh, and custom_partitioning cannot decode such a sharding. `decide` ties ``(g r)`` and ``g`` together instead.
* Dims of size 1 get a factor of their own, since they lack the size of their axis; replicated factors are listed in order.
* A result without a factor that is sharded is a partial sum per device: gradients of shared operands. They are summed as float32
  and cast after.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtops._compat import jax as jax_compat
from jtops.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Specs of operands and results, and per result the mesh axes over which devices hold partial sums of it."""

    ins: tuple[P, ...]
    outs: tuple[P, ...]
    sums: tuple[tuple[str, ...], ...]


Dims = tuple[tuple[str, ...], ...]  # of one array: per dim the names of the axes it is made of


@dataclasses.dataclass(frozen=True, slots=True)
class Axes:
    """Which axis is which dim of operands and results, and which axes a device must hold in full."""

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    whole: frozenset[str]


def parse_arrays(text: str) -> tuple[Dims, ...]:
    """Parse ``"s (g r) d, t g d"``: blanks part dims, commas part arrays, ``()`` is an array without dims."""

    def dims(array):
        parts = re.findall(r"\([^)]*\)|\w+", array)
        return tuple(names for part in parts if (names := tuple(re.findall(r"\w+", part))))

    return tuple(dims(array) for array in text.split(",")) if text.strip() else ()


def _dims(arrays, shapes) -> Iterator[tuple[int, int, tuple[str, ...], int]]:
    """Yield, for every dim, the number of the array, the number of the dim, the names of its axes and its size."""
    for i, (dims, shape) in enumerate(zip(arrays, shapes, strict=True)):
        for j, (names, size) in enumerate(zip(dims, shape, strict=True)):
            yield i, j, names, size


def _factors(axes: Axes, shapes):
    """Axis names of each dim of each operand and result, and the sizes of the axes. Dims of size 1 get a name of their own."""
    named = [list(dims) for dims in (*axes.ins, *axes.outs)]
    dims = list(_dims(named, shapes))
    sizes: dict[str, int] = {}
    for _, _, names, size in dims:
        if len(names) == 1 and size > 1:
            sizes[names[0]] = size
    for _, _, names, size in dims:  # the second axis of a compound dim has what the first leaves
        if len(names) == 2 and size > 1:
            sizes[names[1]] = size // sizes.get(names[0], 1)
    for i, j, names, size in dims:
        named[i][j] = (f"one{i}x{j}",) if size == 1 else tuple(name for name in names if sizes.get(name, 1) > 1)
    return named[: len(axes.ins)], named[len(axes.ins) :], sizes


def _mesh_axes(spec: P, rank: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim of an array."""
    entries = (*spec, *(None,) * rank)[:rank]
    return [entry if isinstance(entry, tuple) else () if entry is None else (entry,) for entry in entries]


def decide(axes: Axes, shapes, mesh_shape, specs) -> Placement:
    """Choose shardings: each axis takes the sharding of the first array (operands, then results) that shards it legally."""
    ins, outs, sizes = _factors(axes, shapes)
    owner: dict[str, tuple[str, ...]] = {}  # axis -> the mesh axes that split it
    for dims, spec in zip(ins + outs, specs, strict=False):
        for names, over in zip(dims, _mesh_axes(spec, len(dims)), strict=True):
            axis, taken = names[0], {a for used in owner.values() for a in used}
            free = bool(over) and axis not in owner and not taken.intersection(over)
            if free and axis in sizes and axis not in axes.whole and sizes[axis] % math.prod(mesh_shape[a] for a in over) == 0:
                owner[axis] = over
    sums = []
    for dims in outs:
        own = {names[0] for names in dims}
        sums.append(tuple(a for axis, over in owner.items() if axis not in own for a in over))
    spec_of = lambda dims: P(*(owner.get(names[0]) for names in dims))
    return Placement(tuple(map(spec_of, ins)), tuple(map(spec_of, outs)), tuple(sums))


def typed(types, operands, specs: Callable[[Any], Sequence[P]]) -> list:
    """Abstract values of results of these types, in the mesh in which the call stands.

    They vary from device to device as the operands do, and where mesh axes are explicit ``specs(mesh)`` shards them.
    """
    mesh, varying = mesh_of(operands), jax_compat.varying_axes(operands[0])
    if AxisType.Explicit not in mesh.axis_types:
        return [jax_compat.shaped_array(t.shape, t.dtype, varying) for t in types]
    shardings = [NamedSharding(mesh, spec) for spec in specs(mesh)]
    return [jax_compat.shaped_array(t.shape, t.dtype, varying, s) for t, s in zip(types, shardings, strict=True)]


sum_p = Primitive("sum_over_devices")
sum_p.def_abstract_eval(lambda x, axes: x)


def _lower_sum(ctx, x, *, axes):
    """Lower psum as if no mesh were set: for a mesh with some explicit axes JAX would write a sharding into the sum's function."""
    return outside_mesh(mlir.lower_fun(lambda v: [lax.psum(v, axes)]))(ctx, x)


mlir.register_lowering(sum_p, _lower_sum)


def _on_device(local, placement: Placement, dtypes, psum=lax.psum):
    """Run `local` on one device's shards and complete partial sums."""

    def f(*args):
        outs = zip(local(*args), placement.sums, dtypes, strict=True)
        return tuple((psum(o, axes) if axes else o).astype(dtype) for o, axes, dtype in outs)

    return f


def _by_types(axes: Axes, local, in_avals, out_avals):
    """Run `local` under a shard_map whose specs come from the operands' own types."""
    mesh = mesh_of(in_avals)
    placement = decide(axes, [a.shape for a in (*in_avals, *out_avals)], mesh.shape, [a.sharding.spec for a in in_avals])
    body = _on_device(local, placement, [o.dtype for o in out_avals])
    f = jax.shard_map(body, mesh=mesh, in_specs=placement.ins, out_specs=placement.outs, check_vma=False)
    move = lambda xs, specs: tuple(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(xs, specs, strict=True))

    def moved(*args):
        with jax.sharding.use_abstract_mesh(mesh):
            return move(f(*move(args, placement.ins)), [o.sharding.spec for o in out_avals])

    return moved


def _by_partitioner(axes: Axes, name: str, local, in_avals, out_avals):
    """Run `local` with a rule by which XLA's partitioner splits it, or by a plain call on one device."""
    shapes, dtypes = [t.shape for t in (*in_avals, *out_avals)], [o.dtype for o in out_avals]

    def whole_call(*args):
        return tuple(o.astype(d) for o, d in zip(local(*args), dtypes, strict=True))

    whole_call.__name__ = name
    f = custom_partitioning(jax.jit(whole_call))  # jit: custom_partitioning takes no function that closes over arrays

    def partition(mesh, arg_types, result_types):
        types = (*arg_types, *result_types)
        if mesh.empty:  # arrays that never saw a mesh, under jax.set_mesh: no axis to split, every device computes all
            devices = {device for t in types for device in t.sharding.device_set}
            mesh = Mesh(sorted(devices, key=lambda d: d.id), ("devices",))
            specs = [P()] * len(types)
        else:
            specs = [t.sharding.spec for t in types]
        placement = decide(axes, shapes, mesh.shape, specs)
        place = lambda specs: tuple(NamedSharding(mesh, s) for s in specs)
        psum = lambda x, axes: sum_p.bind(x, axes=axes)
        return mesh, _on_device(local, placement, dtypes, psum), place(placement.outs), place(placement.ins)

    ins, outs, _ = _factors(axes, shapes)
    ins, outs = _shardy(ins), _shardy(outs)
    used = dict.fromkeys(factor for array in ins + outs for factor in array)
    side = lambda arrays: ", ".join(map(" ".join, arrays))
    whole = tuple(factor for factor in used if factor in axes.whole)
    f.def_partition(partition=partition, sharding_rule=f"{side(ins)} -> {side(outs)}", need_replication_factors=whole)
    return f


def _shardy(arrays) -> list[list[str]]:
    """The factor of each dim in Shardy's rule, one for a compound dim."""
    return [["_".join(names) for names in dims] for dims in arrays]


def outside_mesh(f):
    """Trace `f` as if no mesh were set: under jax.set_mesh jax.numpy would ask for output shardings and emit constraints."""

    def g(*args):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return f(*args)

    return g


def mesh_of(avals) -> jax.sharding.AbstractMesh:
    """The mesh in which a call on arrays of these types stands: the context's or, where ``jax.set_mesh`` was not called, theirs."""
    context = jax.sharding.get_abstract_mesh()
    own = (a.sharding.mesh for a in avals if not a.sharding.mesh.empty)
    return next(own, context) if context.empty else context


def check_manual(ctx, name: str, way_out: str = "") -> None:
    """Raise an UnsupportedError in a shard_map that leaves some mesh axes to the partitioner, which would abort the process."""
    manual = jax_compat.manual_axes(ctx)
    if manual is not None and manual[0] != set(manual[1]):
        raise UnsupportedError(
            f"{name}: inside shard_map every mesh axis must be manual for a kernel; got {sorted(manual[0])} of {manual[1]}. Give "
            f"shard_map all axis_names{way_out}."
        )


def is_automatic(ctx) -> bool:
    """Whether XLA's partitioner splits what `ctx` lowers, if anything does."""
    mesh = mesh_of(ctx.avals_in)
    return jax_compat.manual_axes(ctx) is None and (mesh.empty or not mesh.are_all_axes_explicit)


def lower(ctx, *args, axes: Axes, name: str, local):
    """Lower `local`, the code of one device, on whatever mesh there is; `name` is the partitioned function's."""
    mesh = mesh_of(ctx.avals_in)
    if jax_compat.manual_axes(ctx) is not None:  # sums over devices are JAX's, of the results as they are handed out
        return lower_local(ctx, *args, local=lambda *a: [o.astype(t.dtype) for o, t in zip(local(*a), ctx.avals_out, strict=True)])
    if not mesh.empty and mesh.are_all_axes_explicit:
        return mlir.lower_fun(_by_types(axes, local, ctx.avals_in, ctx.avals_out))(ctx, *args)
    return lower_local(ctx, *args, local=_by_partitioner(axes, name, outside_mesh(local), ctx.avals_in, ctx.avals_out))


def lower_local(ctx, *args, local):
    """Lower plain HLO, which XLA partitions by itself, or the code of one device."""
    f = lambda *a: tuple(local(*a))
    if jax_compat.manual_axes(ctx) is not None:
        return mlir.lower_fun(f)(ctx, *args)
    bare = ctx.replace(avals_in=[a.update(sharding=None) for a in ctx.avals_in])  # sharding types end here
    return mlir.lower_fun(outside_mesh(f))(bare, *args)
