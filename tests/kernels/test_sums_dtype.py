"""Sums of what is short are float32 until their end: gradients of shared operands, of biases, of parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops.kernels._lib.device import activations
from jtops.kernels._lib.frame import local
from jtops.kernels._lib.frame.launch import Rows
from jtops.kernels._lib.product.backward import _dz_kernel
from tests import numerics
from tests.kernels import lowered

BF16 = jnp.bfloat16
ODD = 257  # of ones: no number of bfloat16, which has 256 and 258


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


# --------------------------------------------------------------------------------------------------------------- the frame


@pytest.mark.parametrize("rows", [Rows(1, 2), Rows(ODD, 2)])
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
def test_rows_are_summed_in_float32(rows, dtype):
    """2049 has no float16 either."""
    got = rows.sum(jnp.full((2 * ODD, 3), 7 + 2.0**-5, dtype))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.full((2, 3), ODD * (7 + 2.0**-5)))


def test_axes_that_were_spread_are_summed_in_float32():
    """The middle axis of three, which an operand lacks between two that it has."""
    got = local._restore(jnp.ones((2 * ODD * 3, 5), BF16), (2, 1, 3, 5), 3, (2, ODD, 3))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.full((2, 1, 3, 5), ODD))


def test_sums_of_float64_stay_float64():
    with jax.enable_x64(True):
        wide = jnp.full((4, 1), 1 + 2.0**-40, jnp.float64)
        assert Rows(1, 2).sum(wide).dtype == jnp.float64
        np.testing.assert_array_equal(Rows(1, 2).sum(wide), 2 + 2.0**-39)


# ------------------------------------------------------------------------------------------------------------------ matmul


def test_shared_operands_of_products_are_rounded_once():
    """Each of six, or three, batch elements gives 257: their sum has a nearest bfloat16 that 256s do not give."""
    f = functools.partial(jtops.matmul, implementation="interpret")
    grad = jax.jit(jax.grad(lambda a, b: f(a, b).astype(jnp.float32).sum(), (0, 1)))
    da, _ = grad(jnp.ones((1, 4, 2), BF16), jnp.ones((6, 2, ODD), BF16))
    np.testing.assert_array_equal(da.astype(jnp.float32), np.full(da.shape, 1544))
    _, db = grad(jnp.ones((3, 1, ODD, 2), BF16), jnp.ones((1, 2, 2, 4), BF16))
    np.testing.assert_array_equal(db.astype(jnp.float32), np.full(db.shape, 772))


def test_cotangents_below_float16_survive():
    """A float32 cotangent of float16 operands, as a mean's is, does not become 0; the gradient's sum is no subnormal."""
    a, b = jnp.full((64, 16), 64, jnp.float16), jnp.ones((16, 8), jnp.float16)
    f = lambda b: (jtops.matmul(a, b, preferred_element_type=jnp.float32, implementation="interpret") * 1e-8).sum()
    got = jax.jit(jax.grad(f))(b)
    assert got.dtype == jnp.float16
    np.testing.assert_allclose(got.astype(jnp.float32), 64 * 64 * 1e-8, rtol=2e-3)


def test_parts_of_k_do_not_overlap():
    """Each element of k is in one part, whatever blocks divide."""
    a, b = jnp.ones((3, 1300)), jnp.ones((1300, 5))
    f = jax.jit(lambda a, b: jtops.matmul(a, b, implementation="interpret"))
    assert "tensor<1x2x3x5xf32>" in f.lower(a, b).as_text()  # two parts
    np.testing.assert_array_equal(f(a, b), 1300)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_bias_sums_are_of_what_was_not_rounded(activation):
    """dbias is float32 to the last bits, beside dz in bfloat16."""
    m, n = 700, 16
    g, z = normal(m, n, dtype=BF16), None if activation is None else normal(m, n, seed=1, dtype=BF16)
    dz, dbias = jtops.triton_call(
        g_ptr=g, z_ptr=z, m=m, n=n, parts=1, rows_per_part=704, ACTIVATION=activation, BLOCK_M=16, BLOCK_N=16,
        kernel=_dz_kernel, grid=1, interpret=True,
        out_type=[jax.ShapeDtypeStruct((m, n), BF16), jax.ShapeDtypeStruct((n,), jnp.float32)],
    )  # fmt: skip
    terms = np.asarray(g, np.float64)
    if activation is not None:
        terms = terms * np.asarray(
            jax.vmap(jax.vmap(jax.grad(activations.FUNCTIONS[activation])))(z.astype(jnp.float32)), np.float64
        )
    np.testing.assert_allclose(dz.astype(jnp.float32), terms, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(dbias, terms.sum(0), atol=1e-6 * np.abs(terms).sum(0).max())


# ------------------------------------------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("axes", [((0, None), (0, 0)), ((0, 0), (0, None)), ((None, 0), (0, 0)), ((0, None), (None, 0))], ids=str)
def test_parameters_that_different_rows_share(axes):
    """Scale and bias mapped along one axis of a batch of two and along both: what is summed belongs to one row of either."""
    shape = lambda over: [size for size, axis in zip((2, 3), over, strict=True) if axis == 0]
    scale, bias = (normal(*shape(over), 24, seed=i) for i, over in enumerate(axes, 1))
    x, g = normal(2, 3, 5, 24), normal(2, 3, 5, 24, seed=3)

    def results(implementation):
        op = lambda x, scale, bias: jtops.layer_norm(x, scale, bias, implementation=implementation)
        inner = jax.vmap(op, (0, *(over[1] for over in axes)))
        y, pullback = jax.vjp(jax.vmap(inner, (0, *(over[0] for over in axes))), x, scale, bias)
        return y, pullback(g)

    numerics.close(results("interpret"), results("xla"), 1e-5)


@pytest.mark.parametrize("n", [64, 65536], ids=["whole", "long"])
def test_backward_of_norms_has_no_fused_multiply_add(n):
    """It would subtract a rounded mean from what was not rounded."""
    struct = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    f = jax.grad(lambda x, scale: jtops.layer_norm(x, scale).sum(), (0, 1))
    with jtops.config.target("sm_80"):  # without clusters, which hold longer rows
        kernels = [k for k in lowered.kernels(f, struct(4, n), struct(n), target="sm_80") if "forward" not in k.name]
    assert [k.name for k in kernels][: 1 if n == 64 else 2] == (["_backward_kernel"] if n == 64 else ["_sums_kernel", "_dx_kernel"])
    for kernel in kernels:
        assert "fma.rn.f32" not in kernel.binary, kernel.name


# --------------------------------------------------------------------------------------------------------------------- add


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (jnp.uint8(200), jnp.int8(100)),  # of int16
        (jnp.float16(1 + 2.0**-10), BF16(256)),  # of float32
        (jnp.int32(2**24 + 1), jnp.float16(0)),  # of float16, where it is infinite
        (jnp.uint16(65535), jnp.int16(-1)),
    ],
    ids=lambda x: str(x.dtype),
)
@pytest.mark.parametrize("shape", [(3,), ()])
def test_operands_are_added_in_the_results_dtype(x, y, shape):
    x, y = jnp.full((2, 3), x), jnp.full(shape, y)
    for a, b in ((x, y), (y, x)):
        got, want = jtops.add(a, b, implementation="interpret"), jnp.add(a, b)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
