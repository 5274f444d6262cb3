"""How a call whose code is one device's meets a mesh: one decision, two ways to carry it out.

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

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jtops._compat import jax as jax_compat
from jtops.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
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
    """``"s (g r) d, t g d"``: dims apart by blanks, arrays by commas, ``()`` for an array without dims."""

    def dims(array):
        parts = re.findall(r"\([^)]*\)|\w+", array)
        return tuple(names for part in parts if (names := tuple(re.findall(r"\w+", part))))

    return tuple(dims(array) for array in text.split(",")) if text.strip() else ()


def _factors(axes: Axes, shapes):
    """Axis names of each dim of each operand and result, and the sizes of the axes. Dims of size 1 get a name of their own."""
    named = [list(dims) for dims in (*axes.ins, *axes.outs)]
    places = [(i, j, names, size) for i, (dims, shape) in enumerate(zip(named, shapes, strict=True))
              for j, (names, size) in enumerate(zip(dims, shape, strict=True))]  # fmt: skip
    sizes = {names[0]: size for *_, names, size in places if len(names) == 1 and size > 1}
    for *_, names, size in places:  # of a compound dim the second: whatever the first leaves
        if len(names) == 2 and size > 1:
            sizes[names[1]] = size // sizes.get(names[0], 1)
    for i, j, names, size in places:
        named[i][j] = (f"one{i}x{j}",) if size == 1 else tuple(f for f in names if sizes.get(f, 1) > 1)
    return named[: len(axes.ins)], named[len(axes.ins) :], sizes


def decide(axes: Axes, shapes, mesh_shape, specs) -> Decision:
    """Choose shardings: an axis is sharded as the first array that shards it legally has it. Operands come before results."""
    ins, outs, sizes = _factors(axes, shapes)
    owner: dict[str, tuple[str, ...]] = {}
    for dims, spec in zip(ins + outs, specs, strict=False):
        for names, over in zip(dims, tuple(spec) + (None,) * len(dims), strict=False):
            over = over if isinstance(over, tuple) else () if over is None else (over,)
            parts = math.prod(mesh_shape[a] for a in over)
            taken = {a for used in owner.values() for a in used}
            legal = names[0] in sizes and names[0] not in {*axes.whole, *owner} and sizes[names[0]] % parts == 0
            if over and legal and not taken & set(over):
                owner[names[0]] = over
    spec_of = lambda dims: P(*(owner.get(names[0]) for names in dims))
    sums = (tuple(a for f, over in owner.items() if f not in {names[0] for names in dims} for a in over) for dims in outs)
    return Decision(tuple(map(spec_of, ins)), tuple(map(spec_of, outs)), tuple(sums))


sum_p = Primitive("sum_over_devices")
sum_p.def_abstract_eval(lambda x, axes: x)


def _lower_sum(ctx, x, *, axes):
    """psum as if no mesh were set: of a mesh with some explicit axes JAX would write a sharding into the sum's own function."""
    return outside_mesh(mlir.lower_fun(lambda v: [lax.psum(v, axes)]))(ctx, x)


mlir.register_lowering(sum_p, _lower_sum)


def _on_device(local, decision: Decision, dtypes, psum=lax.psum):
    """`local` on one device's shards, partial sums completed."""

    def f(*args):
        outs = zip(local(*args), decision.sums, dtypes, strict=True)
        return tuple((psum(o, axes) if axes else o).astype(dtype) for o, axes, dtype in outs)

    return f


def _by_types(axes: Axes, local, in_avals, out_avals):
    """`local` under a shard_map whose specs come from the operands' own types."""
    mesh = mesh_of(in_avals)
    decision = decide(axes, [a.shape for a in (*in_avals, *out_avals)], mesh.shape, [a.sharding.spec for a in in_avals])
    body = _on_device(local, decision, [o.dtype for o in out_avals])
    f = jax.shard_map(body, mesh=mesh, in_specs=decision.ins, out_specs=decision.outs, check_vma=False)
    move = lambda xs, specs: tuple(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(xs, specs, strict=True))

    def moved(*args):
        with jax.sharding.use_abstract_mesh(mesh):
            return move(f(*move(args, decision.ins)), [o.sharding.spec for o in out_avals])

    return moved


def _by_partitioner(axes: Axes, name: str, local, in_avals, out_avals):
    """`local` with a rule by which XLA's partitioner splits it; a plain call on one device."""
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
        decision = decide(axes, shapes, mesh.shape, specs)
        place = lambda specs: tuple(NamedSharding(mesh, s) for s in specs)
        psum = lambda x, axes: sum_p.bind(x, axes=axes)
        return mesh, _on_device(local, decision, dtypes, psum), place(decision.outs), place(decision.ins)

    ins, outs, _ = _factors(axes, shapes)
    side = lambda arrays: ", ".join(" ".join("_".join(names) for names in dims) for dims in arrays)
    used = dict.fromkeys("_".join(names) for dims in ins + outs for names in dims)
    whole = tuple(f for f in used if f in axes.whole)
    f.def_partition(partition=partition, sharding_rule=f"{side(ins)} -> {side(outs)}", need_replication_factors=whole)
    return f


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
    """UnsupportedError in a shard_map that leaves some axes of its mesh to the partitioner: there it would abort the process."""
    manual = jax_compat.manual_axes(ctx)
    if manual is not None and manual[0] != set(manual[1]):
        raise UnsupportedError(
            f"{name}: inside shard_map every mesh axis must be manual for a kernel; got {sorted(manual[0])} of {manual[1]}. Give "
            f"shard_map all axis_names{way_out}."
        )


def is_automatic(ctx) -> bool:
    """Is it XLA's partitioner that splits what `ctx` lowers, if anything does?"""
    mesh = mesh_of(ctx.avals_in)
    return jax_compat.manual_axes(ctx) is None and (mesh.empty or not mesh.are_all_axes_explicit)


def lower(ctx, *args, axes: Axes, name: str, local):
    """Lowering rule body: `local`, the code of one device, on whatever mesh there is; `name` is the partitioned function's."""
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
