"""Attention's forward kernel for Hopper: what it compiles to, what it refuses, and on the GPU its numbers."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Config, Launch, Rows
from jtops.kernels.attention.hopper import forward as hopper
from jtops.kernels.attention.mask import mask_of
from tests import oracles
from tests.kernels import lowered, sass

gpu = pytest.mark.gpu
FIELDS = "q k v q_ids kv_ids q_lengths kv_lengths s_index bias mask sinks alibi_slopes"
Operands = collections.namedtuple("Operands", FIELDS, defaults=[None] * 4)


def launch_of(
    q, k, v, *, causal=False, window=(None, None), lengths=(None, None), scale=None, q_size=None, ids=None, rows=None, **fields
):
    """The call as the op makes it -> (launch, operands)."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    q_lengths, kv_lengths = lengths
    b, s, _, d = q.shape
    own = Rows(1, b)
    operands = Operands(q, k, v, ids, ids, q_lengths, kv_lengths, jnp.arange(s, dtype=jnp.int32))
    given = Operands(own, *(rows or (own, own)), *(None if x is None else own for x in operands[3:7]), Rows(1, 1))
    options = {
        "scale": d**-0.5 if scale is None else scale,
        "softcap": None,
        "left": left,
        "right": right,
        "align": "bottom_right" if causal == "bottom_right" else None,
        "q_size": q_size or s,
        "precision": "tf32",
    }
    values = {"target": Target(90), "interpret": False, "config": None} | fields
    return Launch("attention", "fwd", b, given, (), options, device=None, **values), operands


def attend(q, k, v, q_lengths=None, kv_lengths=None, *, offset=0, config=None, **options):
    """(out, lse) by the kernel."""
    launch, operands = launch_of(q, k, v, lengths=(q_lengths, kv_lengths), config=config, **options)
    operands = operands._replace(s_index=operands.s_index + offset)
    assert hopper.unfit(launch, operands) is None
    return hopper.forward(launch, operands)


def tiles(warpgroups, block_n=128, stages=2):
    return Config(WARPGROUPS=warpgroups, BLOCK_N=block_n, num_warps=4, num_stages=stages)


def types(b, s, t, h, g, d, dtype=jnp.bfloat16):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in ((b, s, h, d), (b, t, g, d), (b, t, g, d))]


# --------------------------------------------------------------------------------------------------------------- compiling

LENGTHS = [jax.ShapeDtypeStruct((4,), jnp.int32)] * 2
COMPILED = {  # operands, options, products in the loop of a warpgroup
    "d128": (types(4, 4096, 4096, 16, 16, 128), {}, 16),
    "d128_fp16": (types(4, 4096, 4096, 16, 16, 128, jnp.float16), {"causal": True}, 16),
    "d128_causal": (types(4, 4096, 4096, 16, 16, 128), {"causal": True}, 16),
    "d128_window": (types(4, 4096, 4096, 32, 8, 128), {"causal": True, "window": (1023, None)}, 16),
    "d128_lengths": (types(4, 1000, 1000, 32, 8, 128) + LENGTHS, {"causal": "bottom_right"}, 16),
    "d64": (types(4, 4096, 4096, 32, 32, 64), {}, 12),
    "d64_causal": (types(4, 4096, 4096, 32, 32, 64), {"causal": True}, 12),
    "d64_causal_short": (types(16, 1024, 1024, 32, 32, 64), {"causal": True}, 12),
    "d256": (types(4, 4096, 4096, 8, 8, 256), {}, 20),
    "d256_causal": (types(4, 4096, 4096, 8, 8, 256), {"causal": True}, 20),
    "d192_window": (types(4, 4096, 4096, 8, 8, 192), {"causal": True, "window": (1023, None)}, 20),
    "d80_tail": (types(4, 1000, 1001, 8, 8, 80), {}, 16),
}


@pytest.mark.parametrize("name", COMPILED)
def test_the_loop_is_what_it_was(name):
    """Products stay in flight (ptxas says C75xx where it waits for each), and nothing is spilled or moved about in the loop."""
    operands, options, products = COMPILED[name]
    (kernel,) = lowered.kernels(functools.partial(attend, **options), *operands)
    log, text = sass.assembled(kernel)
    assert "C75" not in log, log
    loops = sass.product_loops(text)
    assert len(loops) == (3 if "d64" in name and "short" not in name else 2)  # one a warpgroup
    for loop in loops:
        assert loop["HGMMA"] == products
        assert not loop["LDL"] + loop["STL"] + loop["PRMT"] + loop["R2UR"], loop
        masks = loop["FSEL"] >= 32
        assert masks == ("window" in name or "lengths" in name), "only what may cut any block has masks in the loop"
    assert kernel.shared_bytes <= Target(90).max_shared_bytes


def test_one_kernel_serves_all_sizes():
    """Lengths, heads and batch are numbers of the launch."""
    sizes = [(1, 1, 1, 1, 1, 128), (4, 4096, 4096, 16, 16, 128), (3, 250, 511, 6, 3, 128)]
    texts = {
        lowered.kernels(functools.partial(attend, causal="bottom_right", window=(5, None)), *types(*n))[0].binary for n in sizes
    }
    assert len(texts) == 1


# ---------------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("sizes", "options", "says"),
    [
        ({}, {}, None),
        ({}, {"interpret": True}, "no interpreter"),
        ({}, {"target": Target(80)}, "sm_90"),
        ({}, {"target": Target(100)}, "sm_90"),
        ({"dtype": jnp.float32}, {}, "bfloat16 and float16"),
        ({"d": 32}, {}, "from 40 to 256"),
        ({"d": 68}, {}, "multiples of 8"),
        ({"d": 264}, {}, "from 40 to 256"),
        ({"t": 0}, {}, "nothing to load"),
        ({}, {"ids": jnp.zeros((2, 64), jnp.int32)}, "segment ids"),
        ({}, {"scale": 0.0}, "positive"),
        ({}, {"scale": -1.0}, "positive"),
        ({}, {"scale": float("nan")}, "positive"),
    ],
)
def test_what_it_refuses_has_a_reason(sizes, options, says):
    launch, operands = launch_of(*types(**{"b": 2, "s": 64, "t": 64, "h": 2, "g": 2, "d": 64} | sizes), **options)
    why = hopper.unfit(launch, operands)
    assert why is None if says is None else says in why


def test_value_heads_of_another_block_are_refused():
    q, k, _ = types(2, 64, 64, 2, 2, 64)
    launch, operands = launch_of(q, k, jax.ShapeDtypeStruct((2, 64, 2, 128), q.dtype))
    assert "one block" in hopper.unfit(launch, operands)


@pytest.mark.parametrize(
    ("s", "t", "options", "where"),
    [
        (256, 256, {}, "none"),
        (256, 250, {}, "first"),
        (250, 250, {"causal": True}, "first"),
        (250, 250, {"causal": "bottom_right"}, "first"),
        (256, 640, {"causal": "bottom_right"}, "first"),
        (256, 600, {"causal": "bottom_right"}, "any"),
        (256, 256, {"window": (None, 128)}, "first"),
        (256, 256, {"window": (None, 7)}, "any"),
        (256, 256, {"window": (7, None)}, "any"),
        (256, 256, {"causal": True, "q_size": 512}, "any"),  # a shard, whose place is known to the device alone
        (256, 256, {"lengths": (None, 1)}, "first"),
        (256, 256, {"lengths": (None, 1), "causal": True}, "first"),
        (256, 256, {"lengths": (1, None), "causal": "bottom_right"}, "any"),
    ],
)
def test_which_blocks_the_mask_can_cut(s, t, options, where):
    """What is "first" or "none" here has no masks in the loop."""
    launch, operands = launch_of(*types(2, s, t, 2, 2, 128), **options)
    assert hopper.cuts(mask_of(launch, operands), s, t, launch.options["q_size"], 128) == where


@pytest.mark.parametrize(
    ("config", "says"),
    [(tiles(4), "WARPGROUPS"), (tiles(2, 32), "BLOCK_N"), (tiles(3, 64), "BLOCK_N"), (tiles(2, 128, 1), "num_stages")],
)
def test_tiles_that_would_hang_or_not_fit_are_refused(config, says):
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(functools.partial(attend, config=config), *types(2, 256, 256, 2, 2, 128))


# ----------------------------------------------------------------------------------------------------------------- numbers


def draw(b, s, t, h, g, d, dtype=jnp.bfloat16, e=None, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = ((b, s, h, d), (b, t, g, d), (b, t, g, e or d))
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def truth(q, k, v, *, causal=False, window=None, scale=None):
    """(out, lse) in float64."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v))
    out = oracles.flash_attention(q, k, v, causal=causal, window=window, scale=scale)
    logits = np.einsum("bshd,bthd->bsht", q, np.repeat(k, q.shape[2] // k.shape[2], 2)) * (scale or q.shape[3] ** -0.5)
    mask = oracles.visible(q, k, causal=causal, window=window)
    return out, oracles.logsumexp(logits, np.broadcast_to(mask[:, None], logits.shape), axis=-1)


def close(got, want, dtype=jnp.bfloat16):
    (out, lse), (want_out, want_lse) = (tuple(np.asarray(x.astype(jnp.float32), np.float64) for x in got), want)
    dead = np.isneginf(want_lse)
    np.testing.assert_array_equal(out[dead], 0)
    np.testing.assert_array_equal(lse[dead], -np.inf)
    unit = 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-11
    assert np.linalg.norm(out - want_out) <= unit * (np.linalg.norm(want_out) or 1)
    assert np.abs(out - want_out).max(initial=0) <= 4 * unit * max(1, np.abs(want_out).max(initial=0))
    np.testing.assert_allclose(lse[~dead], want_lse[~dead], rtol=2e-5, atol=2e-5)


NUMBERS = [1, 63, 64, 65, 127, 128, 129, 300, 577, 1000]


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_lengths(d, causal):
    f = jax.jit(functools.partial(attend, causal=causal))
    for n in NUMBERS:
        operands = draw(2, n, n, 4, 2, d)
        close(f(*operands), truth(*operands, causal=causal))


@gpu
@pytest.mark.parametrize("config", [tiles(3), tiles(2), tiles(2, stages=3), tiles(2, 64)], ids=repr)
def test_tiles(config):
    f = jax.jit(functools.partial(attend, causal=True, config=config))
    for n in NUMBERS:
        operands = draw(2, n, n, 3, 3, 64)
        close(f(*operands), truth(*operands, causal=True))


@gpu
@pytest.mark.parametrize(("s", "t"), [(1, 777), (70, 900), (256, 640), (200, 333), (500, 130), (640, 256)])
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
def test_lengths_that_differ(s, t, causal):
    """With "bottom_right" and more queries than keys the first queries see nothing."""
    operands = draw(2, s, t, 4, 2, 128)
    close(jax.jit(functools.partial(attend, causal=causal))(*operands), truth(*operands, causal=causal))


@gpu
@pytest.mark.parametrize("window", [(90, 40), (0, 0), (None, 70), (None, 128), (50, None), (300, 0)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_windows(window, d):
    operands = draw(2, 500, 700, 4, 2, d)
    close(jax.jit(functools.partial(attend, window=window))(*operands), truth(*operands, window=window))


@gpu
@pytest.mark.parametrize("window", [(None, None), (100, None)])
def test_a_shard_of_the_queries(window):
    """It begins where its first index says."""
    q, k, v = draw(2, 600, 600, 4, 2, 128)
    out, lse = truth(q, k, v, causal=True, window=window)
    f = jax.jit(functools.partial(attend, causal=True, window=window, q_size=600), static_argnames="offset")
    for offset in (0, 200, 400):
        part = slice(offset, offset + 200)
        close(f(q[:, part], k, v, offset=offset), (out[:, part], lse[:, part]))


@gpu
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_lies_beyond_lengths_is_never_used(d, causal):
    """Even where it is NaN."""
    q_lengths, kv_lengths = [300, 20, 0, 129, 300], [577, 100, 7, 0, 128]
    q, k, v = draw(5, 300, 577, 4, 2, d)
    beyond = lambda x, n: jnp.where(
        jnp.arange(x.shape[1])[None, :, None, None] >= jnp.array(n)[:, None, None, None], jnp.nan, x
    ).astype(x.dtype)
    got = jax.jit(functools.partial(attend, causal=causal))(
        beyond(q, q_lengths),
        beyond(k, kv_lengths),
        beyond(v, kv_lengths),
        jnp.array(q_lengths, jnp.int32),
        jnp.array(kv_lengths, jnp.int32),
    )
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, (m, n) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        if m and n:
            rows = slice(b, b + 1)
            out[rows, :m], lse[rows, :m] = truth(q[rows, :m], k[rows, :n], v[rows, :n], causal=causal)
    close(got, (out, lse))


@gpu
@pytest.mark.parametrize(("inner", "own"), [(1, 1), (3, 2), (1, 3)])
def test_rows_that_several_batch_elements_share(inner, own):
    q, k, v = draw(6, 130, 200, 2, 2, 128)
    row = np.arange(6) // inner % own
    got = jax.jit(functools.partial(attend, rows=(Rows(inner, own),) * 2))(q, k[:own], v[:own])
    close(got, truth(q, k[row], v[row]))


@gpu
@pytest.mark.parametrize(("d", "e"), [(40, 40), (80, 80), (96, 128), (72, 128), (192, 256)])
def test_head_dims_that_fill_no_block(d, e):
    operands = draw(2, 300, 300, 4, 2, d, e=e)
    close(jax.jit(functools.partial(attend, causal=True))(*operands), truth(*operands, causal=True))


@gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_float16(d):
    operands = draw(2, 577, 577, 4, 2, d, jnp.float16)
    close(jax.jit(functools.partial(attend, causal=True))(*operands), truth(*operands, causal=True), jnp.float16)


@gpu
@pytest.mark.parametrize("scale", [3.0, 1e-6])
def test_scales(scale):
    operands = draw(2, 300, 300, 4, 2, 128)
    close(jax.jit(functools.partial(attend, scale=scale))(*operands), truth(*operands, scale=scale))


@gpu
def test_a_maximum_that_grows_block_by_block():
    """Keys are walked from the last; here the first weigh most, so O is rescaled again and again."""
    q, k, v = draw(2, 1000, 1000, 2, 2, 128)
    k = (k * jnp.linspace(4, 1, 1000)[None, :, None, None]).astype(k.dtype)
    close(jax.jit(attend)(q, k, v), truth(q, k, v))


@gpu
@pytest.mark.parametrize(
    ("d", "options"),
    [
        (128, {}),
        (128, {"causal": True}),
        (64, {"causal": True, "config": tiles(3)}),
        (256, {"causal": True}),
        (128, {"window": (77, 0)}),
    ],
)
def test_a_thousand_times_the_same_bits(d, options):
    """More tiles than programs, and a result that depends on no order of arrival."""
    f, operands = jax.jit(functools.partial(attend, **options)), draw(4, 1000, 1000, 8, 8, d)
    first = f(*operands)
    same = jax.jit(lambda a, b: jnp.array([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)]).all())
    assert all(jax.device_get([same(first, f(*operands)) for _ in range(1000)]))
