"""rope beyond its SPEC: far positions, what stays as it is, both styles, the way back, shared positions, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles

ways = pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
styles = pytest.mark.parametrize("interleaved", [False, True])


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


@ways
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_case_35_far_positions(dtype, implementation):
    """Angles are as exact there as near 0, in every dtype, before and after it."""
    positions = jnp.array([0, 1, 4095, 131071, 10**6, 10**9 + 7, 2**31 - 1, -1, -5, -(10**6), -(2**31)], jnp.int32)
    x = normal(11, 2, 64, dtype=dtype)
    got = jtops.rope(x, positions, theta=500000.0, implementation=implementation)
    truth = oracles.rope(np.float64(x), np.asarray(positions, np.int64), theta=500000.0)
    assert got.dtype == x.dtype
    np.testing.assert_allclose(np.float64(got), truth, rtol=0, atol=4 * float(jnp.finfo(dtype).eps) * np.abs(x).max())


@ways
@styles
@pytest.mark.parametrize(("d", "rotary"), [(80, 20), (128, 32), (6, 0), (10, 10)])
def test_case_34_what_stays_stays(d, rotary, interleaved, implementation):
    """Features that do not turn have their very bits, q is left alone, and pairs keep their length."""
    q = normal(2, 7, 3, d)
    positions = jnp.array([[5, 3, 9, 0, 1, 1, 100], [7, 6, 5, 4, 3, 2, 1]])
    f = lambda q: (jtops.rope(q, positions, rotary_dim=rotary, interleaved=interleaved, implementation=implementation), q * 1)
    y, same = jax.jit(f)(q)
    np.testing.assert_array_equal(same, q)
    np.testing.assert_array_equal(y[..., rotary:], q[..., rotary:])
    pairs = lambda x: x.reshape(2, 7, 3, -1, 2) if interleaved else x.reshape(2, 7, 3, 2, -1).swapaxes(-1, -2)
    length = lambda x: jnp.linalg.norm(pairs(x[..., :rotary]), axis=-1) if rotary else jnp.zeros(1)
    numerics.close(length(y), length(q), 1e-6)


@ways
def test_styles_differ_by_an_order_of_features(implementation):
    q = normal(5, 2, 16)
    order = np.arange(16).reshape(8, 2).T.ravel()
    apart = jtops.rope(q[..., order], implementation=implementation)
    together = jtops.rope(q, interleaved=True, implementation=implementation)
    numerics.close(apart, together[..., order], 1e-6)
    assert not np.allclose(jtops.rope(q, implementation=implementation), together)


@ways
@styles
def test_case_34_the_gradient_turns_back(interleaved, implementation):
    """Under remat, and with q donated."""
    q, dy, positions = normal(4, 3, 2, 8), normal(4, 3, 2, 8, seed=1), jnp.array([3, 1, 4])
    f = lambda q, p: jtops.rope(q, p, interleaved=interleaved, implementation=implementation)
    want = f(dy, -positions)
    numerics.close(jax.vjp(lambda q: f(q, positions), q)[1](dy)[0], want, 1e-6)
    numerics.close(jax.vjp(jax.checkpoint(lambda q: f(q, positions)), q)[1](dy)[0], want, 1e-6)
    numerics.close(jax.jit(f, donate_argnums=0)(f(q, positions), -positions), q, 1e-6)


@ways
def test_positions_are_shared_and_batched(implementation):
    q = normal(2, 3, 4, 5, 8)
    f = lambda q, p: jtops.rope(q, p, implementation=implementation)
    one = jnp.array([3, 0, 7, 1])
    numerics.close(f(q, one), f(q, jnp.broadcast_to(one, (2, 3, 4))), 0)
    numerics.close(f(q, jnp.stack([one, one + 1, one + 2])), jnp.stack([f(q[:, i], one + i) for i in range(3)], 1), 0)
    numerics.close(jax.vmap(f, (0, None))(q, one), f(q, one), 0)
    numerics.close(jax.vmap(f, (None, 0))(q[0], jnp.stack([one, one * 2])), jnp.stack([f(q[0], one), f(q[0], one * 2)]), 0)
    numerics.close(f(q, None), f(q, jnp.arange(4)), 0)
    numerics.close(f(q, one.astype("int8")), f(q, one), 0)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda x: jtops.rope(x, rotary_dim=3), ValueError, "even and from 0 to d, 8; got 3"),
        (lambda x: jtops.rope(x, rotary_dim=10), ValueError, "even and from 0 to d, 8; got 10"),
        (lambda x: jtops.rope(x[..., :7]), ValueError, "even and from 0 to d, 7; got 7"),
        (lambda x: jtops.rope(x[0, 0]), ValueError, "x"),
        (lambda x: jtops.rope(x, jnp.arange(5)), ValueError, r"here \[..., 3\]; got \(5,\)"),
        (lambda x: jtops.rope(x, jnp.arange(3.0)), TypeError, "integers that fit int32; got float32"),
        (lambda x: jtops.rope(x, theta=-1), ValueError, "theta must be positive and finite; got -1"),
        (lambda x: jtops.rope(x, inverse_frequencies=[1.0]), ValueError, r"4 finite numbers, half of rotary_dim; got \(1,\)"),
        (lambda x: jtops.rope(x, inverse_frequencies=[1, 2, 3, np.nan]), ValueError, "finite"),
        (lambda x: jax.jit(lambda f: jtops.rope(x, inverse_frequencies=f))(jnp.ones(4)), TypeError, "plain numbers; got traced"),
        (lambda x: jtops.rope(x, jnp.zeros((3, 3), int)), ValueError, "batch axes"),
    ],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=says):
        call(normal(2, 3, 2, 8))
