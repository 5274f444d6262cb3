"""The one rule by which a result counts as right, and the tables of exceptions to it.

    error <= 2 * (error of the same-dtype reference) + 2 * eps * max |truth|

where error is the largest absolute difference from the float64 truth and eps that of the result's dtype. The reference's own error
is bounded as well, or a bad reference would excuse a bad kernel.
"""

import jax
import jax.numpy as jnp
import numpy as np

REFERENCE_EPS = 4.0  # the reference's error, in eps * max |truth|
KERNEL_EPS = 2.0  # what a kernel may be off beyond twice that

# (op, case, dtype), or (op, dtype) for all cases -> bound of the reference's error in eps * max |truth|, with the reason.
REFERENCE_EXCEPTIONS = {
    ("flash_attention", "float32"): 16.0,  # a gradient is three products in a row, each a sum of up to 90 terms
    ("matmul", "float32"): 8.0,  # sums of dozens of terms, and of what the activation's derivative has cancelled to
    ("matmul", "split", "float32"): 32.0,  # a sum of 1300 terms, which XLA adds in an order of each CPU's own
    ("gated_linear_unit", "float32"): 8.0,  # as matmul's; an error of either product is as many times larger as the other is large
    ("gated_linear_unit", "split", "float32"): 32.0,  # as matmul's
    ("layer_norm", "mean", "float32"): 400.0,  # x itself is rounded at 100 times the size of the spread that is left of it
    ("cross_entropy", "mean", "float32"): 8.0,  # a weight's gradient is a difference of losses of like size
    ("geglu", "far", "float32"): 64.0,  # jax.nn.gelu by tanh: its derivative cancels terms as large as x^3
    ("layer_norm", "epsilon", "float32"): 8.0,  # sums of 48 products that nearly cancel
}

# (op, dtype) -> the same for kernels, in place of KERNEL_EPS.
KERNEL_EXCEPTIONS = {
    # Tensor cores take ds in the dtype of k, where the reference keeps float32: one more rounding of each term of the sum.
    ("flash_attention", "float16"): 4.0,
    ("flash_attention", "bfloat16"): 4.0,
    ("matmul", "float32"): 8.0,  # three TF32 products leave out that of both small parts, 2^-22 of each term
    ("gated_linear_unit", "float32"): 8.0,  # as matmul's
    ("logsumexp", "float32"): 4.0,  # p comes again from x - maximum - logarithm: what rounds off the logarithm is that share of p
    ("flash_attention", "float32"): 8.0,  # p comes again from score - lse: what rounds off a score is that share of p
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
    case, op = (*key, str(got.dtype)), (*key[:1], str(got.dtype))
    bound = REFERENCE_EXCEPTIONS.get(case, REFERENCE_EXCEPTIONS.get(op, REFERENCE_EPS)) * eps * size
    assert own <= bound, (
        f"{what}: the reference, not the kernel, is off by {own:.3g}, allowed {bound:.3g} (max |truth| {size:.3g}). If the maths "
        f"itself loses that much here, give {case} its bound and reason in REFERENCE_EXCEPTIONS."
    )
    error = largest_error(got, truth)
    allowed = 2 * own + KERNEL_EXCEPTIONS.get(op, KERNEL_EPS) * eps * size
    assert error <= allowed, (
        f"{what}: off by {error:.3g}, allowed {allowed:.3g} (reference off by {own:.3g}, max |truth| {size:.3g})"
    )


def close(got, want, tolerance=2e-5) -> None:
    """Assert that two results of the same computation agree, relative to the largest element of each leaf."""

    def one(a, b):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, (a.shape, b.shape)
        np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance * float(np.max(np.abs(b), initial=1e-30, where=np.isfinite(b)))
        )

    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(one, got, want)
