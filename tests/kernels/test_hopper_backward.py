"""Attention's backward kernels for Hopper: what they compile to, here; what they compute, on a GPU of that kind."""

import collections
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat import triton as triton_compat
from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Config, Launch, Rows
from jtops.kernels.attention.hopper import backward as hopper
from jtops.kernels.attention.hopper.backward_ends import postprocess_kernel, preprocess_kernel
from tests import oracles
from tests.kernels import lowered

gpu = pytest.mark.gpu
slow = pytest.mark.slow
sds = jax.ShapeDtypeStruct
FIELDS = "q k v q_ids kv_ids q_lengths kv_lengths s_index bias mask sinks alibi_slopes"
Operands = collections.namedtuple("Operands", FIELDS, defaults=[None] * 4)


def launch(b=1, *, s=300, rows=(None, None), left=None, right=None, masked=False, **changes):
    """What the frame tells the launcher. `rows`: of q and of k and v, where they are not one a batch element."""
    q_rows, k_rows = (r or Rows(1, b) for r in rows)
    options = {"scale": 0.125, "softcap": None, "q_size": s, "left": left, "right": right, "align": None, "deterministic": True}
    options |= {k: changes.pop(k) for k in list(changes) if k in options}
    given = {
        "config": None,
        "target": Target.parse("sm_90"),
        "device": None,
        "interpret": False,
        "wanted": Operands(*(True,) * 3, *(False,) * 5),
    }
    index = Rows(b, 1) if masked or left is not None or right is not None else None
    rows = Operands(q_rows, k_rows, k_rows, None, None, None, None, index)
    return Launch(op="flash_attention", stage="vjp", batch=b, rows=rows, options=options, **given | changes)


def run(told, q, k, v, out, lse, do=None, dlse=None, index=None):
    """The launcher on arrays, or on their types when it is lowered."""
    operands = Operands(q, k, v, None, None, None, None, index)
    return [x for x in hopper.backward(told, operands, (out, lse), (do, dlse)) if x is not None]


# ------------------------------------------------------------------------------------------------------------------- compiled


def machine_code(kernel) -> tuple[str, str]:
    """(what ptxas says of a kernel, its machine code)."""
    ptxas = Path(triton_compat.ptxas(90))
    ptx = kernel.triton_kernel.asm["ptx"]
    made = subprocess.run(
        ["bash", "-c", f'd=$(mktemp -d); cat > $d/x.ptx; "{ptxas}" -arch=sm_90a -v $d/x.ptx -o $d/x.cubin && '
         f'"{ptxas.with_name("nvdisasm")}" -c $d/x.cubin; rm -r $d'],
        input=ptx, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return made.stderr, made.stdout


def hot_loops(code: str) -> list[collections.Counter]:
    """The instructions of each innermost loop that holds products; a retried allocation of registers is no loop."""
    ops, labels, loops = [], {}, []
    for line in code.splitlines():
        if found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            ops.append(found[1])
        elif line.strip().startswith(".L_x"):
            labels[line.strip().rstrip(":")] = len(ops)
    for end, op in enumerate(ops):
        if (target := re.match(r"BRA.*`\((\.L_x_\d+)\)", op)) and labels.get(target[1], end + 1) <= end:
            loops.append((labels[target[1]], end))
    has = lambda what, a, b: any(op.startswith(what) for op in ops[a:b])
    products = [(a, b) for a, b in loops if has("HGMMA", a, b) and not has("USETMAXREG", a, b)]
    inner = [(a, b) for a, b in products if not any((a, b) != (c, d) and a <= c and d <= b for c, d in products)]
    return [collections.Counter(re.split(r"[ .]", op)[0] for op in ops[a : b + 1]) for a, b in inner]


def kernels(d, s=1000, t=None, h=4, g=2, e=None, dtype="bfloat16", **options):
    told = launch(2, s=s, **options)
    q, k = sds((2, s, h, d), dtype), sds((2, t or s, g, d), dtype)
    out, v = sds((2, s, h, e or d), dtype), sds((2, t or s, g, e or d), dtype)
    index = sds((1, s), jnp.int32) if told.rows[7] else None
    with_index = lambda *a: run(told, *a[:5], do=a[5], index=a[6])
    return lowered.kernels(with_index, q, k, v, out, sds((2, s, h), jnp.float32), out, index)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("window", [{}, {"right": 0}, pytest.param({"left": 100}, marks=slow), {"left": 100, "right": 7}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow)])
@pytest.mark.parametrize("g", [2, 4])  # of 4 heads: groups cut into parts, and none
@pytest.mark.parametrize("d", [64, 128])
def test_machine_code(d, g, dtype, window, deterministic):
    """Products are never serialised, which ptxas only warns of, and the loops hold five products each and nothing of memory."""
    before, main, after = kernels(d, g=g, dtype=dtype, deterministic=deterministic, **window)
    log, code = machine_code(main)
    assert "C75" not in log, log
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= 64
    loops = hot_loops(code)
    assert [loop["HGMMA"] for loop in loops] == [32, 32]
    for loop in loops:
        assert loop["LDL"] == loop["STL"] == loop["R2UR"] == 0, loop
        assert loop["MUFU"] == (32 if d == 128 else 64)  # one exponential a score
        assert loop.total() <= {128: (385, 445, 475), 64: (575, 675, 745)}[d][len(window)]
    assert main.triton_kernel.metadata.shared <= Target.parse("sm_90").max_shared_bytes
    for kernel in (before, after):
        assert "0 bytes spill stores" in machine_code(kernel)[0]


def test_one_kernel_serves_all_sizes():
    """Only a length that does not fill its last block is another kernel, and only without masks."""
    names = lambda *sizes, **window: {k.triton_kernel.hash for s in sizes for k in kernels(128, s=s, **window)}
    assert len(names(128, 1024, h=4, g=1)) == len(names(128, 1024, 2048)) == 3
    assert len(names(1, 1000, 1024, right=0)) == 3
    assert len(names(1000, 1024)) == 4


@pytest.mark.parametrize(("d", "e", "block"), [(40, 56, 64), (80, 80, 128), (96, 112, 128)])
def test_other_head_dims_share_the_main_kernel(d, e, block):
    (before, main, after), (_, same, _) = kernels(d, e=e), kernels(block)
    assert main.triton_kernel.hash == same.triton_kernel.hash
    for kernel in (before, after):
        assert "0 bytes spill stores" in machine_code(kernel)[0]


# -------------------------------------------------------------------------------------------------------- the passes around it


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(("d", "block"), [(64, 64), (128, 128), (40, 64), (72, 128)])
def test_postprocess_undoes_the_order_of_the_registers(d, block):
    """Written out here as the layout of wgmma's accumulators has it, number by number; what is padding is left out."""
    rows = 8192 // block
    b, s, h = 2, rows + 5, 3
    dq = np.asarray(normal(b, s, h, d))
    sums = np.full((b, h, 2, 2, 128, 32), np.nan, np.float32)
    for consumer, thread, i in np.ndindex(2, 128, 32):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
        col = 8 * (i // 4) + 2 * (thread % 4) + i % 2
        row, col = (row, col + 64 * consumer) if block == 128 else (row + 64 * consumer, col)
        for tile in range(2):
            if tile * rows + row < s and col < d:
                sums[:, :, tile, consumer, thread, i] = dq[:, tile * rows + row, :, col]
    got = jtops.triton_call(
        jnp.asarray(sums), kernel=postprocess_kernel, scale=np.float32(2), s=s, h=h, D=d, BLOCK_D=block, BLOCK_M=rows,
        grid=b * h * 2, out_type=sds(dq.shape, jnp.float32), interpret=True,
    )  # fmt: skip
    np.testing.assert_array_equal(got, 2 * dq)


@pytest.mark.parametrize("d", [128, 80])
@pytest.mark.parametrize("dlse", [False, True])
def test_preprocess(dlse, d):
    """delta and lse by head, in tiles; padding and dead queries have no probabilities; sums and turns begin at zero."""
    b, s, h, rows = 2, 70, 3, 64
    out, do, lse = normal(b, s, h, d), normal(b, s, h, d, seed=1), normal(b, s, h, seed=2).at[:, 3].set(-jnp.inf)
    given = normal(b, s, h, seed=3).at[:, 3].set(jnp.nan) if dlse else None
    lines = b * h * 2
    lse2, delta, sums, turns = jtops.triton_call(
        out, do, lse, given, kernel=preprocess_kernel, s=s, h=h, E=d, BLOCK_D=128, BLOCK_M=rows, grid=lines,
        interpret=True,
        out_type=[sds((lines * rows,), jnp.float32), sds((lines * rows,), jnp.float32), sds((lines * 256, 32), jnp.float32),
                  sds((lines,), jnp.int32)],
    )  # fmt: skip
    want = np.einsum("bshd,bshd->bhs", out, do) - (np.swapaxes(given, 1, 2) if dlse else 0)
    alive = np.arange(s) != 3
    by_head = lambda x: np.asarray(x).reshape(b, h, 2 * rows)
    np.testing.assert_allclose(by_head(delta)[..., :s][..., alive], want[..., alive], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(by_head(lse2)[..., :s][..., alive], np.swapaxes(lse, 1, 2)[..., alive] / np.log(2), rtol=1e-6)
    for none, value in ((by_head(delta), 0), (by_head(lse2), np.inf)):
        assert (none[..., s:] == value).all()
        assert (none[..., 3] == value).all()
    assert not np.any(sums)
    assert not np.any(turns)


# ---------------------------------------------------------------------------------------------------------------- what it is for


def types(s=64, t=64, d=128, e=None, dtype="bfloat16", h=2, g=2):
    return sds((1, s, h, d), dtype), sds((1, t, g, d), dtype), sds((1, t, g, e or d), dtype)


def test_unfit():
    nothing = (None,) * 5
    unfit = lambda told, *operands: hopper.unfit(told, Operands(*operands))
    assert unfit(launch(), *types(), *nothing) is None
    assert unfit(launch(left=3, right=0), *types(1, 77, 64, dtype="float16"), *nothing[:4], sds((1, 1), "int32")) is None
    assert unfit(launch(config=hopper.heuristic(128)), *types(), *nothing) is None
    for d, e in ((40, 40), (48, 64), (80, 80), (96, 128), (112, 72)):
        assert unfit(launch(config=hopper.heuristic(d)), *types(d=d, e=e), *nothing) is None
    reasons = [
        (launch(interpret=True), types(), nothing, "interpreter"),
        (launch(target=Target.parse("sm_100")), types(), nothing, "sm_90"),
        (launch(target=Target.parse("gfx942")), types(), nothing, "sm_90"),
        (launch(), types(dtype="float32"), nothing, "float32"),
        (launch(), types(d=32), nothing, "from 40 to 128; got 32 and 32"),
        (launch(), types(d=100), nothing, "multiples of 8"),
        (launch(), types(d=136), nothing, "136"),
        (launch(), types(d=64, e=128), nothing, "one block; got 64 and 128"),
        (launch(), types(), (sds((1, 64), "int32"), sds((1, 64), "int32"), *nothing[2:]), "segment ids"),
        (launch(), types(), (None, None, sds((1,), "int32"), None, None), "lengths"),
        (launch(), types(), (None, None, None, sds((1,), "int32"), None), "lengths"),
        (launch(), types(s=1 << 29), nothing, "32 bits"),
        (launch(1 << 12), types(s=1 << 20), nothing, "32 bits"),
        (launch(config=Config(BLOCK_M=128, BLOCK_N=128)), types(), nothing, "its tiles"),
    ]
    for told, operands, others, words in reasons:
        assert words in unfit(told, *operands, *others), words


@pytest.mark.parametrize(
    ("group", "programs", "parts"),
    [(4, 528, 1), (7, 512, 7), (16, 128, 8), (6, 300, 2), (6, 150, 6), (8, 1, 8), (1, 1, 1), (71, 1000, 1)],
)
def test_parts_of(group, programs, parts):
    """The fewest that give about four programs a multiprocessor; all have as many heads."""
    assert hopper.parts_of(group, programs) == parts


# -------------------------------------------------------------------------------------------------------------------- on a GPU


def truth(q, k, v, do, dlse=None, **options):
    """(out, lse), gradients, in float64."""
    q, k, v, do = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q, k, v, do))
    scale = options.get("scale", q.shape[-1] ** -0.5)
    logits = np.einsum("bshd,bthd->bhst", q, np.repeat(k, q.shape[2] // k.shape[2], 2)) * scale
    mask = oracles.visible(q, k, causal=options.get("causal"), window=options.get("window"))
    lse = np.swapaxes(oracles.logsumexp(logits, np.broadcast_to(mask, logits.shape), axis=-1), 1, 2)
    grads = list(oracles.flash_attention_vjp(q, k, v, g=do, **options))[:3]
    if dlse is not None:  # lse is linear in the scores, to first order, by the probabilities
        p, heads_k, *_ = oracles.attention_parts(q, k, v, **options)
        ds = p * np.swapaxes(np.where(lse == -np.inf, 0, dlse), 1, 2)[..., None] * scale
        grads[0] += np.einsum("bhst,bthd->bshd", ds, heads_k)
        dk = np.einsum("bhst,bshd->bthd", ds, q)
        grads[1] += dk.reshape(*dk.shape[:2], k.shape[2], -1, dk.shape[3]).sum(3)
    return (oracles.flash_attention(q, k, v, **options), lse), grads


def near(got, want, dtype):
    """Root mean squares of the errors, in the largest gradient's: one that cancels to nothing is noise of the others' size."""
    bound, rms = {"bfloat16": 1e-2, "float16": 2e-3}[dtype], lambda x: np.sqrt(np.mean(np.square(x)))
    size = max(map(rms, want))
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        assert rms(np.asarray(x.astype(jnp.float32), np.float64) - y) <= bound * size


def window_of(causal, window):
    left, right = window or (None, None)
    align = "bottom_right" if causal == "bottom_right" else None
    return {"left": left, "right": min(right or 0, 0) if causal else right, "align": align}


def compared(
    s, t, *, d=128, e=None, h=2, g=2, b=1, dtype="bfloat16", causal=False, window=None, scale=None, dlse=False, deterministic=True
):
    """Run it, assert that it is right; -> gradients, lse."""
    q, do = normal(b, s, h, d, dtype=dtype), normal(b, s, h, e or d, seed=3, dtype=dtype)
    k, v = normal(b, t, g, d, seed=1, dtype=dtype), normal(b, t, g, e or d, seed=2, dtype=dtype)
    scale = d**-0.5 if scale is None else scale
    dlse = normal(b, s, h, seed=4) if dlse else None
    (out, lse), want = truth(q, k, v, do, dlse, causal=causal, window=window, scale=scale)
    told = launch(b, s=s, scale=scale, deterministic=deterministic, **window_of(causal, window))
    index = jnp.arange(s, dtype=jnp.int32)[None] if told.rows[7] else None
    poison = jnp.full((1 << 26,), jnp.nan).block_until_ready()
    poison.delete()  # what is not written is likely to be NaN
    saved = jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32)
    got = jax.jit(lambda *a: run(told, *a[:5], do=a[5], dlse=a[6], index=a[7]))(q, k, v, *saved, do, dlse, index)
    near(got, want, dtype)
    return got, lse


LENGTHS = (1, 63, 64, 65, 127, 128, 129, 300, 577, 1000)


@gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("s", LENGTHS)
def test_lengths(s, d, causal, deterministic):
    compared(s, s, d=d, causal=causal, deterministic=deterministic)


@gpu
@pytest.mark.parametrize("causal", [False, True, "bottom_right"])
@pytest.mark.parametrize(("s", "t"), [(300, 1000), (1000, 300), (1, 777), (129, 64)])
@pytest.mark.parametrize("d", [64, 128])
def test_other_keys_than_queries(s, t, d, causal):
    """Aligned to the last key with more queries than keys, the first ones see nothing: no gradient, not NaN."""
    (dq, *_), lse = compared(s, t, d=d, causal=causal, dtype="float16")
    assert not np.asarray(dq)[lse == -np.inf].any()


@gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("window", [(100, None), (None, 50), (70, 33), (0, 0), (1000, 1000), (300, 0)])
@pytest.mark.parametrize("d", [64, 128])
def test_windows(d, window, deterministic):
    compared(1000, 900, d=d, window=window, deterministic=deterministic)


@gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("h", "g"), [(8, 2), (8, 1), (6, 3), (28, 4), (16, 1)])
@pytest.mark.parametrize("s", [64, 200, 577])
def test_grouped_heads(s, h, g, causal):
    compared(s, s, h=h, g=g, b=2, causal=causal)


@gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (70, 33)}], ids=str)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("b", "h", "g", "parts"), [(66, 4, 2, 1), (33, 8, 1, 4), (3, 28, 4, 7)])
def test_parts_of_groups(b, h, g, parts, d, options, deterministic):
    """A program has all heads of its group, or two of eight, or one of seven."""
    assert hopper.parts_of(h // g, b * g * 4) == parts
    compared(130, 500, b=b, h=h, g=g, d=d, deterministic=deterministic, **options)


@gpu
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (70, 33)}, {"h": 6, "dlse": True}], ids=str)
@pytest.mark.parametrize(("s", "t"), [(64, 128), (577, 450)])
@pytest.mark.parametrize(("d", "e"), [(40, 40), (56, 40), (48, 64), (80, 80), (96, 96), (112, 112), (72, 128), (128, 104)])
def test_head_dims(d, e, s, t, options, deterministic):
    compared(s, t, d=d, e=e, b=2, deterministic=deterministic, **options)


@gpu
@pytest.mark.parametrize(("d", "e"), [(80, 80), (48, 64)])
def test_head_dims_of_groups_that_are_not_cut(d, e):
    """dk and dv in q's dtype, clipped."""
    compared(130, 500, d=d, e=e, b=66, h=4, causal=True)


@gpu
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_scales(scale, causal):
    compared(300, 200, scale=scale, causal=causal)


@gpu
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_gradient_of_lse(causal):
    compared(300, 200, dlse=True, causal=causal)


@gpu
@pytest.mark.parametrize("t", [200, 256])
def test_scores_far_below_zero(t):
    """Keys past the end have scores of 0, whose exponential overflows beside a lse of -1000: nothing of it may reach dq."""
    s, d = 100, 128
    q, do = -jnp.abs(normal(1, s, 1, d, dtype="bfloat16")), normal(1, s, 1, d, seed=3, dtype="bfloat16")
    k, v = jnp.abs(normal(1, t, 1, d, seed=1, dtype="bfloat16")), normal(1, t, 1, d, seed=2, dtype="bfloat16")
    (out, lse), want = truth(q, k, v, do, scale=20.0)
    assert lse.max() < -300
    saved = jnp.asarray(out, "bfloat16"), jnp.asarray(lse, jnp.float32)
    got = run(launch(s=s, scale=20.0), q, k, v, *saved, do=do)
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in got)
    near(got[2:], want[2:], "bfloat16")


@gpu
@pytest.mark.parametrize("causal", [True, "bottom_right"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_shards_of_queries(causal, deterministic):
    """Each device has a part of the queries and all keys; the parts of dk and dv add up to the whole."""
    s, t, parts, d = 960, 700, 3, 128
    q, do = normal(1, s, 2, d, dtype="float16"), normal(1, s, 2, d, seed=3, dtype="float16")
    k, v = normal(1, t, 2, d, seed=1, dtype="float16"), normal(1, t, 2, d, seed=2, dtype="float16")
    (out, lse), want = truth(q, k, v, do, causal=causal, scale=0.125)
    out, lse = jnp.asarray(out, "float16"), jnp.asarray(lse, jnp.float32)
    told = launch(s=s, deterministic=deterministic, **window_of(causal, None))
    got = []
    for part in range(parts):
        mine = slice(part * s // parts, (part + 1) * s // parts)
        index = jnp.arange(mine.start, mine.stop, dtype=jnp.int32)[None]
        got.append(run(told, q[:, mine], k, v, out[:, mine], lse[:, mine], do=do[:, mine], index=index))
    dq = jnp.concatenate([x[0] for x in got], 1)
    dk, dv = (sum(x[i].astype(jnp.float32) for x in got) for i in (1, 2))
    near((dq, dk, dv), want, "float16")


@gpu
def test_rows_that_the_batch_shares():
    """q of one row and k, v of two serve six batch elements; each has gradients of its own."""
    q, do = normal(1, 300, 2, 128, dtype="float16"), normal(6, 300, 2, 128, seed=3, dtype="float16")
    k, v = normal(2, 300, 1, 128, seed=1, dtype="float16"), normal(2, 300, 1, 128, seed=2, dtype="float16")
    full = jnp.repeat(q, 6, 0), jnp.repeat(k, 3, 0), jnp.repeat(v, 3, 0)
    (out, lse), want = truth(*full, do, scale=0.125)
    told = launch(6, rows=(Rows(6, 1), Rows(3, 2)))
    near(run(told, q, k, v, jnp.asarray(out, "float16"), jnp.asarray(lse, jnp.float32), do=do), want, "float16")


@gpu
@pytest.mark.parametrize("causal", [False, True])
def test_same_bits(causal):
    """A thousand times; without turns still of dk and dv."""
    b, s, h, g, d = 4, 1024, 8, 2, 128
    q, do = normal(b, s, h, d, dtype="bfloat16"), normal(b, s, h, d, seed=3, dtype="bfloat16")
    k, v = normal(b, s, g, d, seed=1, dtype="bfloat16"), normal(b, s, g, d, seed=2, dtype="bfloat16")
    lse = jnp.broadcast_to(jnp.log(jnp.arange(1, s + 1, dtype=jnp.float32))[None, :, None], (b, s, h))
    index = jnp.arange(s, dtype=jnp.int32)[None] if causal else None
    one = lambda deterministic: jax.jit(
        lambda *a: run(launch(b, s=s, deterministic=deterministic, **window_of(causal, None)), *a[:5], do=a[5], index=a[6])
    )
    same = jax.jit(lambda a, b: jnp.stack([jnp.array_equal(x, y) for x, y in zip(a, b, strict=True)]).all())
    operands = (q, k, v, do, lse, do, index)
    first = one(True)(*operands)
    assert all(bool(same(one(True)(*operands), first)) for _ in range(1000))
    assert all(bool(same(one(False)(*operands)[1:], first[1:])) for _ in range(100))
