"""JAX's own settings, over every op: what is strict there is about the caller's code, not about ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import enable_x64

import jtops
from tests import numerics
from tests.kernels import lowered
from tests.specs import cotangent, draw, function, those, value_and_vjp

SETTINGS = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: enable_x64(True),
    "nans": lambda: jax.debug_nans(True),
    "infs": lambda: jax.debug_infs(True),
    "no jit": jax.disable_jit,
}
IMPLEMENTATIONS = [None, "xla", "interpret"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(("spec", "case"), those("small"))
def test_settings(spec, case, setting, implementation):
    """Case 68: values and gradients, eager and jitted, are as without the setting."""
    operands = draw(spec, case)
    f = function(spec, case, implementation=implementation)
    want = f(*operands)
    g = cotangent(want.shape)
    _, grads = value_and_vjp(f, operands, g)
    with SETTINGS[setting]():
        numerics.close(f(*operands), want, 1e-5)
        got = value_and_vjp(f, operands, g)
        for a, b in zip((got[0], *got[1]), (want, *grads), strict=True):
            assert a.dtype == b.dtype
            numerics.close(a, b, 1e-5)


SEES_NOTHING = {"causal": True, "kv_lengths": 2, "window": (1, 0)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_infinities_of_rows_that_see_nothing(implementation):
    """Case 78e: the results are finite, and so is all that leaves the op."""
    q = jnp.ones((2, 8, 2, 8))
    f = lambda q: jtops.flash_attention(q, q, q, implementation=implementation, **SEES_NOTHING)
    with jax.debug_infs(True):
        assert np.all(np.asarray(f(q))[:, 5:] == 0)
        gradient = jax.jit(jax.grad(lambda q: f(q).sum()))(q)
        assert np.all(np.asarray(gradient)[:, 5:] == 0)
        with pytest.raises(FloatingPointError):  # the caller asks for what is infinite
            jtops.flash_attention(q, q, q, implementation=implementation, return_lse=True, **SEES_NOTHING)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_rank_of_masks(implementation):
    """Case 68: everything that a call of attention may be given."""
    q, ids = jnp.ones((2, 8, 4, 8)), jnp.zeros((2, 8), jnp.int32)
    more = {"causal": "bottom_right", "window": (3, 1), "segment_ids": ids, "q_lengths": ids[:, 0] + 7, "kv_lengths": 6}
    f = lambda q: jtops.flash_attention(q, q[..., :2, :], q[..., :2, :], implementation=implementation, **more)
    want, wants = jax.value_and_grad(lambda q: f(q).sum())(q)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        value, gradient = jax.value_and_grad(lambda q: f(q).sum())(q)
    numerics.close(value, want, 1e-6)
    numerics.close(gradient, wants, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_are_weakly_typed(implementation):
    """Case 75: as jax.numpy.add."""
    x, number = jnp.ones(3, jnp.bfloat16), jnp.asarray(2.0)
    for args in ((1.0, 2.0), (1, 2.0), (number, 1), (x, 1.0), (1, x), (x, x), (number, number)):
        got, want = jtops.add(*args, implementation=implementation), jnp.add(*args)
        assert (got.dtype, got.weak_type) == (want.dtype, want.weak_type)
        assert (x * got).dtype == (x * want).dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("x", [3.0, -np.inf, np.nan])
def test_softmax_ops_of_one_number(x, implementation):
    """Case 78c: an array without axes, of which axis=None takes all."""
    x = jnp.float32(x)
    for name in ("softmax", "log_softmax", "logsumexp"):
        ours, theirs = getattr(jtops, name), getattr(jax.nn, name)
        got, want = ours(x, axis=None, implementation=implementation), theirs(x, axis=None)
        assert got.shape == ()
        np.testing.assert_array_equal(got, want)
    assert jtops.logsumexp(x, keepdims=True, implementation=implementation).shape == ()
    assert jtops.logsumexp(x, where=False, implementation=implementation) == -jnp.inf
    assert jtops.softmax(x, None, jnp.array(False), implementation=implementation) == 0


TOO_SMALL_OR_LARGE = [1e-40, 1e-300, 1e39]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's own, where it has to hold such a number
@pytest.mark.parametrize("number", TOO_SMALL_OR_LARGE)
def test_numbers_that_float32_does_not_hold(number):
    """Case 78a: kernels compile, and compute in float32."""
    x = jnp.ones((2, 16, 2, 16))
    calls = [
        jax.grad(lambda x: jtops.flash_attention(x, x, x, scale=number).sum()),
        *(jax.grad(lambda x, f=f: f(x, epsilon=number).sum()) for f in (jtops.layer_norm, jtops.rms_norm)),
        jax.grad(lambda x: jtops.rms_norm(x, x[0, 0, 0], scale_offset=number).sum()),
    ]
    for f in calls:
        for kernel in lowered.kernels(f, x):
            assert ".f64" not in kernel.binary, kernel.name


def test_a_config_takes_numpys_ints():
    """Case 78b."""
    numbers = {"BLOCK_M": 1, "BLOCK_N": 64, "num_warps": 2, "num_stages": 3, "cluster_size": 2, "PROGRAMS": 3}
    config = jtops.Config(**{name: np.int64(n) for name, n in numbers.items()})
    assert config == jtops.Config(**numbers)
    assert hash(config) == hash(jtops.Config(**numbers))
    assert repr(config) == repr(jtops.Config(**numbers))
    with pytest.raises(ValueError, match="BLOCK_M must be a power of two"):
        jtops.Config(BLOCK_M=np.int64(3))
