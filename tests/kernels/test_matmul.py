"""matmul beyond its SPEC: one-dimensional operands, batches, sums in parts, precision, dtypes, edges, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles
from tests.kernels import lowered

# None on a CPU is the reference as "xla" is, through the primitive that users meet.
ways = pytest.mark.parametrize(
    "implementation",
    [pytest.param("xla", marks=pytest.mark.slow), None, "interpret", pytest.param("triton", marks=pytest.mark.gpu)],
)
TINY = jtops.Config(BLOCK_M=16, BLOCK_N=16, BLOCK_K=16)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def grads(f, *operands):
    return jax.jit(jax.grad(lambda *x: (f(*x).astype(jnp.float32) * jnp.cos(jnp.arange(f(*x).size).reshape(f(*x).shape))).sum(),
                            tuple(range(len(operands)))))(*operands)  # fmt: skip


# ---- shapes


@ways
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((5,), (5,)),
        ((5,), (5, 3)),
        ((2, 5), (5,)),
        ((5,), (4, 5, 3)),
        ((4, 2, 5), (5,)),
        ((4, 2, 5), (5, 3)),
        ((2, 5), (4, 5, 3)),
        ((2, 3, 4, 5), (5, 6)),
        ((2, 1, 4, 5), (1, 3, 5, 6)),
        ((3, 4, 5), (2, 1, 5, 6)),
        ((0, 4, 5), (5, 6)),
        ((4, 0), (0, 6)),
        ((0, 5), (5, 6)),
        ((4, 5), (5, 0)),
        ((0,), (0,)),
    ],
)
def test_shapes_as_jnp_matmul(a, b, implementation):
    a, b = normal(*a), normal(*b, seed=1)
    f = lambda a, b: jtops.matmul(a, b, activation="silu", implementation=implementation)
    plain = lambda a, b: jax.nn.silu(jnp.matmul(a, b, precision="highest"))
    got, want = f(a, b), plain(a, b)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    numerics.close(got, want)
    numerics.close(grads(f, a, b), grads(plain, a, b), 1e-4)


@ways
@pytest.mark.parametrize(("a", "b"), [((5,), (5, 3)), ((2, 5), (5,)), ((5,), (5,)), ((5,), (2, 5, 3))])
def test_residual_of_results_without_rows_or_columns(a, b, implementation):
    a, b = normal(*a), normal(*b, seed=1)
    residual = normal(*jnp.matmul(a, b).shape, seed=2)
    f = lambda a, b, r: jtops.matmul(a, b, residual=r, implementation=implementation)
    numerics.close(f(a, b, residual), a @ b + residual)
    numerics.close(grads(f, a, b, residual), grads(lambda a, b, r: a @ b + r, a, b, residual), 1e-4)


@ways
def test_nothing_to_sum_is_the_epilogue_of_zero(implementation):
    """Case 17: k = 0."""
    bias, residual = normal(6), normal(2, 4, 6)
    f = lambda bias, r: jtops.matmul(
        jnp.zeros((2, 4, 0)), jnp.zeros((0, 6)), bias=bias, activation="gelu", residual=r, implementation=implementation
    )
    plain = lambda bias, r: jax.nn.gelu(bias) + r
    numerics.close(f(bias, residual), plain(bias, residual))
    numerics.close(grads(f, bias, residual), grads(plain, bias, residual))
    numerics.close(jax.vmap(f)(jnp.zeros((0, 6)), jnp.zeros((0, 2, 4, 6))), jnp.zeros((0, 2, 4, 6)))


@ways
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow), pytest.param("float16", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 1), (1, 1, 1), (17, 3, 5), (3, 7, 64), (1, 300, 257), (70, 65, 129)])
def test_case_30_tails_read_nothing(m, n, k, dtype, implementation):
    """NaN behind every edge of the operands: in a's next row and column, in b's, all of them next to the matrix in memory."""
    a, b = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(m, k), (k, n)]))
    pad = lambda x: jnp.pad(x, ((0, 1), (0, 1)), constant_values=jnp.nan)
    f = jax.jit(lambda a, b: jtops.matmul(a[:m, :k], b[:k, :n], activation="relu", implementation=implementation))
    truth = oracles.matmul(np.asarray(a, np.float64), np.asarray(b, np.float64), activation="relu")
    got = f(pad(a), pad(b))
    numerics.check(got, jtops.matmul(a, b, activation="relu", implementation="xla"), truth, key=("matmul",))
    # A row that is NaN spoils its own results alone.
    got = jtops.matmul(jnp.concatenate([a, jnp.full((1, k), jnp.nan, dtype)]), b, implementation=implementation)
    assert not jnp.isnan(got[:m]).any()
    assert jnp.isnan(got[m]).all()


@ways
def test_case_22_transposed_operands(implementation):
    a, b = normal(24, 40), normal(32, 24, seed=1)
    f = jax.jit(lambda a, b: jtops.matmul(a.T, b.T, implementation=implementation))
    want = lambda a, b: jnp.matmul(a.T, b.T, precision="highest")
    numerics.close(f(a, b), want(a, b))
    plain_sum = lambda f: jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(a, b)
    numerics.close(plain_sum(f), plain_sum(want))


# ---- batches


def results(f, *operands):
    """Types of what the kernels of `f` write."""
    text = lowered.text(f, *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in operands))
    return re.findall(lowered.CALL + r".*-> \(?(.*?)\)?\n", text)


def test_rows_that_share_b_are_one_product():
    """[..., m, k] @ [k, n] is [1, rows, n]; so is the gradient of b one sum over all rows, not one per batch element."""
    f = jtops.matmul
    assert results(f, (4, 6, 64, 32), (32, 16)) == ["tensor<1x1536x16xbf16>"]
    assert results(jax.grad(lambda a, b: f(a, b).sum(), 0), (4, 6, 64, 32), (32, 16)) == ["tensor<1x1536x32xbf16>"]
    assert results(jax.grad(lambda a, b: f(a, b).sum(), 1), (4, 2, 64, 32), (32, 16)) == ["tensor<1x32x16xbf16>"]
    assert results(jax.grad(lambda a, b: f(a, b).sum(), 1), (4, 6, 256, 32), (32, 16))[0].startswith("tensor<1x12x32x16xf32>")


def test_experts_share_b_among_their_own_rows():
    """A mapped b with fewer batch axes than a: one product for each b."""
    f = jax.vmap(jtops.matmul)
    assert results(f, (3, 5, 64, 32), (3, 32, 16)) == ["tensor<3x320x16xbf16>"]
    a, b = normal(3, 5, 4, 8), normal(3, 8, 6, seed=1)
    f = jax.vmap(lambda a, b: jtops.matmul(a, b, activation="relu", implementation="interpret"))
    plain = lambda a, b: jax.nn.relu(jnp.einsum("ebmk,ekn->ebmn", a, b, precision="highest"))
    numerics.close(f(a, b), plain(a, b))
    numerics.close(grads(f, a, b), grads(plain, a, b), 1e-4)


@pytest.mark.parametrize("axes", [(0, None, None, None), (None, 0, None, None), (None, None, 0, None), (None, None, None, 0),
                                  (0, None, 0, 0), (None, 0, 0, None)])  # fmt: skip
def test_any_operand_may_be_mapped(axes):
    """Also those that rows share, twice nested."""
    shapes = [(4, 3, 5), (5, 6), (6,), (4, 3, 6)]
    operands = [
        normal(*([2] if axis == 0 else []), *shape, seed=i) for i, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    ]
    f = lambda way: lambda a, b, bias, r: jtops.matmul(a, b, bias=bias, residual=r, activation="silu", implementation=way)
    got, want = (grads(jax.vmap(f(way), axes), *operands) for way in ("interpret", "xla"))
    numerics.close(got, want, 1e-4)


# ---- sums in parts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_split_k_is_right_and_has_the_same_bits(dtype, implementation):
    """Case 20, and case 32: sums of parts of k are float32, and added in one order."""
    a, b, bias = normal(8, 2048, dtype=dtype), normal(2048, 8, seed=1, dtype=dtype), normal(8, seed=2)
    f = jax.jit(lambda *x: jtops.matmul(*x[:2], bias=x[2], activation="gelu", implementation=implementation))
    assert "tensor<1x4x8x8xf32>" in lowered.text(jtops.matmul, a, b)
    numerics.close(f(a, b, bias), oracles.matmul(*(np.asarray(x, np.float64) for x in (a, b, bias)), activation="gelu"), 1e-2)
    first = f(a, b, bias), grads(f, a, b, bias)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, (f(a, b, bias), grads(f, a, b, bias)), first)


# ---- precision and dtypes


@ways
def test_case_31_float32_is_float32(implementation):
    a, b = jnp.full((16, 64), 1 + 2.0**-12), jnp.ones((64, 16))
    f = lambda **kw: jtops.matmul(a, b, implementation=implementation, **kw)
    np.testing.assert_array_equal(f(), 64.015625)
    np.testing.assert_array_equal(f(precision="highest"), 64.015625)
    np.testing.assert_allclose(f(precision="default"), 64.015625, rtol=1e-3)
    np.testing.assert_array_equal(jtops.matmul(a, b.astype(jnp.bfloat16), implementation=implementation), 64.015625)


def test_precision_reaches_the_kernel():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    asked = lambda f: [set(re.findall(r"inputPrecision = (\w+)", k.triton_kernel.asm["ttir"])) for k in lowered.kernels(f, x, x)]
    gradients = lambda **kw: jax.grad(lambda a, b: jtops.matmul(a, b, **kw).sum(), (0, 1))
    assert asked(jtops.matmul) == [{"tf32x3"}]
    assert asked(gradients()) == [{"tf32x3"}] * 2
    assert asked(gradients(precision="default")) == [{"tf32"}] * 2
    assert asked(lambda a, b: jtops.matmul(a, b, precision=jax.lax.Precision.HIGHEST)) == [{"tf32x3"}]
    with jax.default_matmul_precision("tensorfloat32"):
        assert asked(jtops.matmul) == [{"tf32"}]


@ways
def test_case_32_sums_are_float32(implementation):
    ones = jnp.ones((1, 4099), jnp.bfloat16)
    f = lambda *x, **kw: jtops.matmul(*x, implementation=implementation, **kw)
    assert f(ones, ones.T, preferred_element_type=jnp.float32) == 4099
    hundreds = jnp.full((16, 64), 100, jnp.float16)  # the sum is beyond float16, what follows it is not
    np.testing.assert_array_equal(f(hundreds, hundreds.T, activation="sigmoid"), 1.0)
    np.testing.assert_array_equal(f(hundreds, hundreds.T, bias=jnp.full(16, -630000.0)), jnp.full((16, 16), 10000, jnp.float16))


@ways
@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("asked", ["bfloat16", "float16", "float32"])
def test_preferred_element_type(given, asked, implementation):
    a, b = normal(5, 24, dtype=given), normal(24, 7, seed=1, dtype=given)
    f = lambda a, b: jtops.matmul(a, b, activation="gelu", preferred_element_type=asked, implementation=implementation)
    got, plain = f(a, b), jtops.matmul(a, b, activation="gelu", preferred_element_type=asked, implementation="xla")
    assert got.dtype == asked
    numerics.check(
        got, plain, oracles.matmul(np.asarray(a, np.float64), np.asarray(b, np.float64), activation="gelu"), key=("matmul",)
    )
    da, db = grads(f, a, b)
    assert (da.dtype, db.dtype) == (a.dtype, b.dtype)


@ways
def test_small_float32_cotangents_of_float16_survive(implementation):
    """A mean's cotangent lies below what float16 holds; the gradient does not."""
    a, b = jnp.ones((8, 16), jnp.float16), jnp.ones((16, 32), jnp.float16)
    f = lambda b: (jtops.matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation) * 1.01e-8).sum() * 2.0**20
    scaled = lambda b: (jtops.matmul(a, b, preferred_element_type=jnp.float32, implementation=implementation) * 1.01e-8).sum()
    np.testing.assert_allclose(jax.grad(f)(b), 8 * 1.01e-8 * 2.0**20, rtol=1e-3)
    many = jnp.ones((2**12, 16), jnp.float16)
    g = jax.grad(lambda b: (jtops.matmul(many, b, preferred_element_type=jnp.float32, implementation=implementation) * 1e-8).sum())(
        b
    )
    np.testing.assert_allclose(g.astype(jnp.float32), 2**12 * 1e-8, rtol=2e-2)
    assert jax.grad(scaled)(b).dtype == jnp.float16


@ways
def test_mixed_dtypes_promote(implementation):
    f = lambda a, b, **kw: jtops.matmul(normal(4, 8, dtype=a), normal(8, 4, dtype=b), implementation=implementation, **kw)
    for a, b in [("bfloat16", "float32"), ("bfloat16", "float16"), ("float16", "float32")]:
        assert f(a, b).dtype == jnp.float32
    assert f("bfloat16", "bfloat16", bias=jnp.ones(4), residual=jnp.ones((4, 4))).dtype == jnp.bfloat16


@ways
def test_integers_in_bfloat16_are_exact(implementation):
    """Case 50."""
    a, b = (jnp.asarray(np.random.default_rng(i).integers(-2, 3, (16, 16)), jnp.bfloat16) for i in range(2))
    np.testing.assert_array_equal(
        jtops.matmul(a, b, implementation=implementation).astype(jnp.float32), np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    )


# ---- activations at the edges


@ways
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_exact", "silu", "sigmoid", "tanh"])
def test_case_33_activations_far_out(activation, implementation):
    """Values and derivatives where exp, tanh and powers overflow, and near 0; NaN stays NaN."""
    z = np.array([0.0, 1e-6, 1e-3, 0.2499, 0.2501, 1, 8, 11, 13.3, 15, 40, 100, 1e5, 1e20, 1e30])
    z = np.concatenate([-z[::-1], z[1:]])
    f = lambda z: jtops.matmul(jnp.ones((1, 1)), z[None], activation=activation, implementation=implementation)[0]
    with np.errstate(all="ignore"):
        near = np.clip(z, -100, 100)  # beyond, every activation is 0, 1 or the identity
        value, slope = oracles.ACTIVATIONS[activation](near)
        value = np.where(np.abs(z) > 100, value / near * z if "elu" in activation or activation == "silu" else value, value)
    got = f(jnp.asarray(z, jnp.float32))
    np.testing.assert_allclose(got, value, rtol=2e-6, atol=2e-6)
    if implementation == "interpret":  # jax.nn's own derivatives are NaN at 1e30
        np.testing.assert_allclose(jax.grad(lambda z: f(z).sum())(jnp.asarray(z, jnp.float32)), slope, atol=2e-6)
    assert jnp.isnan(f(jnp.full(3, jnp.nan))).all()


@ways
def test_tanh_near_zero_is_relative(implementation):
    z = jnp.asarray([1e-6, 1e-4, 1e-2, 0.1, 0.24, 0.26], jnp.float32)
    got = jtops.matmul(jnp.ones((1, 1)), z[None], activation="tanh", implementation=implementation)[0]
    np.testing.assert_allclose(got, np.tanh(np.asarray(z, np.float64)), rtol=5e-7)


# ---- tiling


@pytest.mark.parametrize(
    "config", [TINY, jtops.Config(BLOCK_M=16, BLOCK_N=128, BLOCK_K=32), jtops.Config(BLOCK_M=64, BLOCK_N=16, BLOCK_K=16)]
)
def test_any_tiling_gives_the_same_values(config):
    """Many tiles, so that grouped numbering has whole and cut groups; the epilogue whole and in halves."""
    a, b, residual = normal(150, 40), normal(40, 140, seed=1), normal(150, 140, seed=2)
    f = lambda **kw: lambda *x: jtops.matmul(x[0], x[1], residual=x[2], activation="silu", **kw)
    numerics.close(f(implementation="interpret", config=config)(a, b, residual), f(implementation="xla")(a, b, residual))


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_tiles_fit_every_target(target, dtype):
    for shape in [(512, 512, 512), (1, 1, 16), (16, 4096, 512), (4096, 16, 64)]:
        m, n, k = shape
        operands = [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k, n))]
        platform = "rocm" if target.startswith("gfx") else "cuda"
        for kernel in lowered.kernels(jtops.matmul, *operands, target=target, platform=platform):
            assert kernel.shared_bytes <= jtops.core.target.Target.parse(target).max_shared_bytes


def test_grid_is_one_dimensional():
    """Case 18: 70000 batch elements."""
    a, b = jax.ShapeDtypeStruct((70000, 16, 16), jnp.bfloat16), jax.ShapeDtypeStruct((70000, 16, 16), jnp.bfloat16)
    assert "tensor<70000x16x16xbf16>" in lowered.text(jtops.matmul, a, b)


# ---- malformed calls


ones, mm = jnp.ones, jtops.matmul
A, B = ones((2, 3)), ones((3, 4))


@pytest.mark.parametrize(
    ("f", "error", "match"),
    [
        (lambda: mm(A, ones((4, 5))), ValueError, r"axis k is 3 elsewhere but 4 in b; got a \(2, 3\), b \(4, 5\)"),
        (lambda: mm(ones(()), ones((4, 5))), ValueError, r"a must have shape \[..., m, k\]; got \(\)"),
        (lambda: mm(A, 1.0), ValueError, r"b must have shape \[..., k, n\]; got \(\)"),
        (lambda: mm(ones((2, 2, 3)), ones((3, 3, 4))), ValueError, r"batch axes must broadcast together; got a \(2,\), b \(3,\)"),
        (lambda: mm(A, B, bias=ones(3)), ValueError, "axis n is 4 elsewhere but 3 in bias"),
        (lambda: mm(A, B, bias=ones((1, 4))), ValueError, r"bias must have shape \[n\]"),
        (lambda: mm(A, ones(3), bias=ones(1)), ValueError, "bias goes along axis n, which a one-dim"),
        (lambda: mm(A, B, residual=ones(4)), ValueError, r"result's shape \(2, 4\); got \(4,\)"),
        (lambda: mm(A, B, activation="gleu"), ValueError, "'gleu'. Did you mean 'gelu'?"),
        (lambda: mm(A, B, activation=jax.nn.silu), ValueError, "Did you mean 'silu'?"),
        (lambda: mm(A, B, precision="exact"), ValueError, "precision must be"),
        (lambda: mm(ones((2, 3), int), B), TypeError, r"a must have a floating dtype; got int32 \(2, 3\).*astype"),
        (lambda: mm(A, ones((3, 4), complex)), TypeError, "b must have a floating dtype; got complex64"),
        (lambda: mm(A, B, preferred_element_type=int), TypeError, "must be a floating dtype; got int32"),
        (lambda: mm(A, B, preferred_element_type="x"), TypeError, "must be a dtype or None; got 'x'"),
        (lambda: mm("a", B), TypeError, "a must be an array; got 'a'"),
        (lambda: mm(A, B, config=jtops.Config(BLOCK_M=16)), ValueError, "BLOCK_K, BLOCK_M, BLOCK_N"),
    ],
)  # fmt: skip
def test_malformed_calls(f, error, match):
    with pytest.raises(error, match=match):
        f()
    with pytest.raises(error, match=match):
        jax.eval_shape(f)


def test_float64_results_need_xla():
    with jax.enable_x64(True):
        a = jnp.ones((2, 2), jnp.float32)
        assert jtops.matmul(a, a, preferred_element_type="float64").dtype == jnp.float64
        with pytest.raises(jtops.UnsupportedError, match=r'float64.*implementation="xla"'):
            jtops.matmul(a, a, preferred_element_type="float64", implementation="interpret")
