"""gated_linear_unit beyond its SPEC: shapes, batches, sums in parts, activations far out, dtypes, launches, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles
from tests.kernels import lowered

ways = pytest.mark.parametrize("implementation", [None, "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
KERNELS = pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def plain(x, w_gate, w_up, activation=jax.nn.silu):
    return activation(jnp.matmul(x, w_gate, precision="highest")) * jnp.matmul(x, w_up, precision="highest")


def grads(f, *operands):
    """Of a sum with weights that no symmetry hides behind."""
    loss = lambda *x: (f(*x).astype(jnp.float32) * jnp.cos(jnp.arange(f(*x).size).reshape(f(*x).shape))).sum()
    return jax.jit(jax.grad(loss, tuple(range(len(operands)))))(*operands)


# ---- shapes and batches


@ways
@pytest.mark.parametrize("x", [(5,), (1, 5), (4, 5), (2, 3, 4, 5), (0, 5), (2, 0, 5)])
def test_any_rows(x, implementation):
    operands = normal(*x), normal(5, 6, seed=1), normal(5, 6, seed=2)
    f = lambda *x: jtops.gated_linear_unit(*x, implementation=implementation)
    got, want = f(*operands), plain(*operands)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    numerics.close(got, want)
    numerics.close(grads(f, *operands), grads(plain, *operands), 1e-4)


@ways
@pytest.mark.parametrize(("k", "n"), [(0, 6), (5, 0), (0, 0)])
def test_empty_axes(k, n, implementation):
    """Case 17: a sum of nothing is 0, and so is the result."""
    operands = jnp.ones((4, k)), jnp.ones((k, n)), jnp.ones((k, n))
    f = lambda *x: jtops.gated_linear_unit(*x, implementation=implementation)
    np.testing.assert_array_equal(f(*operands), jnp.zeros((4, n)))
    for got, x in zip(grads(f, *operands), operands, strict=True):
        np.testing.assert_array_equal(got, jnp.zeros_like(x))


@KERNELS
@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, None, 0), (0, 0, 0)])
def test_any_operand_may_be_mapped(axes, implementation):
    """Also one weight and not the other: then they serve other rows."""
    shapes = [(4, 3, 5), (5, 6), (5, 6)]
    operands = [normal(*([2] if axis == 0 else []), *s, seed=i) for i, (s, axis) in enumerate(zip(shapes, axes, strict=True))]
    f = jax.vmap(lambda *x: jtops.gated_linear_unit(*x, implementation=implementation), axes)
    numerics.close(f(*operands), jax.vmap(plain, axes)(*operands), 1e-4)
    numerics.close(grads(f, *operands), grads(jax.vmap(plain, axes), *operands), 1e-4)


@ways
def test_gradients_per_example(implementation):
    """vmap of grad, with shared weights: a gradient of them for each example."""
    x, w_gate, w_up = normal(3, 4, 5), normal(5, 6, seed=1), normal(5, 6, seed=2)
    each = lambda f: jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)), (0, None, None))(x, w_gate, w_up)
    numerics.close(each(lambda *x: jtops.gated_linear_unit(*x, implementation=implementation)), each(plain), 1e-4)


# ---- what is launched


X, W = jax.ShapeDtypeStruct((4, 96, 64), jnp.bfloat16), jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)


def loss(x, w_gate, w_up):
    return jtops.gated_linear_unit(x, w_gate, w_up).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    ("wrt", "launched"),
    [
        ((0, 1, 2), {"vjp_dz", "vjp_dx", "vjp_dw_gate_dw_up"}),
        ((0,), {"vjp_dz", "vjp_dx"}),
        ((1,), {"vjp_dz", "vjp_dw_gate"}),
        ((2,), {"vjp_dz", "vjp_dw_up"}),
    ],
)
def test_launches(wrt, launched):
    """One forward; backward, one for the cotangents of both products, one for x and one for both weights: those asked for."""
    got = lowered.launches(jax.value_and_grad(loss, wrt), X, W, W)
    assert got == {f"jtops_gated_linear_unit_{name}": 1 for name in launched | {"fwd"}}


def test_rows_that_share_weights_are_one_product():
    assert "tensor<1x384x128xbf16>" in lowered.text(jtops.gated_linear_unit, X, W, W)
    assert "tensor<1x384x64xbf16>" in lowered.text(jax.grad(loss), X, W, W)


def test_gradients_save_only_operands():
    """Between forward and backward nothing is kept that has the size of the result."""
    x, w = jnp.ones((64, 16)), jnp.ones((16, 1024))
    _, pullback = jax.vjp(lambda *x: jtops.gated_linear_unit(*x, implementation="interpret"), x, w, w)
    assert max(leaf.size for leaf in jax.tree.leaves(pullback)) == w.size


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_chosen_tiles_fit_every_target(target, dtype):
    platform = "rocm" if target.startswith("gfx") else "cuda"
    for m, k, n in [(512, 512, 512), (1, 16, 1), (16, 512, 4096)]:
        operands = [jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (k, n), (k, n))]
        for kernel in lowered.kernels(jtops.gated_linear_unit, *operands, target=target, platform=platform):
            assert kernel.shared_bytes <= jtops.core.target.Target.parse(target).max_shared_bytes


# ---- numbers


@KERNELS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_split_k_is_right_and_has_the_same_bits(dtype, implementation):
    """Cases 20 and 32: both sums of parts of k are float32 and added in one order; forward, and again backward."""
    operands = normal(8, 1024, dtype=dtype), *((normal(1024, 8, seed=i) / 32).astype(dtype) for i in (1, 2))
    f = jax.jit(lambda *x: jtops.gated_linear_unit(*x, activation="gelu", implementation=implementation))
    assert lowered.text(jtops.gated_linear_unit, *operands).count("tensor<1x2x8x8xf32>") >= 2
    wide = [np.asarray(x, np.float64) for x in operands]
    numerics.close(f(*operands), oracles.gated_linear_unit(*wide, activation="gelu"), 2e-2)
    jax.tree.map(np.testing.assert_array_equal, (f(*operands), grads(f, *operands)), (f(*operands), grads(f, *operands)))


@ways
def test_case_33_gradients_are_not_swapped(implementation):
    """silu: gate = 1, up = 3, cotangent 1."""
    one, three = jnp.ones((1, 1)), jnp.full((1, 1), 3.0)
    f = lambda *x: jtops.gated_linear_unit(*x, implementation=implementation)[0, 0]
    _, dgate, dup = jax.grad(f, (0, 1, 2))(one, one, three)
    np.testing.assert_allclose(dgate, 2.783012, rtol=1e-6)
    np.testing.assert_allclose(dup, 0.731059, rtol=1e-6)


@ways
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact", "silu", "sigmoid", "tanh", "relu"])
def test_case_33_gates_far_out(activation, implementation):
    """Values and slopes where exp, tanh and powers overflow: never NaN."""
    gate = np.array([8, 11, 13.3, 15, 40, 100])
    gate = np.concatenate([-gate, gate])
    if implementation == "interpret":  # jax.nn's own slopes are NaN there
        gate = np.append(gate, [-1e20, 1e20])
    near = np.clip(gate, -100, 100)  # beyond, every activation is 0, 1 or the identity
    value, slope = oracles.ACTIVATIONS[activation](near)
    value = value * np.where(np.abs(value) > 1, gate / near, 1)
    f = lambda gate, up: jtops.gated_linear_unit(
        jnp.ones((1, 1)), gate[None], up, activation=activation, implementation=implementation
    )[0]
    operands = jnp.asarray(gate, jnp.float32), jnp.full((1, len(gate)), 2.0)
    np.testing.assert_allclose(f(*operands), 2 * value, rtol=2e-6, atol=2e-6)
    dgate, dup = jax.grad(lambda *x: f(*x).sum(), (0, 1))(*operands)
    np.testing.assert_allclose(dgate, 2 * slope, atol=4e-6)
    np.testing.assert_allclose(dup[0], value, rtol=2e-6, atol=2e-6)


@ways
def test_products_are_not_rounded_before_they_meet(implementation):
    """In float16 each product overflows or vanishes alone; together they are 1."""
    x = jnp.full((1, 4), 256.0, jnp.float16)
    large, small = jnp.full((4, 3), 256.0, jnp.float16), jnp.full((4, 3), 2.0**-24, jnp.float16)
    got = jtops.gated_linear_unit(x, large, small, activation=None, implementation=implementation)
    np.testing.assert_array_equal(got, jnp.full((1, 3), 16.0, jnp.float16))


@ways
def test_dtypes(implementation):
    f = lambda *dtypes, **kw: jtops.gated_linear_unit(
        *(normal(*s, dtype=d) for s, d in zip([(4, 8), (8, 3), (8, 3)], dtypes, strict=True)), implementation=implementation, **kw
    )
    assert f("bfloat16", "bfloat16", "bfloat16").dtype == jnp.bfloat16
    assert f("bfloat16", "float16", "bfloat16").dtype == jnp.float32
    assert f("bfloat16", "bfloat16", "float32").dtype == jnp.float32
    assert f("bfloat16", "bfloat16", "bfloat16", preferred_element_type="float32").dtype == jnp.float32
    operands = normal(4, 8, dtype="bfloat16"), normal(8, 3), normal(8, 3, dtype="float16")
    got = grads(lambda *x: jtops.gated_linear_unit(*x, implementation=implementation), *operands)
    assert [g.dtype for g in got] == [x.dtype for x in operands]


@ways
def test_small_float32_cotangents_of_float16_survive(implementation):
    """A mean's cotangent lies below what float16 holds; the gradient does not."""
    x, w = jnp.ones((2**10, 16), jnp.float16), jnp.full((16, 4), 1 / 16, jnp.float16)
    f = lambda w: jtops.gated_linear_unit(
        x, w, w, activation=None, preferred_element_type=jnp.float32, implementation=implementation
    )
    g = jax.grad(lambda w: (f(w) * 1e-8).sum())(w)
    np.testing.assert_allclose(g.astype(jnp.float32), 2 * 2**10 * 1e-8, rtol=2e-2)


def test_precision_reaches_every_kernel():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    f = lambda **kw: jax.grad(lambda *x: jtops.gated_linear_unit(*x, **kw).sum(), (0, 1, 2))
    for how, used in [({}, "tf32x3"), ({"precision": "default"}, "tf32")]:
        for kernel in lowered.kernels(f(**how), x, x, x):
            assert f"inputPrecision = {used}" in kernel.triton_kernel.asm["ttir"], kernel.name


@KERNELS
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 3, 5), (70, 65, 129)])
def test_case_30_tails_read_nothing(m, n, k, implementation):
    """NaN behind every edge of the operands."""
    operands = normal(m, k), normal(k, n, seed=1) / k**0.5, normal(k, n, seed=2) / k**0.5
    pad = lambda x: jnp.pad(x, ((0, 1), (0, 1)), constant_values=jnp.nan)
    cut = lambda x, a, b: jtops.gated_linear_unit(x[:m, :k], a[:k, :n], b[:k, :n], implementation=implementation)
    numerics.close(jax.jit(cut)(*map(pad, operands)), plain(*operands), 1e-4)


# ---- malformed calls


glu = jtops.gated_linear_unit
A, B = jnp.ones((2, 3)), jnp.ones((3, 4))


@pytest.mark.parametrize(
    ("f", "error", "match"),
    [
        (lambda: glu(A, jnp.ones((4, 5)), jnp.ones((4, 5))), ValueError, r"axis k is 3 elsewhere but 4 in w_gate; got x \(2, 3\)"),
        (lambda: glu(A, B, jnp.ones((3, 5))), ValueError, "axis n is 4 elsewhere but 5 in w_up"),
        (lambda: glu(A, B[None], B), ValueError, r"w_gate must have shape \[k, n\]; got \(1, 3, 4\)"),
        (lambda: glu(jnp.ones(()), B, B), ValueError, r"x must have shape \[..., m, k\]; got \(\)"),
        (lambda: glu(A, B, B, activation="swish"), ValueError, "activation must be None or one of .*'silu'"),
        (lambda: glu(A, B, B, activation=jax.nn.silu), ValueError, "Did you mean 'silu'?"),
        (lambda: glu(A, B, B, precision="exact"), ValueError, "precision must be"),
        (lambda: glu(A, B, B.astype(int)), TypeError, "w_up must have a floating dtype; got int32"),
        (lambda: glu(A, B, B, preferred_element_type=int), TypeError, "must be a floating dtype; got int32"),
        (lambda: glu(A, B, B, config=jtops.Config(BLOCK_M=16)), ValueError, "BLOCK_K, BLOCK_M, BLOCK_N"),
    ],
)
def test_malformed_calls(f, error, match):
    with pytest.raises(error, match=match):
        f()
    with pytest.raises(error, match=match):
        jax.eval_shape(f)


def test_float64_needs_xla():
    with jax.enable_x64(True):
        x = jnp.ones((2, 2), jnp.float64)
        assert glu(x, x, x).dtype == jnp.float64
        with pytest.raises(jtops.UnsupportedError, match=r'float64.*implementation="xla"'):
            glu(x, x, x, implementation="interpret")
