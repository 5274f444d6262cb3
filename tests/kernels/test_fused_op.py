"""The interface that ops are written against, by ops made for the purpose: grouped heads, optional and integer operands, residuals,
several outputs, a weight shared by rows, a logical offset. Their launchers are jax.numpy, so that the frame alone is tested."""

import collections
import copy
import pickle
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jtops
from jtops._compat.triton import tl, triton
from jtops.core.sizes import cdiv
from jtops.kernels._lib.device.rows import row
from jtops.kernels._lib.frame import tuned
from jtops.kernels._lib.frame.axes import AxisRule
from jtops.kernels._lib.frame.launch import Config, Rows
from jtops.kernels._lib.frame.op import Variant, fused_op, refused
from tests import numerics
from tests.kernels import lowered
from tests.kernels.test_sharding import collectives, mesh, put

seen = []  # what launchers were told: (stage, batch, rows)


def own_rows(x, rows, batch):
    """An operand with a row per row of the call, by the contract's formula and nothing else."""
    return None if x is None else x[np.arange(batch) // rows.inner % rows.own]


def numpy_launchers(reference):
    def forward(launch, x):
        seen.append((launch.stage, launch.batch, launch.rows))
        full = [own_rows(a, r, launch.batch) for a, r in zip(x, launch.rows, strict=True)]
        outs = reference(*full, **launch.options)
        return outs if launch.residuals else outs[: 1 if len(outs) == 1 else 2]

    def backward(launch, x, saved, cotangents):
        seen.append((launch.stage, launch.batch, launch.rows))
        full = [own_rows(a, r, launch.batch) for a, r in zip(x, launch.rows, strict=True)]
        where = [i for i, w in enumerate(launch.wanted) if w]

        def live(*moved):
            args = list(full)
            for i, a in zip(where, moved, strict=True):
                args[i] = a
            outs = reference(*args, **launch.options)
            return [o for o, ct in zip(outs, cotangents, strict=True) if ct is not None]

        grads = iter(jax.vjp(live, *(full[i] for i in where))[1]([ct for ct in cotangents if ct is not None]))
        return [next(grads) if w else None for w in launch.wanted]

    return {"forward": forward, "backward": backward}


def attention_reference(q, k, v, bias, lengths, *, scale=1.0):
    """q [... s h d], k v [... t g d], bias [... h s t] or None, lengths [...] int or None -> out, lse [... s h]."""
    r = q.shape[-2] // k.shape[-2]
    k, v = jnp.repeat(k, r, -2), jnp.repeat(v, r, -2)
    logits = jnp.einsum("...shd,...thd->...hst", q, k).astype(jnp.float32) * scale
    if bias is not None:
        logits = logits + bias
    if lengths is not None:
        logits = jnp.where(jnp.arange(k.shape[-3]) < lengths[..., None, None, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, -1)
    p = jnp.exp(logits - lse[..., None]).astype(v.dtype)
    return jnp.einsum("...hst,...thd->...shd", p, v), jnp.swapaxes(lse, -1, -2)


attention = fused_op(
    "attention",
    operands={"q": "s (g r) d", "k": "t g d", "v": "t g d", "bias": "(g r) s t", "lengths": ""},
    results={"out": "s (g r) d", "lse": "s (g r)"},
    reference=attention_reference,
    saves=("out", "lse"),
    whole="s t d",
    **numpy_launchers(attention_reference),
)


def plain_attention(q, k, v, bias=None, lengths=None):
    return attention_reference(q, k, v, bias, lengths)


def fused_attention(q, k, v, bias=None, lengths=None, implementation="interpret"):
    return attention(q, k, v, bias, lengths, implementation=implementation)


def rand(i, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(i).normal(size=shape), dtype)


Q, K, V, B = rand(1, 2, 5, 4, 8), rand(2, 2, 6, 2, 8), rand(3, 2, 6, 2, 8), rand(4, 2, 4, 5, 6)
LENGTHS = jnp.array([6, 3], jnp.int32)


def loss(f):
    return lambda *a: sum((o.astype(jnp.float32) ** 2).sum() for o in jax.tree.leaves(f(*a)))


@pytest.mark.parametrize("bias", [True, False])
def test_all_gradients_and_second_order(bias):
    args = (Q, K, V, B) if bias else (Q, K, V)
    numerics.close(fused_attention(*args), plain_attention(*args))
    which = tuple(range(len(args)))
    numerics.close(jax.grad(loss(fused_attention), which)(*args), jax.grad(loss(plain_attention), which)(*args), 1e-4)
    check_grads(fused_attention, args, 2, modes=("fwd", "rev"), atol=3e-2, rtol=3e-2)


def test_only_what_is_used_reaches_the_backward():
    def told(f, *args):
        seen.clear()
        jax.jit(f).lower(*args)
        return [stage for stage, *_ in seen]

    assert told(fused_attention, Q, K, V) == ["out"]
    assert told(jax.grad(loss(fused_attention), (0, 1, 2)), Q, K, V) == ["fwd", "vjp"]
    assert told(jax.vmap(jax.grad(loss(fused_attention))), jnp.stack([Q] * 3), jnp.stack([K] * 3), jnp.stack([V] * 3)) == [
        "fwd",
        "vjp",
    ]
    for pick in (0, 1):  # one output's cotangent, one operand's gradient
        f = lambda g, pick=pick: jax.grad(lambda *a: (g(*a)[pick] ** 2).sum(), (0, 1, 2))
        numerics.close(f(fused_attention)(Q, K, V), f(plain_attention)(Q, K, V), 1e-4)


def test_integer_and_absent_operands():
    numerics.close(fused_attention(Q, K, V, None, LENGTHS), plain_attention(Q, K, V, None, LENGTHS))
    g = lambda f: jax.grad(lambda q, n: f(q, K, V, None, n)[0].sum(), (0, 1), allow_int=True)
    got, want = g(fused_attention)(Q, LENGTHS), g(plain_attention)(Q, LENGTHS)
    assert got[1].dtype == jax.dtypes.float0
    assert got[1].shape == LENGTHS.shape
    numerics.close(got[0], want[0], 1e-4)
    tangents = (jnp.ones_like(Q), np.zeros(LENGTHS.shape, jax.dtypes.float0))
    f = lambda g: jax.jvp(lambda q, n: g(q, K, V, None, n), (Q, LENGTHS), tangents)
    numerics.close(f(fused_attention), f(plain_attention), 1e-4)
    f = lambda g: jax.vmap(lambda q, n: g(q, K[0], V[0], None, n))(Q, LENGTHS)
    numerics.close(f(fused_attention), f(plain_attention))


def test_gradients_have_their_operands_dtype():
    low = [x.astype(jnp.bfloat16) for x in (Q, K, V)]
    for implementation in (None, "interpret"):
        f = lambda *a, i=implementation: fused_attention(*a, implementation=i)
        grads = jax.grad(loss(f), (0, 1, 2, 3))(*low, B)
        assert [g.dtype for g in grads] == [jnp.bfloat16] * 3 + [jnp.float32]


@pytest.mark.parametrize("in_axes", [(0, None, None), (None, 0, -1), (None, None, 0), (-1, 0, None), (0, -1, 0), (1, 2, 3)])
def test_vmap_in_axes(in_axes):
    place = lambda x, a: x if a is None else jnp.moveaxis(jnp.stack([x, x + 1, x * 2]), 0, a)
    args = [place(x, a) for x, a in zip((Q, K, V), in_axes, strict=True)]
    for f in (
        lambda g: jax.vmap(g, in_axes),
        lambda g: jax.vmap(jax.grad(loss(g), (0, 1, 2)), in_axes),
        lambda g: jax.grad(loss(jax.vmap(g, in_axes)), (0, 1, 2)),
    ):
        numerics.close(jax.jit(f(fused_attention))(*args), jax.jit(f(plain_attention))(*args), 1e-3)


def test_shared_operands_are_not_copied():
    x, shared = jnp.stack([Q, Q + 1, Q * 2]), B[:1]
    nest = lambda g: jax.vmap(jax.vmap(lambda q, b: g(q, K[0], V[0], b)[0], (0, None)), (0, None))
    numerics.close(nest(fused_attention)(x, B[0]), nest(plain_attention)(x, B[0]))
    seen.clear()
    jax.jit(nest(fused_attention)).lower(x, B[0])
    ((stage, batch, rows),) = seen
    assert (stage, batch) == ("out", 6)
    assert rows._asdict() == {"q": Rows(1, 6), "k": Rows(1, 1), "v": Rows(1, 1), "bias": Rows(1, 1), "lengths": None}
    for bias in (shared, B[:, :1], B[:, :, :1], B[:1, :1, :1]):  # core axes of size 1 too
        g = lambda h: jax.grad(lambda q, b: (h(q, K, V, b)[0] ** 2).sum(), (0, 1))
        numerics.close(g(fused_attention)(Q, bias), g(plain_attention)(Q, bias), 1e-4)


# --------------------------------------------------------------------------------------------------------- shared weights


def scale_reference(x, w):
    return (x * w,)


scale_rows = fused_op(
    "scale_rows",
    operands={"x": "n", "w": "n"},
    results={"y": "n"},
    reference=scale_reference,
    whole="n",
    **numpy_launchers(scale_reference),
)


def fused_scale(x, w):
    return scale_rows(x, w, implementation="interpret")[0]


@pytest.mark.parametrize(
    ("x", "w", "rows"),
    [
        ((3, 4, 8), (8,), Rows(inner=1, own=1)),
        ((3, 4, 8), (3, 1, 8), Rows(inner=4, own=3)),
        ((3, 4, 8), (4, 8), Rows(inner=1, own=4)),
        ((2, 3, 4, 8), (1, 3, 1, 8), Rows(inner=4, own=3)),
        ((2, 3, 4, 8), (2, 1, 4, 8), Rows(inner=1, own=24)),  # full axes that are not neighbours: spread, and summed after
    ],
)
def test_rows_of_shared_operands(x, w, rows):
    x, w = rand(1, *x), rand(2, *w)
    seen.clear()
    got = jax.jit(jax.value_and_grad(loss(fused_scale), (0, 1)))(x, w)
    assert {told.w for *_, told in seen} == {rows}
    numerics.close(got, jax.value_and_grad(loss(lambda x, w: x * w), (0, 1))(x, w), 1e-4)
    numerics.close(jax.hessian(loss(fused_scale), 1)(x, w), jax.hessian(loss(lambda x, w: x * w), 1)(x, w), 1e-4)


# --------------------------------------------------------------------------------------------------------------- sharding

AQ, AK, AV, AB = rand(1, 8, 5, 16, 4), rand(2, 8, 6, 8, 4), rand(3, 8, 6, 8, 4), rand(4, 1, 16, 5, 6)


@pytest.mark.parametrize("kv_heads", [8, 4, 1])
@pytest.mark.parametrize("names", [("x",), ("a", "x")])
def test_grouped_heads(kv_heads, names):
    """Query heads and key/value heads are sharded together, or where the mesh does not divide the latter, not at all."""
    m = mesh(names=names)
    n, batch = m.shape["x"], "a" if len(names) == 2 else None
    k, v = AK[:, :, :kv_heads], AV[:, :, :kv_heads]
    args = (
        put(AQ, m, batch, None, "x"),
        *(put(x, m, batch, None, "x" if kv_heads % n == 0 else None) for x in (k, v)),
        put(AB, m, None, "x"),
    )
    f = jax.jit(fused_attention)
    numerics.close(f(*args), plain_attention(AQ, k, v, AB))
    if kv_heads % n == 0:
        assert collectives(f, *args) == {}
    d = lambda g: jax.jit(jax.grad(loss(g), (0, 1, 2, 3)))
    numerics.close(d(fused_attention)(*args), d(plain_attention)(AQ, k, v, AB), 1e-3)


def test_grouped_heads_explicit():
    m = mesh(AxisType.Explicit)
    with jax.set_mesh(m):
        q, k, v = (put(x, m, None, None, "x") for x in (AQ, AK, AV))
        d = lambda g: jax.jit(jax.grad(loss(g), (0, 1, 2)))
        numerics.close(d(fused_attention)(q, k, v), d(plain_attention)(AQ, AK, AV), 1e-3)


def test_awkward_shardings():
    m, f, want = mesh(), jax.jit(fused_attention), plain_attention(AQ, AK, AV, AB)
    for sq, sk in [((None, None, "x"), ("x",)), ((), (None, None, "x")), (("x",), (None, None, "x")), ((), ("x",)), (("x",), ())]:
        numerics.close(f(put(AQ, m, *sq), put(AK, m, *sk), AV, AB), want, 1e-4)
    numerics.close(f(put(AQ, mesh(names=("a", "b")), None, None, "a", "b"), AK, AV, AB), want, 1e-4)  # head_dim sharded


# ------------------------------------------------------------------------------------------------------- logical positions


@triton.jit
def _position_kernel(x_ptr, index_ptr, y_ptr, n, s, BLOCK: tl.constexpr):
    """Adds its logical position to each element; the shard's offset is the first element of its own piece of an iota."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    offset = tl.load(index_ptr)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + (offset + i % s).to(tl.float32), mask=i < n)


def _position_launcher(launch, x):
    n, s = x.x.size, x.x.shape[1]
    out = launch(
        _position_kernel,
        outputs={"y_ptr": jax.ShapeDtypeStruct(x.x.shape, x.x.dtype)},
        config=Config(BLOCK=64),
        grid=cdiv(n, 64),
        x_ptr=x.x,
        index_ptr=x.s_index,
        n=n,
        s=s,
    )
    return (out["y_ptr"],)


add_position = fused_op(
    "add_position",
    operands={"x": "s"},
    results={"y": "s"},
    positions=("s",),
    reference=lambda x, s_index: (x + s_index,),
    forward=_position_launcher,
    backward=lambda launch, x, saved, cotangents: (cotangents.y,),
)


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.multigpu)])
def test_logical_offset_of_a_shard(implementation):
    """Each device's kernel learns where its shard begins, on automatic and on explicit axes, without any collective."""
    f = jax.jit(lambda x: add_position(x, implementation=implementation)[0])
    x = rand(0, 3, 64)
    want = x + jnp.arange(64)
    numerics.close(f(x), want)
    numerics.close(add_position(x, implementation="xla")[0], want)
    numerics.close(jax.vmap(jax.grad(lambda x: (f(x) ** 2).sum()))(x), 2 * want)
    for kind in (AxisType.Auto, AxisType.Explicit):
        m = mesh(kind)
        with jax.set_mesh(m):
            sharded = put(x, m, None, "x")
            numerics.close(f(sharded), want)
            assert f(sharded).sharding.is_equivalent_to(sharded.sharding, 2)
            assert collectives(f, sharded) == {}


# ------------------------------------------------------------------------------------------ ops without a backward kernel


def square(backward):
    return fused_op(
        "square",
        operands={"x": "n"},
        results={"y": "n"},
        reference=lambda x: (x * x,),
        forward=lambda launch, x: (x.x * x.x,),
        backward=backward,
    )


def test_no_backward_kernel():
    """The derivative is the reference's, by XLA, and explain says so."""
    f = lambda x: square(None)(x, implementation="interpret")[0]
    x = rand(0, 3, 8)
    check_grads(f, (x,), 2, modes=("fwd", "rev"), atol=3e-2, rtol=3e-2)
    numerics.close(jax.vmap(jax.grad(lambda x: f(x).sum()))(x), 2 * x)
    found = {launch.name: launch for launch in jtops.explain(jax.grad(lambda x: f(x).sum()), x)}
    assert found["jtops_square_vjp"].path == "XLA"
    assert found["jtops_square_vjp"].reason == "the op's derivatives are the reference's"


def test_refused_derivative():
    """At trace time, on every platform; values and what does not depend on the operands are as ever."""
    f = lambda x: square(refused("nobody asked for one"))(x)[0]
    x = rand(0, 3, 8)
    numerics.close(f(x), x * x)
    said = r"square has no derivative: nobody asked for one\. Use jax\.lax\.stop_gradient"
    for differentiate in (lambda: jax.grad(lambda x: f(x).sum())(x), lambda: jax.jvp(f, (x,), (x,))):
        with pytest.raises(jtops.UnsupportedError, match=said):
            differentiate()
    numerics.close(jax.grad(lambda x: (x * f(jax.lax.stop_gradient(x))).sum())(x), x * x)


# ------------------------------------------------------------------------------------------------------------- variants


@triton.jit
def _add_kernel(x_ptr, y_ptr, n, more, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + more, mask=i < n)


@triton.jit
def _add_by_lines_kernel(x_ptr, y_ptr, n, more, LINE: tl.constexpr):
    i = tl.program_id(0) * LINE + tl.arange(0, LINE)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + more, mask=i < n)


def _variant(name, block, kernel, more, unfit=lambda launch, x: None):
    """A stage that adds `more` to its operand, so that the result says which variant ran."""

    def run(launch, x, *_):
        given = {"x_ptr": x.x, "n": x.x.size, "more": more}
        config = launch.choose(Config(**{block: 8}), (kernel,), given)
        y = jax.ShapeDtypeStruct(x.x.shape, x.x.dtype)
        out = launch(kernel, outputs={"y_ptr": y}, config=config, grid=cdiv(x.x.size, config[block]), **given)
        return (out["y_ptr"],)

    return Variant(name=name, blocks=frozenset({block}), run=run, unfit=unfit)


_short = lambda launch, x: None if x.x.shape[-1] <= 8 else f"rows of {x.x.shape[-1]} are longer than 8"
_moved = fused_op(
    "moved",
    operands={"x": "n"},
    results={"y": "n"},
    whole="n",
    reference=lambda x: (x + 0.0,),
    forward=(_variant("short", "LINE", _add_by_lines_kernel, 1.0, _short), _variant("any", "BLOCK", _add_kernel, 2.0)),
    backward=(_variant("any", "BLOCK", _add_kernel, 3.0),),
)


def moved(n, config=None):
    """What the variants of forward and backward add."""
    x = jnp.zeros((2, n))
    y, back = jax.vjp(lambda x: _moved(x, config=config, implementation="interpret")[0], x)
    dx = jnp.zeros_like(x) if back is None else back(x)[0]
    np.testing.assert_array_equal(y, jnp.full_like(y, y[0, 0]))
    return float(y[0, 0]), float(dx[0, 0])


def test_the_first_variant_that_fits():
    assert moved(8) == (1, 3)
    assert moved(9) == (2, 3)


@pytest.mark.parametrize(
    ("config", "ran"),
    [
        (Config(LINE=4), (1, 3)),  # no notice of it in the backward, which has no such block
        (Config(BLOCK=4), (2, 3)),
        (Config(variant="any"), (2, 3)),
        (Config(variant="short"), (1, 3)),
        (Config(variant="any", BLOCK=4), (2, 3)),
        (Config(variant="short", LINE=2, num_warps=1), (1, 3)),
    ],
)
def test_a_config_is_for_the_variants_that_have_its_blocks(config, ran):
    with tuned.choices() as found:
        assert moved(8, config) == ran
    settled = {choice.problem.choice: config for choice, config in found}
    forward, backward = ("short.fwd" if ran[0] == 1 else "any.fwd"), "any.vjp"
    assert settled.keys() == {forward, backward}
    for taken in settled.values():
        mine = config.blocks.keys() == taken.blocks.keys()
        assert taken.source == ("explicit" if mine else "heuristic")
        assert taken["variant"] is None
        if mine:
            assert taken == config.plain()


def test_a_config_that_no_variant_can_have():
    for config, said in [
        (Config(variant="short"), "moved: no kernel for this call is as its config asks. short: rows of 9 are longer than 8"),
        (Config(LINE=4), "moved: no kernel for this call is as its config asks. short: rows of 9 are longer than 8"),
    ]:
        with pytest.raises(jtops.UnsupportedError, match=said):
            moved(9, config)
    for config, said in [
        (Config(variant="long"), "moved has the variants short, any; got Config"),
        (Config(LINES=4), "must give the blocks LINE; or BLOCK; got"),
        (Config(variant="any", LINE=4), "must give the blocks BLOCK; got"),
        (Config(variant="any", num_warps=8), "must give the blocks BLOCK; got"),
        (Config(), "must give the blocks LINE; or BLOCK; got"),
    ]:
        with pytest.raises(ValueError, match=said):
            moved(8, config)
    with pytest.raises(ValueError, match="softmax has no variants; got Config"):
        jtops.softmax(jnp.ones((2, 8)), config=Config(variant="portable"))
    with pytest.raises(TypeError, match="variant must be a name or None; got 3"):
        Config(variant=3)


def test_explain_says_the_variant_and_what_did_not_fit():
    f = lambda n, **how: jtops.explain(lambda x: _moved(x, implementation="interpret", **how)[0], jnp.zeros((2, n)))
    assert [launch.variant for launch in f(8)] == ["short"]
    assert [launch.variant for launch in f(9)] == ["any (short: rows of 9 are longer than 8)"]
    assert [launch.variant for launch in f(8, config=Config(BLOCK=4))] == ["any"]
    assert "any (short: rows of 9 are longer than 8)" in str(f(9))
    assert [
        launch.variant for launch in jtops.explain(lambda x: jtops.add(x, x, implementation="interpret"), jnp.zeros((2, 8)))
    ] == [""]


# ---------------------------------------------------------------------------------------------------- launches by name


class Pair(NamedTuple):
    left: Any
    right: Any


@triton.jit
def _pair_kernel(pair, x_rows, sum_ptr, difference_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    at = row(tl.program_id(0), x_rows) * n + i
    left, right = tl.load(pair.left + at, mask=i < n), tl.load(pair.right + at, mask=i < n)
    at = tl.program_id(0) * n + i
    if sum_ptr is not None:
        tl.store(sum_ptr + at, left + right, mask=i < n)
    if difference_ptr is not None:
        tl.store(difference_ptr + at, left - right, mask=i < n)


def pairs(wanted, config, chosen=lambda *_: None):
    """An op of bundles and of outputs that are there or not: x + x and 0, of the operand's own rows."""

    def forward(launch, x):
        like = jax.ShapeDtypeStruct((launch.batch, 8), jnp.float32)
        arguments = {"pair": Pair(x.x, x.x), "x_rows": launch.rows.x, "n": 8}
        chosen(launch, arguments)
        outputs = {"difference_ptr": like if "difference" in wanted else None, "sum_ptr": like if "sum" in wanted else None}
        out = launch(_pair_kernel, outputs=outputs, config=config, grid=launch.batch, **arguments)
        assert list(out) == list(outputs)
        assert [name for name, x in out.items() if x is None] == [name for name, t in outputs.items() if t is None]
        numbers = [jnp.zeros(like.shape) if x is None else x for x in (out["sum_ptr"], out["difference_ptr"])]
        full = launch.full("x", x.x)
        return (*numbers, full + jnp.zeros_like(full))

    shapes = {"sum": "n", "difference": "n", "copy": "n"}
    reference = lambda x, like: tuple(jnp.broadcast_to(y, like.shape) for y in (2 * x, 0 * x, x))
    return fused_op(
        "pairs", operands={"x": "n", "like": "n"}, results=shapes, reference=reference, forward=forward, backward=None, whole="n"
    )


@pytest.mark.parametrize("wanted", [("sum", "difference"), ("sum",), ("difference",)])
def test_outputs_by_name(wanted):
    x, like = rand(0, 3, 1, 8), jnp.zeros((2, 3, 4, 8))
    total, difference, copy = pairs(wanted, Config(BLOCK=8))(x, like, implementation="interpret")
    full = jnp.broadcast_to(x, like.shape)
    numerics.close(total, 2 * full if "sum" in wanted else 0 * full)
    numerics.close(difference, 0 * full)
    numerics.close(copy, full)


def test_a_launch_takes_the_blocks_that_its_kernel_has():
    x = rand(0, 2, 8)
    f = lambda config: pairs(("sum",), config)(x, x, implementation="interpret")[0]
    config = Config(BLOCK=8, PROGRAMS=4, source="trial")
    with pytest.raises(TypeError, match=r"_pair_kernel has no parameter PROGRAMS.* config\.without"):
        f(config)
    less = config.without("PROGRAMS")
    assert (less, less.source) == (Config(BLOCK=8), "trial")
    numerics.close(f(less), 2 * x)


def test_the_tables_key_is_read_off_the_arguments():
    """Dtypes, bundles, constants and integers: by value, rounded or by alignment. Rows and floats are left out."""

    def chosen(launch, arguments):
        arguments = arguments | {"BLOCK": 8, "scale": 0.5, "sum_ptr": None}
        for how in ({}, {"rounded": ["n"]}, {"aligned": ["n"]}, {"rounded": ["n"], "aligned": ["n"]}):
            launch.choose(Config(BLOCK=8), (_pair_kernel,), arguments | {"n": 24}, **how, even=(True, 1))

    x = rand(0, 2, 8)
    with tuned.choices() as found:
        pairs(("sum",), Config(BLOCK=8), chosen)(x, x, implementation="interpret")
    texts = [choice.problem.text for choice, _ in found]
    assert texts == [f"float32,float32,- n={n} BLOCK=8 even=True,1" for n in ("24", "32", "16|8", "32/16|8")]


# ------------------------------------------------------------------------------------------------------------ front door


def test_axis_rules():
    rule = AxisRule.of(["s (g r) d", "t g d", ""], ["s (g r) d"], ["s (g r)", ""], "s t")
    assert rule.operands == ((("s",), ("g", "r"), ("d",)), (("t",), ("g",), ("d",)), ())
    assert rule.residuals == ((("s",), ("g", "r")), ())
    assert rule.whole == {"s", "t"}
    for ins, outs in (([], ["n"]), (["n"], []), (["n, n"], ["n"])):
        with pytest.raises(ValueError, match="the dims of one array for each"):
            AxisRule.of(ins, outs, [], "")
    with pytest.raises(ValueError, match="no array has axes m, which shall be whole"):
        AxisRule.of(["n"], ["n"], [], "m n")


def test_unsupported_calls():
    x = jnp.ones((2, 8))
    with pytest.raises(NotImplementedError, match='implementation="triton" needs a GPU'):
        jtops.softmax(x, implementation="triton")
    with jax.enable_x64(True):
        wide = jnp.ones((2, 8), jnp.float64)
        assert jtops.softmax(wide).dtype == jnp.float64  # on CPU the reference serves it
        with pytest.raises(NotImplementedError, match="no kernel for dtype float64"):
            jtops.softmax(wide, implementation="triton")  # at trace time
        with pytest.raises(jtops.UnsupportedError, match=r'no kernel for dtype float64.*Use implementation="xla"'):
            lowered.text(jtops.softmax, wide)  # nothing falls back on a GPU
        assert "custom_call" not in lowered.text(lambda x: jtops.softmax(x, implementation="xla"), wide)


def test_bad_implementation_and_config():
    x = jnp.ones((2, 8))
    with pytest.raises(ValueError, match=r"interpret. or None; got .cuda."):
        jtops.softmax(x, implementation="cuda")
    with pytest.raises(TypeError, match=r"config must be a jtops\.Config"):
        jtops.softmax(x, config={"BLOCK_N": 8})
    with pytest.raises(ValueError, match="must give the blocks BLOCK_M, BLOCK_N"):
        jtops.softmax(x, config=jtops.Config(BLOCK_N=8))
    with pytest.raises(ValueError, match="power of two; got 12"):
        jtops.Config(BLOCK_N=12)
    config = jtops.Config(BLOCK_M=2, BLOCK_N=4, PROGRAMS=8, num_warps=2)
    assert config == jtops.Config(num_warps=2, PROGRAMS=8, BLOCK_N=4, BLOCK_M=2)
    assert hash(config) == hash(jtops.Config(num_warps=2, PROGRAMS=8, BLOCK_N=4, BLOCK_M=2))
    assert repr(config) == "Config(BLOCK_M=2, BLOCK_N=4, PROGRAMS=8, num_warps=2)"
    assert repr(jtops.Config(PROGRAMS=None, cluster_size=2)) == "Config(PROGRAMS=None, cluster_size=2, num_warps=4)"
    with pytest.raises(AttributeError, match="a Config cannot be changed"):
        config.source = "elsewhere"
    for same in (pickle.loads(pickle.dumps(config.said_by("trial"))), copy.copy(config.said_by("trial"))):
        assert (same, same.source) == (config, "trial")
    numerics.close(jtops.softmax(x, config=config, implementation="interpret"), jax.nn.softmax(x))


def test_settings_change_what_is_traced():
    """A jitted function follows the setting, not the first trace."""
    f, x = jax.jit(jtops.softmax), jnp.ones((2, 8))
    calls = lambda: collections.Counter(re.findall(r"custom_call @(\w+)", f.lower(x).as_text()))
    assert calls() == {}
    with jtops.config.implementation("interpret"):
        assert calls() == {"jtops_host_call": 1}
        numerics.close(f(x), jax.nn.softmax(x))
    with jtops.config.interpret():
        assert calls() == {"jtops_host_call": 1}
    assert calls() == {}
    jax.config.update("jtops_implementation", "interpret")
    try:
        assert calls() == {"jtops_host_call": 1}
    finally:
        jax.config.update("jtops_implementation", None)
    with pytest.raises(ValueError, match="must be None or one of 'triton', 'xla', 'interpret'; got 'cuda'"):
        jtops.config.implementation("cuda").__enter__()


def test_export():
    x = rand(0, 3, 8)
    numerics.close(jax.export.deserialize(jax.export.export(jax.jit(jtops.softmax))(x).serialize()).call(x), jax.nn.softmax(x))
    with jtops.config.target("sm_90"):
        exported = jax.export.export(jax.jit(jtops.softmax), platforms=("cpu", "cuda"), disabled_checks=jtops.export_checks)(x)
    assert re.search(lowered.CALL, exported.mlir_module())
    numerics.close(jax.export.deserialize(exported.serialize()).call(x), jax.nn.softmax(x))


def test_named_axis_is_local_device():
    """One device of several: the call stays on it."""
    x = jax.device_put(rand(0, 4, 8), jax.devices()[3])
    y = jtops.softmax(x, implementation="interpret")
    assert y.devices() == {jax.devices()[3]}
    assert NamedSharding(mesh(), P()).is_fully_replicated
