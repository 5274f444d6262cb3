"""Flax computes calls that no op serves, on CPU and GPU alike; it says so, and is refused where one asks for kernels alone."""

import itertools

import flax.linen as fnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as fnnx

import jtops
import jtops.linen as nn
from jtops import nnx

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 8)), jnp.float32)


def attention(module, heads=2, features=8, **options):
    return module.MultiHeadAttention(heads, 8, features, decode=False, rngs=fnnx.Rngs(0), **options)


# the layer of a module, keywords of its call, the reason
UNSERVED = {
    "head dim": (lambda m: attention(m, 1, 512), {}, "no kernel for head dims above 256"),
    "mask of a norm": (lambda m: m.LayerNorm(8, rngs=fnnx.Rngs(0)), {"mask": X > 0}, "a mask is given"),
    "dropout": (lambda m: attention(m, dropout_rate=0.5), {"deterministic": False}, "dropout is active"),
    "dot_general": (lambda m: m.Linear(8, 4, rngs=fnnx.Rngs(0), dot_general=jax.lax.dot_general), {}, "a dot_general"),
}


@pytest.mark.parametrize(("make", "options", "reason"), UNSERVED.values(), ids=UNSERVED)
def test_flax_computes_it(make, options, reason):
    """Cases 102, 103 and 116: the same values as Flax's, a line of explain for CPU and for a GPU, an error if one asks for it."""
    given = lambda: options | ({"rngs": fnnx.Rngs(dropout=1)} if "deterministic" in options else {})
    layer, flax = make(nnx), make(fnnx)
    call = lambda x: layer(x, **given())
    want = np.asarray(flax(X, **given()), np.complex64)
    np.testing.assert_allclose(np.asarray(call(X), np.complex64), want, rtol=1e-5, atol=1e-5)
    flaxs = lambda: [(launch.name, launch.reason) for launch in jtops.explain(call, X) if "Flax's own code" in launch.reason]
    said = flaxs()
    assert any(reason.replace("_", " ") in why for _, why in said)
    with jtops.config.target("sm_90"):
        assert flaxs() == said
    with jtops.config.flax_fallback("error"), pytest.raises(jtops.UnsupportedError, match=f"serves this call .*{reason}"):
        call(X)
    with jtops.config.flax_fallback("allow"):
        call(X)


def test_explain_of_a_jitted_layer():
    """A function that was traced before says the same."""
    layer = attention(nnx, 1, 512)
    call = jax.jit(lambda x: layer(x))
    call(X)
    assert any("head dims above 256" in launch.reason for launch in jtops.explain(call, X))


def test_linen_attention_of_complex_numbers():
    """Case 116: Flax's code for what no op takes."""
    x = X.astype(jnp.complex64)
    layers = [m.MultiHeadDotProductAttention(num_heads=2) for m in (nn, fnn)]
    got, want = (layer.apply(layer.init(jax.random.key(0), x), x) for layer in layers)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_kernels_alone():
    """Where every call is served, the setting changes nothing."""
    with jtops.config.flax_fallback("error"):
        x = nnx.LayerNorm(8, rngs=fnnx.Rngs(0))(X)
        assert attention(nnx)(x, is_causal=True).shape == X.shape
        assert attention(nnx)(x, mask=jnp.ones((2, 1, 4, 4), bool)).shape == X.shape


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_norms_of_8_bits(dtype):
    """Case 102: an op serves them on CPU and GPU, which compute in float32 and round once; Flax's own code refuses them."""
    short = X.astype(dtype)
    layer, linen = nnx.RMSNorm(8, dtype=dtype, rngs=fnnx.Rngs(0)), nn.RMSNorm(dtype=dtype)
    want = jtops.rms_norm(short.astype(jnp.float32)).astype(dtype)
    np.testing.assert_array_equal(np.asarray(layer(X), np.float32), np.asarray(want, np.float32))
    apply = lambda x: linen.apply(linen.init(jax.random.key(0), x), x)
    np.testing.assert_array_equal(np.asarray(apply(short), np.float32), np.asarray(want, np.float32))
    with jtops.config.target("sm_90"):
        assert [launch.kernel is not None for launch in jtops.explain(layer, X)] == [True]


def test_names():
    """Case 107: what completion shows is what there is to use."""
    assert set(dir(jtops)) == {*jtops.__all__, "__version__"}
    assert not [name for module in (nnx, nn) for name in dir(module) if name.startswith("_")]


@pytest.mark.parametrize(
    "setting", [(jax.numpy_dtype_promotion, "strict"), (jax.numpy_rank_promotion, "raise")], ids=["dtypes", "ranks"]
)
def test_settings_that_flax_takes(setting):
    """Under a strict setting our layers take what Flax's take; some of bfloat16 Flax's own refuse."""
    x16 = X.astype(jnp.bfloat16)
    calls = [
        lambda m, x, **options: m.LayerNorm(8, rngs=fnnx.Rngs(0), **options)(x),
        lambda m, x, **options: m.RMSNorm(8, rngs=fnnx.Rngs(0), **options)(x),
        lambda m, x, **options: m.Linear(8, 4, rngs=fnnx.Rngs(0), **options)(x),
        lambda m, x, **options: attention(m, **options)(x),
    ]
    taken = 0
    with setting[0](setting[1]):
        for call, (x, options) in itertools.product(calls, [(X, {}), (x16, {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16})]):
            try:
                want = call(fnnx, x, **options)
            except ValueError:  # what JAX raises for dtypes that do not promote, and for ranks
                continue
            assert call(nnx, x, **options).dtype == want.dtype
            taken += 1
    assert taken >= 5
