"""Faults that people met in kernel libraries, as cases of our own with the mathematically right value; and malformed calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles

# None on a CPU is the reference as "xla" is, through the primitive that users meet.
ways = pytest.mark.parametrize(
    "implementation",
    [pytest.param("xla", marks=pytest.mark.slow), None, "interpret", pytest.param("triton", marks=pytest.mark.gpu)],
)


def normal(*shape, seed=0, mean=0.0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(mean, 1.0, shape), dtype)


# ---- Case 22: operands and cotangents that are not dense row-major where they come from

X = normal(64, 64)
PRODUCERS = {
    "transpose": lambda x: x.T,
    "strided": lambda x: x[:, ::2],
    "broadcast": lambda x: jnp.broadcast_to(x[0], (64, 64)),
    "product": lambda x: jnp.matmul(x, x, precision="highest").T,
    "moveaxis": lambda x: jnp.moveaxis(x.reshape(4, 16, 64), 1, 2),
    "reverse": lambda x: x[::-1, ::-1],
}
OPS = {
    "add": lambda x, **kw: jtops.add(x, x[..., :1] * 2, **kw),
    "softmax": jtops.softmax,
    "softmax_0": lambda x, **kw: jtops.softmax(x, axis=0, **kw),
    "layer_norm": lambda x, **kw: jtops.layer_norm(x, jnp.linspace(0, 1, x.shape[-1]), **kw),
}


@ways
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_case_22_layouts(producer, op, implementation):
    """Case 22: what is transposed, strided or broadcast, also as a cotangent, inside one program."""
    make, f = PRODUCERS[producer], lambda x: OPS[op](x, implementation=implementation)
    plain = lambda x: OPS[op](x, implementation="xla")
    copied = jnp.asarray(np.ascontiguousarray(make(X)))
    # The plain sum's cotangent is a broadcast; the weighted one's a transpose.
    uses = lambda f, make: (
        lambda x: (f(make(x)), jax.grad(lambda x: f(make(x)).sum())(x), jax.grad(lambda x: (f(make(x)).T * make(x).T).sum())(x))
    )
    got, want = jax.jit(uses(f, make))(X), jax.jit(uses(plain, make))(X)
    numerics.close(got[0], plain(copied), 1e-4)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


# ---- Cases 24 and 25: the variance


@ways
@pytest.mark.parametrize("n", [3, 17, 33, 127, 768, 1000])
def test_case_24_variance_ignores_padding(n, implementation):
    """Case 24: lanes past the row are no part of it."""
    x = jnp.arange(100.0, 100.0 + n)
    got = jtops.layer_norm(x, epsilon=0.0, implementation=implementation)
    k = np.arange(n) - (n - 1) / 2
    np.testing.assert_allclose(got, k / np.sqrt((n * n - 1) / 12), rtol=1e-5, atol=1e-6)


@ways
def test_case_24_values(implementation):
    """Case 24: a row of three, of 17 and of one."""
    f = lambda x, **kw: jtops.layer_norm(jnp.asarray(x), implementation=implementation, **kw)
    np.testing.assert_allclose(f([99.0, 100.0, 101.0], epsilon=0.0), [-1.224745, 0.0, 1.224745], atol=1e-6)
    np.testing.assert_allclose(f(np.arange(100.0, 117.0), epsilon=0.0)[jnp.array([0, -1])], [-1.632993, 1.632993], atol=1e-6)
    np.testing.assert_array_equal(f([100.0]), [0.0])


@ways
def test_case_25_mean_far_above_spread(implementation):
    """Case 25: two passes, never E[x^2] - E[x]^2; a constant row is exactly 0, its gradient finite."""
    f = lambda x, **kw: jtops.layer_norm(jnp.asarray(x), implementation=implementation, **kw)
    got = f([40000.0, 40001.0, 40002.0, 40003.0], epsilon=1e-5)
    np.testing.assert_allclose(got, [-1.341635, -0.447212, 0.447212, 1.341635], rtol=1e-5)
    constant = jnp.full((256,), 1234.0)
    np.testing.assert_array_equal(f(constant), jnp.zeros(256))
    assert jnp.isfinite(jax.grad(lambda x: (f(x) * jnp.arange(256.0)).sum())(constant)).all()
    for n in (4, 4096):
        x = normal(3, n, mean=2000.0)
        np.testing.assert_allclose(f(x), oracles.layer_norm(np.asarray(x, np.float64)), rtol=1e-3, atol=1e-3)


# ---- Case 26: any rank, with and without parameters


@ways
@pytest.mark.parametrize("shape", [(2, 5, 7, 48), (48,)])
@pytest.mark.parametrize("present", [(True, True), (True, False), (False, True), (False, False)])
def test_case_26_ranks_and_absent_parameters(shape, present, implementation):
    """Case 26: any rank, as if its rows were in one axis; what is absent is ones or zeros; gradients of what is there."""
    x, scale, bias = normal(*shape), normal(48, seed=1), normal(48, seed=2)
    used = [p for p, there in zip((scale, bias), present, strict=True) if there]
    names = [n for n, there in zip(("scale", "bias"), present, strict=True) if there]
    loss = lambda x, *p: (jtops.layer_norm(x, **dict(zip(names, p, strict=True)), implementation=implementation) ** 3).sum()
    ones = lambda x, scale, bias: (jtops.layer_norm(x, scale, bias, implementation="xla") ** 3).sum()
    grads = jax.jit(jax.grad(loss, tuple(range(1 + len(used)))))(x, *used)
    full = jax.grad(ones, (0, 1, 2))(
        x.reshape(-1, 48), scale if present[0] else jnp.ones(48), bias if present[1] else jnp.zeros(48)
    )
    numerics.close(grads[0], full[0].reshape(shape), 1e-4)
    kept = [g for g, there in zip(full[1:], present, strict=True) if there]
    for got, want, p in zip(grads[1:], kept, used, strict=True):
        assert got.shape == p.shape
        numerics.close(got, want, 1e-4)


# ---- Case 53: an argument that does not move


@ways
def test_case_53_zero_tangents(implementation):
    """Case 53: an argument that does not move."""
    x, scale = normal(2, 8), normal(8, seed=1)
    f = lambda x: jtops.layer_norm(x, scale, scale, implementation=implementation)
    numerics.close(jax.jvp(f, (x,), (jnp.zeros_like(x),))[1], jnp.zeros_like(x))
    dead = jax.jvp(lambda x: jtops.softmax(jax.lax.stop_gradient(x), implementation=implementation) * x, (x,), (x,))[1]
    numerics.close(dead, jax.nn.softmax(x) * x, 1e-4)


# ---- Cases 53 and 57: options as any kind of number


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, jnp.float32, np.array])
def test_epsilon_of_any_kind_gives_the_same_bits(kind):
    """Cases 28 and 57: numbers of any type."""
    x = normal(4, 32, dtype=jnp.bfloat16)
    value = 0.25  # exact in every format
    got = jtops.layer_norm(x, epsilon=kind(value), implementation="interpret")
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jtops.layer_norm(x, epsilon=value, implementation="interpret"))
    assert jtops.layer_norm(x, epsilon=0, scale=jnp.ones(32)).dtype == jnp.bfloat16


def test_weak_scalars():
    """Case 57: weak numbers take the other operand's type."""
    x = normal(4, dtype=jnp.bfloat16)
    for two in (2, 2.0, jnp.asarray(2.0).astype("bfloat16"), np.float32(2)):
        got, want = jtops.add(x, two), jnp.add(x, two)
        assert got.dtype == want.dtype
        assert got.weak_type == want.weak_type is False
        np.testing.assert_array_equal(got, want)
    assert jtops.add(2, 3).dtype == jnp.add(2, 3).dtype
    np.testing.assert_array_equal(jtops.add(jnp.arange(3), jnp.arange(3)), [0, 2, 4])
    np.testing.assert_array_equal(jtops.add(jnp.arange(3), 1, implementation="interpret"), [1, 2, 3])
    assert jax.grad(lambda s: jtops.add(x.astype(jnp.float32), s).sum())(2.0) == 4.0


# ---- softmax at the edges: jax.nn's rules


@ways
@pytest.mark.parametrize("block", [None, jtops.Config(BLOCK_M=1, BLOCK_N=4, PROGRAMS=4)])
def test_softmax_of_infinities_and_nan(block, implementation):
    kw = {"implementation": implementation} | ({} if block is None or implementation == "xla" else {"config": block})
    inf, nan = jnp.inf, jnp.nan
    x = jnp.array([[-inf] * 8, [0.0, -inf] * 4, [nan] + [0.0] * 7, [inf] + [0.0] * 7, [-inf] * 7 + [1.0], [1e38, -1e38] * 4])
    got, want = jtops.softmax(x, **kw), jax.nn.softmax(x)
    np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    dead = jtops.softmax(x, where=jnp.zeros_like(x, bool), **kw)
    np.testing.assert_array_equal(dead, jnp.zeros_like(x))


@ways
def test_softmax_masked_elements_may_hold_anything(implementation):
    x, mask = normal(4, 16), jnp.arange(16) < 10
    f = lambda x: jtops.softmax(x, where=mask, implementation=implementation)
    weights = normal(4, 16, seed=3)
    loss = lambda x: (f(x) * weights).sum()
    want, grad = f(x), jax.grad(loss)(x)
    np.testing.assert_allclose(want[:, :10], jax.nn.softmax(x[:, :10]), rtol=1e-5)
    for poison in (jnp.nan, jnp.inf, 3e38):
        bad = jnp.where(mask, x, poison)
        np.testing.assert_array_equal(f(bad), want)
        got = jax.grad(loss)(bad)
        np.testing.assert_array_equal(got, grad)
        np.testing.assert_array_equal(got[:, 10:], 0.0)


@ways
def test_softmax_gradient_of_a_constant_cotangent_is_zero(implementation):
    """Rows sum to 1, whatever x: in low precision the saved result does not, and must not be taken as if it did."""
    x = normal(8, 1000, dtype=jnp.bfloat16)
    g = jax.grad(lambda x: jtops.softmax(x, implementation=implementation).astype(jnp.float32).sum())(x)
    assert jnp.abs(g.astype(jnp.float32)).max() < 1e-6


# ---- log_softmax and logsumexp at the edges


kernels = pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
LONG, SPLIT = (jtops.Config(BLOCK_M=1, BLOCK_N=4, PROGRAMS=programs) for programs in (4, 16))


@kernels
@pytest.mark.parametrize(("axis", "block"), [(-1, None), (-1, LONG), (-1, SPLIT), (0, None)])
def test_log_softmax_and_logsumexp_of_infinities_and_nan(block, axis, implementation):
    kw = {"implementation": implementation} | ({} if block is None or implementation == "xla" else {"config": block})
    inf, nan = jnp.inf, jnp.nan
    x = jnp.array([[-inf] * 8, [0.0, -inf] * 4, [nan] + [0.0] * 7, [inf] + [0.0] * 7, [-inf] * 7 + [1.0], [1e38, -1e38] * 4])
    x = x if axis == -1 else x.T
    got, want = jtops.log_softmax(x, axis, **kw), jax.nn.log_softmax(x, axis)
    np.testing.assert_array_equal(jnp.isnan(got), jnp.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    got, want = jtops.logsumexp(x, axis, **kw), jax.nn.logsumexp(x, axis)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert got[0] == -inf
    assert got[3] == inf
    none = jnp.zeros_like(x, bool)
    np.testing.assert_array_equal(jtops.log_softmax(x, axis, none, **kw), jnp.full_like(x, -inf))
    f = lambda x: jtops.logsumexp(x, axis, none, **kw)
    np.testing.assert_array_equal(f(x), jnp.full(6, -inf))
    np.testing.assert_array_equal(jax.vjp(f, x)[1](jnp.ones(6))[0], jnp.zeros_like(x))


@kernels
@pytest.mark.parametrize("axis", [-1, 0])
def test_masked_elements_of_log_softmax_may_hold_anything(axis, implementation):
    x, mask = normal(16, 16), (jnp.arange(16) < 10) if axis == -1 else (jnp.arange(16) < 10)[:, None]
    weights = jnp.where(mask, normal(16, 16, seed=3), 0.0)
    f = lambda x: jtops.log_softmax(x, axis, mask, implementation=implementation)
    g = lambda x: jtops.logsumexp(x, axis, mask, implementation=implementation)
    results = lambda x: (f(x), g(x), jax.vjp(f, x)[1](weights)[0], jax.vjp(g, x)[1](jnp.ones(16))[0])
    want = results(x)
    np.testing.assert_array_equal(want[2][~jnp.broadcast_to(mask, x.shape)], 0.0)
    for poison in (jnp.nan, jnp.inf, 3e38):
        jax.tree.map(np.testing.assert_array_equal, results(jnp.where(mask, x, poison)), want)


@kernels
def test_log_softmax_of_large_values_and_low_precision(implementation):
    """A gradient from a rounded y would be off by the rounding of y times its size."""
    x = normal(4, 64, mean=1e4)
    g = normal(4, 64, seed=1)
    got = jax.vjp(lambda x: jtops.log_softmax(x, implementation=implementation), x)[1](g)[0]
    want = oracles.log_softmax_vjp(np.asarray(x, np.float64), g=np.asarray(g, np.float64))[0]
    np.testing.assert_allclose(got, want, atol=1e-5)
    low = x.astype(jnp.bfloat16) - 1e4
    got = jax.vjp(lambda x: jtops.logsumexp(x, -1, implementation=implementation), low)[1](jnp.ones(4, jnp.bfloat16))[0]
    np.testing.assert_allclose(got.astype(jnp.float32).sum(-1), 1.0, atol=5e-3)


def test_logsumexp_shapes():
    x = normal(2, 3, 4)
    for axis, keepdims in ((None, False), (None, True), (1, True), ((0, 2), False), ((-1, -2), True)):
        got, want = jtops.logsumexp(x, axis, keepdims=keepdims), jax.nn.logsumexp(x, axis, keepdims=keepdims)
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(jtops.logsumexp(jnp.zeros((3, 0)), 1), jnp.full(3, -jnp.inf))
    np.testing.assert_array_equal(jtops.logsumexp(jnp.zeros((0, 3)), 1), jnp.zeros(0))


# ---- the sum and its norm


@kernels
@pytest.mark.parametrize(
    ("dtypes", "block"),
    [
        (("float32", "float32"), None),
        pytest.param(("bfloat16", "bfloat16"), LONG, marks=pytest.mark.slow),
        (("bfloat16", "float32"), SPLIT),
    ],
)
def test_add_norms_are_the_two_ops(dtypes, block, implementation):
    """The same values, each result of its dtype; and a gradient by either result alone, and by both."""
    kw = {"implementation": implementation} | ({} if block is None or implementation == "xla" else {"config": block})
    x, residual = (normal(6, 33, seed=i, dtype=d) for i, d in enumerate(dtypes))
    scale, bias = normal(33, seed=2), normal(33, seed=3)
    for op, norm, parameters in (
        (jtops.add_layer_norm, jtops.layer_norm, (scale, bias)),
        (jtops.add_rms_norm, jtops.rms_norm, (scale,)),
    ):
        total = x + residual
        y, kept = op(x, residual, *parameters, **kw)
        assert (y.dtype, kept.dtype) == (x.dtype, total.dtype)
        np.testing.assert_array_equal(kept, total)
        numerics.close(y, norm(total, *parameters, **kw).astype(y.dtype), 8e-3 if y.dtype == jnp.bfloat16 else 1e-6)
        _, pullback = jax.vjp(lambda *a: op(*a, **kw), x, residual, *parameters)
        plain = lambda x, residual, *p: (norm(x + residual, *p, **kw).astype(x.dtype), x + residual)
        _, want_pullback = jax.vjp(plain, x, residual, *parameters)
        gy, gs = normal(6, 33, seed=4, dtype=y.dtype), normal(6, 33, seed=5, dtype=kept.dtype)
        for cotangents in ((gy, gs), (jnp.zeros_like(gy), gs), (gy, jnp.zeros_like(gs))):
            a, b = pullback(cotangents), want_pullback(cotangents)
            assert [g.dtype for g in a] == [g.dtype for g in b]
            numerics.close(a, b, 2e-2 if "bfloat16" in dtypes else 1e-5)
        only = lambda i: jax.grad(lambda x: (op(x, residual, *parameters, **kw)[i].astype(jnp.float32) ** 2).sum())(x)
        expected = lambda i: jax.grad(lambda x: (plain(x, residual, *parameters)[i].astype(jnp.float32) ** 2).sum())(x)
        for i in (0, 1):
            numerics.close(only(i), expected(i), 2e-2 if "bfloat16" in dtypes else 1e-5)


# ---- case 23: very long rows; and widths that no vector divides


@kernels
@pytest.mark.parametrize("n", [65537, pytest.param(131072, marks=pytest.mark.slow)])
def test_case_23_long_rows_react_to_their_last_column(n, implementation):
    """Case 23: rows longer than a block of registers, and every column counts."""
    x = jnp.asarray(np.arange(2 * n) % 7, jnp.float32).reshape(2, n)
    ops = {"softmax": jtops.softmax, "layer_norm": jtops.layer_norm, "rms_norm": jtops.rms_norm, "log_softmax": jtops.log_softmax}
    for name, op in ops.items():
        got = op(x, implementation=implementation)
        numerics.close(got, getattr(oracles, name)(np.asarray(x, np.float64)), 1e-5)
        changed = op(x.at[:, -1].set(50.0), implementation=implementation)
        assert jnp.abs(changed[:, -1] - got[:, -1]).min() > 0.5


# ---- deterministic: the same bits every time


@ways
def test_same_bits_every_time(implementation):
    x, scale = normal(60 if implementation == "interpret" else 700, 33), normal(33, seed=1)

    @jax.jit
    def f(x, scale):
        y = jtops.layer_norm(x, scale, scale, implementation=implementation)
        return (jtops.add(jtops.softmax(y, implementation=implementation), scale, implementation=implementation) ** 2).sum()

    first = jax.grad(f, (0, 1))(x, scale)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, jax.grad(f, (0, 1))(x, scale), first)


# ---- malformed calls: at trace time, with the rule, the values and the way out


@pytest.mark.parametrize(
    ("f", "error", "match"),
    [
        (lambda: jtops.add(jnp.ones((2, 3)), jnp.ones((2, 4))), ValueError, r"add: shapes must broadcast.*x \(2, 3\), y \(2, 4\)"),
        (lambda: jtops.add("a", 1), TypeError, "add: x must be an array; got 'a' of type str"),
        (lambda: jtops.softmax(jnp.ones(3), axis=1), ValueError, "softmax: axis 1 does not exist in an array of 1 dimensions"),
        (lambda: jtops.softmax(jnp.ones(())), ValueError, "axis -1 does not exist in an array of 0 dimensions"),
        (lambda: jtops.softmax(jnp.ones((2, 3)), axis=(0, -2)), ValueError, r"distinct axes; got \(0, -2\)"),
        (lambda: jtops.softmax(jnp.ones((2, 3)), axis=1.0), TypeError, "axis must be an int"),
        (lambda: jtops.softmax(jnp.arange(3)), TypeError, r"x must have a floating dtype; got int32 \(3,\).*astype"),
        (lambda: jtops.softmax(jnp.ones(3), where=jnp.ones(3)), TypeError, "where must be boolean; got float32"),
        (lambda: jtops.softmax(jnp.ones((2, 3)), where=jnp.ones((2, 2), bool)), ValueError, r"where \(2, 2\), x \(2, 3\)"),
        (lambda: jtops.softmax(jnp.ones(3), where=jnp.ones((2, 3), bool)), ValueError, "where must broadcast to x"),
        (
            lambda: jtops.logsumexp(jnp.ones((2, 3)), where=jnp.ones((3, 2), bool)),
            ValueError,
            r"logsumexp: where .* to a; .*a \(2, 3\)",
        ),
        (lambda: jtops.log_softmax(jnp.ones((2, 3)), axis=2), ValueError, "log_softmax: axis 2 does not exist"),
        (lambda: jtops.add_layer_norm(jnp.ones((2, 3)), jnp.ones(3)), ValueError, r"one shape; got \(2, 3\) and \(3,\)"),
        (lambda: jtops.add_rms_norm(jnp.ones((2, 3)), jnp.ones((2, 3), int)), TypeError, "residual must have a floating dtype"),
        (lambda: jtops.layer_norm(jnp.ones(())), ValueError, r"x must have shape \[..., n\]; got \(\)"),
        (
            lambda: jtops.layer_norm(jnp.ones((2, 3)), jnp.ones(4)),
            ValueError,
            r"axis n is 3 elsewhere but 4 in scale; got x \(2, 3\), scale",
        ),
        (
            lambda: jtops.layer_norm(jnp.ones((2, 3)), None, jnp.ones((1, 3))),
            ValueError,
            r"bias must have shape \[n\]; got \(1, 3\)",
        ),
        (lambda: jtops.layer_norm(jnp.ones(3), epsilon="a"), TypeError, "epsilon must be a number; got 'a'"),
        (lambda: jtops.layer_norm(jnp.ones(3), epsilon=jnp.ones(2)), TypeError, "epsilon must be a number"),
        (
            lambda: jax.jit(lambda e: jtops.layer_norm(jnp.ones(3), epsilon=e))(1e-6),
            TypeError,
            "epsilon is compiled into the kernel",
        ),
        (lambda: jax.eval_shape(lambda x: jtops.softmax(x, axis=3), jnp.ones(3)), ValueError, "axis 3 does not exist"),
    ],
)
def test_malformed_calls(f, error, match):
    with pytest.raises(error, match=match):
        f()
