"""Programs with row ops: one compiled kernel for a bucket of shapes, one launch under vmap, and which collectives they have."""

import contextlib
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jtops
from jtops.core.compile import kernel as compiling
from tests import numerics
from tests.kernels import lowered
from tests.kernels.test_sharding import collectives, mesh, normal, put

# ------------------------------------------------------------------------------------------- one kernel for many shapes


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def with_gradients(f):
    def both(*operands):
        value, pullback = jax.vjp(f, *operands)
        return value, pullback(jax.tree.map(lambda v: v * 2, value))

    return both


@contextlib.contextmanager
def without_compiling():
    """Programs are lowered as ever, around kernels of no code. -> the keys under which their code would be kept."""

    def pretend(kernel, bound, parameters, options, target):
        ones = frozenset(p.name for p in parameters if p.folds)
        return compiling.CompiledKernel(kernel.__name__, target, "", 4, 1, 0, 0, 1, (), ones, None)

    with mock.patch.object(compiling, "_compiled", {}) as keys, mock.patch.object(compiling, "_compile", pretend):
        yield keys


def number_compiled(f, *calls) -> int:
    """How many kernels these calls compile, forward and backward."""
    with without_compiling() as keys:
        for operands in calls:
            lowered.text(with_gradients(f), *operands)
        return len(keys)


OF_ROWS = {  # op and its operands for r rows of n
    "add": (jtops.add, lambda r, n: (struct(r, n), struct(n))),
    "softmax": (jtops.softmax, lambda r, n: (struct(r, n),)),
    "masked": (lambda x: jtops.softmax(x, where=x > 0), lambda r, n: (struct(r, n),)),
    "log_softmax": (jtops.log_softmax, lambda r, n: (struct(r, n),)),
    "logsumexp": (lambda x: jtops.logsumexp(x, -1), lambda r, n: (struct(r, n),)),
    "layer_norm": (jtops.layer_norm, lambda r, n: (struct(r, n), struct(n), struct(n))),
    "add_rms_norm": (jtops.add_rms_norm, lambda r, n: (struct(r, n), struct(r, n), struct(n))),
}


def in_parts(names, at_once):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in at_once)) for name in names]


@pytest.mark.parametrize("name", in_parts(OF_ROWS, ("add", "masked", "layer_norm")))
def test_shapes_of_a_bucket_share_their_kernels(name):
    """Any number of rows, and lengths of a block that 16 divides; another alignment, or a full block, is another kernel, once."""
    f, operands = OF_ROWS[name]
    one = number_compiled(f, operands(8192, 4080))
    alike = [operands(*shape) for shape in ((8192, 4080), (8000, 4080), (7001, 3600))]
    assert number_compiled(f, *alike) == one
    assert number_compiled(f, operands(8192, 4096), operands(7001, 4096)) == one
    assert number_compiled(f, *alike, operands(8192, 4001), operands(8000, 4003)) == 2 * one


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_long_shapes_of_a_bucket_share_their_kernels(name):
    f, operands = OF_ROWS[name]
    for r in (64, 4096):
        one = number_compiled(f, operands(r, 131072))
        assert number_compiled(f, operands(r, 131072), operands(r - 3, 131072), operands(r, 131072 - 16)) == one


def test_strided_shapes_of_a_bucket_share_their_kernels():
    f = lambda x: jtops.softmax(x, 1)
    one = number_compiled(f, [struct(64, 1000, 48)])
    assert number_compiled(f, *([struct(*shape)] for shape in ((64, 1000, 48), (61, 999, 48), (64, 600, 64)))) == one


# --------------------------------------------------------------------------------------------------------------------- axes


@pytest.mark.parametrize("axis", [0, 1, 2, -1, (0, 1), (1, 2), (2, 1), (1, 2, 3), None])
def test_no_axis_is_moved_where_strides_serve(axis):
    """One axis, or neighbours, wherever they are: no transpose before or after the kernels."""
    x = struct(4, 24, 40, 64)
    for op in (jtops.softmax, jtops.log_softmax):
        with without_compiling():
            text = lowered.text(with_gradients(lambda x, op=op: op(x, axis)), x)
        assert "stablehlo.transpose" not in text
        assert len(re.findall(lowered.CALL, text)) >= 2


@pytest.mark.parametrize(("axis", "shape"), [((0, 2), (4, 24, 40)), (0, (8192, 3))])
def test_axes_are_moved_where_they_must_be(axis, shape):
    """No stride leads along axes that are not neighbours; and few long columns are quicker as rows."""
    with without_compiling():
        assert "stablehlo.transpose" in lowered.text(with_gradients(lambda x: jtops.softmax(x, axis)), struct(*shape))


# --------------------------------------------------------------------------------------------------------------------- vmap

B, R, N = 5, 6, 48
WIDE, MATRIX, VECTORS, VECTOR = (struct(*shape, dtype="float32") for shape in ((B, R, N), (R, N), (B, N), (N,)))
MASK, MASKS = (struct(*shape, dtype="bool") for shape in ((R, N), (B, R, N)))
masked = lambda op, axis: lambda x, where: op(x, axis, where)
OF_SHARED = {  # op, in_axes, operands
    "softmax": (masked(jtops.softmax, -1), (0, None), (WIDE, MASK)),
    "softmax_0": (masked(jtops.softmax, 0), (0, None), (WIDE, MASK)),
    "softmax_row": (masked(jtops.softmax, -1), (0, None), (WIDE, struct(N, dtype="bool"))),
    "log_softmax": (masked(jtops.log_softmax, -1), (0, None), (WIDE, MASK)),
    "logsumexp": (masked(jtops.logsumexp, -1), (0, None), (WIDE, MASK)),
    "layer_norm": (jtops.layer_norm, (0, None, None), (WIDE, VECTOR, VECTOR)),
    "layer_norm_scales": (jtops.layer_norm, (0, 0, None), (WIDE, VECTORS, VECTOR)),
    "rms_norm": (jtops.rms_norm, (0, None), (WIDE, VECTOR)),
    "add_layer_norm": (jtops.add_layer_norm, (0, 0, None, None), (WIDE, WIDE, VECTOR, VECTOR)),
    "add_layer_norm_residual": (jtops.add_layer_norm, (0, None, None, None), (WIDE, MATRIX, VECTOR, VECTOR)),
    "add_rms_norm_x": (jtops.add_rms_norm, (None, 0, None), (MATRIX, WIDE, VECTOR)),
    "add": (jtops.add, (0, None), (WIDE, MATRIX)),
    "add_row": (jtops.add, (0, None), (WIDE, VECTOR)),
}


def copied(f, *operands) -> list[str]:
    """Operations that spread an array of a row or more to a larger one. To put axes of size 1 is none."""
    size = lambda shape: math.prod(map(int, shape.split("x")))
    spread = re.findall(r"broadcast_in_dim .*: \(tensor<([\dx]+)x\w+>\) -> tensor<([\dx]+)x\w+>", lowered.text(f, *operands))
    return [f"{small} -> {large}" for small, large in spread if N <= size(small) < size(large)]


@pytest.mark.parametrize("name", OF_SHARED)
def test_vmap_is_one_launch_and_copies_nothing(name):
    """Operands that are not mapped stay as they are, forward and in the gradient of what is mapped and of what is shared."""
    f, axes, operands = OF_SHARED[name]
    mapped = jax.vmap(f, axes)
    with without_compiling():
        check_shared(name, mapped, operands)


def check_shared(name, mapped, operands):
    op = name if hasattr(jtops, name) else name.rpartition("_")[0]
    assert lowered.launches(mapped, *operands) == {f"jtops_{op}_out": 1}
    assert copied(mapped, *operands) == []
    floats = tuple(i for i, x in enumerate(operands) if x.dtype != bool)
    grads = jax.grad(lambda *a: sum(jnp.sin(y).sum() for y in jax.tree.leaves(mapped(*a))), floats)
    assert copied(grads, *operands) == []
    launched = lowered.launches(grads, *operands)
    assert launched[f"jtops_{op}_fwd"] == 1
    assert all(k.startswith(f"jtops_{op}_") for k in launched)


# ----------------------------------------------------------------------------------------------------------------- sharding

X, SCALE = normal(16, 8, 32), normal(32, seed=1)
ON_MESHES = {  # op and its operands; arrays that are gathered where the features are split, forward
    "add": (jtops.add, (X, SCALE), 0),
    "add_same": (jtops.add, (X, X), 0),
    "softmax": (jtops.softmax, (X,), 1),
    "log_softmax": (jtops.log_softmax, (X,), 1),
    "logsumexp": (lambda x, **kw: jtops.logsumexp(x, -1, **kw), (X,), 1),
    "layer_norm": (jtops.layer_norm, (X, SCALE, SCALE), 1),
    "rms_norm": (jtops.rms_norm, (X, SCALE), 1),
    "add_layer_norm": (jtops.add_layer_norm, (X, X, SCALE, SCALE), 2),
    "add_rms_norm": (jtops.add_rms_norm, (X, X, SCALE), 2),
}
ON_MESHES_AT_ONCE = (("softmax", AxisType.Auto), ("rms_norm", AxisType.Explicit))  # `test_auto_rows` has more
loss = lambda f: lambda *a: sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*a)))


def interpreted(name):
    f, operands, gathers = ON_MESHES[name]
    all_of = tuple(range(len(operands)))
    g = lambda *a: f(*a, implementation="interpret")
    return g, jax.grad(loss(g), all_of), jax.grad(loss(f), all_of)(*operands), operands, gathers


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] * ((name, kind) not in ON_MESHES_AT_ONCE))
        for name in ON_MESHES
        for kind in (AxisType.Auto, AxisType.Explicit)
    ],
)
def test_collectives(name, kind):
    """Split rows: none forward, and backward one sum of all the parameters' gradients. Split features: they are gathered."""
    f, grads, want, operands, gathers = interpreted(name)
    m = mesh(kind)
    shared = any(x.ndim == 1 for x in operands)
    with jax.set_mesh(m) if kind is AxisType.Explicit else contextlib.nullcontext():
        for spec, forward, backward in (
            (("x",), {}, {"all-reduce": 1} if shared else {}),
            ((None, None, "x"), {"all-gather": gathers} if gathers else {}, None),
        ):
            placed = [put(x, m, *(spec if x.ndim == 3 else ())) for x in operands]
            assert collectives(jax.jit(f), *placed) == forward
            jitted = jax.jit(grads)
            numerics.close(jitted(*placed), want, 1e-4)
            used = collectives(jitted, *placed)
            assert set(used) <= {"all-gather"} if backward is None else used == backward


@pytest.mark.parametrize("name", in_parts(ON_MESHES, ("rms_norm",)))
def test_collectives_in_shard_map(name):
    """There the call is its device's own: it has no collective, and of split features it sees those of its device alone."""
    f, _, want, operands, _ = interpreted(name)
    m = mesh()
    for spec in (P("x"), P(None, None, "x")):
        split = tuple(spec if x.ndim == 3 else P() if spec[0] else P("x") for x in operands)
        reduced = name == "logsumexp" and not spec[0]
        if reduced:
            continue  # its result has no features to split
        mapped = lambda f, split=split, spec=spec: jax.jit(jax.shard_map(f, mesh=m, in_specs=split, out_specs=spec))
        g = mapped(f)
        assert collectives(g, *operands) == {}
        numerics.close(g(*operands), mapped(lambda *a: ON_MESHES[name][0](*a, implementation="xla"))(*operands), 1e-5)
        if spec[0]:
            grads = jax.jit(jax.grad(loss(g), tuple(range(len(operands)))))
            numerics.close(grads(*operands), want, 1e-4)
            used = collectives(grads, *(put(x, m, *s) for x, s in zip(operands, split, strict=True)))
            assert used == ({"all-reduce": 1} if any(x.ndim == 1 for x in operands) else {})
