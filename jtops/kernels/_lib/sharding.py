"""How a fused op meets a mesh: one decision, two ways to carry it out.

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

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """Specs of operands and results, and per result the mesh axes over which devices hold partial sums of it."""

    ins: tuple[P, ...]
    outs: tuple[P, ...]
    sums: tuple[tuple[str, ...], ...]


def _factors(call, shapes):
    """Axis names of each dim of each operand and result, and the sizes of the axes. Dims of size 1 get a name of their own."""
    ins, outs = call.axes()
    named = [[(f"batch{i}",) for i in range(call.n_batch)] + list(dims) for dims in (*ins, *outs)]
    places = [(i, j, names, size) for i, (dims, shape) in enumerate(zip(named, shapes, strict=True))
              for j, (names, size) in enumerate(zip(dims, shape, strict=True))]  # fmt: skip
    sizes = {names[0]: size for *_, names, size in places if len(names) == 1 and size > 1}
    for *_, names, size in places:  # of a compound dim the second: whatever the first leaves
        if len(names) == 2 and size > 1:
            sizes[names[1]] = size // sizes.get(names[0], 1)
    for i, j, names, size in places:
        named[i][j] = (f"one{i}x{j}",) if size == 1 else tuple(f for f in names if sizes.get(f, 1) > 1)
    return named[: len(ins)], named[len(ins) :], sizes


def decide(call, shapes, mesh_shape, specs) -> Decision:
    """Choose shardings: an axis is sharded as the first array that shards it legally has it. Operands come before results."""
    ins, outs, sizes = _factors(call, shapes)
    owner: dict[str, tuple[str, ...]] = {}
    for dims, spec in zip(ins + outs, specs, strict=False):
        for names, axes in zip(dims, tuple(spec) + (None,) * len(dims), strict=False):
            axes = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
            parts = math.prod(mesh_shape[a] for a in axes)
            taken = {a for used in owner.values() for a in used}
            legal = names[0] in sizes and names[0] not in {*call.op.rule.whole, *owner} and sizes[names[0]] % parts == 0
            if axes and legal and not taken & set(axes):
                owner[names[0]] = axes
    spec_of = lambda dims: P(*(owner.get(names[0]) for names in dims))
    sums = (tuple(a for f, axes in owner.items() if f not in {names[0] for names in dims} for a in axes) for dims in outs)
    return Decision(tuple(map(spec_of, ins)), tuple(map(spec_of, outs)), tuple(sums))


def _on_device(local, decision: Decision, dtypes):
    """`local` on one device's shards, partial sums completed."""

    def f(*args):
        outs = zip(local(*args), decision.sums, dtypes, strict=True)
        return tuple((lax.psum(o, axes) if axes else o).astype(dtype) for o, axes, dtype in outs)

    return f


def by_types(call, local, in_avals, out_avals):
    """`local` under a shard_map whose specs come from the operands' own types."""
    mesh = in_avals[0].sharding.mesh
    decision = decide(call, [a.shape for a in (*in_avals, *out_avals)], mesh.shape, [a.sharding.spec for a in in_avals])
    body = _on_device(local, decision, [o.dtype for o in out_avals])
    f = jax.shard_map(body, mesh=mesh, in_specs=decision.ins, out_specs=decision.outs, check_vma=False)
    move = lambda xs, specs: tuple(jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(xs, specs, strict=True))
    return lambda *args: move(f(*move(args, decision.ins)), [o.sharding.spec for o in out_avals])


def by_partitioner(call, local, in_types, out_types):
    """`local` with a rule by which XLA's partitioner splits it; a plain call on one device."""
    shapes, dtypes = [t.shape for t in (*in_types, *out_types)], [o.dtype for o in out_types]

    def whole_call(*args):
        return tuple(o.astype(d) for o, d in zip(local(*args), dtypes, strict=True))

    whole_call.__name__ = f"{call.op.name}_{call.stage}"
    f = custom_partitioning(jax.jit(whole_call))  # jit: custom_partitioning takes no function that closes over arrays

    def partition(mesh, arg_types, result_types):
        decision = decide(call, shapes, mesh.shape, [t.sharding.spec for t in (*arg_types, *result_types)])
        place = lambda specs: tuple(NamedSharding(mesh, s) for s in specs)
        return mesh, _on_device(local, decision, dtypes), place(decision.outs), place(decision.ins)

    ins, outs, _ = _factors(call, shapes)
    side = lambda arrays: ", ".join(" ".join("_".join(names) for names in dims) for dims in arrays)
    used = dict.fromkeys("_".join(names) for dims in ins + outs for names in dims)
    whole = tuple(f for f in used if f in call.op.rule.whole)
    f.def_partition(partition=partition, sharding_rule=f"{side(ins)} -> {side(outs)}", need_replication_factors=whole)
    return f
