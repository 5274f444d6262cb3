"""Rows that programs of a cluster share: right on the GPU for every op and size of cluster, refused where there are none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops.kernels._lib.spec import Case, mask, normal
from tests import numerics
from tests.kernels import lowered
from tests.specs import SPECS, cotangent, draw, function, truth, truth_vjp, value_and_vjp

OPS = ("softmax", "log_softmax", "logsumexp", "layer_norm", "rms_norm", "add_layer_norm")


def config(cluster, programs=None, block=256, stages=None):
    return jtops.Config(BLOCK_M=1, BLOCK_N=block, PROGRAMS=programs, num_warps=2, num_stages=stages, cluster_size=cluster)


def case_of(spec, r, n, config, where=False):
    """The op's small case at another size."""
    small, main = spec.small[0], next(iter(spec.operands))
    inputs = {k: normal((r, n) if len(i.shape) > 1 else (n,)) for k, i in small.inputs.items() if k != "where"}
    masked = {"where": mask(inputs[main].shape, 0.6)} if where and "where" in spec.operands else {}
    return Case(f"cluster-{r}-{n}", inputs | masked, "rows shared by a cluster", small.options, config)


SIZES = [  # rows, width, cluster, programs, stages
    (5, 512, 2, None, None),
    (7, 1000, 4, None, None),
    (9, 700, 3, 2, 3),
    (33, 2000, 8, 4, 2),
    (8, 515, 3, None, None),  # rows that begin inside a vector, where the op shifts them
    (3, 130, 8, None, None),  # members without a column
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: "x".join(map(str, s[:3])))
@pytest.mark.parametrize("op", OPS)
def test_value_and_gradients(op, size, dtype):
    r, n, cluster, programs, stages = size
    spec = SPECS[op]
    case = case_of(spec, r, n, config(cluster, programs, stages=stages), where=n == 1000)
    operands = draw(spec, case, dtype)
    value = truth(spec, case, operands)
    g = cotangent(value.shape, dtype)
    wants = [value, *truth_vjp(spec, case, operands, g)]
    out, grads = value_and_vjp(function(spec, case, implementation="triton"), operands, g)
    ref, ref_grads = value_and_vjp(function(spec, case, implementation="xla"), operands, g)
    for i, (got, reference, want) in enumerate(zip((out, *grads), (ref, *ref_grads), wants, strict=True)):
        numerics.check(got, reference, want, key=(spec.name, case.id), what=f"gradient {i - 1}" if i else "value")


@pytest.mark.gpu
def test_special_rows():
    """A part, or all, of a row of nothing but -inf; infinities; NaN: as jax.nn has them, and the same bits every time."""
    x = np.random.default_rng(0).normal(size=(8, 600)).astype(np.float32) - 1000
    x[0, :256] = x[1] = -np.inf
    x[2, 300], x[3, 5], x[4, 599] = np.inf, np.nan, 1e30
    x = jnp.asarray(x)
    for op, reference in ((jtops.softmax, jax.nn.softmax), (jtops.log_softmax, jax.nn.log_softmax)):
        np.testing.assert_allclose(op(x, config=config(3)), reference(x), rtol=2e-5, atol=1e-6)
    lse = lambda x: jtops.logsumexp(x, axis=-1, config=config(3))
    np.testing.assert_allclose(lse(x), jax.nn.logsumexp(x, axis=-1), rtol=2e-5)
    x = jax.random.normal(jax.random.key(1), (300, 1000))
    loss = lambda x, s: jtops.layer_norm(x, s, config=config(4, 7, stages=3)).sum()
    first, again = (jax.jit(jax.grad(loss, (0, 1)))(x, x[0]) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_lowers():
    """Clusters compile for sm_90, and say so in the kernel's text."""
    x = jax.ShapeDtypeStruct((16, 1000), jnp.bfloat16)
    (kernel,) = lowered.kernels(lambda x: jtops.softmax(x, implementation="triton", config=config(4)), x)
    assert ".reqnctapercluster 4, 1, 1" in kernel.binary
    assert "st.async" in kernel.binary


@pytest.mark.parametrize("op", OPS)
def test_refused(op):
    """Where there are no clusters, and several rows at a time."""
    spec = SPECS[op]
    case = case_of(spec, 4, 500, config(2))
    operands = draw(spec, case)
    with pytest.raises(jtops.UnsupportedError, match=rf"{op}: cluster_size=2 needs clusters, from sm_90 on; running in the interp"):
        function(spec, case, implementation="interpret")(*operands)
    with pytest.raises(jtops.UnsupportedError, match="running in sm_80"):
        lowered.text(function(spec, case, implementation="triton"), *operands, target="sm_80")
    rows = dataclasses.replace(case, config=jtops.Config(BLOCK_M=2, BLOCK_N=256, PROGRAMS=1, cluster_size=2))
    with pytest.raises(jtops.UnsupportedError, match="share one row at a time: BLOCK_M must be 1"):
        lowered.text(function(spec, rows, implementation="triton"), *operands)


@pytest.mark.parametrize(
    ("f", "kernel"),
    [
        (lambda x, config: jtops.softmax(x, config=config), "_long_forward_kernel"),  # longer than the cluster holds
        (lambda x, config: jtops.rms_norm(x, config=config), "_long_forward_kernel"),
        (lambda x, config: jtops.softmax(x, axis=0, config=config), "_strided_forward_kernel"),
    ],
    ids=["softmax", "rms_norm", "strided"],
)
def test_kernels_that_would_not_use_clusters(f, kernel):
    x = jax.ShapeDtypeStruct((8, 1000), jnp.float32)
    with pytest.raises(jtops.UnsupportedError, match=rf"asks for clusters, which {kernel} does not use"):
        lowered.text(lambda x: f(x, jtops.Config(BLOCK_M=1, BLOCK_N=64, PROGRAMS=1, cluster_size=2)), x)


@pytest.mark.parametrize(
    "target", ["sm_90", pytest.param("sm_100", marks=pytest.mark.slow), pytest.param("sm_120", marks=pytest.mark.slow)]
)
def test_long_rows_go_to_clusters(target):
    """By themselves, where there are such; elsewhere, and where vectors do not divide a row, they are read twice."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    softmax = jax.grad(lambda x: jtops.softmax(x).astype(jnp.float32).sum())
    norm = jax.grad(lambda x, s: jtops.layer_norm(x, s).astype(jnp.float32).sum(), (0, 1))
    asked = (softmax, shape(4096, 65536)), (norm, shape(8192, 16384), shape(16384))
    for f, *operands in asked:
        with jtops.config.target(target):
            sizes = [launch.options.get("cluster_size", 1) for launch in jtops.explain(f, *operands)]
        assert max(sizes) > 1, f
        with jtops.config.target("sm_80"):
            assert all("cluster_size" not in launch.options for launch in jtops.explain(f, *operands))
    with jtops.config.target(target):
        assert all("cluster_size" not in launch.options for launch in jtops.explain(softmax, shape(4096, 50257)))
