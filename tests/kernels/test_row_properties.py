"""Properties of the row ops over random shapes, axes, dtypes, masks, tiles and values: the reference and the kernels, interpreted.

The rule is that of `tests.numerics`, element by element: an error may be a few eps of the terms that are added up to the element,
which are larger than an element whose terms cancel. No reference excuses a kernel here.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jtops
from tests import oracles

KERNEL_EPS = 8.0  # of float32, in which all sums are
RESULT_EPS = 2.0  # of the result's dtype: the rounding of what is saved, and of the result
DTYPES = ("float32", "bfloat16", "float16")
SIZES = (0, 1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 70)


def profiles(quick: int, ways=("xla", "interpret")):
    """Few examples at once, a few hundred of the kernels in test-all; the same every time.

    The rule is the kernels'. The reference, which `numerics` bounds, breaks it in one draw of a hundred: XLA sums float16 in
    float16, and the derivative of rsqrt(v) is lost where v^-1.5 underflows, from values of 1e13 on.
    """
    calls = [pytest.param(quick, way, id=f"{way}-{quick}") for way in ways]
    calls += [pytest.param(300, "interpret", id="interpret-many", marks=pytest.mark.slow)]
    return pytest.mark.parametrize(("examples", "implementation"), calls)


def hold(examples, implementation, strategy, claim):
    """`claim` of every example; with the reference it takes a third of them."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    n = examples if implementation == "interpret" else max(1, examples // 3)
    how = settings(max_examples=n, deadline=None, derandomize=True, database=None, suppress_health_check=checks)
    how(given(strategy)(lambda example: claim(example, implementation)))()


# ------------------------------------------------------------------------------------------------------------ what is drawn


@st.composite
def shapes(draw, least=1):
    """Rank 1 to 4 and at most some hundreds of elements, of which there may be none."""
    rank, shape, left = draw(st.integers(least, 4)), [], 600
    for _ in range(rank):
        shape.append(draw(st.sampled_from([s for s in SIZES if s <= left])))
        left //= max(1, shape[-1])
    if rank and draw(st.booleans()):  # rows of many tiles
        return (*(s for s in shape[1:] if s < 4), draw(st.sampled_from([33, 64, 70, 129, 200])))
    return tuple(draw(st.permutations(shape)))


@st.composite
def configs(draw):
    """None, or tiles so small that rows take several, and are split over several programs."""
    if draw(st.integers(0, 4)) == 0:
        return None
    blocks = {"BLOCK_M": (1, 2, 4), "BLOCK_N": (4, 8, 8, 16, 64), "PROGRAMS": (1, 2, 4, 8, 64)}
    stages = draw(st.sampled_from([None, 3]))
    return jtops.Config(**{name: draw(st.sampled_from(sizes)) for name, sizes in blocks.items()}, num_stages=stages)


@st.composite
def broadcasting(draw, shape):
    """A shape that broadcasts to `shape`."""
    kept = draw(st.integers(0, len(shape)))
    return tuple(1 if draw(st.booleans()) else n for n in shape[len(shape) - kept :])


seeds = st.integers(0, 2**32 - 1)
kinds = st.sampled_from(["normal", "normal", "offset", "huge", "tiny", "constant", "ties"])


def values(kind, shape, dtype, seed):
    """Random values of a kind in `dtype`, of NumPy: JAX would compile each operation for each shape."""
    rng = np.random.default_rng(seed)
    normal, half = rng.normal(size=shape), dtype == "float16"
    made = {
        "normal": lambda: normal,
        "offset": lambda: normal + 1000.0,
        "huge": lambda: normal * (8e3 if half else 1e17),
        "tiny": lambda: normal * (1e-7 if half else 1e-30),
        "constant": lambda: np.full(shape, 1234.1),
        "ties": lambda: rng.integers(-2, 3, shape).astype(float),
        "special": lambda: rng.choice([np.nan, np.inf, -np.inf, 0.0, 1.0, *[-3.0] * 20], shape),
        "infinite": lambda: rng.choice([-np.inf, -np.inf, 0.5], shape),
        "extreme": lambda: rng.choice([1.0, -1.0], shape) * float(jnp.finfo(dtype).max),
    }[kind]()
    return made.astype(jnp.dtype(dtype))


def wide(x):
    """In float64, or what is no number as it is."""
    return x if x is None else np.asarray(x) if x.dtype == bool else np.asarray(x, np.float64)


@functools.partial(jax.jit, static_argnums=0)
def run(call, operands, g=None):
    """Results, and gradients by operand's name. `call`: name and options, of which jit keeps the code."""
    name, options = call
    moved = {k: x for k, x in operands.items() if x is not None and jnp.issubdtype(x.dtype, jnp.floating)}
    f = lambda moved: getattr(jtops, name)(**operands | moved, **dict(options))
    if g is None:
        return f(moved)
    value, pullback = jax.vjp(f, moved)
    return value, pullback(g)[0]


def options(implementation, config, **others):
    kept = {} if config is None or implementation == "xla" else {"config": config}
    return tuple(sorted({**others, **kept, "implementation": implementation}.items()))


def agrees(got, truth, terms, *, what):
    """The rule: `terms` is the size of what is added up to an element, a float64 array that broadcasts to the truth."""
    eps, tiny = float(jnp.finfo(got.dtype).eps), float(jnp.finfo(got.dtype).smallest_subnormal)
    got, dtype = np.asarray(got, np.float64), got.dtype
    assert got.shape == truth.shape, (what, got.shape, truth.shape)
    with np.errstate(all="ignore"):
        rounded = np.asarray(np.asarray(truth).astype(dtype), np.float64)
        finite, terms = np.isfinite(rounded), np.broadcast_to(np.nan_to_num(terms, nan=0.0, posinf=np.inf), truth.shape)
        np.testing.assert_array_equal(got[~finite], rounded[~finite], err_msg=what)
        allowed = KERNEL_EPS * float(jnp.finfo("float32").eps) * terms + RESULT_EPS * eps * np.abs(truth) + tiny
        off = np.abs(got - truth)
        wrong = finite & ~(off <= allowed) & ~np.isinf(terms)
    if wrong.any():
        i = np.unravel_index(np.argmax(wrong), wrong.shape)
        said = f"{got[i]}, truth {truth[i]}, allowed {allowed[i]:.3g}; {wrong.sum()} are wrong"
        raise AssertionError(f"{what}[{', '.join(map(str, i))}]: {said}")


def same(got, want, err_msg=""):
    """Bit for bit, but that NaN is NaN."""
    wide = lambda v: np.asarray(v, np.float64)  # NumPy has no NaN of bfloat16
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(wide(a), wide(b), err_msg=err_msg), got, want)


# ------------------------------------------------------------------------------------------------------- the softmax family


@st.composite
def softmax_calls(draw, names=("softmax", "log_softmax", "logsumexp"), kinds=kinds):
    shape, dtype = draw(shapes()), draw(st.sampled_from(DTYPES))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    axes = tuple(a - len(shape) * draw(st.booleans()) for a in axes)
    axis = draw(st.sampled_from([axes, axes[0], -1, -1, None]))
    x = values(draw(st.one_of(kinds, st.sampled_from(["special", "infinite", "extreme"]))), shape, dtype, draw(seeds))
    where = None
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(seeds))
        where = np.asarray(rng.random(draw(broadcasting(shape))) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])))
    name = draw(st.sampled_from(names))
    more = {"keepdims": draw(st.booleans())} if name == "logsumexp" else {}
    return name, x, where, {"axis": axis, **more}, draw(configs()), draw(seeds)


def softmax_terms(name, x, where, g, axis):
    """Sizes of what is added up to the result and to its gradient."""
    with np.errstate(all="ignore"):
        where = np.broadcast_to(True if where is None else where, x.shape)
        y, lse = oracles.softmax(x, where, axis=axis), oracles.logsumexp(x, where, axis=axis, keepdims=True)
        n = np.log1p(where.sum(axis, keepdims=True))
        total = lambda v: np.where(where, v, 0.0).sum(axis, keepdims=True)
        below = np.where(where, np.abs(x - lse), 0.0)
        near = np.where(y > 0, below, 0.0)  # what is infinitely far below has no share in a gradient
        if name == "softmax":
            return y.max(axis, keepdims=True, initial=0.0), y * (np.abs(g) + total(y * np.abs(g)))
        if name == "log_softmax":
            return 1.0 + below + n, np.abs(g) + y * total(np.abs(g)) * (1.0 + near)
        return 1.0 + np.abs(lse) + n, y * np.abs(g) * (1.0 + near + n)


def as_drawn(call, implementation):
    name, x, where, given, config, seed = call
    how = (name, options(implementation, config, **given))
    operands = {"a" if name == "logsumexp" else "x": x, "where": where}
    g = values("normal", jax.eval_shape(functools.partial(run, how), operands).shape, x.dtype, seed)
    return how, operands, g


def softmax_is_right(call, implementation):
    name, x, where, given, _, _ = call
    how, operands, g = as_drawn(call, implementation)
    y, grads = run(how, operands, g)
    (dx,) = grads.values()
    assert y.dtype == dx.dtype == x.dtype
    xw, gw, mask = wide(x), wide(g), None if where is None else np.asarray(where)
    value, (da, _) = getattr(oracles, name)(xw, mask, **given), getattr(oracles, f"{name}_vjp")(xw, mask, g=gw, **given)
    axis = tuple(range(x.ndim)) if given["axis"] is None else given["axis"]
    full = gw if name != "logsumexp" or given["keepdims"] else np.expand_dims(gw, axis)
    of_value, of_dx = softmax_terms(name, xw, mask, full, axis)
    of_value = np.asarray(of_value)
    if name == "logsumexp":
        of_value = of_value.reshape(value.shape)
    agrees(y, np.asarray(value), of_value, what="value")
    saved = float(jnp.finfo(x.dtype).eps / jnp.finfo("float32").eps) / 2 if name == "softmax" else 1.0  # y is, rounded
    agrees(dx, da, of_dx * max(1.0, saved), what="gradient")


@profiles(12)
def test_softmax_family(examples, implementation):
    hold(examples, implementation, softmax_calls(), softmax_is_right)


def masked_do_not_matter(call, implementation):
    """Whatever they hold, in x and in the cotangent; and rows apart from each other do not matter either."""
    name, x, where, _, _, seed = call
    how, operands, g = as_drawn(call, implementation)
    if where is None or x.size == 0:
        return
    rng = np.random.default_rng(seed)
    mask = np.broadcast_to(where, x.shape)
    poison = rng.choice([np.nan, np.inf, -np.inf, 3e4], x.shape).astype(x.dtype)
    bad = {k: np.where(mask, v, poison) if k != "where" else v for k, v in operands.items()}
    bad_g = g if name == "logsumexp" else np.where(mask, g, poison)
    want, got = run(how, operands, g), run(how, bad, bad_g)
    same(got, want)
    if name != "logsumexp":
        np.testing.assert_array_equal(np.asarray(got[0], np.float64)[~mask], 0.0 if name == "softmax" else -np.inf)
    (dx,) = got[1].values()
    np.testing.assert_array_equal(np.asarray(dx, np.float64)[~mask], 0.0)


@profiles(4)
def test_what_is_masked_does_not_matter(examples, implementation):
    calls = softmax_calls(kinds=st.sampled_from(["normal", "offset", "special"])).filter(lambda call: call[2] is not None)
    hold(examples, implementation, calls, masked_do_not_matter)


def rows_are_alike(call, implementation):
    """Shift a row and it stays; permute rows and the results are permuted; bit for bit. Rows sum to 1."""
    name, x, where, given, config, seed = call
    axis = given["axis"]
    axis = tuple(range(x.ndim)) if axis is None else axis
    reduced = {a % x.ndim for a in (axis if isinstance(axis, tuple) else (axis,))}
    how, operands, g = as_drawn((name, x, where, given, config, seed), implementation)
    y, grads = run(how, operands, g)
    key = next(iter(grads))
    moved, moved_grads = run(how, operands | {key: x + x.dtype.type(8)}, g)
    if name != "logsumexp":
        same((moved, moved_grads), (y, grads))
    if name == "softmax":
        sums = np.asarray(y, np.float64).sum(axis)
        some = np.broadcast_to(True if where is None else where, x.shape).any(axis)
        np.testing.assert_allclose(sums, some, atol=float(jnp.finfo(x.dtype).eps) * max(1.0, math.sqrt(x.size)) + 2e-6)
    rng = np.random.default_rng(seed)
    for a in set(range(x.ndim)) - reduced:
        order = rng.permutation(x.shape[a])
        turn = lambda v, at, order=order: np.take(np.asarray(v), order, at)
        lacks = lambda v, a=a: v is None or v.ndim < x.ndim - a or v.shape[a - x.ndim] == 1
        at = lambda v, a=a: v if lacks(v) else turn(v, a - x.ndim)
        of_g = lambda v, a=a: turn(v, a if g.ndim == x.ndim else a - sum(b < a for b in reduced))
        got = run(how, {k: at(v) for k, v in operands.items()}, of_g(g))
        same(got, (of_g(y), {key: at(grads[key])}), f"rows permuted along axis {a}")


@profiles(4)
def test_rows_are_alike(examples, implementation):
    drawn = softmax_calls(kinds=st.just("ties"))
    hold(examples, implementation, drawn.filter(lambda call: np.isfinite(np.asarray(call[1], float)).all()), rows_are_alike)


def family_is_consistent(call, implementation):
    _, x, where, given, config, _ = call
    axis, how = given["axis"], {"implementation": implementation}
    x = x.astype(np.float32)
    if config is not None and implementation != "xla":
        how["config"] = config
    p, log_p, total = jax.jit(
        lambda x: (
            jtops.softmax(x, axis, where, **how),
            jtops.log_softmax(x, axis, where, **how),
            jtops.logsumexp(x, axis, where, keepdims=True, **how),
        )
    )(x)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(np.exp(np.asarray(log_p, np.float64)), p, rtol=1e-4, atol=1e-6)
        mask = np.broadcast_to(True if where is None else where, x.shape)
        expected = np.where(mask, np.asarray(x, np.float64) - np.asarray(total, np.float64), -np.inf)
        size = 1.0 + np.abs(np.asarray(total, np.float64)) + np.abs(np.where(mask, np.asarray(x, np.float64), 0.0))
        ok = ~np.isinf(np.broadcast_to(size, x.shape)) & (np.abs(expected) < np.finfo(np.float32).max)
        assert (np.abs(np.asarray(log_p, np.float64) - expected) <= 1e-6 * size)[ok].all()


@profiles(2)
def test_the_family_is_consistent(examples, implementation):
    calls = softmax_calls(names=("softmax",), kinds=st.sampled_from(["normal", "offset", "constant", "huge"]))
    hold(examples, implementation, calls.filter(lambda call: np.isfinite(np.asarray(call[1], float)).all()), family_is_consistent)


# ---------------------------------------------------------------------------------------------------------------- the norms


@st.composite
def norm_calls(draw, kinds=kinds):
    name = draw(st.sampled_from(["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"]))
    shape, dtype = draw(shapes()), draw(st.sampled_from(DTYPES))
    operands = {"x": values(draw(kinds), shape, dtype, draw(seeds))}
    if name.startswith("add_"):
        operands["residual"] = values(draw(st.sampled_from(["normal", "ties"])), shape, draw(st.sampled_from(DTYPES)), draw(seeds))
    for parameter in ("scale", "bias")[: 1 + name.endswith("layer_norm")]:
        there = draw(st.booleans())
        operands[parameter] = values("normal", shape[-1:], draw(st.sampled_from(DTYPES)), draw(seeds)) if there else None
    more = {"epsilon": draw(st.sampled_from([1e-6, 1e-3, 0.5])), "scale_offset": draw(st.sampled_from([0.0, 0.0, 1.0, -0.5]))}
    return name, operands, more, draw(configs()), draw(seeds)


def norm_as_drawn(call, implementation):
    """The call, and cotangents of its results, of which that of a sum may be absent: then it is zeros."""
    name, operands, more, config, seed = call
    how = (name, options(implementation, config, **more))
    outs = jax.eval_shape(functools.partial(run, how), operands)
    gs = [values("normal", o.shape, str(o.dtype), seed + i) for i, o in enumerate(jax.tree.leaves(outs))]
    return how, operands, tuple(gs) if len(gs) > 1 else gs[0]


def norm_terms(x, scale, bias, g, g_sum, *, epsilon, scale_offset, centred):
    """-> sizes of what is added up to the result and to the gradients of x, scale and bias."""
    mean = x.mean(-1, keepdims=True) if centred else 0.0
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)
    # The mean is off by eps of the largest x, and so is what it is subtracted from.
    lost = 1.0 + np.abs(x).max(-1, keepdims=True, initial=0.0) * rstd if centred else 1.0
    x_hat = np.abs((x - mean) * rstd) + lost * centred
    s = 1.0 if scale is None else np.abs(scale) + abs(scale_offset)
    w, rows = np.abs(g * s), tuple(range(x.ndim - 1))
    dx = rstd * (w + w.mean(-1, keepdims=True) + x_hat * (w * x_hat).mean(-1, keepdims=True)) * lost
    return (
        x_hat * s * lost + (0.0 if bias is None else np.abs(bias)),
        dx + np.abs(g_sum),
        (np.abs(g) * x_hat).sum(rows),
        np.abs(g).sum(rows),
    )


def norm_is_right(call, implementation):
    name, _, more, _, _ = call
    how, operands, gs = norm_as_drawn(call, implementation)
    outs, grads = run(how, operands, gs)
    (y, *sums), (g, *g_sums) = (v if isinstance(v, tuple) else (v,) for v in (outs, gs))
    x, scale, bias = operands["x"], wide(operands["scale"]), wide(operands.get("bias"))
    assert y.dtype == x.dtype
    if sums:  # rounded before it is normalised
        promoted = jnp.promote_types(x.dtype, operands["residual"].dtype)
        total = x.astype(promoted) + operands["residual"].astype(promoted)
        assert sums[0].dtype == promoted
        np.testing.assert_array_equal(sums[0], total)
        x = total
    x, g, g_sum = wide(x), wide(g), wide(g_sums[0]) if g_sums else 0.0
    centred = name.endswith("layer_norm")
    if x.shape[-1] == 0:
        assert y.size == 0
        return
    norm, parameters = name.removeprefix("add_"), (scale, bias)[: 1 + centred]
    truth = getattr(oracles, norm)(x, *parameters, **more)
    dx, *others = getattr(oracles, f"{norm}_vjp")(x, *parameters, g=g, **more)
    of_y, of_dx, *of_others = norm_terms(x, scale, bias, g, g_sum, centred=centred, **more)
    agrees(y, truth, of_y, what="value")
    for key in ("x", "residual")[: 1 + len(sums)]:
        assert grads[key].dtype == operands[key].dtype
        rounded = 1.0 if not sums else 1.0 + float(jnp.finfo(sums[0].dtype).eps / jnp.finfo("float32").eps) * 0.1
        agrees(grads[key], dx + g_sum, of_dx * rounded, what=f"gradient of {key}")
    for key, want, terms in zip(("scale", "bias"), others, of_others, strict=False):
        if want is not None:
            assert grads[key].dtype == operands[key].dtype
            agrees(grads[key], want, terms, what=f"gradient of {key}")


@profiles(8)
def test_norms(examples, implementation):
    hold(examples, implementation, norm_calls(), norm_is_right)


def norm_rows_are_alike(call, implementation):
    """Rows permuted are results permuted; a row of NaN is its own affair; a row scaled, and epsilon with it, stays."""
    name, _, more, _, seed = call
    how, operands, gs = norm_as_drawn(call, implementation)
    x, rng = operands["x"], np.random.default_rng(seed)
    r = math.prod(x.shape[:-1])
    if x.size == 0:
        return
    rows = lambda v: np.asarray(v).reshape(r, -1)
    whole = lambda out: [rows(v) for v in jax.tree.leaves((out[0], {k: v for k, v in out[1].items() if k in ("x", "residual")}))]
    want = whole(run(how, operands, gs))
    order = rng.permutation(r)
    turn = lambda v: rows(v)[order].reshape(v.shape)
    turned = {k: turn(v) if k in ("x", "residual") else v for k, v in operands.items()}
    same(whole(run(how, turned, jax.tree.map(turn, gs))), [v[order] for v in want], "rows permuted")
    bad = int(rng.integers(r))
    poisoned = operands | {"x": x.copy()}
    poisoned["x"].reshape(r, -1)[bad] = rng.choice([np.nan, np.inf])
    rest = np.arange(r) != bad
    same([v[rest] for v in whole(run(how, poisoned, gs))], [v[rest] for v in want], "beside a row that is no number")
    if name.startswith("add_"):
        return
    two = dict(how[1]) | {"epsilon": more["epsilon"] * 4}
    scaled = run((name, tuple(sorted(two.items()))), operands | {"x": x * x.dtype.type(2)})
    np.testing.assert_array_equal(rows(scaled), want[0])


@profiles(4)
def test_norm_rows_are_alike(examples, implementation):
    hold(examples, implementation, norm_calls(kinds=st.sampled_from(["normal", "ties", "offset"])), norm_rows_are_alike)


# --------------------------------------------------------------------------------------------------------------------- add


@st.composite
def add_calls(draw):
    shape = draw(shapes(least=0))
    operands = {}
    for name in "xy":
        dtype = draw(st.sampled_from([*DTYPES, "int32"]))
        own = shape if name == "x" and draw(st.booleans()) else draw(broadcasting(shape))
        kind = "ties" if dtype == "int32" else draw(st.sampled_from(["normal", "huge", "ties"]))
        operands[name] = values(kind, own, dtype, draw(seeds))
    blocks = {"BLOCK_M": draw(st.sampled_from([1, 2, 4])), "BLOCK_N": draw(st.sampled_from([1, 4, 16]))}
    return operands, draw(st.sampled_from([None, jtops.Config(**blocks)])), draw(seeds)


def add_is_right(call, implementation):
    operands, config, seed = call
    x, y = operands.values()
    dtype = jnp.promote_types(x.dtype, y.dtype)
    shape = np.broadcast_shapes(x.shape, y.shape)
    how = ("add", options(implementation, config))
    if not jnp.issubdtype(dtype, jnp.floating):
        np.testing.assert_array_equal(run(how, operands), np.asarray(x) + np.asarray(y))
        return
    g = values("normal", shape, str(dtype), seed)
    out, grads = run(how, operands, g)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, np.asarray(x).astype(dtype) + np.asarray(y).astype(dtype))
    for name, truth, size in zip(
        "xy", oracles.add_vjp(wide(x), wide(y), g=wide(g)), oracles.add_vjp(wide(x), wide(y), g=np.abs(wide(g))), strict=True
    ):
        if name in grads:
            assert grads[name].dtype == operands[name].dtype
            agrees(grads[name], truth, size, what=f"gradient of {name}")


@profiles(8)
def test_add(examples, implementation):
    hold(examples, implementation, add_calls(), add_is_right)


# -------------------------------------------------------------------------------------------------------------------- vmap


@st.composite
def mapped(draw):
    """A call, and which of its operands vmap maps, over which of their axes; None: shared."""
    call = draw(st.one_of(norm_calls(kinds=st.just("normal")), softmax_calls(kinds=st.just("normal"))))
    name, *_ = call
    operands = call[1] if "norm" in name else {"a" if name == "logsumexp" else "x": call[1], "where": call[2]}
    axes = {k: draw(st.integers(0, v.ndim)) if v is not None and draw(st.booleans()) else None for k, v in operands.items()}
    first = next(iter(axes))
    if set(axes.values()) == {None}:
        axes[first] = 0
    given = call[2] if "norm" in name else call[3]
    return name, operands, given, call[-2], axes, draw(st.sampled_from([1, 2, 3])), call[-1]


def mapped_is_a_loop(call, implementation):
    name, operands, given, config, axes, size, seed = call
    how = (name, options(implementation, config, **given))
    rng = np.random.default_rng(seed)
    draws = {
        k: [
            np.asarray(rng.random(v.shape) < 0.7) if v.dtype == bool else values("normal", v.shape, str(v.dtype), seed + i)
            for i in range(size)
        ]
        for k, v in operands.items()
        if axes[k] is not None
    }
    stacked = operands | {k: np.stack(v, axes[k]) for k, v in draws.items()}
    outs = jax.eval_shape(functools.partial(run, how), operands)
    gs = jax.tree.map(lambda o: values("normal", (size, *o.shape), str(o.dtype), seed), outs)
    got = jax.jit(jax.vmap(functools.partial(run, how), (axes, 0)))(stacked, gs)
    for i in range(size):
        want = run(how, operands | {k: v[i] for k, v in draws.items()}, jax.tree.map(lambda g: g[i], gs))
        for a, b in zip(jax.tree.leaves(jax.tree.map(lambda v: np.asarray(v)[i], got)), jax.tree.leaves(want), strict=True):
            eps = float(jnp.finfo(a.dtype).eps)
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            top = np.max(np.abs(b), initial=0.0, where=np.isfinite(b))
            np.testing.assert_allclose(a, b, rtol=4 * eps, atol=4 * eps * top + 2e-6 * top)


@profiles(3)
def test_vmap_is_a_loop(examples, implementation):
    hold(examples, implementation, mapped(), mapped_is_a_loop)
