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

# Here by interpreted kernels on 8 forced devices; with two GPUs by the kernels themselves.
everywhere = pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.multigpu)])
by_default = pytest.mark.parametrize("implementation", [None, "interpret", pytest.param("triton", marks=pytest.mark.multigpu)])

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


X, W, B = normal(16, 8, 32), normal(32, seed=1), normal(32, seed=2)

# name -> (function of x, w, b; which of them it uses)
OPS = {
    "add": lambda x, w, b, **kw: jtops.add(x, w, **kw),
    "softmax": lambda x, w, b, **kw: jtops.softmax(x, **kw) * w,
    "layer_norm": jtops.layer_norm,
}
every_op = pytest.mark.parametrize("name", OPS)


def op(name, implementation):
    return lambda x, w, b: OPS[name](x, w, b, implementation=implementation)


def grads(f):
    return jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))


@everywhere
@pytest.mark.parametrize("spec", [("x",), (None, "x")], ids=["rows", "inner_rows"])
@every_op
def test_auto_rows(name, spec, implementation):
    """Sharded rows stay so; the forward has no collective; shared parameters' gradients are summed once."""
    f, want = jax.jit(op(name, implementation)), op(name, "xla")
    x = put(X, mesh(), *spec)
    y = f(x, W, B)
    numerics.close(y, want(X, W, B))
    assert y.sharding.is_equivalent_to(x.sharding, 3)
    assert collectives(f, x, W, B) == {}
    g = jax.jit(grads(op(name, implementation)))
    got = g(x, W, B)
    numerics.close(got, grads(want)(X, W, B), 1e-4)
    assert got[0].sharding.is_equivalent_to(x.sharding, 3)
    used = collectives(g, x, W, B)
    assert set(used) <= {"all-reduce"}
    assert used.get("all-reduce", 0) <= 2, used


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
@every_op
def test_auto_features(name, implementation):
    """A sharded feature axis gives the right answer; only ops that need whole rows gather them."""
    f, want = jax.jit(op(name, implementation)), op(name, "xla")
    x = put(X, mesh(), None, None, "x")
    numerics.close(f(x, W, B), want(X, W, B))
    numerics.close(jax.jit(grads(op(name, implementation)))(x, W, B), grads(want)(X, W, B), 1e-4)
    assert ("all-gather" in collectives(f, x, W, B)) == (name != "add")
    f = jax.jit(op(name, implementation), out_shardings=NamedSharding(mesh(), P(None, None, "x")))
    numerics.close(f(X, W, B), want(X, W, B))


@everywhere
@every_op
def test_auto_awkward(name, implementation):
    """Inconsistent operands, sharded parameters, two mesh axes, rows that the mesh does not divide."""
    f, want = jax.jit(op(name, implementation)), op(name, "xla")
    m = mesh()
    numerics.close(f(X, put(W, m, "x"), B), want(X, W, B))
    numerics.close(f(put(X, m, "x"), put(W, m, "x"), put(B, m, "x")), want(X, W, B))
    numerics.close(jax.jit(grads(op(name, implementation)))(put(X, m, "x"), put(W, m, "x"), B), grads(want)(X, W, B), 1e-4)
    odd = jax.jit(lambda x: op(name, implementation)(jax.lax.with_sharding_constraint(x, NamedSharding(m, P("x"))), W, B))
    numerics.close(odd(X[: devices() - 1]), want(X[: devices() - 1], W, B))
    if devices() >= 4:
        two = mesh(names=("a", "b"))
        for spec in (("a", "b"), (("a", "b"),), ("a", None, "b")):
            numerics.close(f(put(X, two, *spec), W, B), want(X, W, B))


@by_default
@every_op
def test_explicit(name, implementation):
    """Explicit axes: types carry the sharding, eagerly and under jit; the text is the same every time and exports."""
    m = mesh(AxisType.Explicit)
    f, want = op(name, implementation), op(name, "xla")
    w, b = put(W, m), put(B, m)
    with jax.set_mesh(m):
        for spec in (("x",), (None, "x"), (None, None, "x")):
            x = put(X, m, *spec)
            for transform in (lambda f: f, grads, lambda f: jax.vmap(f, (0, None, None))):
                expected = transform(want)(X, W, B)
                numerics.close(transform(f)(x, w, b), expected, 1e-4)
                numerics.close(jax.jit(transform(f))(x, w, b), expected, 1e-4)
            numerics.close(
                jax.jit(lambda x: jax.jvp(lambda x: f(x, w, b), (x,), (jnp.cos(x),))[1])(x),
                jax.jvp(lambda x: want(x, W, B), (X,), (jnp.cos(X),))[1],
                1e-4,
            )
        x = put(X, m, "x")
        assert jax.typeof(f(x, w, b)).sharding.spec[0] == "x"
        assert collectives(jax.jit(f), x, w, b) == {}
        if implementation is not None:
            texts = [jax.jit(grads(f)).lower(x, w, b).as_text() for _ in range(2)]
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
@pytest.mark.parametrize("check_vma", [True, False])
@every_op
def test_manual(name, check_vma, implementation):
    """Inside shard_map the call is local, and a shared parameter's gradient is summed over devices by JAX."""
    f, want, m = op(name, implementation), op(name, "xla"), mesh()
    mapped = lambda g, ins, outs: jax.jit(jax.shard_map(g, mesh=m, in_specs=ins, out_specs=outs, check_vma=check_vma))
    ins = (P("x"), P(), P())
    numerics.close(mapped(f, ins, P("x"))(X, W, B), want(X, W, B))
    numerics.close(mapped(jax.vmap(f, (0, None, None)), ins, P("x"))(X, W, B), want(X, W, B))
    numerics.close(jax.jit(grads(mapped(f, ins, P("x"))))(X, W, B), grads(want)(X, W, B), 1e-4)
    if check_vma:  # gradients taken inside: JAX knows that W and B are shared
        numerics.close(mapped(grads(f), ins, ins)(X, W, B), grads(want)(X, W, B), 1e-4)


def test_manual_sum_of_shared_gradients_is_there():
    """On the kernel path, where no jax.numpy would bring the sum by itself."""
    f = jax.shard_map(jtops.layer_norm, mesh=mesh(), in_specs=(P("x"), P(), P()), out_specs=P("x"))
    assert "all_reduce" in lowered.text(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)), X, W, B)


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
