"""Faults that people met in row ops of other libraries, beside `test_cases`: long rows, epsilon, remat, donation, layouts."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles
from tests.kernels.test_cases import LONG, PRODUCERS, SPLIT, X, normal

# ------------------------------------------------------------------------------------------------------------------ layouts

PARAMETER = jnp.linspace(0.5, 1.0, 64)
LAYOUTS = {
    "softmax_1": lambda x, **kw: jtops.softmax(x, axis=1, **kw),
    "log_softmax_0": lambda x, **kw: jtops.log_softmax(x, axis=0, **kw),
    "logsumexp_1": lambda x, **kw: jnp.expand_dims(jtops.logsumexp(x, 1, **kw), 1) + x,
    "rms_norm": lambda x, **kw: jtops.rms_norm(x, PARAMETER[: x.shape[-1]], **kw),
    "add_layer_norm": lambda x, **kw: sum(jtops.add_layer_norm(x, x * 2, PARAMETER[: x.shape[-1]], **kw)),
}
AT_ONCE = {("rms_norm", "transpose"), ("softmax_1", "moveaxis"), ("add_layer_norm", "broadcast")}


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("op", "producer"),
    [pytest.param(op, p, marks=[pytest.mark.slow] * ((op, p) not in AT_ONCE)) for op in LAYOUTS for p in PRODUCERS],
)
def test_case_22_more_layouts(op, producer, implementation):
    """Case 22: what is transposed, strided or broadcast, also as a cotangent, inside one program."""
    make, f = PRODUCERS[producer], LAYOUTS[op]
    uses = lambda how: (
        lambda x: (
            f(make(x), implementation=how),
            jax.grad(lambda x: f(make(x), implementation=how).sum())(x),  # its cotangent is a broadcast
            jax.grad(lambda x: (f(make(x), implementation=how).T * make(x).T).sum())(x),  # and this one a transpose
        )
    )
    got, want = jax.jit(uses(implementation))(X), jax.jit(uses("xla"))(X)
    numerics.close(got[0], f(jnp.asarray(np.ascontiguousarray(make(X))), implementation="xla"), 1e-4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------------------------------------------ lengths


@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("interpret", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.gpu)]
)
def test_case_23_a_row_of_a_million_and_a_half(implementation):
    """Case 23: longer than any block, and no column is left out."""
    n = 1_500_000
    y = jtops.softmax(jnp.zeros((1, n)), implementation=implementation)
    np.testing.assert_allclose(y, 6.6666667e-07, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(y, np.float64).sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(jtops.logsumexp(jnp.zeros(n), implementation=implementation), math.log(n), rtol=1e-6)


# The kernels at once, the plain reference in test-all.
by_kernel = pytest.mark.parametrize(
    "implementation", ["interpret", pytest.param("xla", marks=pytest.mark.slow), pytest.param("triton", marks=pytest.mark.gpu)]
)


@pytest.mark.slow
@by_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("n", [65537, 131072, 200001])
def test_case_23_gradients_of_long_rows(n, dtype, implementation):
    """Case 23: the gradients of long norms, which the last column moves as well."""
    x, g = jnp.asarray(np.arange(n) % 7, dtype).reshape(1, n), normal(1, n, seed=1, dtype=dtype)
    scale = normal(n, seed=2, mean=1.0)
    tolerance = 2e-5 if dtype == "float32" else 8e-3
    for name in ("layer_norm", "rms_norm"):
        run = jax.jit(
            lambda x, name=name: jax.vjp(lambda x, s: getattr(jtops, name)(x, s, implementation=implementation), x, scale)[1](g)
        )
        for last in (0.0, 50.0):
            changed = x.at[:, -1].set(last)
            wide = [np.asarray(v, np.float64) for v in (changed, scale, g)]
            dx, dscale, *_ = getattr(oracles, f"{name}_vjp")(*wide[:2], g=wide[2])
            numerics.close(run(changed), (dx, dscale), tolerance)


# ----------------------------------------------------------------------------------------------------------------- variance


@by_kernel
@pytest.mark.parametrize("block", [LONG, SPLIT])
def test_case_25_in_parts(block, implementation):
    """Case 25: means and deviations of parts, put together, cancel as little as those of a whole; a constant row is exactly 0."""
    kw = {"implementation": implementation} | ({"config": block} if implementation != "xla" else {})
    f = lambda x: jtops.layer_norm(x, epsilon=1e-5, **kw)
    got = f(jnp.asarray([40000.0, 40001.0, 40002.0, 40003.0] * 5))
    np.testing.assert_allclose(got[:4], [-1.341635, -0.447212, 0.447212, 1.341635], rtol=1e-5)
    constant = jnp.full((2, 19), 1234.0)
    np.testing.assert_array_equal(f(constant), jnp.zeros((2, 19)))
    assert jnp.isfinite(jax.grad(lambda x: (f(x) * jnp.arange(19.0)).sum())(constant)).all()
    x = normal(3, 70, mean=2000.0)
    np.testing.assert_allclose(f(x), oracles.layer_norm(np.asarray(x, np.float64), epsilon=1e-5), rtol=1e-3, atol=1e-3)


@by_kernel
@pytest.mark.parametrize("shape", [(2, 5, 7, 48), pytest.param((48,), marks=pytest.mark.slow)])
@pytest.mark.parametrize("there", [True, False])
def test_case_26_rms_norm(there, shape, implementation):
    """Case 26: any rank, as if its rows were in one axis; no scale is a scale of ones; gradients of what is there."""
    x, scale = normal(*shape), normal(48, seed=1)
    loss = lambda how: lambda x, *s: (jtops.rms_norm(x, *s, implementation=how) ** 3).sum()
    got = jax.jit(jax.grad(loss(implementation), (0, 1)[: 1 + there]))(x, *[scale][:there])
    dx, dscale = jax.grad(loss("xla"), (0, 1))(x.reshape(-1, 48), scale if there else jnp.ones(48))
    numerics.close(got, (dx.reshape(shape), dscale)[: 1 + there], 1e-4)


# ------------------------------------------------------------------------------------------------------------------ epsilon

NORMS = {
    "layer_norm": jtops.layer_norm,
    "rms_norm": jtops.rms_norm,
    "add_layer_norm": lambda x, **kw: jtops.add_layer_norm(x, jnp.zeros_like(x), **kw)[0],
    "add_rms_norm": lambda x, **kw: jtops.add_rms_norm(x, jnp.zeros_like(x), **kw)[0],
}


@by_kernel
@pytest.mark.parametrize("name", NORMS)
def test_case_28_epsilon_is_float32(name, implementation):
    """Case 28: an epsilon that float16 has not keeps a row of zeros from NaN; one of bfloat16's size does not stand in for it."""
    f = lambda x, **kw: NORMS[name](x, implementation=implementation, **kw)
    zeros, g = jnp.zeros((2, 32), jnp.float16), jnp.asarray(np.tile([1.0, -1.0], (2, 16)), jnp.float16)
    y, pullback = jax.vjp(lambda x: f(x, epsilon=1e-8), zeros)
    np.testing.assert_array_equal(y, zeros)
    np.testing.assert_allclose(pullback(g)[0].astype(jnp.float32), 1e4 * g.astype(jnp.float32), rtol=1e-3)
    small = jnp.asarray(np.tile([0.0625, -0.0625], (2, 16)), jnp.bfloat16)  # squares of 0.0039, where bfloat16's eps is 0.0078
    np.testing.assert_array_equal(f(small), jnp.sign(small))


@pytest.mark.parametrize("name", NORMS)
def test_case_28_epsilon_of_any_kind(name):
    """Case 28: the same bits for the same number, of whatever type; a traced one is refused; 0 is one as well."""
    x = normal(4, 32, dtype=jnp.bfloat16)
    f = lambda x, **kw: NORMS[name](x, implementation="interpret", **kw)
    want = f(x, epsilon=0.25)
    for kind in (np.float32, np.float64, jnp.float32, np.array):
        got = f(x, epsilon=kind(0.25))
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, want)
    assert jnp.isfinite(f(x, epsilon=0).astype(jnp.float32)).all()
    with pytest.raises(TypeError, match=f"{name}: epsilon is compiled into the kernel"):
        jax.jit(lambda e: f(x, epsilon=e))(0.25)


# ------------------------------------------------------------------------------------------------------- transforms and x64

ROWS = {
    "add": jtops.add,
    "softmax": lambda x, w, **kw: jtops.softmax(x, **kw) * w,
    "log_softmax": lambda x, w, **kw: jtops.log_softmax(x, 0, **kw) * w,
    "logsumexp": lambda x, w, **kw: jtops.logsumexp(x * w, -1, keepdims=True, **kw) + x,
    "layer_norm": lambda x, w, **kw: jtops.layer_norm(x, w, w, **kw),
    "add_rms_norm": lambda x, w, **kw: sum(jtops.add_rms_norm(x, jnp.sin(x), w, **kw)),
}


# Two of them at once.
in_parts = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("softmax", "add_rms_norm"))) for n in ROWS]
)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@in_parts
def test_case_55_remat_gives_the_same_bits(name, implementation):
    """Case 55: what is computed again is what was; on a GPU, XLA may contract what is around it another way."""
    x, w = normal(5, 40), normal(40, seed=1)
    f = lambda x, w: ROWS[name](jnp.sin(x), w, implementation=implementation)
    grads = lambda f: jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1)))(x, w)
    again = jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)
    got, want = grads(again), grads(f)
    if implementation == "interpret":
        np.testing.assert_array_equal(got[0], want[0])
    numerics.close(got, want, 1e-6)  # XLA sums what is after some of the ops, in an order of each program's


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROWS)
def test_case_56_dead_and_donated_buffers(name):
    """Case 56: a chain whose inputs die on the way, run often, among other allocations; donated operands; results in any order."""
    x, w = normal(256, 1024), normal(1024, seed=1)
    f = lambda x: ROWS[name](x, w, implementation="triton")

    def chain(x):
        for _ in range(10):
            x = f(x)
        return x

    run, kept = jax.jit(lambda x: (x, chain(x), f(x))), np.asarray(x)
    want = [np.asarray(v) for v in run(x)]
    turned, given = jax.jit(lambda x: run(x)[::-1]), jax.jit(chain, donate_argnums=0)
    for i in range(50):
        spare = [jnp.full((1 << 20,), jnp.nan) for _ in range(i % 7)]
        for a, b in zip(turned(x)[::-1], want, strict=True):
            np.testing.assert_array_equal(a, b)
        mine = x.copy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            np.testing.assert_array_equal(given(mine), want[1])
        del spare
    np.testing.assert_array_equal(x, kept)


@in_parts
def test_case_57_the_same_bits_with_x64(name):
    """Case 57: 64 bit index arithmetic and weak numbers change no bit, value or gradient, of a kernel."""

    def results():
        x, w = normal(5, 40, dtype=jnp.bfloat16), normal(40, seed=1)
        both = lambda x, w: jax.vjp(lambda x, w: ROWS[name](x, w, implementation="interpret"), x, w)
        y, pullback = both(x, w)
        return y, pullback(jnp.ones_like(y))

    before = results()
    with jax.enable_x64(True):
        after = results()
        assert [v.dtype for v in jax.tree.leaves(after)] == [v.dtype for v in jax.tree.leaves(before)]
        jax.tree.map(np.testing.assert_array_equal, after, before)


# --------------------------------------------------------------------------------------------------- what only a GPU can show


@pytest.mark.gpu
def test_case_18_offsets_past_31_bits():
    """Case 18: the last rows of arrays of more than 2**31 elements are what they are alone."""
    scale = normal(4096, seed=1)
    f = lambda x: jax.vjp(lambda x: jtops.rms_norm(x, scale), x)
    x = jnp.broadcast_to(jnp.arange(7, dtype=jnp.bfloat16)[:, None] + 1, (7, 4096)) * jnp.linspace(-1, 1, 4096, dtype=jnp.bfloat16)
    x = jnp.tile(x, (75000, 1))  # 2.15 billion elements
    y, pullback = f(x)
    some, some_pullback = f(x[-7:])  # in other tiles, so not to the bit
    numerics.close(y[-7:], some, 1e-2)
    numerics.close(pullback(y)[0][-7:], some_pullback(some)[0], 1e-2)
    del y, pullback
    numerics.close(jtops.softmax(x)[-7:], jtops.softmax(x[-7:]), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(4096, 4096), (100_000, 64), (64, 131072), (600, 40000)])
def test_parameter_gradients_have_the_same_bits(shape):
    """In one program and another, and in a run beside others: sums over rows are taken in one order."""
    x, residual = normal(*shape, dtype=jnp.bfloat16), normal(*shape, seed=1, dtype=jnp.bfloat16)
    scale, bias = normal(shape[-1], seed=2), normal(shape[-1], seed=3)
    loss = lambda *a: (sum(jtops.add_layer_norm(*a)).astype(jnp.float32) ** 2).mean()
    grads = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    first = grads(x, residual, scale, bias)
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, grads(x, residual, scale, bias)[2:], first[2:])
    other = jax.jit(lambda *a: (grads(*a), x * 2))(x, residual, scale, bias)[0]
    jax.tree.map(np.testing.assert_array_equal, other[2:], first[2:])


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("shared", ["x", "residual", "both"])
@pytest.mark.parametrize("block", [(64, 1), (32, 1), (8, 1), (8, 64)], ids=["rows", "tail", "long", "split"])
def test_rows_that_share_what_is_added(block, shared, implementation):
    """x or the residual of all of a batch, or each of another axis of it, is read in place, by every kernel."""
    config = jtops.Config(BLOCK_M=1, BLOCK_N=block[0], PROGRAMS=block[1])
    axes = {"x": (None, 0), "residual": (0, None), "both": (0, 0)}[shared]
    if shared == "both":  # each shared along one of two mapped axes
        f = lambda op: jax.vmap(jax.vmap(op, (0, None, None)), (None, 0, None))
        operands = normal(3, 2, 40), normal(4, 2, 40, seed=1), normal(40, seed=2)
    else:
        f = lambda op: jax.vmap(op, (*axes, None))
        operands = *(normal(*([5] * (a == 0)), 3, 40, seed=i) for i, a in enumerate(axes)), normal(40, seed=2)

    def results(implementation, **config):
        op = lambda *a: jtops.add_rms_norm(*a, implementation=implementation, **config)
        y, pullback = jax.vjp(f(op), *operands)
        return y, pullback(jax.tree.map(jnp.sin, y))

    numerics.close(results(implementation, config=config), results("xla"), 1e-5)
