"""cross_entropy beyond its SPEC: ignored rows, labels out of range, logits far out, aliasing, dtypes, launches, errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles
from tests.kernels import lowered

ways = pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def value_and_grad(logits, labels, **options):
    """The sum of the losses and the gradient of the logits."""
    return jax.jit(jax.value_and_grad(lambda x: jtops.cross_entropy(x, labels, **options).sum()))(logits)


# ---- what does not count


@ways
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_case_37_nothing_counts(reduction, implementation):
    """The mean over nothing is 0, and gradients are 0: not NaN."""
    options = {"reduction": reduction, "implementation": implementation, "label_smoothing": 0.1, "z_loss": 0.1}
    loss, grad = value_and_grad(normal(5, 10), jnp.full(5, -100), **options)
    assert float(loss) == 0.0
    np.testing.assert_array_equal(grad, 0.0)


@ways
def test_case_37_ignored_rows_take_no_part(implementation):
    """Neither in the mean, nor by smoothing or z; whatever they hold."""
    options = {"label_smoothing": 0.2, "z_loss": 0.01, "implementation": implementation}
    logits, labels = normal(4, 5), jnp.array([1, -100, 3, 0])
    kept = jnp.array([0, 2, 3])
    for poison in (0.0, np.nan, np.inf, -np.inf):
        poisoned = logits.at[1].set(poison)
        for reduction in ("sum", "mean"):
            got, grad = value_and_grad(poisoned, labels, reduction=reduction, **options)
            want, kept_grad = value_and_grad(logits[kept], labels[kept], reduction=reduction, **options)
            numerics.close(got, want)
            numerics.close(grad[kept], kept_grad)
            np.testing.assert_array_equal(grad[1], 0.0)
    losses = jtops.cross_entropy(logits, labels, **options)
    assert float(losses[1]) == 0.0


@ways
def test_case_37_an_index_inside_the_vocabulary(implementation):
    logits, labels = normal(3, 5), jnp.array([2, 0, 1])
    got = jtops.cross_entropy(logits, labels, ignore_index=2, reduction="mean", implementation=implementation)
    numerics.close(got, jtops.cross_entropy(logits[1:], labels[1:], reduction="mean", implementation=implementation))
    every = jtops.cross_entropy(logits, labels, ignore_index=None, implementation=implementation)
    assert float(every[0]) > 0


# ---- labels


@ways
@pytest.mark.parametrize("n", [10, 257])
def test_case_38_labels_out_of_range(n, implementation):
    """NaN in their own row alone."""
    labels = jnp.array([n, 3, n + 100, 65535, -1, 2**31 - 1, 0], jnp.int32)
    losses = jax.jit(lambda x: jtops.cross_entropy(x, labels, implementation=implementation))(normal(7, n))
    np.testing.assert_array_equal(np.isnan(losses), [True, False, True, True, True, True, False])
    _, grad = value_and_grad(normal(7, n), labels, implementation=implementation)
    np.testing.assert_array_equal(np.isnan(grad).all(-1), np.isnan(losses))
    np.testing.assert_array_equal(np.isnan(grad).any(-1), np.isnan(losses))
    truth = oracles.cross_entropy(np.float64(normal(7, n))[[1, 6]], np.array([3, 0]))
    numerics.close(losses[jnp.array([1, 6])], truth)
    with pytest.raises(ValueError, match=rf"labels must be from 0 to {n - 1}, or ignore_index \(-100\); got {n}"):
        jtops.cross_entropy(normal(7, n), np.asarray(labels), implementation=implementation)


@ways
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_case_38_labels_of_any_integers(dtype, implementation):
    with jax.enable_x64(dtype.endswith("64")):
        logits = normal(3, 300).astype("float32")
        labels = jnp.array([100, 0, 7], dtype)
        numerics.close(
            jtops.cross_entropy(logits, labels, implementation=implementation),
            oracles.cross_entropy(np.float64(logits), np.array([100, 0, 7])),
        )
        if dtype.endswith("64"):
            far = jtops.cross_entropy(logits, jnp.array([2**32 + 3, 1, 2], dtype), implementation=implementation)
            np.testing.assert_array_equal(np.isnan(far), [True, False, False])


# ---- logits


@ways
@pytest.mark.parametrize("size", [1e4, -1e4, 3e38])
def test_large_logits(size, implementation):
    """The loss is that of the differences."""
    logits = jnp.full((2, 70), size, jnp.float32).at[0, 3].mul(1.0 - 2**-20)
    losses = jtops.cross_entropy(logits, jnp.array([3, 5]), implementation=implementation, label_smoothing=0.25)
    numerics.close(losses, oracles.cross_entropy(np.float64(logits), np.array([3, 5]), label_smoothing=0.25), 1e-6)


@ways
def test_infinite_logits(implementation):
    """-inf is a class that cannot be: its own loss is inf; a row of nothing else, or with +inf, is NaN."""
    logits = jnp.array([[-jnp.inf, 0.0, 0.0], [-jnp.inf, 0.0, 0.0], [-jnp.inf] * 3, [jnp.inf, 0.0, 0.0]])
    losses, grad = jax.value_and_grad(lambda x: jtops.cross_entropy(x, jnp.array([1, 0, 0, 0]), implementation=implementation)[0])(
        logits
    )
    numerics.close(losses, np.log(2.0))
    numerics.close(grad[0], np.array([0.0, -0.5, 0.5]))
    losses = jtops.cross_entropy(logits, jnp.array([1, 0, 0, 0]), implementation=implementation)
    assert np.isposinf(losses[1])
    assert np.isnan(losses[2:]).all()


@ways
def test_lse_has_a_gradient(implementation):
    logits, labels = normal(4, 33), jnp.array([0, 5, -100, 32])
    options = {"implementation": implementation, "return_lse": True}
    lse, grad = jax.value_and_grad(lambda x: jtops.cross_entropy(x, labels, **options)[1].sum())(logits)
    counts = labels != -100  # a row that does not count has 0
    numerics.close(lse, jnp.where(counts, jax.nn.logsumexp(logits, -1), 0).sum())
    numerics.close(grad, jnp.where(counts[:, None], jax.nn.softmax(logits), 0))


@ways
def test_case_36_logits_are_left_alone(implementation):
    """A second use of them, a second call of the pullback, a cotangent of 3, and no gradient at all."""
    z, labels = normal(8, 1000), jnp.arange(8)
    f = lambda z: jtops.cross_entropy(z, labels, reduction="mean", implementation=implementation)
    onehot = jax.nn.one_hot(labels, 1000)
    want = (jax.nn.softmax(z) - onehot) / 8
    both, pullback = jax.vjp(lambda z: f(z) + 0.5 * (z**2).sum(), z)
    for g in (1.0, 3.0, 1.0):
        numerics.close(pullback(jnp.asarray(g, both.dtype))[0], g * (want + z))
    numerics.close(f(jnp.zeros((8, 1000))), np.log(1000.0))
    np.testing.assert_array_equal(z, normal(8, 1000))


@ways
def test_blocks_and_shifts(implementation):
    """Rows of every width about a vector and a block, with the same numbers."""
    for n, dtype in itertools.product((31, 32, 33, 127, 128, 129, 250), ("float32", "bfloat16")):
        logits, labels = normal(8, n, dtype=dtype), jnp.arange(8) * (n - 1) // 7
        config = jtops.Config(BLOCK_M=1, BLOCK_N=32)
        more = {} if implementation == "xla" else {"config": config}
        got, grad = value_and_grad(logits, labels, implementation=implementation, **more)
        wide = np.float64(logits)
        numerics.close(got, oracles.cross_entropy(wide, np.asarray(labels)).sum())
        want, *_ = oracles.cross_entropy_vjp(wide, np.asarray(labels), g=np.ones(8))
        assert grad.dtype == logits.dtype
        numerics.close(grad, want, 2e-5 if dtype == "float32" else 8e-3)


def test_launches():
    """One forward and one backward; no array of the logits' size but their gradient."""
    logits, labels = jax.ShapeDtypeStruct((64, 1000), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    loss = lambda x, y: jtops.cross_entropy(x, y, reduction="mean", label_smoothing=0.1, z_loss=1e-4)
    found = lowered.launches(jax.value_and_grad(loss), logits, labels)
    assert found == {"jtops_cross_entropy_fwd": 1, "jtops_cross_entropy_vjp": 1}
    text = lowered.text(jax.value_and_grad(loss), logits, labels)
    assert "64x1000xf32" not in text


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"labels": jnp.zeros(3)}, TypeError, "labels must be integers; got float32"),
        ({"labels": jnp.zeros((3, 1), int)}, ValueError, r"without classes, \(3,\); got \(3, 1\)"),
        ({"logits": jnp.zeros((3, 0))}, ValueError, r"at least one class; got \(3, 0\)"),
        ({"logits": jnp.zeros((3, 4), int)}, TypeError, "floating"),
        ({"weights": jnp.zeros((3, 4))}, ValueError, "weights"),
        ({"weights": jnp.zeros((2, 3))}, ValueError, r"must broadcast to the labels' shape \(3,\)"),
        ({"label_smoothing": 1.5}, ValueError, "from 0 to 1; got 1.5"),
        ({"z_loss": -1}, ValueError, "at least 0; got -1"),
        ({"softcap": 0.0}, ValueError, "positive and finite, or None; got 0"),
        ({"reduction": "max"}, ValueError, '"none", "sum" or "mean"; got \'max\''),
    ],
)
def test_errors(change, error, says):
    call = {"logits": jnp.zeros((3, 4)), "labels": jnp.zeros(3, int)} | change
    with pytest.raises(error, match=says):
        jtops.cross_entropy(**call)
