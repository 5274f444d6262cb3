"""What the members of a cluster tell each other is put together right: with the exchange replaced, the interpreter can run it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from jtops.kernels.norm import forward


@triton.jit
def told_kernel(means_ptr, squares_ptr, mean_ptr, square_ptr, n, part_n, CENTRED: tl.constexpr, CLUSTER: tl.constexpr):
    member = tl.arange(0, 8)
    means, squares = tl.load(means_ptr + member), tl.load(squares_ptr + member)
    mean, square = forward._of_cluster(means, squares, 0, n, part_n, CENTRED, CLUSTER)
    tl.store(mean_ptr + tl.arange(0, 1), mean)
    tl.store(square_ptr + tl.arange(0, 1), square)


@triton.jit
def as_told(a, b, turn):
    """In the place of `cluster_gather`: what all members have."""
    return a, b


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(
    ("n", "part_n", "cluster"),
    [(32, 16, 2), (33, 32, 2), (100, 32, 4), (48, 16, 4), (130, 32, 8), (1000, 128, 8)],
    ids=["even", "last has one", "last has some", "last has none", "three have none", "eight"],
)
def test_statistics_of_a_row(n, part_n, cluster, centred, monkeypatch):
    """Those of its parts, of which the last is shorter, or there is nothing; what is past the cluster is NaN."""
    monkeypatch.setattr(forward, "cluster_gather", as_told)
    x = np.random.default_rng(0).normal(size=n) * 3 + np.linspace(0, 50, n)
    means, squares = np.full((2, 8), np.nan, np.float32)
    for i in range(cluster):
        part = x[i * part_n : (i + 1) * part_n]
        means[i] = part.mean() if centred and part.size else 0.0
        squares[i] = ((part - means[i]) ** 2).sum()
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    mean, square = jtops.triton_call(
        jnp.asarray(means), jnp.asarray(squares), n=n, part_n=part_n, CENTRED=centred, CLUSTER=cluster,
        kernel=told_kernel, out_type=(one, one), grid=1, interpret=True,
    )  # fmt: skip
    want = x.mean() if centred else 0.0
    np.testing.assert_allclose(mean[0], want, rtol=1e-6)
    np.testing.assert_allclose(square[0], ((x - want) ** 2).sum(), rtol=1e-5)
