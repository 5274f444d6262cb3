"""Ops on a mesh: automatic, explicit and manual axes, right values and no collective that the maths does not need."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
from jtops.kernels._lib.spec import floating
from tests import numerics
from tests.kernels import lowered
from tests.specs import draw, every_meshed, function, some_meshed, those

# Here by interpreted kernels on 8 forced devices; with two GPUs by the kernels themselves.
everywhere = pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.multigpu)])
by_default = pytest.mark.parametrize(
    "implementation",
    [pytest.param(None, marks=pytest.mark.slow), "interpret", pytest.param("triton", marks=pytest.mark.multigpu)],
)
COLLECTIVE = re.compile(r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def collectives(f, *args) -> dict[str, int]:
    return dict(collections.Counter(COLLECTIVE.findall(f.lower(*args).compile().as_text())))


def devices() -> int:
    return min(8, len(jax.devices()))


def mesh(kind=AxisType.Auto, names=("x",), count=8):
    n = min(count, devices())
    shape = (n,) if len(names) == 1 else (2, n // 2)
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=jax.devices()[:n])


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(16, 8, 32)


class Meshed:
    """An op's case for meshes: its operands, where they may lie, and the op by an implementation."""

    def __init__(self, spec, case, implementation):
        self.operands = draw(spec, case)
        self.f, self.want = (function(spec, case, implementation=i) for i in (implementation, "xla"))
        self.named, self.result = case.named_axes()
        self.first, self.last = self.named[0][0], self.named[0][-1]

    def where(self, axes, names):
        return P(*(axes.get(name) for name in names))

    def put(self, mesh, **axes):
        """Operands with the axes so named sharded, wherever they have them."""
        return [put(x, mesh, *self.where(axes, names)) for x, names in zip(self.operands, self.named, strict=True)]

    def ins(self):
        """For `jax.shard_map`, where the first axis is shared out."""
        return tuple(self.where({self.first: "x"}, names) for names in self.named)

    def batched(self):
        """The same for `jax.vmap`."""
        return [0 if self.first in names else None for names in self.named]

    def grads(self, f):
        weights = jnp.cos(jnp.arange(self.want(*self.operands).size, dtype=jnp.float32)).reshape(self.want(*self.operands).shape)
        return jax.grad(lambda *a: (f(*a) * weights).sum() + (f(*a) ** 2).sum(), floating(self.operands))

    def summed(self, axis):
        """How many gradients are sums over an axis."""
        return sum(axis not in self.named[i] for i in floating(self.operands))


def compiled(f, *operands):
    """The result of a jitted function, and the collectives it took."""
    program = f.lower(*operands).compile()
    return program(*operands), dict(collections.Counter(COLLECTIVE.findall(program.as_text())))


@everywhere
@every_meshed
def test_auto_rows(spec, case, implementation):
    """What is sharded stays so; the forward has no collective; gradients of what all devices share are summed, once each."""
    meshed = Meshed(spec, case, implementation)
    want, grads = meshed.want(*meshed.operands), meshed.grads(meshed.want)(*meshed.operands)
    for axis, count in zip(case.split.split(), itertools.cycle((8, 4))):
        m = mesh(count=count)
        placed = meshed.put(m, **{axis: "x"})
        y, used = compiled(jax.jit(meshed.f), *placed)
        numerics.close(y, want)
        assert y.sharding.is_equivalent_to(NamedSharding(m, meshed.where({axis: "x"}, meshed.result)), y.ndim)
        assert used == {}
        got, used = compiled(jax.jit(meshed.grads(meshed.f)), *placed)
        numerics.close(got, grads, 1e-4)
        assert got[0].sharding.is_equivalent_to(placed[0].sharding, got[0].ndim)
        assert set(used) <= {"all-reduce"}
        assert used.get("all-reduce", 0) <= meshed.summed(axis), used


@everywhere
@pytest.mark.parametrize("transform", ["vmap", "vmap_grad", "grad_vmap", "vmap_jvp", "jvp_vmap", "hvp", "remat", "scan"])
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_auto_rows_in_every_nesting(name, transform, implementation):
    """Without parameters there is nothing to sum, so there is no collective at all."""
    simple = {"softmax": jtops.softmax, "layer_norm": jtops.layer_norm}[name]
    weights = X[:, ::-1] + 1.0  # a plain sum of outputs, or of their squares, hardly depends on x
    weigh = lambda y: y * (weights if y.ndim == 3 else weights[0])
    loss = lambda f: lambda x: weigh(f(x) + 1.0).sum()
    build = {
        "vmap": jax.vmap,
        "vmap_grad": lambda f: jax.vmap(jax.grad(loss(f))),
        "grad_vmap": lambda f: jax.grad(loss(jax.vmap(f))),
        "vmap_jvp": lambda f: jax.vmap(lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]),
        "jvp_vmap": lambda f: lambda x: jax.jvp(jax.vmap(f), (x,), (jnp.cos(x),))[1],
        "hvp": lambda f: lambda x: jax.jvp(jax.grad(loss(f)), (x,), (jnp.cos(x),))[1],
        "remat": lambda f: jax.grad(loss(jax.checkpoint(f))),
        "scan": lambda f: jax.grad(lambda x: weigh(jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]).sum()),
    }[transform]
    f, want = (build(lambda x, i=i: simple(x, implementation=i)) for i in (implementation, "xla"))
    x = put(X, mesh(), "x")
    numerics.close(jax.jit(f)(x), want(X), 1e-3)
    assert collectives(jax.jit(f), x) == {}


@everywhere
@some_meshed
def test_auto_features(spec, case, implementation):
    """An axis that a device needs in full is gathered where it is sharded, and the answer may be asked for in parts."""
    meshed = Meshed(spec, case, implementation)
    want, grads = meshed.want(*meshed.operands), meshed.grads(meshed.want)(*meshed.operands)
    for i, axis in enumerate(case.gathered.split()):
        placed = meshed.put(mesh(), **{axis: "x"})
        y, used = compiled(jax.jit(meshed.f), *placed)
        numerics.close(y, want)
        assert "all-gather" in used
        if i == 0:
            numerics.close(jax.jit(meshed.grads(meshed.f))(*placed), grads, 1e-4)
    parts = NamedSharding(mesh(), P(*["x" if i == want.ndim - 1 and n > 1 else None for i, n in enumerate(want.shape)]))
    numerics.close(jax.jit(meshed.f, out_shardings=parts)(*meshed.operands), want)


@everywhere
def test_axes_after_a_reduced_one_stay_sharded(implementation):
    for op in (jtops.softmax, jtops.logsumexp):
        f = lambda x, op=op, **kw: op(x, 1, **kw)
        for axes in (("x",), (None, None, "x")):
            x, g = put(X, mesh(), *axes), jax.jit(lambda x, f=f: f(x, implementation=implementation))
            numerics.close(g(x), f(X))
            assert collectives(g, x) == {}
            m = mesh(AxisType.Explicit)
            with jax.set_mesh(m):
                numerics.close(g(put(X, m, *axes)), f(X))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_arrays_that_never_saw_a_mesh(kind):
    """Made before jax.set_mesh, used under it: every device computes the whole."""
    with jax.set_mesh(mesh(kind)):
        for f in (jtops.softmax, jax.jit(jtops.softmax, static_argnames="implementation")):
            numerics.close(f(X, implementation="interpret"), jax.nn.softmax(X))
        loss = lambda x, implementation: (jtops.layer_norm(x, implementation=implementation) ** 2 * x).sum()
        numerics.close(jax.grad(loss)(X, "interpret"), jax.grad(loss)(X, "xla"), 1e-4)


@everywhere
@some_meshed
def test_auto_awkward(spec, case, implementation):
    """Inconsistent operands, sharded parameters, two mesh axes, rows that the mesh does not divide."""
    meshed, m = Meshed(spec, case, implementation), mesh()
    f, operands = jax.jit(meshed.f), meshed.operands
    want = meshed.want(*operands)
    first, last = ({axis: "x"} for axis in (meshed.first, meshed.last))
    numerics.close(f(meshed.put(m, **first)[0], *operands[1:]), want)
    numerics.close(f(operands[0], *(put(x, m, *[None] * (x.ndim - 1), "x") for x in operands[1:])), want)
    parameters = [put(x, m, "x") for x in operands]
    numerics.close(f(*parameters), want)
    numerics.close(jax.jit(meshed.grads(meshed.f))(*parameters), meshed.grads(meshed.want)(*operands), 1e-4)
    some = draw(spec, case.resized(meshed.first, devices() - 1))
    odd = jax.jit(lambda x, *rest: meshed.f(jax.lax.with_sharding_constraint(x, NamedSharding(m, P("x"))), *rest))
    numerics.close(odd(*some), meshed.want(*some))
    if devices() >= 4:
        two, second = mesh(names=("a", "b")), meshed.named[0][1]
        for axes in ({meshed.first: "a", second: "b"}, {meshed.first: ("a", "b")}, {meshed.first: "a", meshed.last: "b"}):
            numerics.close(f(*meshed.put(two, **axes)), want)
    numerics.close(f(*meshed.put(m, **last)), want)


def explicit_axes(case, implementation):
    """The first axis and the last; of a case with ids or lengths those that they have with others."""
    (named, *_), result = case.named_axes()
    also = case.split.split() if any(i.dtype == "int32" for i in case.given) else []
    axes = dict.fromkeys(also or (named[0], named[-1]))
    return [a for a in axes if implementation is not None or a in result]  # XLA wants to be told where to contract in parts


@by_default
@pytest.mark.parametrize(("spec", "case"), those("meshed", lambda spec, i: spec.model or i))
def test_explicit(spec, case, implementation):
    """Explicit axes: types carry the sharding, eagerly and under jit; the text is the same every time and exports."""
    meshed = Meshed(spec, case, implementation)
    for i, axis in enumerate(explicit_axes(case, implementation)):
        m = mesh(AxisType.Explicit, count=8 if i else 4)
        with jax.set_mesh(m):
            placed = meshed.put(m, **{axis: "x"})
            y, used = compiled(jax.jit(meshed.f), *placed)
            numerics.close(y, meshed.want(*meshed.operands), 1e-4)
            if axis in case.split.split():
                assert y.sharding.spec == meshed.where({axis: "x"}, meshed.result)
                assert used == {}
            for transform in (meshed.grads, lambda f: jax.vmap(f, meshed.batched()))[: 1 if i else 2]:
                expected = jax.jit(transform(meshed.want))(*meshed.operands)
                numerics.close(jax.jit(transform(meshed.f))(*placed), expected, 1e-4)
                if i == 0 and spec.model:  # not under jit
                    numerics.close(transform(meshed.f)(*placed), expected, 1e-4)
            if i or not spec.model:
                continue
            y, tangent = meshed.f(*placed), jnp.cos(placed[0])
            numerics.close(y, meshed.want(*meshed.operands), 1e-4)
            assert jax.typeof(y).sharding.spec == meshed.where({axis: "x"}, meshed.result)
            numerics.close(
                jax.jit(lambda x, *r: jax.jvp(lambda x: meshed.f(x, *r), (x,), (tangent,))[1])(*placed),
                jax.jvp(lambda x: meshed.want(x, *meshed.operands[1:]), (meshed.operands[0],), (jnp.cos(meshed.operands[0]),))[1],
                1e-4,
            )
            if implementation is not None:
                texts = [jax.jit(meshed.grads(meshed.f)).lower(*placed).as_text() for _ in range(2)]
                assert texts[0] == texts[1]
                assert "CustomSPMD" not in texts[0]


def test_explicit_exports():
    m = mesh(AxisType.Explicit)
    with jax.set_mesh(m):
        x, f = put(X, m, "x"), jax.jit(jax.grad(lambda x: (jtops.softmax(x, implementation="interpret") ** 2).sum()))
        check = jax.export.DisabledSafetyCheck.custom_call("jtops_host_call")
        exported = jax.export.deserialize(jax.export.export(f, disabled_checks=[check])(x).serialize())
        numerics.close(jax.jit(exported.call)(x), jax.grad(lambda x: (jax.nn.softmax(x) ** 2).sum())(X), 1e-4)


def test_auto_kernels_do_not_export():
    """What custom_partitioning writes into a program is an address: JAX refuses to export it, and so do we not pretend."""
    x = put(X, mesh(), "x")
    jax.export.export(jax.jit(jtops.softmax))(x)  # by reference: plain HLO
    with pytest.raises(NotImplementedError):
        jax.export.export(jax.jit(lambda x: jtops.softmax(x, implementation="interpret")))(x).serialize()


@by_default
@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
@every_meshed
def test_manual(spec, case, check_vma, implementation):
    """Inside shard_map the call is local, and the gradient of what devices share is summed over them by JAX."""
    meshed, m = Meshed(spec, case, implementation), mesh()
    mapped = lambda g, ins, outs: jax.jit(jax.shard_map(g, mesh=m, in_specs=ins, out_specs=outs, check_vma=check_vma))
    f, want, ins, operands = meshed.f, meshed.want, meshed.ins(), meshed.operands
    numerics.close(mapped(f, ins, P("x"))(*operands), want(*operands))
    numerics.close(mapped(jax.vmap(f, meshed.batched()), ins, P("x"))(*operands), want(*operands))
    numerics.close(jax.jit(meshed.grads(mapped(f, ins, P("x"))))(*operands), meshed.grads(want)(*operands), 1e-4)
    if check_vma:  # gradients taken inside: JAX knows what is shared
        where = floating(operands)
        square = lambda f: jax.grad(lambda *a: (f(*a) ** 3).sum(), where)
        numerics.close(mapped(square(f), ins, tuple(ins[i] for i in where))(*operands), square(want)(*operands), 1e-4)


def test_manual_sum_of_shared_gradients_is_there():
    """On the kernel path, where no jax.numpy would bring the sum by itself."""
    f = jax.shard_map(jtops.layer_norm, mesh=mesh(), in_specs=(P("x"), P(), P()), out_specs=P("x"))
    w = jnp.ones(32)
    assert "all_reduce" in lowered.text(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)), X, w, w)


@every_meshed
def test_manual_low_precision(spec, case):
    """Gradients that a kernel hands out in float32 have their operand's dtype inside shard_map too."""
    meshed = Meshed(spec, case, "interpret")
    meshed.operands = draw(spec, case, "bfloat16")
    f = jax.shard_map(meshed.f, mesh=mesh(), in_specs=meshed.ins(), out_specs=P("x"))
    got, want = jax.jit(meshed.grads(f))(*meshed.operands), meshed.grads(meshed.want)(*meshed.operands)
    assert [g.dtype for g in got] == [w.dtype for w in want]
    numerics.close(got, want, 5e-2)


def test_partly_manual_is_refused_for_kernels():
    m = mesh(names=("a", "b"))
    part = lambda implementation: jax.jit(
        jax.shard_map(
            lambda x: jtops.softmax(x, implementation=implementation), mesh=m, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}
        )
    )
    x = put(X, m, "a", "b")
    numerics.close(part(None)(x), jax.nn.softmax(X))
    numerics.close(part("xla")(x), jax.nn.softmax(X))
    with pytest.raises(NotImplementedError, match="every mesh axis must be manual"):
        part("interpret")(x)


@everywhere
def test_spmd_axis_name(implementation):
    f = jax.jit(jax.vmap(lambda x: jtops.softmax(x, implementation=implementation), spmd_axis_name="x"))
    x = put(X, mesh(), "x")
    numerics.close(f(x), jax.nn.softmax(X))
    assert collectives(f, x) == {}


@everywhere
def test_low_precision_gradients_are_summed_in_float32(implementation):
    """Partial sums of a bfloat16 parameter's gradient are rounded once, after the sum over devices."""
    x = jnp.ones((devices() * 4, 64), jnp.bfloat16)
    w = jnp.zeros((64,), jnp.bfloat16)
    # Each device's part is 4 * 65.0: 260 is exact in bfloat16, 261 is not; the total of 8 * 257 is neither.
    f = lambda x, w: (jtops.add(x, w, implementation=implementation).astype(jnp.float32) * (64.25)).sum()
    got = jax.jit(jax.grad(f, 1))(put(x, mesh(), "x"), w)
    exact = jnp.bfloat16(64.25) * (devices() * 4)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.full((64,), exact, jnp.bfloat16))


def test_sum_on_a_mesh_of_both_kinds():
    """A shared operand's gradient, where XLA's partitioner splits the rows and another axis of the mesh is explicit."""
    both = jax.make_mesh((devices(), 1), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    loss = lambda x, scale, implementation: (jtops.rms_norm(x, scale, implementation=implementation) ** 2 * x).sum()
    scale = normal(32, seed=1)
    want = jax.grad(loss, 1)(X, scale, "xla")
    with jax.set_mesh(both):
        got = jax.jit(jax.grad(loss, 1), static_argnums=2)(put(X, both, "a"), put(scale, both), "interpret")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
