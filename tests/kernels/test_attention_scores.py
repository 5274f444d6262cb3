"""What becomes of attention's scores: caps, biases, masks, sinks and slopes, alone and together."""

import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from tests import numerics, oracles
from tests.specs import value_and_vjp

ways = pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
attention = jtops.flash_attention


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def gradients(f, *operands):
    """Value and gradients of the sum of squares, under jit."""
    return jax.jit(lambda *a: (f(*a), jax.grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).sum(), tuple(range(len(a))))(*a)))(
        *operands
    )


# ---- Case 11: caps, and scores of any size


@ways
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_case_11_huge_scores(causal, implementation):
    """Scores of 1e4 and -1e4, past where exp overflows; with causality a third key that holds the hugest is hidden."""
    q = jnp.zeros((1, 2, 1, 16)).at[..., 0].set(100.0)
    k = jnp.zeros((1, 3, 1, 16)).at[0, 0, 0, 0].set(100.0).at[0, 1, 0, 0].set(-100.0).at[0, 2, 0, 0].set(3e38)
    v = jnp.ones((1, 3, 1, 16)).at[:, 1].set(-1.0)
    k, v = (k, v) if causal else (k[:, :2], v[:, :2])
    f = lambda q, k, v: attention(q, k, v, scale=1.0, softcap=50.0, causal=causal, implementation=implementation)[:, :1]
    out, pullback = jax.vjp(f, q, k, v)
    np.testing.assert_array_equal(out, jnp.ones_like(out))
    dq, dk, dv = pullback(jnp.ones_like(out))
    assert not np.asarray(dq).any()
    assert not np.asarray(dk).any()
    np.testing.assert_array_equal(dv[0, :, 0, 0], [1.0, 0.0, 0.0][: v.shape[1]])


@ways
@pytest.mark.parametrize(
    ("cap", "score", "capped"), [(50.0, 100.0, 48.20138), (50.0, 5000.0, 50.0), (50.0, -5000.0, -50.0), (30.0, 124.0, 29.98459)]
)
def test_case_11_values_of_the_cap(cap, score, capped, implementation):
    q, v = jnp.ones((1, 1, 1, 16)), jnp.ones((1, 1, 1, 16))
    k = jnp.full((1, 1, 1, 16), score / 16)
    _, lse = attention(q, k, v, scale=1.0, softcap=cap, return_lse=True, implementation=implementation)
    np.testing.assert_allclose(lse, capped, rtol=1e-6)


@ways
def test_case_11_scale_of_zero_and_below(implementation):
    q, k, v = normal(1, 8, 2, 16), normal(1, 9, 1, 16, seed=1), normal(1, 9, 1, 16, seed=2)
    f = functools.partial(attention, softcap=4.0, implementation=implementation)
    mean = v.mean(1, keepdims=True).repeat(2, 2)
    numerics.close(f(q, k, v, scale=0.0), jnp.broadcast_to(mean, q.shape), 1e-6)
    numerics.close(f(q, k, v, scale=-1.0), f(-q, k, v, scale=1.0), 1e-6)


# ---- Case 12: units


@ways
def test_case_12_bias_in_the_logits_unit(implementation):
    zeros, v = jnp.zeros((1, 2, 1, 16)), jnp.broadcast_to(jnp.arange(2.0)[:, None, None], (1, 2, 1, 16))
    bias = jnp.log(jnp.asarray([1.0, 3.0]))
    out = attention(zeros[:, :1], zeros, v, bias=bias, implementation=implementation)
    np.testing.assert_allclose(out, 0.75, rtol=1e-6)


# ---- Case 14: biases of other dtypes, and of sizes that half precision lacks


@ways
def test_case_14_float32_bias_of_bfloat16_attention(implementation):
    q, k, v = (normal(3, 33, 4, 32, seed=i, dtype=jnp.bfloat16) for i in range(3))
    bias = normal(1, 4, 33, 33, seed=3)
    f = lambda *a: attention(*a[:3], bias=a[3], implementation=implementation)
    out, grads = gradients(f, q, k, v, bias)
    assert out.dtype == jnp.bfloat16
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3 + [jnp.float32]
    truth, truths = gradients(
        lambda *a: attention(*a[:3], bias=a[3], implementation="xla"), *(x.astype(jnp.float32) for x in (q, k, v, bias))
    )
    numerics.close((out, *grads), (truth, *truths), 3e-2)


@ways
def test_case_14_largest_negative_bias_is_no_infinity(implementation):
    """Half precision's least number, added to scores below 0, hides a key as a mask would; alone it leaves finite numbers."""
    q, k, v = (normal(1, 20, 2, 16, seed=i, dtype=jnp.float16) for i in range(3))
    q = q * 4
    seen = np.random.default_rng(3).random((20, 20)) < 0.6
    seen[:, 0] = True
    least = float(jnp.finfo(jnp.float16).min)
    f = functools.partial(attention, q, k, v, implementation=implementation)
    numerics.close(f(bias=jnp.where(seen, 0, least).astype(jnp.float16)), f(mask=jnp.asarray(seen)), 1e-6)
    assert jnp.isfinite(f(bias=jnp.full((20, 20), least, jnp.float16))).all()


@ways
def test_infinite_bias_is_a_mask(implementation):
    """Where all of a query's biases are -inf it is dead: 0, lse -inf, and no gradient of anything."""
    q, k, v = normal(2, 9, 2, 16), normal(2, 11, 1, 16, seed=1), normal(2, 11, 1, 16, seed=2)
    seen = np.random.default_rng(3).random((1, 2, 9, 11)) < 0.5
    seen[..., 4, :] = False
    bias = jnp.where(seen, normal(1, 2, 9, 11, seed=4), -jnp.inf)
    f = lambda *a: attention(*a[:3], bias=a[3], return_lse=True, implementation=implementation)
    (out, lse), pullback = jax.vjp(f, q, k, v, bias)
    assert not np.asarray(out[:, 4]).any()
    assert (lse[:, 4] == -jnp.inf).all()
    grads = pullback((out, jnp.ones_like(lse)))
    masked = lambda *a: attention(
        *a[:3], bias=jnp.where(seen, a[3], 0), mask=jnp.asarray(seen), return_lse=True, implementation="xla"
    )
    (want, want_lse), theirs = jax.vjp(masked, q, k, v, bias)
    numerics.close((out, lse, *grads), (want, want_lse, *theirs((want, jnp.ones_like(lse)))), 1e-4)
    assert not np.asarray(grads[3])[~seen].any()


@ways
@pytest.mark.parametrize(
    "shape",
    [(2, 4, 12, 20), (1, 4, 12, 20), (2, 1, 12, 20), (12, 20), (2, 4, 1, 20), (20,), (2, 4, 12, 1), (1, 1, 12, 1), (1,), ()],
)
def test_every_shape_of_a_bias_has_its_gradient(shape, implementation):
    """Through lse and with a sink, which make a gradient of what all keys of a query share."""
    q, k, v = normal(2, 12, 4, 16), normal(2, 20, 2, 16, seed=1), normal(2, 20, 2, 16, seed=2)
    bias, sinks = normal(*shape, seed=3), normal(4, seed=4)
    loss = lambda implementation: (
        lambda bias, sinks: sum(
            (x**2).sum()
            for x in attention(q, k, v, bias=bias, sinks=sinks, causal=True, return_lse=True, implementation=implementation)
        )
    )
    got = jax.jit(jax.grad(loss(implementation), (0, 1)))(bias, sinks)
    assert got[0].shape == shape
    numerics.close(got, jax.grad(loss("xla"), (0, 1))(bias, sinks), 2e-5)
    full = jax.grad(loss("xla"))(jnp.broadcast_to(bias, (2, 4, 12, 20)), sinks)
    numerics.close(got[0], oracles._sum_to(np.asarray(full), np.asarray(bias)), 2e-5)


@ways
@pytest.mark.parametrize("batch", [(3, 1), (1, 2), (1, 1), (3, 2)])
def test_a_bias_that_an_inner_batch_axis_shares(batch, implementation):
    """Which of the batch elements share a bias's row is a matter of which axes it lacks."""
    q, k, v = (normal(3, 2, 9, 2, 16, seed=i) for i in range(3))
    bias = normal(*batch, 2, 9, 9, seed=3)
    f = lambda implementation: lambda bias: (attention(q, k, v, bias=bias, implementation=implementation) ** 2).sum()
    numerics.close(jax.grad(f(implementation))(bias), jax.grad(f("xla"))(bias), 2e-5)


@pytest.mark.parametrize(
    ("shape", "wrt", "launched"),
    [
        ((40, 24), (0, 1), {"vjp_dkdv", "vjp_dq"}),
        ((2, 1, 24), (0, 1, 2), {"vjp_dkdv", "vjp_dq"}),
        ((40, 24), (0, 1, 2), {"vjp_dkdv", "vjp_dq", "vjp_dbias"}),
        ((40, 24), (2,), {"vjp_dbias"}),
        ((24,), (2,), {"vjp_dkdv"}),
        ((2, 40, 1), (2,), set()),  # what the keys of a query share follows from its lse
        ((2, 40, 1), (0, 2), {"vjp_dq"}),
    ],
)
def test_what_a_biass_gradient_launches(shape, wrt, launched):
    """No table of scores is written unless the bias is one and its gradient is asked for."""
    f = lambda q, k, bias: attention(q, k, k, bias=bias).sum()
    types = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 40, 2, 16), (1, 24, 2, 16), shape)]
    with jtops.config.target("sm_90"):
        got = {launch.name.removeprefix("jtops_flash_attention_") for launch in jtops.explain(jax.grad(f, wrt), *types)}
    assert got == {"fwd", *launched}


# ---- Masks


@ways
@pytest.mark.parametrize("shape", [(2, 4, 12, 20), (1, 1, 12, 20), (20,), (2, 1, 1, 20), (12, 1), (4, 1, 1), (1,)])
def test_a_mask_is_a_bias_of_minus_infinity(shape, implementation):
    q, k, v = normal(2, 12, 4, 16), normal(2, 20, 2, 16, seed=1), normal(2, 20, 2, 16, seed=2)
    mask = jnp.asarray(np.random.default_rng(3).random(shape) < 0.5)
    f = functools.partial(attention, window=(9, 9))
    got = gradients(lambda *a: f(*a, mask=mask, implementation=implementation), q, k, v)
    want = gradients(lambda *a: f(*a, bias=jnp.where(mask, 0.0, -jnp.inf), implementation="xla"), q, k, v)
    numerics.close(got, want, 2e-5)


@ways
def test_masked_numbers_of_any_size_never_leak(implementation):
    q, k, v = normal(1, 9, 1, 16), normal(1, 40, 1, 16, seed=1), normal(1, 40, 1, 16, seed=2)
    mask = jnp.arange(40) < 25
    f = lambda *a: attention(*a, mask=mask, bias=jnp.where(mask, 0, 3e38), softcap=5.0, implementation=implementation)
    clean = gradients(f, q, k, v)
    hidden = ~mask[None, :, None, None]
    jax.tree.map(np.testing.assert_array_equal, gradients(f, q, jnp.where(hidden, 3e38, k), jnp.where(hidden, 3e38, v)), clean)


# ---- Sinks and slopes


@ways
def test_a_sink_is_a_key_without_a_value(implementation):
    q, k, v = normal(2, 9, 4, 16), normal(2, 11, 2, 16, seed=1), normal(2, 11, 2, 16, seed=2)
    sinks = normal(4, seed=3)
    f = lambda *a: attention(*a[:3], sinks=a[3], return_lse=True, implementation=implementation)
    (out, lse), pullback = jax.vjp(f, q, k, v, sinks)

    def longer(q, k, v, sinks):  # a key more, of which the bias says all
        k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
        bias = jnp.zeros((4, 1, 12)).at[:, 0, 11].set(sinks)
        return attention(q, k, v, bias=bias, return_lse=True, implementation="xla")

    want, theirs = jax.vjp(longer, q, k, v, sinks)
    numerics.close((out, lse), want, 1e-5)
    numerics.close(pullback((out, lse)), theirs((out, lse)), 2e-5)


@ways
def test_a_sink_and_no_key(implementation):
    """0, and lse is the sink; a sink of -inf is none. What cotangents of padding hold reaches no gradient."""
    q, k, v = normal(1, 20, 2, 16), normal(1, 24, 2, 16, seed=1), normal(1, 24, 2, 16, seed=2)
    sinks = jnp.asarray([0.5, -jnp.inf])
    f = lambda *a: attention(*a[:3], sinks=a[3], q_lengths=jnp.asarray([15]), return_lse=True, implementation=implementation)
    (out, lse), pullback = jax.vjp(f, q, k, v, sinks)
    assert not np.asarray(out[:, 15:]).any()
    np.testing.assert_allclose(lse[0, 15:], jnp.broadcast_to(sinks, (5, 2)))
    _, plain = attention(q, k, v, q_lengths=jnp.asarray([15]), return_lse=True, implementation="xla")
    numerics.close(lse[0, :15, 1], plain[0, :15, 1], 1e-6)
    g = normal(1, 20, 2, 16, seed=4)
    inside = (jnp.arange(20) < 15)[None, :, None, None]
    clean = pullback((jnp.where(inside, g, 0), jnp.zeros_like(lse)))
    jax.tree.map(np.testing.assert_array_equal, pullback((jnp.where(inside, g, jnp.nan), jnp.zeros_like(lse))), clean)
    assert not np.asarray(clean[3][1]).any()
    assert jnp.isfinite(clean[3][0])


@ways
def test_slopes_count_from_positions(implementation):
    q, k, v = normal(2, 9, 2, 16), normal(2, 14, 2, 16, seed=1), normal(2, 14, 2, 16, seed=2)
    slopes, lengths = jnp.asarray([0.5, 0.25]), jnp.asarray([14, 11])
    f = functools.partial(attention, q, k, v, causal="bottom_right", kv_lengths=lengths)
    position = jnp.arange(9)[:, None] + (lengths - 9)[:, None, None]
    bias = -slopes[:, None, None] * jnp.abs(position - jnp.arange(14))[:, None]
    numerics.close(f(alibi_slopes=slopes, implementation=implementation), f(bias=bias, implementation="xla"), 1e-5)


def test_slopes_have_no_derivative():
    q = normal(1, 4, 2, 16)
    f = lambda slopes: attention(q, q, q, alibi_slopes=slopes).sum()
    with pytest.raises(jtops.UnsupportedError, match="no derivative by alibi_slopes"):
        jax.grad(f)(jnp.ones(2))
    with pytest.raises(jtops.UnsupportedError, match="no derivative by alibi_slopes"):
        jax.jit(jax.grad(f))(jnp.ones(2))
    g = jax.grad(lambda s: f(jax.lax.stop_gradient(s)) + s.sum())(jnp.ones(2))
    np.testing.assert_array_equal(g, jnp.ones(2))
    assert jax.vmap(f)(jnp.ones((3, 2))).shape == (3,)


# ---- Errors


Q = jnp.ones((2, 4, 6, 8))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, or None; got 0.0"),
        ({"softcap": np.inf}, ValueError, "softcap must be positive and finite"),
        ({"softcap": jnp.ones(2)}, TypeError, "softcap must be a number"),
        ({"bias": jnp.ones((3, 4))}, ValueError, r"bias must broadcast to .*here \[..., 6, 4, 4\]; got \(1, 3, 4\)"),
        ({"bias": jnp.ones((5, 6, 4, 4))}, ValueError, "batch axes must broadcast together"),
        ({"bias": jnp.ones((4, 4), int)}, TypeError, "bias must have a floating dtype; got int32"),
        ({"mask": jnp.ones((4, 4))}, TypeError, "mask must be boolean; got float32"),
        ({"mask": jnp.ones((2, 4, 4), bool)}, ValueError, "mask must broadcast to"),
        ({"sinks": jnp.ones(2)}, ValueError, r"sinks must have shape \[h\], here \(6,\); got \(2,\)"),
        ({"alibi_slopes": jnp.ones((1, 6))}, ValueError, r"alibi_slopes must have shape \[h\]"),
        ({"bias": jnp.ones((1 << 23) + 1)}, ValueError, "bias must broadcast to"),
    ],
)  # fmt: skip
def test_malformed_calls(options, error, match):
    with pytest.raises(error, match=match):
        attention(Q, Q, Q, **options)


def test_tables_of_too_many_keys_have_no_kernel():
    keys = jax.ShapeDtypeStruct((1, (1 << 23) + 1, 1, 8), jnp.float32)
    f = lambda q, k, mask: attention(q, k, k, mask=mask, implementation="triton")
    with pytest.raises(jtops.UnsupportedError, match="bias or mask of more than 8388608 keys"):
        jax.eval_shape(f, jax.ShapeDtypeStruct((1, 1, 1, 8), jnp.float32), keys, jax.ShapeDtypeStruct((keys.shape[1],), bool))


# ---- All together: random calls


def random_call(seed):
    """Operands by name and options of a random legal call of small sizes."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    b, s, t, g, r, d = pick(1, 2, 3), pick(1, 5, 16, 33, 40), pick(1, 7, 16, 32, 45), pick(1, 2), pick(1, 2, 3), pick(8, 16, 24)
    h, e = g * r, pick(d, 16)
    operands = {"q": rng.normal(size=(b, s, h, d)), "k": rng.normal(size=(pick(1, b), t, g, d)), "v": rng.normal(size=(b, t, g, e))}
    table = lambda: tuple(pick(1, n) for n in (b, h, s, t))[pick(0, 0, 0, 1, 2) :]
    options = {}
    if rng.random() < 0.5:
        operands["bias"] = rng.normal(size=table())
        if rng.random() < 0.3:
            operands["bias"] = np.where(rng.random(operands["bias"].shape) < 0.3, -np.inf, operands["bias"])
    if rng.random() < 0.4:
        operands["mask"] = rng.random(table()) < pick(0.3, 0.8)
    if rng.random() < 0.4:
        operands["sinks"] = rng.normal(size=h)
    if rng.random() < 0.4:
        options["softcap"] = pick(0.5, 2.0, 30.0)
    if rng.random() < 0.3:
        options["alibi_slopes"] = tuple(rng.normal(size=h) * 0.3)
    if rng.random() < 0.3:
        options["scale"] = pick(0.5, -0.3, 1.0)
    options["causal"] = pick(False, False, True, "bottom_right")
    if rng.random() < 0.3:
        options["window"] = pick(3, (20, None), (None, 2), (9, 4), 0)
    if rng.random() < 0.3:
        ids = lambda n: np.sort(rng.integers(-1, 3, (pick(1, b), n)), -1).astype(np.int32)
        operands["segment_ids"] = (ids(s), ids(t))
    for name, n in (("q_lengths", s), ("kv_lengths", t)):
        if rng.random() < 0.25:
            operands[name] = rng.integers(0, n + 3, b).astype(np.int32)
    return operands, options


def agrees(seed, implementation, dtype):
    """Value, lse and gradients of one random call, against the truth, by the rule of `numerics`."""
    given, options = random_call(seed)
    operands = {n: jax.tree.map(lambda x: jnp.asarray(x, dtype if x.dtype == np.float64 else None), x) for n, x in given.items()}
    names = [n for n in operands if n in ("q", "k", "v", "bias", "sinks")]
    rest = {n: x for n, x in operands.items() if n not in names}
    config = jtops.Config(BLOCK_M=16, BLOCK_N=16) if seed % 2 and implementation != "xla" else None

    def result(implementation, config):
        f = lambda *a: attention(
            **dict(zip(names, a, strict=True)), **rest, **options, implementation=implementation, config=config
        )
        return value_and_vjp(f, [operands[n] for n in names], g)

    exact = {n: np.asarray(operands[n], np.float64) for n in names}
    exact |= {n: jax.tree.map(np.asarray, x) for n, x in rest.items()}
    truth = oracles.flash_attention(**exact, **options)
    g = jnp.asarray(np.random.default_rng(seed).normal(size=truth.shape), dtype)
    truths = oracles.flash_attention_vjp(**exact, **options, g=np.asarray(g, np.float64))
    truths = dict(zip(("q", "k", "v", "bias", "mask", "sinks"), truths, strict=True))
    truths = {n: oracles._sum_to(truths[n], exact[n]) for n in names}  # an axis of the batch that an operand shares
    out, grads = result(implementation, config)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # which compiles it sooner
        plain, plains = result("xla", None)
    what = f"seed {seed}: { ({n: jax.tree.map(jnp.shape, x) for n, x in operands.items()}) } {options}"
    numerics.check(out, plain, truth, key=("flash_attention", "random"), what=f"value, {what}")
    size = max(np.abs(truths[n]).max(initial=0.0) for n in names)
    for name, got, reference in zip(names, grads, plains, strict=True):
        # A gradient that cancels to nothing is noise of the size of its terms: the others' largest is the unit.
        pad = lambda x: np.append(np.asarray(x, np.float64).ravel(), size).astype(x.dtype)
        wanted = np.append(truths[name].ravel(), size)
        numerics.check(
            jnp.asarray(pad(got)), jnp.asarray(pad(reference)), wanted, key=("flash_attention", "random"), what=f"d{name}, {what}"
        )


@pytest.mark.parametrize("block", range(10))
def test_random_calls(block):
    for seed in range(10 * block, 10 * block + 10):
        agrees(seed, "interpret", "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("block", range(10))
def test_random_calls_on_a_gpu(block):
    one = lambda seed: agrees(seed, "triton", "bfloat16" if seed % 3 == 0 else "float32")
    with ThreadPoolExecutor(16) as pool:  # most of the time goes into compiling
        list(pool.map(one, range(30 * block, 30 * block + 30)))
