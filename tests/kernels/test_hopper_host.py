"""What the launchers of attention's Hopper kernels work out before they launch; nothing is compiled here."""

import dataclasses
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtops._compat import gluon as gluon_compat
from jtops.kernels._lib.frame.launch import Config, Launch, Rows
from jtops.kernels.attention.hopper import backward, forward
from jtops.kernels.attention.mask import Mask, visible
from tests.kernels import test_hopper_backward as of_backward
from tests.kernels.test_hopper_forward import launch_of, types


def launches(run):
    """The arguments of every launch that `run` makes, which gets zeros of them."""
    found = []

    def launched(launch, kernel, outputs, **arguments):
        found.append({"kernel": kernel.__name__, "outputs": outputs} | arguments)
        base = lambda t: getattr(t, "base", t)
        zeros = {name: None if t is None else jnp.zeros(base(t).shape, base(t).dtype) for name, t in outputs.items()}
        return zeros | {name: jnp.zeros(arguments["inputs"].sums.shape) for name in arguments.get("in_place", ()) if "." in name}

    with mock.patch.object(Launch, "__call__", launched):
        jax.eval_shape(run)
    return found


def forward_launch(b=2, s=256, t=256, h=4, g=2, d=128, lengths=(None, None), **options):
    operands = types(b, s, t, h, g, d)
    (told,) = launches(lambda: forward.forward(*launch_of(*map(zeros, operands), lengths=lengths, **options)))
    return told


def zeros(t):
    return jnp.zeros(t.shape, t.dtype)


# ----------------------------------------------------------------------------------------------------------------- forward


def test_what_the_forward_refuses():
    """Each limit, and what is just inside."""
    unfit = lambda *sizes, **more: forward.unfit(*launch_of(*types(*sizes), **more))
    assert [unfit(1, 64, 64, 1, 1, d) is None for d in (32, 40, 256, 264)] == [False, True, True, False]
    empty = [unfit(*sizes) for sizes in ((0, 64, 64, 1, 1, 64), (1, 0, 64, 1, 1, 64), (1, 64, 0, 1, 1, 64))]
    assert all("nothing to load" in reason for reason in empty)
    assert [unfit(1, 64, 64, 1, 1, 64, scale=scale) is None for scale in (1e-30, 0.0, np.inf)] == [True, False, False]
    q, k, _ = types(1, 64, 64, 1, 1, 64)
    values = lambda e: forward.unfit(*launch_of(q, k, jax.ShapeDtypeStruct((1, 64, 1, e), q.dtype)))
    assert [values(e) is None for e in (32, 36, 40, 64, 72)] == [False, False, True, True, False]
    with mock.patch.object(gluon_compat, "version", return_value=(3, 8)):
        assert unfit(1, 64, 64, 1, 1, 64) == "it is not proven with Triton 3.8"
    only_keys = launch_of(*types(1, 64, 64, 1, 1, 64))
    for name in ("bias", "mask", "sinks", "alibi_slopes"):
        said = [stage.unfit(only_keys[0], only_keys[1]._replace(**{name: jnp.zeros(1)})) for stage in (forward, backward)]
        assert said == [f"it has no {name}"] * 2
    capped = dataclasses.replace(only_keys[0], options=only_keys[0].options | {"softcap": 2.0})
    assert [stage.unfit(capped, only_keys[1]) for stage in (forward, backward)] == ["it has no softcap"] * 2
    assert "ids" in forward.unfit(only_keys[0], only_keys[1]._replace(kv_ids=jnp.zeros((1, 64), jnp.int32)))


@pytest.mark.parametrize("block_n", [64, 128, 256])
def test_blocks_without_a_mask_are_seen_in_full(block_n):
    """By every warpgroup's 64 queries: all blocks but the first that they walk, the last of their keys; of "none" that one too."""
    sizes = itertools.product((64, 130, 256, 512), (1, 127, 128, 512, 600), (None, 0, 7, 64, 128), (False, True), (None, 100, 256))
    said = set()
    for s, t, right, aligned, kv_length in sizes:
        align = "bottom_right" if aligned else None
        mask = Mask(right=right, align=align, kv_lengths=kv_length)
        cut = forward.cuts(mask, s, t, s, block_n)
        said.add(cut)
        length = t if kv_length is None else min(kv_length, t)
        i, j = np.arange(-(-s // 64) * 64)[:, None], np.arange(-(-t // block_n) * block_n)[None, :]
        seen = np.broadcast_to(j < length, (i.size, j.size))
        if right is not None:
            seen = seen & (j <= i + right + (length - s if aligned else 0))
        for first in range(0, i.size, 64):
            rows = seen[first : first + 64]
            blocks = [rows[:, start : start + block_n] for start in range(0, j.size, block_n)]
            walked = [block for block in blocks if block.any()]
            plain = {"none": walked, "first": walked[:-1], "any": []}[cut]
            assert all(block.all() for block in plain), (s, t, right, aligned, kv_length, first)
            if cut == "first" and not forward.dead(mask, t, s):  # no maximum is -inf from there on
                assert walked[-1][: s - first].any(1).all(), (s, t, right, aligned, first)
    assert said == {"none", "first", "any"}


def test_dead_queries_are_foretold():
    """Those that see no key, by their place alone; lengths may make any."""
    said = set()
    for s, t, left, right, align in itertools.product((1, 5, 9), (1, 5, 9), (None, 0, 3), (None, 0, 2), (None, "bottom_right")):
        mask = Mask(left=left, right=right, align=align)
        seen = np.broadcast_to(visible(mask, s, t, s), (s, t))
        assert forward.dead(mask, t, s) == (not seen.any(1).all()), (s, t, left, right, align)
        said.add(forward.dead(mask, t, s))
        assert forward.dead(mask._replace(q_lengths=0), t, s)
        assert forward.dead(mask._replace(kv_lengths=0), t, s)
    assert said == {True, False}


def test_tiles_of_the_forward():
    """Three warpgroups where a head of 64 leaves them registers, and where a mask leaves enough for them to do."""
    chosen = lambda *call: [forward.heuristic(*call)[name] for name in ("WARPGROUPS", "BLOCK_N")]
    for masked in (False, True):
        assert chosen(64, 64, 4096, masked) == [3, 128]
        assert chosen(128, 128, 4096, masked) == chosen(80, 96, 512, masked) == [2, 128]
        assert chosen(256, 256, 4096, masked) == chosen(136, 192, 4096, masked) == [2, 64]
    assert chosen(64, 64, 1024, False) == [3, 128]
    assert chosen(64, 64, 1024, True) == chosen(64, 64, 2047, True) == [2, 128]
    assert chosen(64, 64, 2048, True) == [3, 128]
    for d, masked in itertools.product((40, 64, 128, 256), (False, True)):
        forward.check(forward.heuristic(d, d, 1024, masked))


def test_tiles_are_drawn_where_they_differ():
    """By what masks leave of them; else each program knows its own. The counter begins at 0."""
    for options in ({"causal": True}, {"window": (9, None)}, {"lengths": (jnp.ones(2, jnp.int32), None)},
                    {"lengths": (None, jnp.ones(2, jnp.int32))}):  # fmt: skip
        told = forward_launch(**options)
        assert told["DYNAMIC"]
        assert told["outputs"]["counter"] is not None
        assert told["zeroed"] == ("counter",)
    assert not forward_launch()["DYNAMIC"]
    assert forward_launch()["outputs"]["counter"] is None


def test_programs_and_registers_of_the_forward():
    """A program a multiprocessor at most, and no more registers than it has: 65536."""
    for d, warpgroups in ((64, 3), (128, 2), (256, 2)):
        told = forward_launch(1, 300, 300, 3, 3, d)
        assert told["config"]["WARPGROUPS"] == warpgroups
        assert told["grid"] == 3 * -(-300 // (64 * warpgroups))
        assert 128 * (warpgroups * told["REGISTERS"] + told["MOVER_REGISTERS"]) <= 65536
        assert told["AHEAD"] == (d < 256)
        assert [told[x].array.block_shape for x in "qkv"] == [(1, 64, 1, d)] + [(1, told["config"]["BLOCK_N"], 1, d)] * 2
    assert forward_launch(8, 4096, 4096, 16, 16, 128)["grid"] == 132


def test_where_a_shard_begins_is_read_only_of_shards():
    assert forward_launch(causal=True)["mask"].q_index is None
    assert forward_launch(causal=True, q_size=512)["mask"].q_index is not None


@pytest.mark.parametrize(
    "sizes", [(1, 4096, 8, 8, 128), (4, 16384, 32, 8, 128), (2, 65536, 16, 1, 64), (8, 1024, 32, 32, 256), (1, 10**6, 4, 4, 256)]
)
def test_heads_whose_keys_fit_the_cache_go_together(sizes):
    """As many as a power of two can say; one at least."""
    b, t, h, g, d = sizes
    section = forward_launch(b, 256, t, h, g, d)["sizes"].section
    of_head = t * 2 * d * 2 * g / h
    assert section & (section - 1) == 0
    assert section == 1 or section * of_head <= forward.L2_BYTES
    assert 2 * section * of_head > forward.L2_BYTES or section >= b * h


# ---------------------------------------------------------------------------------------------------------------- backward


def backward_launch(b=1, s=300, t=300, h=4, g=2, d=128, **options):
    told = of_backward.launch(b, s=s, **options)
    q, k = (jnp.zeros((b, size, heads, d), jnp.bfloat16) for size, heads in ((s, h), (t, g)))
    index = jnp.arange(s, dtype=jnp.int32) if told.rows[7] else None
    run = lambda: of_backward.run(told, q, k, k, q, jnp.zeros((b, s, h)), q, index=index)
    return {one["kernel"]: one for one in launches(run)}


def test_what_the_backward_refuses():
    """At its edges: sizes of 2^28, and 2^38 bytes of sums of dq."""
    unfit = lambda b=1, s=64, t=64, d=128, h=1, **more: backward.unfit(
        of_backward.launch(b, s=s, **more), of_backward.Operands(*of_backward.types(s, t, d, h=h, g=1), *(None,) * 5)
    )
    assert [unfit(t=n) is None for n in (2**28, 2**28 + 1)] == [True, False]
    assert [unfit(d=64, s=n) is None for n in (2**28, 2**28 + 1)] == [True, False]
    assert [unfit(q_size=n) is None for n in (2**28, 2**28 + 1)] == [True, False]
    assert [unfit(b, 2**19) is None for b in (2**10 - 1, 2**10)] == [True, False]
    assert [unfit(h=h, s=2**19 - 100) is None for h in (2**10 - 1, 2**10)] == [True, False]  # filled up to tiles
    assert unfit(config=Config(BLOCK_M=64, BLOCK_N=128, num_warps=4)) is None
    assert "its tiles" in unfit(config=Config(BLOCK_M=64, BLOCK_N=128, num_warps=8))
    assert "its tiles" in unfit(d=64, config=backward.heuristic(128))


def test_only_what_no_mask_cuts_needs_an_edge():
    edge = lambda t, **window: backward_launch(t=t, **window)["backward_kernel"]["EDGE"]
    assert [edge(256), edge(300), edge(300, right=0), edge(300, left=5), edge(1)] == [False, True, False, False, True]


def test_windows_past_all_keys_stay_in_32_bits():
    window = lambda **sides: backward_launch(s=300, t=200, **sides)["backward_kernel"]["window"]
    assert window(left=2**40, right=2**33) == (500, 500)
    assert window(left=499, right=3) == (499, 3)
    assert window(right=0) == (0, 0)


def test_grids_and_memory_of_the_backward():
    made = backward_launch(2, 300, 260, 4, 2, 128, rows=(Rows(1, 2), Rows(2, 1)))
    tiles = 2 * 4 * 5  # of 64 queries
    before, main, after = (made[name] for name in ("preprocess_kernel", "backward_kernel", "postprocess_kernel"))
    assert (before["grid"], main["grid"], after["grid"]) == (tiles, 2 * 4 * 3, tiles)  # a group of two heads in parts
    assert before["outputs"]["sums_ptr"].shape == (tiles * 256, 32)
    assert before["outputs"]["sums_ptr"].size == tiles * 64 * 128
    assert before["outputs"]["lse2_ptr"].shape == (tiles * 64,)
    assert tuple(main["rows"]) == ((1, 2), (2, 1), (2, 1))
    assert (main["outputs"]["dk_desc"].base.shape, main["outputs"]["dk_desc"].base.dtype) == ((2, 260, 4, 128), jnp.float32)
    alone = backward_launch(2, 300, 260, 2, 2, 128)["backward_kernel"]["outputs"]["dk_desc"].base
    assert (alone.shape, alone.dtype) == ((2, 260, 2, 128), jnp.bfloat16)


@pytest.mark.parametrize("deterministic", [True, False])
def test_turns_are_kept_only_for_one_order_of_sums(deterministic):
    made = backward_launch(deterministic=deterministic)
    assert (made["preprocess_kernel"]["outputs"]["turns_ptr"] is not None) == deterministic
    assert ("turns_ptr" in made["backward_kernel"]["in_place"]) == deterministic
    assert made["backward_kernel"]["DETERMINISTIC"] == deterministic


@pytest.mark.parametrize("sizes", [(1, 4096, 8, 8, 128), (4, 16384, 32, 8, 128), (2, 65536, 16, 1, 64), (8, 512, 32, 32, 64)])
def test_heads_whose_queries_fit_the_cache_go_together(sizes):
    """Their q, cotangents and sums of dq: 8 bytes a number. Without turns at least as many as run at one time."""
    b, s, h, g, d = sizes
    for deterministic, t in ((True, 256), (False, 256), (False, 8192)):
        shape = backward_launch(b, s, t, h, g, d, deterministic=deterministic)["backward_kernel"]["shape"]
        (_, _, groups, heads, parts, _, section) = shape
        assert (groups, groups * heads) == (g * parts, h)
        of_head = heads * s * d * 8
        least = 1 if deterministic else min(b * groups, -(-132 // (t // 128)))
        assert section & (section - 1) == 0
        assert 2 * section > least
        assert section <= least or section * of_head <= 40 * 2**20
        assert 2 * section * of_head > 40 * 2**20 or 2 * section > b * groups


def test_a_call_without_cotangent_of_the_result():
    """Only lse was used: the launch reads zeros in its place, and a call that does not ask for dq does not write it."""
    told = of_backward.launch(1, s=64, wanted=of_backward.Operands(False, True, True, *(False,) * 5))
    q = jnp.zeros((1, 64, 2, 128), jnp.bfloat16)
    made = launches(lambda: of_backward.run(told, q, q, q, q, jnp.zeros((1, 64, 2)), None, jnp.zeros((1, 64, 2))))
    assert [one["kernel"] for one in made] == ["preprocess_kernel", "backward_kernel"]
    assert made[0]["do_ptr"].shape == q.shape
    assert made[1]["inputs"].do.base.shape == q.shape
