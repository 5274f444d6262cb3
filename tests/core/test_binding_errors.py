"""What a caller gets to see who gives a kernel what it does not take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from tests.kernels import lowered

X = jnp.ones(16)


@triton.jit
def step_kernel(x_ptr, y_ptr, lr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * lr)


def step(*args, **more):
    return jtops.triton_call(*args, kernel=step_kernel, out_type=X, grid=1, N=16, **more)


ADVICE = r"\(An array is a pointer in a kernel, one without dims too: tl\.load\(p\) is its number\.\)"
MISTAKES = {
    "an array without dims": (
        lambda lr, **more: step(X, lr=lr, **more),
        jnp.float32(2),
        r"x_ptr: \*fp32, y_ptr: \*fp32, lr: \*fp32, N: 16 \(constexpr\)\. " + ADVICE,
        r"x_ptr: array float32\[16\], y_ptr: array float32\[16\], lr: array float32\[\], N: 16\. " + ADVICE,
    ),
    "the wrong order": (
        lambda x, **more: step(3, lr=x, **more),
        X,
        r"x_ptr: 3 \(i32\), y_ptr: \*fp32, lr: \*fp32",
        r"x_ptr: 3, y_ptr: array float32\[16\], lr: array float32\[16\]",
    ),
    "a list": (
        lambda x, **more: step(x, lr=[1.0, 2.0], **more),
        X,
        r"lr\[0\]: 1\.0 \(fp32\), lr\[1\]: 2\.0 \(fp32\), .*\(A tuple or list is a tuple in a kernel; jnp\.array makes an array",
        r"lr\[0\]: 1\.0, lr\[1\]: 2\.0, .*\(A tuple or list is a tuple in a kernel; jnp\.array makes an array",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_errors_show_what_each_parameter_was_given(name):
    """Cases 104 and 105: compiled and interpreted."""
    f, array, compiled, interpreted = MISTAKES[name]
    with pytest.raises(jtops.errors.KernelCompileError, match=compiled):
        lowered.kernels(f, array)
    with pytest.raises(Exception, match=interpreted):
        f(array, interpret=True).block_until_ready()


def test_an_operand_given_twice():
    """Case 115: by position and by keyword."""
    with pytest.raises(TypeError, match=r"Given by position and by keyword: x_ptr\."):
        step(X, 2.0, x_ptr=X)
    with pytest.raises(TypeError, match=r"Given by position and by keyword: x_ptr, lr\."):
        step(X, X, X, x_ptr=X, lr=3.0)


def test_aliases_and_refs():
    """Case 115: the Ref is what is wrong, not the output's number."""
    f = lambda out: jtops.triton_call(
        jax.new_ref(X), lr=1.0, kernel=step_kernel, out_type=out, grid=1, N=16, input_output_aliases={0: 0}, interpret=True
    )
    for out in ((), X):
        with pytest.raises(ValueError, match="input_output_aliases cannot be combined with Ref operands"):
            f(out)


def test_a_traced_causal():
    """Case 105."""
    q = jnp.ones((1, 8, 1, 8))
    with pytest.raises(ValueError, match=r'causal must be False, True, "top_left" or "bottom_right"; got .*Tracer'):
        jax.jit(lambda causal: jtops.flash_attention(q, q, q, causal=causal))(True)
    np.testing.assert_array_equal(jtops.flash_attention(q, q, q, causal=np.True_), jtops.flash_attention(q, q, q, causal=True))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_products_of_8_bits(dtype):
    """Case 105: as jax.numpy.matmul, where no kernel has to run; else an error that says so."""
    a, b = (jnp.asarray(np.random.default_rng(i).integers(-4, 5, (8, 8)), dtype) for i in (0, 1))
    wide = {"preferred_element_type": jnp.float32}
    want = jnp.matmul(a, b, **wide)
    np.testing.assert_array_equal(jtops.matmul(a, b, **wide), want)
    np.testing.assert_array_equal(jtops.gated_linear_unit(a, b, b, activation=None, **wide), want * want)
    with pytest.raises(jtops.UnsupportedError, match=f"matmul: no kernel for dtype {dtype}"):
        jtops.matmul(a, b, implementation="interpret", **wide)


@triton.jit
def described_kernel(desc, y_ptr):
    i = tl.arange(0, 16)
    tl.store(y_ptr + i, desc.load([0]))


def test_rounding_by_a_descriptor():
    """Case 115: what lies 13 bits lower is rounded off, to nearest even; what is not finite stays."""
    ulp = 2.0**-10
    given = np.ones(16, np.float32)
    given[:8] = [1 + ulp / 4, 1 + ulp / 2, 1 + 3 * ulp / 2, 1 + 3 * ulp / 4, -1 - ulp / 4, np.inf, -np.inf, np.nan]
    want = np.ones(16, np.float32)
    want[:8] = [1, 1, 1 + 2 * ulp, 1 + ulp, -1, np.inf, -np.inf, np.nan]
    for rounded, expected in ((True, want), (False, given)):
        x = jtops.TensorDescriptor.from_array(jnp.asarray(given), (16,), round_f32_to_tf32=rounded)
        got = jtops.triton_call(x, kernel=described_kernel, out_type=X, grid=1, interpret=True)
        np.testing.assert_array_equal(got, expected)
