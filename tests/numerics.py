"""The one rule by which a result counts as right, and the one table of exceptions to it.

    error <= 2 * (error of the same-dtype reference) + 2 * eps * max |truth|

where error is the largest absolute difference from the float64 truth and eps that of the result's dtype. The reference's own error
is bounded as well, or a bad reference would excuse a bad kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np

REFERENCE_EPS = 4.0  # the reference's error, in eps * max |truth|

# (op, case, dtype) -> bound of the reference's error in eps * max |truth|, with the reason.
REFERENCE_EXCEPTIONS = {
    ("layer_norm", "mean", "float32"): 400.0,  # x itself is rounded at 100 times the size of the spread that is left of it
    ("layer_norm", "epsilon", "float32"): 8.0,  # sums of 48 products that nearly cancel
}


def largest_error(got, truth) -> float:
    """The largest absolute difference. NaN and infinity must stand where the truth has them."""
    got, truth = np.asarray(got, np.float64), np.asarray(truth, np.float64)
    assert got.shape == truth.shape, (got.shape, truth.shape)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(got[~finite], truth[~finite])
    return float(np.max(np.abs(got[finite] - truth[finite]), initial=0.0))


def check(got, reference, truth, *, key=(), what: str = "") -> None:
    """Assert the rule for `got`, and the bound for `reference`."""
    eps, size = float(jnp.finfo(got.dtype).eps), float(np.max(np.abs(truth), initial=0.0, where=np.isfinite(truth)))
    assert got.dtype == reference.dtype, (what, got.dtype, reference.dtype)
    own = largest_error(reference, truth)
    bound = REFERENCE_EXCEPTIONS.get((*key, str(got.dtype)), REFERENCE_EPS) * eps * size
    assert own <= bound, f"{what}: the reference is off by {own:.3g}, allowed {bound:.3g} (max |truth| {size:.3g})"
    error = largest_error(got, truth)
    allowed = 2 * own + 2 * eps * size
    assert error <= allowed, (
        f"{what}: off by {error:.3g}, allowed {allowed:.3g} (reference off by {own:.3g}, max |truth| {size:.3g})"
    )


def close(got, want, tolerance=2e-5) -> None:
    """Assert that two results of the same computation agree, relative to the largest element of each leaf."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * float(np.max(np.abs(b), initial=1e-30)))

    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(one, got, want)
