"""Ops on a mesh: automatic, explicit and manual axes, right values and no collective that the maths does not need."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
from tests import numerics
from tests.kernels import lowered
from tests.specs import draw, every_op, function, some_ops

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


def mesh(kind=AxisType.Auto, names=("x",)):
    n = devices()
    return jax.make_mesh((n,) if len(names) == 1 else (2, n // 2), names, axis_types=(kind,) * len(names))


def put(x, mesh, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X = normal(16, 8, 32)


class Meshed:
    """An op's case for meshes: its operands, where they may lie, and the op by an implementation."""

    def __init__(self, spec, implementation):
        drawn = draw(spec, spec.meshed)
        self.where = [i for i, x in enumerate(drawn) if x is not None]
        self.operands = [drawn[i] for i in self.where]
        self.f, self.want = (self.op(spec, i) for i in (implementation, "xla"))
        self.main = self.operands[0]
        self.alike = [x.ndim == self.main.ndim and x.shape[0] == self.main.shape[0] for x in self.operands]

    def op(self, spec, implementation):
        whole = function(spec, spec.meshed, implementation=implementation)

        def f(*present):
            full = [None] * len(spec.operands)
            for i, x in zip(self.where, present, strict=True):
                full[i] = x
            return whole(*full)

        return f

    def put(self, mesh, *axes, rest=()):
        """Operands of the first one's kind sharded as said, the others as `rest` says."""
        return [put(x, mesh, *(axes if alike else rest)) for x, alike in zip(self.operands, self.alike, strict=True)]

    def grads(self, f):
        weights = jnp.cos(jnp.arange(self.want(*self.operands).size, dtype=jnp.float32)).reshape(self.want(*self.operands).shape)
        floats = tuple(i for i, x in enumerate(self.operands) if jnp.issubdtype(x.dtype, jnp.floating))
        return jax.grad(lambda *a: (f(*a) * weights).sum() + (f(*a) ** 2).sum(), floats)


@everywhere
@every_op
def test_auto_rows(spec, implementation):
    """Sharded rows stay so; the forward has no collective; gradients of what all devices share are summed, once each."""
    case = Meshed(spec, implementation)
    for axes in (("x",), (None, "x")):
        if case.main.shape[len(axes) - 1] % devices() or (axes[0] is None and spec.name == "flash_attention"):
            continue
        placed = case.put(mesh(), *axes)
        f, g = jax.jit(case.f), jax.jit(case.grads(case.f))
        y = f(*placed)
        numerics.close(y, case.want(*case.operands))
        assert y.sharding.is_equivalent_to(placed[0].sharding, y.ndim)
        assert collectives(f, *placed) == {}
        got = g(*placed)
        numerics.close(got, case.grads(case.want)(*case.operands), 1e-4)
        assert got[0].sharding.is_equivalent_to(placed[0].sharding, got[0].ndim)
        used = collectives(g, *placed)
        assert set(used) <= {"all-reduce"}
        assert used.get("all-reduce", 0) <= case.alike.count(False), used


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
@some_ops
def test_auto_features(spec, implementation):
    """A sharded last axis gives the right answer, and so does one asked for."""
    case = Meshed(spec, implementation)
    f, want = jax.jit(case.f), case.want(*case.operands)
    placed = case.put(mesh(), *[None] * (case.main.ndim - 1), "x")
    numerics.close(f(*placed), want)
    numerics.close(jax.jit(case.grads(case.f))(*placed), case.grads(case.want)(*case.operands), 1e-4)
    if want.shape[-1] == 1:
        return  # nothing to shard
    f = jax.jit(case.f, out_shardings=NamedSharding(mesh(), P(*[None] * (want.ndim - 1), "x")))
    numerics.close(f(*case.operands), want)


@everywhere
@pytest.mark.parametrize(("name", "gathers"), [("add", False), ("softmax", True), ("layer_norm", True)])
def test_only_whole_axes_are_gathered(name, gathers, implementation):
    x = put(X, mesh(), None, None, "x")
    other = {"add": (2.0,)}.get(name, ())
    f = jax.jit(lambda x: getattr(jtops, name)(x, *other, implementation=implementation))
    assert ("all-gather" in collectives(f, x)) == gathers


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
@some_ops
def test_auto_awkward(spec, implementation):
    """Inconsistent operands, sharded parameters, two mesh axes, rows that the mesh does not divide."""
    case, m = Meshed(spec, implementation), mesh()
    f, want = jax.jit(case.f), case.want(*case.operands)
    numerics.close(f(put(case.main, m, "x"), *case.operands[1:]), want)
    numerics.close(f(case.main, *(put(x, m, *[None] * (x.ndim - 1), "x") for x in case.operands[1:])), want)
    parameters = case.put(m, "x", rest=("x",))
    numerics.close(f(*parameters), want)
    numerics.close(jax.jit(case.grads(case.f))(*parameters), case.grads(case.want)(*case.operands), 1e-4)
    some = [x[: devices() - 1] if alike else x for x, alike in zip(case.operands, case.alike, strict=True)]
    odd = jax.jit(lambda x, *rest: case.f(jax.lax.with_sharding_constraint(x, NamedSharding(m, P("x"))), *rest))
    numerics.close(odd(*some), case.want(*some))
    if devices() >= 4:
        two = mesh(names=("a", "b"))
        for axes in (("a", "b"), (("a", "b"),), ("a", *[None] * (case.main.ndim - 2), "b")):
            numerics.close(f(*case.put(two, *axes)), want)


@by_default
@some_ops
def test_explicit(spec, implementation):
    """Explicit axes: types carry the sharding, eagerly and under jit; the text is the same every time and exports."""
    case, m = Meshed(spec, implementation), mesh(AxisType.Explicit)
    batched = [0 if alike else None for alike in case.alike]
    with jax.set_mesh(m):
        for axes in (("x",), (*[None] * (case.main.ndim - 1), "x")):
            placed = case.put(m, *axes)
            for transform in (lambda f: f, case.grads, lambda f: jax.vmap(f, batched))[: 3 if axes[0] else 2]:
                if spec.name == "flash_attention" and axes[0] is None and implementation is None:
                    continue  # the reference splits heads; on a GPU and in the interpreter the kernel does not
                expected = transform(case.want)(*case.operands)
                numerics.close(jax.jit(transform(case.f))(*placed), expected, 1e-4)
                if axes[0] is not None:
                    numerics.close(transform(case.f)(*placed), expected, 1e-4)
        placed = case.put(m, "x")
        tangent = jnp.cos(placed[0])
        numerics.close(
            jax.jit(lambda x, *r: jax.jvp(lambda x: case.f(x, *r), (x,), (tangent,))[1])(*placed),
            jax.jvp(lambda x: case.want(x, *case.operands[1:]), (case.main,), (jnp.cos(case.main),))[1],
            1e-4,
        )
        assert jax.typeof(case.f(*placed)).sharding.spec[0] == "x"
        assert collectives(jax.jit(case.f), *placed) == {}
        if implementation is not None:
            texts = [jax.jit(case.grads(case.f)).lower(*placed).as_text() for _ in range(2)]
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
@every_op
def test_manual(spec, check_vma, implementation):
    """Inside shard_map the call is local, and the gradient of what devices share is summed over them by JAX."""
    case, m = Meshed(spec, implementation), mesh()
    mapped = lambda g, ins, outs: jax.jit(jax.shard_map(g, mesh=m, in_specs=ins, out_specs=outs, check_vma=check_vma))
    ins = tuple(P("x") if alike else P() for alike in case.alike)
    numerics.close(mapped(case.f, ins, P("x"))(*case.operands), case.want(*case.operands))
    batched = [0 if alike else None for alike in case.alike]
    numerics.close(mapped(jax.vmap(case.f, batched), ins, P("x"))(*case.operands), case.want(*case.operands))
    numerics.close(jax.jit(case.grads(mapped(case.f, ins, P("x"))))(*case.operands), case.grads(case.want)(*case.operands), 1e-4)
    if check_vma:  # gradients taken inside: JAX knows what is shared
        square = lambda f: jax.grad(lambda *a: (f(*a) ** 3).sum(), tuple(range(len(ins))))
        numerics.close(mapped(square(case.f), ins, ins)(*case.operands), square(case.want)(*case.operands), 1e-4)


def test_manual_sum_of_shared_gradients_is_there():
    """On the kernel path, where no jax.numpy would bring the sum by itself."""
    f = jax.shard_map(jtops.layer_norm, mesh=mesh(), in_specs=(P("x"), P(), P()), out_specs=P("x"))
    w = jnp.ones(32)
    assert "all_reduce" in lowered.text(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)), X, w, w)


@every_op
def test_manual_low_precision(spec):
    """Gradients that a kernel hands out in float32 have their operand's dtype inside shard_map too."""
    case = Meshed(spec, "interpret")
    case.operands = [x.astype(jnp.bfloat16) if x.dtype != bool else x for x in case.operands]
    f = jax.shard_map(case.f, mesh=mesh(), in_specs=tuple(P("x") if alike else P() for alike in case.alike), out_specs=P("x"))
    got, want = jax.jit(case.grads(f))(*case.operands), case.grads(case.want)(*case.operands)
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
