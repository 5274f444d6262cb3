"""Attention's masks, padding, accuracy and errors: faults that people met elsewhere, and what SPEC's cases do not say."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles

ways = pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
attention = jtops.flash_attention


def in_test_all(value):
    return pytest.param(value, marks=pytest.mark.slow)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def qkv(s, t, h=1, d=16, g=None, dtype=jnp.float32, b=1):
    return (
        normal(b, s, h, d, dtype=dtype),
        normal(b, t, g or h, d, seed=1, dtype=dtype),
        normal(b, t, g or h, d, seed=2, dtype=dtype),
    )


def seen(s, t, implementation, b=1, **options):
    """The mean index of the keys that each query sees: with equal scores and v[j] = j, the output. 0 where there is none."""
    v = jnp.broadcast_to(jnp.arange(t, dtype=jnp.float32)[:, None, None], (b, t, 1, 16))
    q = jnp.zeros((b, s, 1, 16))
    out = attention(q, jnp.zeros_like(v), v, implementation=implementation, **options)
    np.testing.assert_array_equal(out, jnp.broadcast_to(out[..., :1], out.shape))
    return np.asarray(out[..., 0, 0])


def both(f, *operands):
    """Value and gradients, under jit."""
    return jax.jit(lambda *a: (f(*a), jax.grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).sum(), tuple(range(len(a))))(*a)))(
        *operands
    )


def near(got, want, tolerance):
    """Agreement relative to the largest element of all: gradients that cancel to nothing are noise of the size of the others."""
    size = max(float(jnp.max(jnp.abs(x.astype(jnp.float32)))) for x in jax.tree.leaves(want))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=tolerance, atol=tolerance * size), got, want
    )


# ---- Case 1: queries that see nothing


@ways
def test_case_1_dead_queries(implementation):
    ids = (jnp.array([[1, 1, 1, 1, 9, 9, 9, 9]]), jnp.ones((1, 8), int))
    np.testing.assert_allclose(seen(8, 8, implementation, segment_ids=ids)[0], [3.5] * 4 + [0] * 4, rtol=1e-6)


@ways
@pytest.mark.parametrize("dtype", ["float32", in_test_all("bfloat16"), in_test_all("float16")])
def test_case_1_dead_blocks(dtype, implementation):
    q, k, v = qkv(200, 200, d=64, dtype=dtype)
    ids = (jnp.where(jnp.arange(200) < 70, 1, 9)[None], jnp.ones((1, 200), int))
    f = functools.partial(attention, segment_ids=ids, implementation=implementation)
    out, (dq, dk, dv) = both(f, q, k, v)
    want, wants = both(
        functools.partial(attention, implementation="xla"), q[:, :70].astype(jnp.float32), *(x.astype(jnp.float32) for x in (k, v))
    )
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    numerics.close((out[:, :70], dq[:, :70], dk, dv), (want, *wants), tolerance)
    np.testing.assert_array_equal(out[:, 70:], jnp.zeros_like(out[:, 70:]))
    np.testing.assert_array_equal(dq[:, 70:], jnp.zeros_like(dq[:, 70:]))
    _, lse = f(q, k, v, return_lse=True)
    assert (lse[:, 70:] == -jnp.inf).all()
    assert jnp.isfinite(lse[:, :70]).all()


# ---- Case 3: masked scores far above the row's largest


@ways
@pytest.mark.parametrize("dtype", ["bfloat16", in_test_all("float32")])
def test_case_3_masked_scores_overflow(dtype, implementation):
    q, v = jnp.ones((1, 48, 1, 32), dtype), normal(1, 48, 1, 32, dtype=dtype)
    k = jnp.full((1, 48, 1, 32), 50, dtype).at[:, 0].set(0)
    loss = lambda implementation: lambda *a: attention(*a, causal=True, implementation=implementation).astype(jnp.float32).sum()
    out = attention(q, k, v, causal=True, implementation=implementation)
    numerics.close(out[0, 0], v[0, 0], 1e-6)
    got = jax.grad(loss(implementation), (0, 1, 2))(q, k, v)
    assert all(jnp.isfinite(g).all() for g in got)
    want = jax.grad(loss("xla"), (0, 1, 2))(*(x.astype(jnp.float32) for x in (q, k, v)))
    near(got, want, 1e-4 if dtype == "float32" else 5e-2)


# ---- Case 4: what lies in padding never leaks


@ways
@pytest.mark.parametrize("by", ["kv_lengths", "segment_ids"])
@pytest.mark.parametrize("poison", [np.nan, in_test_all(np.inf)])
def test_case_4_padding_never_leaks(poison, by, implementation):
    q, k, v = qkv(70, 70, d=32)
    inside = (jnp.arange(70) < 50)[None, :, None, None]
    options = (
        {"kv_lengths": jnp.array([50])} if by == "kv_lengths" else {"segment_ids": jnp.where(jnp.arange(70) < 50, 0, -1)[None]}
    )
    f = functools.partial(attention, implementation=implementation, **options)
    clean = both(f, q, jnp.where(inside, k, 0), jnp.where(inside, v, 0))
    out, (dq, dk, dv) = both(f, q, jnp.where(inside, k, poison), jnp.where(inside, v, poison))
    np.testing.assert_array_equal(out[:, :50], clean[0][:, :50])
    np.testing.assert_array_equal(dq[:, :50], clean[1][0][:, :50])
    for dx, want in ((dk, clean[1][1]), (dv, clean[1][2])):
        np.testing.assert_array_equal(dx, want)
        assert not np.asarray(dx[:, 50:]).any()


@ways
def test_case_4_padded_queries_never_leak(implementation):
    q, k, v = qkv(70, 70, d=32)
    inside = (jnp.arange(70) < 50)[None, :, None, None]
    f = functools.partial(attention, q_lengths=jnp.array([50]), implementation=implementation)
    loss = lambda *a: (jnp.where(inside, f(*a), 0) ** 2).sum()
    got = jax.grad(loss, (0, 1, 2))(jnp.where(inside, q, jnp.nan), k, v)
    numerics.close(got, jax.grad(loss, (0, 1, 2))(jnp.where(inside, q, 0), k, v), 1e-6)
    assert not np.asarray(f(jnp.where(inside, q, jnp.nan), k, v)[:, 50:]).any()


# ---- Case 5: lengths that fill no block, every call


@ways
@pytest.mark.parametrize(("s", "t", "d"), [(1, 1, 16), (2, 7, 16), (15, 17, 16), (130, 257, 16), (192, 192, 16), (33, 100, 80)])
def test_case_5_tails(s, t, d, implementation):
    q, k, v = qkv(s, t, d=d, h=2)
    calls = [both(functools.partial(attention, implementation=implementation), q, k, v) for _ in range(2)]
    want = both(functools.partial(attention, implementation="xla"), *(x.astype(jnp.float32) for x in (q, k, v)))
    near(calls[0], want, 1e-5)
    jax.tree.map(np.testing.assert_array_equal, calls[0], calls[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("b", "s", "h", "d", "dtype"), [(1, 192, 8, 16, "bfloat16"), (3, 1023, 4, 32, "float32"), (1, 4092, 2, 32, "float32")]
)
def test_case_5_same_bits_every_time(b, s, h, d, dtype):
    operands = qkv(s, s, h=h, d=d, b=b, dtype=dtype)
    f = jax.jit(lambda *a: both(functools.partial(attention, implementation="triton", deterministic=True), *a))
    first = f(*operands)
    for i in range(10):
        _ = jax.block_until_ready(jnp.full((64 * 2**20,), jnp.nan, jnp.float32) + i)  # what memory is used next holds NaN
        jax.tree.map(np.testing.assert_array_equal, f(*operands), first)
    want = both(functools.partial(attention, implementation="xla"), *(x.astype(jnp.float32) for x in operands))
    numerics.close(first, want, 2e-2 if dtype == "bfloat16" else 1e-4)


# ---- Case 7: where causality begins


@ways
@pytest.mark.parametrize(
    ("causal", "s", "t", "want"),
    [
        ("bottom_right", 2, 5, [1.5, 2.0]),
        ("bottom_right", 5, 2, [0, 0, 0, 0, 0.5]),
        (True, 2, 5, [0, 0.5]),
        ("top_left", 5, 2, [0, 0.5, 0.5, 0.5, 0.5]),
        ("bottom_right", 1, 100, [49.5]),
        (True, 1, 100, [0]),
    ],
)
def test_case_7_alignment(causal, s, t, want, implementation):
    np.testing.assert_allclose(seen(s, t, implementation, causal=causal)[0], want, rtol=1e-6)


@ways
def test_bottom_right_uses_each_batch_elements_lengths(implementation):
    lengths = {"q_lengths": jnp.array([2, 1]), "kv_lengths": jnp.array([5, 3])}
    got = seen(3, 6, implementation, b=2, causal="bottom_right", **lengths)
    np.testing.assert_allclose(got, [[1.5, 2.0, 0], [1.0, 0, 0]], rtol=1e-6)


# ---- Case 8: windows


@ways
@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"window": (2, 0)}, [0, 0.5, 1, 2, 3, 4]),
        ({"window": 1}, [0.5, 1, 2, 3, 4, 4.5]),
        ({"window": (None, 1)}, [0.5, 1, 1.5, 2, 2.5, 2.5]),
        ({"window": (1, None)}, [2.5, 2.5, 3, 3.5, 4, 4.5]),
        ({"window": (2, 9), "causal": True}, [0, 0.5, 1, 2, 3, 4]),
        ({"window": (99, None), "causal": True}, [0, 0.5, 1, 1.5, 2, 2.5]),
        ({"window": 0}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_case_8_windows(options, want, implementation):
    np.testing.assert_allclose(seen(6, 6, implementation, **options)[0], want, rtol=1e-6)


# ---- Case 10: segments and lengths


@ways
def test_case_10_segments_and_lengths(implementation):
    ids = jnp.array([[1, 1, 1, 2, 2, 2]])
    np.testing.assert_allclose(seen(6, 6, implementation, causal=True, segment_ids=ids)[0], [0, 0.5, 1, 3, 3.5, 4], rtol=1e-6)
    np.testing.assert_allclose(seen(6, 6, implementation, kv_lengths=jnp.array([3]))[0], [1.0] * 6, rtol=1e-6)
    np.testing.assert_allclose(seen(6, 6, implementation, q_lengths=jnp.array([2]))[0], [2.5, 2.5, 0, 0, 0, 0], rtol=1e-6)


@ways
def test_case_10_packed(implementation):
    q, k, v = qkv(300, 300, d=16)
    starts = [0, 1, 127, 128, 129, 255, 280, 300]
    ids = jnp.asarray(np.repeat([1, 2, 3, 4, 5, 6, -1], np.diff(starts)))[None]
    f = functools.partial(attention, segment_ids=ids, implementation=implementation)
    out, grads = both(f, q, k, v)
    for a, b in itertools.pairwise(starts[:-1]):
        part = slice(a, b)
        own, own_grads = both(functools.partial(attention, implementation="xla"), q[:, part], k[:, part], v[:, part])
        near((out[:, part], *(g[:, part] for g in grads)), (own, *own_grads), 1e-5)
    assert not np.asarray(out[:, 280:]).any()
    assert not any(np.asarray(g[:, 280:]).any() for g in grads)
    other = f(q, k.at[:, 129:255].multiply(3.0), v.at[:, 129:255].add(1.0))
    np.testing.assert_array_equal(other[:, :129], out[:, :129])
    np.testing.assert_array_equal(other[:, 255:], out[:, 255:])


# ---- Case 31: float32 is float32


@ways
def test_case_31_float32_accuracy(implementation):
    q = jnp.full((1, 16, 1, 64), 1 + 2.0**-12)
    k = normal(1, 32, 1, 64) * 8
    v = normal(1, 32, 1, 64, seed=1)
    truth = oracles.flash_attention(*(np.asarray(x, np.float64) for x in (q, k, v)))
    np.testing.assert_allclose(attention(q, k, v, implementation=implementation), truth, rtol=2e-5, atol=2e-5)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(attention(q, k, v, implementation=implementation), truth, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("ask", [{"precision": "default"}, {}], ids=["argument", "config"])
def test_less_precision_is_taken_where_asked_for(ask):
    q, k, v = qkv(256, 256, d=64)
    exact = attention(q, k, v)
    with jax.default_matmul_precision(None if ask else "tensorfloat32"):
        less = attention(q, k, v, **ask)
    assert not (less == exact).all()
    numerics.close(less, exact, 5e-3)


# ---- The rest


@ways
def test_lse_and_its_gradient(implementation):
    q, k, v = qkv(20, 30, h=4, g=2)
    f = lambda *a: attention(*a, return_lse=True, causal="bottom_right", implementation=implementation)
    out, lse = f(q, k, v)
    assert lse.shape == (1, 20, 4)
    assert lse.dtype == jnp.float32
    mask = jnp.arange(30)[None, :] <= jnp.arange(20)[:, None] + 10
    logits = lambda q, k: jnp.einsum("bshd,bthd->bhst", q, jnp.repeat(k, 2, 2), precision="highest") / 4
    want = lambda q, k: jax.nn.logsumexp(jnp.where(mask, logits(q, k), -jnp.inf), -1).swapaxes(1, 2)
    numerics.close(lse, want(q, k), 1e-5)
    loss = lambda *a: jnp.sin(f(*a)[1]).sum()
    got = jax.grad(loss, (0, 1, 2))(q, k, v)
    numerics.close(got[:2], jax.grad(lambda q, k: jnp.sin(want(q, k)).sum(), (0, 1))(q, k), 1e-4)
    assert not np.asarray(got[2]).any()
    assert out.shape == q.shape


@ways
def test_batch_axes_broadcast(implementation):
    """Any number of batch axes, shared ones not copied; lengths and ids broadcast with them."""
    q, k, v = normal(3, 2, 9, 2, 16), normal(2, 11, 2, 16, seed=1), normal(1, 11, 2, 16, seed=2)
    lengths = jnp.array([11, 5])
    f = functools.partial(attention, implementation=implementation)
    out = f(q, k, v, kv_lengths=lengths)
    for i in range(3):
        for j in range(2):
            alone = attention(q[i, j], k[j], v[0], kv_lengths=lengths[j], implementation="xla")
            numerics.close(out[i, j], alone, 1e-5)
    got = jax.grad(lambda v: (f(q, k, v, kv_lengths=lengths) ** 2).sum())(v)
    numerics.close(got, jax.grad(lambda v: (attention(q, k, v, kv_lengths=lengths, implementation="xla") ** 2).sum())(v), 1e-4)


@ways
def test_agrees_with_jax_nn(implementation):
    q, k, v = qkv(24, 24, h=4, g=2, b=2)
    for options, theirs in [({"causal": True}, {"is_causal": True}), ({"window": (3, 2)}, {"local_window_size": (3, 2)})]:
        with jax.default_matmul_precision("highest"):
            want = jax.nn.dot_product_attention(q, k, v, **theirs)
        numerics.close(attention(q, k, v, implementation=implementation, **options), want, 1e-5)


def test_nan_past_a_later_shards_length_reaches_no_gradient():
    """Queries in parts on devices: a shard's own index of a query is not the one that lengths count."""
    q, k, v = qkv(32, 8)
    inside = (jnp.arange(32) < 18)[None, :, None, None]
    f = functools.partial(attention, q_lengths=jnp.array([18]), implementation="interpret")
    loss = lambda *a: jnp.where(inside, f(*a) ** 2, 0).sum()
    mesh = jax.make_mesh((4,), ("s",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    poisoned = jax.device_put(jnp.where(inside, q, jnp.nan), jax.NamedSharding(mesh, jax.P(None, "s")))
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(poisoned, k, v)
    numerics.close(got, jax.grad(loss, (0, 1, 2))(jnp.where(inside, q, 0), k, v), 1e-5)


Q = jnp.ones((2, 4, 6, 8))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: attention(Q, Q[:, :, :4], Q[:, :, :4]), ValueError, r"query heads \(6\) must be a multiple of .* \(4\)"),
        (lambda: attention(Q, Q[..., :4], Q), ValueError, "axis d is 8 elsewhere but 4 in k"),
        (lambda: attention(Q, Q, Q[:, :3]), ValueError, "axis t is 4 elsewhere but 3 in v"),
        (lambda: attention(Q, Q.astype(jnp.bfloat16), Q), TypeError, "must have one dtype; got float32, bfloat16, float32"),
        (lambda: attention(Q.astype(int), Q, Q), TypeError, "q must have a floating dtype; got int32"),
        (lambda: attention(Q[0, 0], Q, Q), ValueError, r"q must have shape \[..., s, h, d\]; got \(6, 8\)"),
        (lambda: attention(Q, Q[:1].repeat(3, 0), Q), ValueError, "batch axes must broadcast together"),
        (lambda: attention(Q, Q, Q, window=-1), ValueError, "window must be an int, or a pair"),
        (lambda: attention(Q, Q, Q, window=(1, 2, 3)), ValueError, "window must be an int, or a pair"),
        (lambda: attention(Q, Q, Q, causal="left"), ValueError, "causal must be False, True"),
        (lambda: attention(Q, Q, Q, segment_ids=jnp.ones((2, 4))), TypeError, "must be integers; got float32"),
        (lambda: attention(Q, Q, Q, segment_ids=jnp.ones((2, 5), int)), ValueError, r"must have shape \[batch, 4\]; got \(2, 5\)"),
        (lambda: attention(Q, Q[:, :3], Q[:, :3], segment_ids=jnp.ones((2, 4), int)), ValueError, "pass a pair"),
        (lambda: attention(Q, Q, Q, kv_lengths=jnp.ones((3,), int)), ValueError, "batch axes must broadcast together"),
        (lambda: attention(Q, Q, Q, kv_lengths=jnp.ones((2,))), TypeError, "kv_lengths must be integers"),
        (lambda: attention(Q, Q, Q, segment_ids=jnp.ones((2, 4), "uint32")), TypeError, "must fit int32; got uint32"),
        (lambda: attention(Q, Q, Q, precision="exact"), ValueError, "precision must be"),
        (lambda: jax.jit(lambda s: attention(Q, Q, Q, scale=s))(1.0), TypeError, "scale is compiled into the kernel"),
        (lambda: attention(*[jnp.ones((1, 4, 1, 300))] * 3, implementation="triton"), jtops.UnsupportedError, "dims above 256"),
    ],
)  # fmt: skip
def test_malformed_calls(call, error, match):
    with pytest.raises(error, match=match):
        call()


# ---- Variants


def variants(*operands, target="sm_90", **options):
    """Name and variant of every launch of value and gradients."""
    f = lambda *x: attention(*x, **options)
    with jtops.config.target(target):
        grads = jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2))
        return {launch.name.removeprefix("jtops_flash_attention_"): launch.variant for launch in jtops.explain(grads, *operands)}


HALF = [jax.ShapeDtypeStruct((2, 1024, 4, 64), jnp.bfloat16)] * 3


def test_hopper_has_kernels_of_its_own():
    hopper = {"fwd": "hopper", "vjp_preprocess": "hopper", "vjp": "hopper", "vjp_postprocess": "hopper"}
    assert variants(*HALF) == hopper
    assert variants(*HALF, causal=True, config=jtops.Config(variant="hopper")) == hopper


def test_small_calls_take_what_is_launched_soonest():
    """The backward's portable kernels are launched no sooner than Hopper's. A config that names the variant is obeyed."""
    small = [jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.bfloat16)] * 3
    got = variants(*small)
    assert got["fwd"] == "portable (hopper: its launch would take longer than so small a call)"
    assert got["vjp"] == "hopper"
    assert variants(*small, config=jtops.Config(variant="hopper"))["fwd"] == "hopper"
    assert variants(*small, config=jtops.Config(WARPGROUPS=2, BLOCK_N=128, num_stages=2))["fwd"] == "hopper"
    assert variants(*[jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)] * 3)["fwd"] == "hopper"
    assert variants(*[jax.ShapeDtypeStruct((1, 1023, 4, 64), jnp.bfloat16)] * 3)["fwd"].startswith("portable")


@pytest.mark.parametrize(
    ("why", "operands", "how"),
    [
        ("written for sm_90, not sm_80", HALF, {"target": "sm_80"}),
        ("written for sm_90, not sm_100", HALF, {"target": "sm_100"}),
        ("written for sm_90, not gfx942", HALF, {"target": "gfx942"}),
        ("no interpreter", HALF, {"implementation": "interpret", "target": None}),
        ("not float32", [jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.float32)] * 3, {}),
        ("segment ids", HALF, {"segment_ids": jnp.zeros((2, 1024), jnp.int32)}),
    ],
)
def test_other_calls_take_the_portable_kernels(why, operands, how):
    got = variants(*operands, **how)
    assert got.keys() == {"fwd", "vjp_dkdv", "vjp_dq"}
    assert all(said.startswith("portable (hopper: ") for said in got.values()), got
    assert why in got["fwd"]


def test_a_config_names_the_variant():
    got = variants(*HALF, config=jtops.Config(variant="portable"))
    assert got == {"fwd": "portable", "vjp_dkdv": "portable", "vjp_dq": "portable"}
    got = variants(*HALF, config=jtops.Config(BLOCK_M=64, BLOCK_N=64))  # blocks that only the portable forward has
    assert got["fwd"] == "portable"
    assert "its tiles are" in got["vjp_dkdv"]
    got = variants(*HALF, config=jtops.Config(WARPGROUPS=2, BLOCK_N=128, num_stages=2))
    assert (got["fwd"], got["vjp"]) == ("hopper", "hopper")
    with pytest.raises(jtops.UnsupportedError, match="hopper: it is written for sm_90, not sm_80"):
        variants(*HALF, target="sm_80", config=jtops.Config(variant="hopper"))


# ---- Cases 63, 70, 78: numbers at their edges, and arguments of other types


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**63, (2**31 - 1, 0), (2**31 - 1, None), (None, 2**32)])
@ways
def test_case_63_no_window_by_the_largest_int(window, implementation):
    """A window that reaches every key is none, whatever the int."""
    q, k, v = qkv(4, 6)
    for causal in (False, True, "bottom_right"):
        f = lambda w, c=causal: both(functools.partial(attention, causal=c, window=w, implementation=implementation), q, k, v)
        right = 0 if isinstance(window, tuple) and window[1] == 0 else None
        near(f(window), f((None, right)), 1e-6)


def test_case_63_values():
    v = jnp.broadcast_to(jnp.arange(4.0)[None, :, None, None], (1, 4, 1, 16))
    f = lambda v: attention(jnp.zeros_like(v), jnp.zeros_like(v), v, causal=True, window=(2**31 - 1, 0), implementation="interpret")
    np.testing.assert_allclose(f(v)[0, :, 0, 0], [0, 0.5, 1, 1.5], atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda v: f(v).sum())(v)[0, :, 0, 0], [25 / 12, 13 / 12, 7 / 12, 1 / 4], atol=1e-6)


def test_case_70_segment_ids_in_a_list():
    ids = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(TypeError, match=r"segment_ids must be an array or a tuple of two, \(q_ids, kv_ids\); got a list of 2"):
        attention(*qkv(4, 4), segment_ids=[ids, ids])


def test_case_78_numpy_and_python_ints():
    q, k, v = qkv(4, 4, b=2)
    want = attention(q, k, v, window=(3, 1), kv_lengths=jnp.asarray([4, 4], jnp.int32))
    np.testing.assert_array_equal(attention(q, k, v, window=(np.int64(3), np.int8(1)), kv_lengths=4), want)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(attention(q, k, v, window=(3, 1), kv_lengths=4), want)
        np.testing.assert_array_equal(attention(q, k, v, window=(3, 1), kv_lengths=[4, 4]), want)
        with pytest.raises(TypeError, match="must fit int32"):
            attention(q, k, v, kv_lengths=np.asarray([4, 4], np.int64))
        with pytest.raises(TypeError, match="must fit int32"):
            attention(q, k, v, kv_lengths=2**40)


# ---- deterministic


def test_deterministic_is_argument_setting_and_xlas_flag(monkeypatch):
    """The argument counts before the setting, that before XLA's flags; it is known when a call is traced."""
    q = jnp.ones((1, 4, 1, 16), jnp.bfloat16)
    said = lambda **kw: [dict(e.params["jaxpr"].eqns[-1].params["call"].options)["deterministic"]
                         for e in jax.make_jaxpr(lambda q: attention(q, q, q, **kw))(q).eqns if "jaxpr" in e.params]  # fmt: skip
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert said() == [False]
    assert said(deterministic=True) == [True]
    with jtops.config.deterministic("on"):
        assert said() == [True]
        assert said(deterministic=False) == [False]
    for flags, want in [
        ("--xla_gpu_deterministic_ops", True),
        ("--a=b --xla_gpu_deterministic_ops=true --c", True),
        ("--xla_gpu_exclude_nondeterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops_of_mine=true", False),
    ]:
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert jtops.config.is_deterministic() is want, flags
    with jtops.config.deterministic("off"):
        assert said() == [False]
    with pytest.raises(TypeError, match="deterministic must be True, False or None; got 'yes'"):
        attention(q, q, q, deterministic="yes")
