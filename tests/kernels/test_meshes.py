"""Shardings of results and gradients are jax.numpy's: on automatic and explicit axes, with jax.set_mesh and without, jitted or not.

Case 99: on a mesh of explicit axes, which is what jax.make_mesh makes, types carry shardings whether a mesh is set or not.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jtops
from tests import numerics


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def norm(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale + bias


X, ROW = normal(16, 64), normal(64, seed=1)
QKV = tuple(normal(8, 8, 8, 16, seed=i) for i in range(3))
# op, the same in jax.numpy, operands, their specs; None: an array that was never put on the mesh
OPS = {
    "softmax": (jtops.softmax, jax.nn.softmax, (X,), (P("d"),)),
    "logsumexp": (lambda x, **o: jtops.logsumexp(x, axis=-1, **o), lambda x: jax.nn.logsumexp(x, -1), (X,), (P("d"),)),
    "layer_norm": (jtops.layer_norm, norm, (X, ROW, ROW), (P("d"), P(), P())),
    "layer_norm, parameters elsewhere": (jtops.layer_norm, norm, (X, ROW, ROW), (P("d"), None, None)),
    "add": (jtops.add, jnp.add, (X, X), (P("d"), P("d"))),
    "add a row": (jtops.add, jnp.add, (X, ROW), (P("d"), None)),
    "matmul": (jtops.matmul, lambda a, b: jnp.matmul(a, b, precision="highest"), (X, normal(64, 24)), (P("d"), P())),
    "attention": (jtops.flash_attention, jax.nn.dot_product_attention, QKV, (P("d"),) * 3),
    "attention, heads": (jtops.flash_attention, jax.nn.dot_product_attention, QKV, (P(None, None, "d"),) * 3),
}
SET = ["unset", "set"]


def placed(mesh, operands, specs):
    return [x if s is None else jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(operands, specs, strict=True)]


@pytest.mark.parametrize("set_mesh", SET)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("implementation", [
    *(pytest.param(i, marks=pytest.mark.slow) for i in (None, "xla")),
    "interpret",
    pytest.param("triton", marks=pytest.mark.multigpu),
])  # fmt: skip
@pytest.mark.parametrize("name", OPS)
def test_shardings_are_jax_numpys(name, implementation, kind, set_mesh):
    op, plain, operands, specs = OPS[name]
    mesh = jax.make_mesh((min(8, len(jax.devices())),), ("d",), axis_types=(kind,))
    inside = jax.set_mesh(mesh) if set_mesh == "set" else contextlib.nullcontext()
    f = lambda *a: op(*a, implementation=implementation)
    with inside:
        args = placed(mesh, operands, specs)
        alike = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for call in (jax.jit, lambda f: f):
            got, want = call(f)(*args), jax.jit(plain)(*args)
            assert jax.typeof(got).str_short(mesh_axis_types=True) == jax.typeof(want).str_short(mesh_axis_types=True)
            assert alike(got, want)
            numerics.close(got, want, 1e-4)
        where = tuple(range(len(args)))
        grads, wants = (jax.jit(jax.grad(lambda *a, f=f: (f(*a) ** 2).sum(), where))(*args) for f in (f, plain))
        for got, want, x in zip(grads, wants, args, strict=True):
            assert jax.typeof(got).sharding.spec == jax.typeof(x).sharding.spec
            numerics.close(got, want, 1e-3)


@pytest.mark.parametrize("implementation", [None, "interpret"])
def test_case_99_einsum(implementation):
    """What failed: the next operation saw an operand without its sharding."""
    mesh = jax.make_mesh((8,), ("d",))
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    f = jax.jit(lambda x: jnp.einsum("bd,bd->b", x, jtops.softmax(x, implementation=implementation)))
    np.testing.assert_allclose(f(x), (X * jax.nn.softmax(X)).sum(-1), rtol=1e-5)
    if implementation == "interpret":
        assert "all-gather" not in f.lower(x).compile().as_text()


def test_case_99_for_a_gpu():
    """Traced for CUDA the result's type has the operand's sharding as well."""
    mesh = jax.make_mesh((8,), ("d",))
    x = jax.device_put(X, NamedSharding(mesh, P("d")))
    with jtops.config.target("sm_90"):
        assert jax.jit(jtops.softmax).trace(x).out_info.sharding.spec == P("d", None)


@pytest.mark.parametrize("implementation", ["interpret", "xla", None])
@pytest.mark.parametrize("set_mesh", SET)
def test_case_100_grouped_heads_over_devices(implementation, set_mesh):
    """Heads of q over 8 devices, of k and v over none."""
    mesh = jax.make_mesh((8,), ("d",))
    q, k, v = QKV[0], QKV[1][:, :, :2], QKV[2][:, :, :2]
    want = jtops.flash_attention(q, k, v, causal=True)
    with jax.set_mesh(mesh) if set_mesh == "set" else contextlib.nullcontext():
        args = placed(mesh, (q, k, v), (P(None, None, "d"), P(), P()))
        f = jax.jit(lambda *a: jtops.flash_attention(*a, causal=True, implementation=implementation))
        numerics.close(f(*args), want, 1e-5)
        for g, x in zip(jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)))(*args), args, strict=True):
            assert jax.typeof(g).sharding.spec == jax.typeof(x).sharding.spec
