"""Which calls of Flax's layers an op serves, rule by rule, and which reason stands where none does; Flax itself is not asked."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jtops import _layers
from tests.layers import ops_in

F32, BF16, F16, E4M3 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn
ATTENTION = nnx.dot_product_attention


def norm(**changes):
    return SimpleNamespace(
        **{"axis_name": None, "reduction_axes": -1, "feature_axes": -1, "epsilon": 1e-6, "dtype": None} | changes
    )


@pytest.mark.parametrize(
    ("layer", "x", "mask", "parameters", "reason"),
    [
        (norm(), (3, 4), None, (F32, F32), None),
        (norm(reduction_axes=(1,), feature_axes=[1]), (3, 4), None, (), None),
        (norm(reduction_axes=(-1, 1)), (3, 4), None, (), None),  # one axis, said twice
        (norm(), (), None, (), "no axis"),
        (norm(), (3, 4), True, (), "mask"),
        (norm(axis_name="batch"), (3, 4), None, (), "axis_name"),
        (norm(reduction_axes=0), (3, 4), None, (), "last one"),
        (norm(reduction_axes=(0, 1)), (3, 4), None, (), "last one"),
        (norm(feature_axes=(0,)), (3, 4), None, (), "last one"),
        (norm(feature_axes=-2), (3, 4), None, (), "last one"),
    ],
)
def test_norms(layer, x, mask, parameters, reason):
    got = _layers.unserved_norm(layer, jnp.ones(x), mask, *parameters)
    assert got is None if reason is None else reason in got


def test_dtypes_of_norms():
    """Those that all operands promote to count; 8 bits do as float32, and no dtype asked for narrows nothing."""
    why = lambda x, *parameters, dtype=None: _layers.unserved_norm(norm(dtype=dtype), jnp.ones((2, 4), x), None, *parameters)
    for x, p, dtype in itertools.product((F32, BF16, F16, E4M3), (F32, BF16), (None, F16, E4M3)):
        assert why(x, p, dtype=dtype) is None
    assert "complex64" in why(jnp.complex64, F32)
    with jax.enable_x64(True):
        assert "float64" in why(jnp.float64)
        assert "float64" in why(F32, jnp.float64)
        assert "float64" in why(F32, dtype=jnp.float64)


def test_a_traced_epsilon():
    seen = []
    jax.jit(lambda e: seen.append(_layers.unserved_norm(norm(epsilon=e), jnp.ones((2, 4)), None)))(1e-6)
    assert seen == ["epsilon is traced"]


def test_norms_round_once():
    """Neither the input nor the result passes through what is shorter than both."""
    asked = []
    op = lambda x, *parameters, epsilon: asked.append([p.dtype for p in (x, *parameters) if p is not None]) or x
    for x, p, dtype, want in [
        (BF16, F32, F32, [F32, F32]),
        (F32, BF16, BF16, [F32, BF16]),
        (E4M3, E4M3, BF16, [F32, F32]),
        (BF16, None, BF16, [BF16]),
        (F16, F32, BF16, [F32, F32]),
    ]:
        scale = None if p is None else jnp.ones(4, p)
        assert _layers.normalize(op, jnp.ones((2, 4), x), scale, epsilon=1e-6, dtype=dtype).dtype == dtype
        assert asked.pop() == [jnp.dtype(d) for d in want]


PRODUCTS = [  # shapes, dimension numbers, by matmul
    ((3, 4), (4, 5), (((1,), (0,)), ((), ())), True),
    ((2, 3, 4), (4, 5, 6), (((2,), (0,)), ((), ())), True),
    ((2, 3, 4), (3, 4, 5), (((1, 2), (0, 1)), ((), ())), True),
    ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,))), True),
    ((2, 3, 4), (3, 4, 5), (((2, 1), (1, 0)), ((), ())), False),  # summed in another order
    ((2, 4, 3), (3, 4, 5), (((2, 1), (0, 1)), ((), ())), False),
    ((3, 4), (5, 4), (((1,), (1,)), ((), ())), False),
    ((4, 3), (4, 5), (((0,), (0,)), ((), ())), False),
    ((2, 3, 4), (2, 3, 4, 5), (((2,), (2,)), ((0, 1), (0, 1))), True),
    ((2, 3, 4), (3, 2, 4, 5), (((2,), (2,)), ((0, 1), (1, 0))), False),  # batch axes in another order
    ((3, 2, 4), (2, 4, 5), (((2,), (1,)), ((1,), (0,))), False),  # a batch axis that does not lead
    ((3,), (4,), (((), ()), ((), ())), False),  # nothing is summed
]


@pytest.mark.parametrize(("a", "b", "numbers", "served"), PRODUCTS)
def test_products(a, b, numbers, served):
    """As jax.lax has them, in shape and value."""
    a, b = (jnp.asarray(np.random.default_rng(i).normal(size=shape), F32) for i, shape in enumerate((a, b)))
    f = lambda a, b: _layers.dot_general(a, b, numbers)
    assert ops_in(f, a, b) == ({"matmul"} if served else set())
    np.testing.assert_allclose(f(a, b), jax.lax.dot_general(a, b, numbers, precision="highest"), rtol=1e-5, atol=1e-5)


def test_dtypes_and_precisions_of_products():
    numbers = (((1,), (0,)), ((), ()))

    def by(a, b, **more):
        return ops_in(lambda a, b: _layers.dot_general(a, b, numbers, **more), jnp.ones((3, 4), a), jnp.ones((4, 5), b))

    for dtype in (F32, BF16, F16):
        assert by(dtype, dtype, precision="highest") == {"matmul"}
    for a, b in ((F32, BF16), (jnp.int32, jnp.int32), (jnp.complex64, jnp.complex64)):
        assert by(a, b) == set()
    assert by(F32, F32, precision=jax.lax.Precision.HIGH) == {"matmul"}
    assert by(F32, F32, precision=("highest", "default")) == set()


def test_a_bias_of_another_dtype_is_added_after():
    x, kernel = jnp.ones((3, 4), BF16), jnp.ones((4, 5), BF16)
    y = _layers.linear(x, kernel, jnp.full(5, 2.0**-12, F32), None)
    assert y.dtype == F32
    np.testing.assert_array_equal(y, 4 + 2.0**-12)
    assert ops_in(lambda x: _layers.linear(x, kernel, jnp.ones(5, BF16), None), x) == {"matmul"}


def attended(q=F32, k=F32, v=F32, d=8, **options):
    """Whether an op computes it."""
    given = [jnp.ones((2, 4, 2, d), dtype) for dtype in (q, k, v)]
    promote = lambda xs, dtype: [x if dtype is None else x.astype(dtype) for x in xs]
    return ops_in(lambda *x: _layers.attend(ATTENTION, promote, *x, **options), *given) == {"flash_attention"}


def test_attention():
    rng = jax.random.key(0)
    assert attended()
    assert attended(d=256)
    assert attended(is_causal=False, precision="highest", dropout_rng=rng, broadcast_dropout=False)
    assert attended(causal=True)
    assert attended(dropout_rate=0.5, deterministic=True)
    assert attended(BF16, BF16, F32, dtype=BF16)
    assert not attended(d=264)
    assert attended(mask=jnp.ones((2, 1, 4, 4), bool), bias=jnp.ones((1, 2, 1, 4), BF16))
    assert not attended(bias=jnp.ones((2, 1, 4, 4), int))
    assert not attended(dropout_rate=0.5, deterministic=False, dropout_rng=rng)
    assert not attended(precision=("highest", "default"))


@pytest.mark.parametrize("by", ["op", "masked op", "Flax", "masked Flax"])
@pytest.mark.parametrize(("s", "t"), [(4, 4), (1, 6), (3, 5), (5, 3)])
def test_causal_attention_is_bottom_right(s, t, by):
    """The last query sees all keys; with a mask of one's own what both let through. To a query without a key Flax shows all."""
    q, k, v = (jnp.asarray(np.random.default_rng(i).normal(size=(2, n, 2, 8)), F32) for i, n in enumerate((s, t, t)))
    mask = jnp.arange(t) != 1 if "masked" in by else None
    bias = jnp.ones((1, 1, 1, t), int) if "Flax" in by else None  # which has no kernel
    f = lambda q: _layers.attend(ATTENTION, lambda xs, dtype: xs, q, k, v, causal=True, mask=mask, bias=bias)
    assert ops_in(f, q) == (set() if "Flax" in by else {"flash_attention"})
    seen = np.tril(np.ones((s, t), bool), t - s) & (np.ones(t, bool) if mask is None else np.asarray(mask))
    want = ATTENTION(q, k, v, mask=jnp.asarray(seen)[None, None])
    if by == "op":  # flash_attention's own rule
        want = jnp.where(seen.any(1)[None, :, None, None], want, 0)
    np.testing.assert_allclose(f(q), want, rtol=1e-4, atol=1e-5)
