"""Attention's masks in kernels: the ranges that they walk, by trying everything small; and what the portable launchers are told."""

import contextlib
import dataclasses
import itertools
from types import FunctionType, SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from jtops.core.target import Target
from jtops.kernels._lib.frame.launch import Rows
from jtops.kernels.attention import mask as masks
from jtops.kernels.attention.mask import Mask
from jtops.kernels.attention.portable import backward as portable_backward
from jtops.kernels.attention.portable import forward as portable_forward
from tests import numerics
from tests.kernels.test_hopper_forward import launch_of

TILES = jtops.Config(BLOCK_M=16, BLOCK_N=16, num_warps=4, num_stages=1)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


# ------------------------------------------------------------------------------------------------------------------ ranges


class Int(int):
    """An integer whose division, as a kernel's, goes towards 0."""

    def __floordiv__(self, other):
        return Int(abs(int(self)) // other * (1 if self >= 0 else -1))

    def __add__(self, other):
        return Int(int(self) + other)

    def __sub__(self, other):
        return Int(int(self) - other)

    def __mul__(self, other):
        return Int(int(self) * other)


def plain(function):
    """A jitted function of scalars as one of Python's, thousands of times faster than the interpreter."""
    pick = lambda choose: lambda *numbers: Int(choose(numbers))
    language = SimpleNamespace(minimum=pick(min), maximum=pick(max))
    return FunctionType(function.fn.__code__, {"tl": language})


key_range, query_range = plain(masks.key_range), plain(masks.query_range)
BOUNDS = (None, 0, 1, 3, 9)
LENGTHS = [(7, 5), (5, 7), (6, 6), (3, 8), (8, 1), (4, 0), (0, 4)]  # of queries and keys, of 8 there may be


def calls():
    """Every mask with the lengths of a batch element, and which of its 8 queries sees which of its 8 keys."""
    for left, right, aligned, (q_length, kv_length) in itertools.product(BOUNDS, BOUNDS, (False, True), LENGTHS):
        mask = Mask(left=left, right=right, align="bottom_right" if aligned else None)
        shift = Int(kv_length - q_length) if aligned else Int(0)
        yield mask, (Int(q_length), Int(kv_length), shift), seen_by(mask, q_length, kv_length, int(shift))


def seen_by(mask, q_length, kv_length, shift):
    """Which query sees which key."""
    i, j = np.arange(8)[:, None], np.arange(8)[None, :]
    seen = (i < q_length) & (j < kv_length)
    if mask.left is not None:
        seen = seen & (j >= i + shift - mask.left)
    if mask.right is not None:
        seen = seen & (j <= i + shift + mask.right)
    return seen


def blocks(start, stop, size):
    return list(range(start, stop, size))


def needed(seen, size):
    """The blocks from the first in which anything is seen to the last."""
    there = np.flatnonzero(seen)
    return blocks(there[0] // size * size, there[-1] + 1, size) if there.size else []


def tight(walked, wanted):
    """No block too much; where there is nothing to walk, a start that is no block's may leave one."""
    return walked == wanted if wanted else len(walked) <= 1


@pytest.mark.parametrize("size", [1, 2, 4])
def test_keys_that_a_block_of_queries_walks(size):
    """All that it sees and, where the length cuts it nowhere, no block more; without masks in blocks seen in full."""
    for mask, lengths, seen in calls():
        for first, count in itertools.product(range(8), (1, 2, 4)):
            last = min(first + count, 8) - 1
            start, full_start, full_stop, stop = key_range(Int(first), Int(last), (*lengths, 0), mask, size)
            what = (mask, lengths, first, last, (start, full_start, full_stop, stop))
            tile = seen[first : last + 1]
            walked, full = blocks(start, stop, size), blocks(full_start, full_stop, size)
            wanted = needed(tile.any(0), size)
            assert set(wanted) <= set(walked), what
            assert start <= full_start <= full_stop, what
            assert full_start == start or mask.left is not None, what  # then kernels do not look before the middle
            whole = [j for j in range(0, 8, size) if tile[:, j : j + size].all()]
            assert set(full) <= set(whole), what
            # What kernels do: before the middle, in it, after it.
            assert blocks(start, full_start, size) + full + blocks(full_stop, stop, size) == sorted({*walked, *full}), what
            if last < lengths[0] or first >= lengths[0]:
                assert tight(walked, wanted), what
                assert full == whole, what


def test_ids_leave_no_middle():
    """Any block may hold another's keys."""
    for mask, lengths, _ in calls():
        start, full_start, full_stop, stop = key_range(Int(0), Int(3), (*lengths, 0), mask._replace(q_ids=1), 2)
        assert start == full_start == full_stop
        assert (start, stop) == key_range(Int(0), Int(3), (*lengths, 0), mask, 2)[::3]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_queries_that_a_block_of_keys_walks(size):
    """Of each shard of the queries those that see any of the keys, and no block more; counted from the shard's first."""
    for mask, lengths, seen in calls():
        for (offset, s), first, count in itertools.product([(0, 8), (0, 4), (4, 4), (2, 5)], range(8), (1, 2, 4)):
            last = min(first + count, 8) - 1
            start, stop = query_range(Int(first), Int(last), Int(s), (*lengths, Int(offset)), mask, size)
            wanted = needed(seen[offset : offset + s, first : last + 1].any(1), size)
            what = (mask, lengths, offset, s, first, last, (start, stop))
            assert set(wanted) <= set(blocks(start, stop, size)), what
            if last < lengths[1] or first >= lengths[1]:
                assert tight(blocks(start, stop, size), wanted), what


@triton.jit
def narrowed_kernel(ids_ptr, others_ptr, found_ptr, start, stop, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    ids = tl.load(ids_ptr + tl.arange(0, ROWS))
    others = masks.Operand(others_ptr, Rows(1, 1))
    first, last = masks.narrowed(start, stop, ids, others, tl.program_id(0), n, BLOCK)
    tl.store(found_ptr, first)
    tl.store(found_ptr + 1, last)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("ids", "others"),
    [
        ([3, 3, 4, 4], np.repeat([0, 1, 2, 3, 4, 5], 50)),
        ([4, -1, -1, 2], np.repeat([0, 1, 2, 3, 4, 5], 50)),
        ([7, 7, 7, 7], np.repeat([0, 1, 2], 100)),
        ([-1, -1, -1, -5], np.repeat([0, -1, 2], 100)),
        ([2**31 - 1] * 4, np.r_[np.zeros(299), 2**31 - 1]),
        ([0, 0, 0, 0], np.r_[0, np.full(5000, 9), 0, np.full(5000, 9)]),
        ([1, 1, 1, 1], np.r_[np.full(4095, 9), 1, 1, np.full(4095, 9)]),
    ],
)
def test_ids_narrow_the_range(ids, others, implementation):
    """To whole blocks from the first to past the last id between the least and the greatest, wherever one looks."""
    n, block = len(others), 16
    near = np.flatnonzero((others >= min([i for i in ids if i >= 0], default=2**31 - 1)) & (others <= max(ids)))
    with jtops.config.interpret() if implementation == "interpret" else contextlib.nullcontext():
        for start, stop in ((0, n), (32, n), (0, 40), (96, 96), (n // 32 * 16, n - 3)):
            like = jax.ShapeDtypeStruct((2,), jnp.int32)
            given = {"start": start, "stop": stop, "n": n, "ROWS": 4, "BLOCK": block}
            operands = jnp.asarray(ids, jnp.int32), jnp.asarray(others, jnp.int32)
            first, last = map(int, jtops.triton_call(*operands, kernel=narrowed_kernel, out_type=like, grid=1, **given))
            inside = near[(near >= start) & (near < stop)]
            assert first % block == 0
            if inside.size:
                assert (first, last) == (inside[0] // block * block, inside[-1] + 1)
            else:
                assert first == last


# --------------------------------------------------------------------------------------------------------------- launchers


def portable(q, k, v, g, *, offset=0, **options):
    """(out, lse), (dq, dk, dv) by the portable kernels, interpreted."""
    options = {"target": Target(90), "interpret": True, "config": TILES} | options
    launch, operands = launch_of(q, k, v, **options)
    operands = operands._replace(s_index=operands.s_index + offset)
    out, lse = portable_forward.forward(launch, operands)
    wanted = type(operands)(*[True] * 3, *[False] * 5)
    launch = dataclasses.replace(launch, wanted=wanted)
    return (out, lse), portable_backward.backward(launch, operands, (out, lse), (g, None))[:3]


def test_queries_past_their_length_in_a_later_shard():
    """What they hold, and their cotangents, reach no gradient: the length counts from the whole sequence's start."""
    q, k, v, g = normal(1, 24, 1, 16), normal(1, 40, 1, 16, seed=1), normal(1, 40, 1, 16, seed=2), normal(1, 24, 1, 16, seed=3)
    lengths = jnp.asarray([30], jnp.int32), None  # of 40 queries in all, this shard has those from 16 on
    past = lambda x, fill: x.at[:, 14:].set(fill)
    results = [
        portable(past(q, fill), k, v, past(g, fill), offset=16, q_size=40, causal=True, lengths=lengths) for fill in (0.0, jnp.nan)
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)
    (out, _), (dq, dk, dv) = results[0]
    plain = lambda q, k, v: jtops.flash_attention(
        jnp.pad(q, ((0, 0), (16, 0), (0, 0), (0, 0))), k, v, causal=True, q_lengths=lengths[0], implementation="xla"
    )[:, 16:]
    want, pullback = jax.vjp(plain, past(q, 0.0), k, v)
    numerics.close((out, dq, dk, dv), (want, *pullback(past(g, 0.0))), 1e-4)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_of_negative_ids_reaches_nothing(causal, implementation):
    """Not even as 0 * NaN: what queries, keys, values and cotangents hold there, between others and past all."""
    ids = jnp.asarray([[0, -1, 0, 0, -2] + [0] * 4 + [-1] * 4 + [2] * 13 + [-7] * 6], jnp.int32)
    operands = [normal(1, 32, 1, 16, seed=i) for i in range(4)]
    pads = lambda fill: [jnp.where((ids < 0)[..., None, None], fill, x) for x in operands]

    def results(implementation, q, k, v, g):
        f = lambda *x: jtops.flash_attention(*x, causal=causal, segment_ids=ids, implementation=implementation)
        out, pullback = jax.vjp(f, q, k, v)
        return out, pullback(g)

    clean = results(implementation, *pads(0.0))
    jax.tree.map(np.testing.assert_array_equal, results(implementation, *pads(jnp.nan)), clean)
    numerics.close(clean, results("xla", *pads(0.0)), 1e-4)


@pytest.mark.parametrize("implementation", ["xla", "interpret", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("causal", [False, "bottom_right"])
def test_lengths_above_the_size_are_the_size(causal, implementation):
    q, k, v = normal(1, 20, 1, 16), normal(1, 24, 1, 16, seed=1), normal(1, 24, 1, 16, seed=2)

    def results(q_length, kv_length):
        f = lambda *x: jtops.flash_attention(
            *x, causal=causal, q_lengths=q_length, kv_lengths=kv_length, implementation=implementation
        )
        out, pullback = jax.vjp(f, q, k, v)
        return out, pullback(out)

    want = results(20, 24)
    for lengths in ((20, 31), (29, 24), (1000, 2**31 - 1)):
        jax.tree.map(np.testing.assert_array_equal, results(*lengths), want)


@pytest.mark.parametrize(("s", "t"), [(32, 24), (24, 32), (24, 24), (32, 32)])
def test_tails_of_either_length_are_masked(s, t):
    """Nothing is read past the end of either sequence, where no mask says so: the interpreter refuses it."""
    q, k, v, g = normal(1, s, 1, 16), normal(1, t, 1, 16, seed=1), normal(1, t, 1, 16, seed=2), normal(1, s, 1, 16, seed=3)
    (out, _), grads = portable(q, k, v, g)
    want, pullback = jax.vjp(lambda *x: jtops.flash_attention(*x, implementation="xla"), q, k, v)
    numerics.close((out, *grads), (want, *pullback(g)), 1e-4)


def precisions(**options):
    """PRECISION of every launch of the portable kernels, value and gradients, for sm_90."""
    asked = []

    def launched(launch, kernel, **arguments):
        asked.append(arguments["PRECISION"])
        return {name: None if t is None else jnp.zeros(t.shape, t.dtype) for name, t in arguments["outputs"].items()}

    x = jnp.ones((1, 32, 1, 16))
    with jtops.config.target("sm_90"), mock.patch.object(portable_forward.Launch, "__call__", launched):
        f = lambda *x: jtops.flash_attention(*x, **options).sum()
        jax.jit(jax.grad(f, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",))
    return asked


def test_products_of_float32_are_as_exact_as_was_asked():
    assert precisions() == ["tf32x3"] * 3
    assert precisions(precision="highest") == ["tf32x3"] * 3
    assert precisions(precision="default") == ["tf32"] * 3


def test_keys_that_devices_share_are_gathered():
    """Queries stay where they are; each device's see all keys."""
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(*spec)))
    q, k, v = normal(1, 8, 1, 16), normal(1, 8, 1, 16, seed=1), normal(1, 8, 1, 16, seed=2)
    f = jax.jit(lambda q, k, v: jtops.flash_attention(q, k, v, implementation="interpret"))
    got = f(place(q, None, "a"), place(k, None, "b"), place(v, None, "b"))
    numerics.close(got, jtops.flash_attention(q, k, v, implementation="xla"), 1e-5)
    assert got.sharding.spec[:2] == (None, "a")
