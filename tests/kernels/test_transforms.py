"""Each JAX transform once per op, on its small case: by default (the primitive over the reference) and by kernel."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import numerics
from tests.kernels import lowered
from tests.specs import (
    ALIKE,
    MODELS,
    SPECS,
    cotangent,
    draw,
    every_op,
    floating,
    function,
    some_ops,
    truth,
    truth_vjp,
    value_and_vjp,
)

every_way = pytest.mark.parametrize("implementation", [None, "interpret", pytest.param("triton", marks=pytest.mark.gpu)])


def loss(f):
    return lambda *operands: (f(*operands).astype(jnp.float32) ** 2).sum()


def all_grads(f, operands):
    return jax.grad(loss(f), floating(operands))


def tangents(operands):
    return [jnp.cos(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0) for x in operands]


def given(spec, f, operands):
    """`f` and its operands without the absent ones."""
    where = [i for i, x in enumerate(operands) if x is not None]

    def g(*present):
        full = [None] * len(operands)
        for i, x in zip(where, present, strict=True):
            full[i] = x
        return f(*full)

    return g, [operands[i] for i in where]


def both(spec, implementation):
    """(function of present operands, the same by plain jax.numpy, operands)"""
    operands = draw(spec, spec.small)
    f, present = given(spec, function(spec, spec.small, implementation=implementation), operands)
    return f, given(spec, function(spec, spec.small, implementation="xla"), operands)[0], present


def scanned(f, n=3):
    """The first operand carried through `n` steps."""

    def g(*operands):
        step = lambda x, _: (f(x, *operands[1:]) + x, None)
        return jax.lax.scan(step, operands[0], None, length=n)[0]

    return g


def remat(f):
    return jax.checkpoint(f)


TRANSFORMS = {
    "value": lambda f, x: f,
    "jit": lambda f, x: jax.jit(f),
    "grad": all_grads,
    "grad_first": lambda f, x: jax.grad(loss(f)),
    "grad_last": lambda f, x: jax.grad(loss(f), floating(x)[-1]),
    "value_and_grad": lambda f, x: jax.value_and_grad(loss(f), floating(x)),
    "jvp": lambda f, x: lambda *x: jax.jvp(f, x, tuple(tangents(x))),
    "jvp_first": lambda f, x: lambda *x: jax.jvp(lambda y: f(y, *x[1:]), x[:1], (jnp.cos(x[0]),)),
    "linearize": lambda f, x: lambda *x: jax.linearize(f, *x)[1](*tangents(x)),
    "jacfwd": lambda f, x: jax.jacfwd(lambda *x: f(*x)[0], floating(x)),
    "jacrev": lambda f, x: jax.jacrev(lambda *x: f(*x)[0], floating(x)),
    "hessian": lambda f, x: jax.hessian(loss(lambda *x: f(*x)[0]), floating(x)),
    "hvp": lambda f, x: lambda *x: jax.jvp(all_grads(f, x), x, tuple(tangents(x)))[1],
    "rev_of_rev": lambda f, x: jax.jacrev(lambda *y: jax.tree.leaves(all_grads(f, y)(*y))[0][0], floating(x)),
    "rev_of_fwd": lambda f, x: jax.grad(lambda *y: (jax.jvp(f, y, tuple(tangents(y)))[1] ** 2).sum(), floating(x)),
    "third": lambda f, x: jax.grad(lambda y, *r: (jax.jvp(lambda y: jax.grad(loss(f))(y, *r), (y,), (y,))[1] * jnp.cos(y)).sum()),
    "linear_transpose": lambda f, x: (
        lambda *x: jax.linear_transpose(lambda t: jax.jvp(lambda y: f(y, *x[1:]), x[:1], (t,))[1], x[0])(f(*x))
    ),
    "remat": lambda f, x: all_grads(remat(f), x),
    "hessian_of_remat": lambda f, x: jax.hessian(loss(remat(lambda *x: f(*x)[0])), floating(x)),
    "scan": lambda f, x: scanned(f),
    "grad_of_scan": lambda f, x: all_grads(scanned(f), x),
    "grad_of_scan_of_remat": lambda f, x: all_grads(scanned(remat(f)), x),
    "cond": lambda f, x: (
        lambda *x: jax.lax.cond(x[0].sum() > -1e9, all_grads(f, x), lambda *x: tuple(x[i] * 0 for i in floating(x)), *x)
    ),
    "unused": lambda f, x: lambda *x: (f(*x), x[0])[1],
}


# By default, which is the reference on CPUs, each stage once; the other orders in test-all.
AT_ONCE = ("value", "grad", "jvp", "hvp", "linear_transpose", "remat", "scan")
CALLS = [
    pytest.param(
        *(spec, name, way),
        id=f"{op}-{name}-{way}",
        marks=[pytest.mark.slow] * ((name not in AT_ONCE and (way is None or op not in MODELS)) or op in ALIKE),
    )
    for op, spec in SPECS.items()
    for name in TRANSFORMS
    for way in (None, "interpret")
] + [
    pytest.param(spec, name, "triton", id=f"{op}-{name}-triton", marks=pytest.mark.gpu)
    for op, spec in SPECS.items()
    for name in TRANSFORMS
]


@pytest.mark.parametrize(("spec", "name", "implementation"), CALLS)
def test_transform(spec, name, implementation):
    """Cases 53 and 55: forward mode, any order, checkpoint and scan give what the plain reference does."""
    f, _, operands = both(spec, implementation)
    got = jax.jit(TRANSFORMS[name](f, operands))(*operands)
    numerics.close(got, by_reference(spec.name, name), 1e-4)


@functools.cache
def by_reference(op, name):
    _, reference, operands = both(SPECS[op], None)
    return jax.jit(TRANSFORMS[name](reference, operands))(*operands)


@some_ops
@pytest.mark.parametrize("name", ["value", "grad", "jvp", pytest.param("hvp", marks=pytest.mark.slow)])
def test_without_jit(spec, name):
    f, reference, operands = both(spec, None)
    got, want = (TRANSFORMS[name](g, operands)(*operands) for g in (f, reference))
    numerics.close(got, want, 1e-4)
    with jax.disable_jit():
        numerics.close(TRANSFORMS[name](f, operands)(*operands), want, 1e-4)


BATCHES = {  # which operands have a mapped axis, and where
    "all_first": lambda n: [0] * n,
    "first_only": lambda n: [0] + [None] * (n - 1),
    "last_only": lambda n: [None] * (n - 1) + [0],
    "axis_1": lambda n: [1] + [0] * (n - 1),
    "axis_last": lambda n: [-1] * n,
}


@every_way
@pytest.mark.parametrize("batch", BATCHES)
@some_ops
def test_vmap(spec, batch, implementation):
    f, reference, operands = both(spec, implementation)
    in_axes = BATCHES[batch](len(operands))
    put = lambda x, axis: (
        x if axis is None else jnp.moveaxis(jnp.stack([x, x + 1, x * 2] if x.dtype != bool else [x, ~x, x]), 0, axis)
    )
    operands = [put(x, axis) for x, axis in zip(operands, in_axes, strict=True)]
    uses = lambda f: (
        lambda *x: (
            jax.vmap(f, in_axes)(*x),
            jax.vmap(all_grads(f, x), in_axes)(*x),  # a gradient per example, of shared operands too
            all_grads(jax.vmap(f, in_axes), x)(*x),  # summed over what is shared
        )
    )
    got, want = (jax.jit(uses(g))(*operands) for g in (f, reference))
    numerics.close(got, want, 1e-4)


@every_way
@some_ops
def test_nested_vmap(spec, implementation):
    _, _, operands = both(spec, implementation)
    n = len(operands)
    f, reference, _ = both(spec, implementation)
    spread = lambda x, m: x + jnp.arange(m, dtype=x.dtype).reshape(m, *[1] * x.ndim) if x.dtype != bool else jnp.stack([x] * m)
    operands = [spread(spread(operands[0], 2), 3), *(spread(x, 2) for x in operands[1:])]  # [3, 2, ...] and [2, ...]
    nest = lambda f: jax.vmap(jax.vmap(f), [0] + [None] * (n - 1))
    uses = lambda f: lambda *x: (nest(f)(*x), all_grads(nest(f), x)(*x))
    got, want = (jax.jit(uses(g))(*operands) for g in (f, reference))
    numerics.close(got, want, 1e-4)


@every_way
@every_op
def test_empty(spec, implementation):
    """Case 17: size 0 in the batch, in the rows, and in a mapped axis; right shape and dtype, no launch."""
    f, _, operands = both(spec, implementation)
    rows = operands[0].shape[0]
    empty = [x[:0] if x.ndim == operands[0].ndim and x.shape[0] == rows else x for x in operands]
    reduced = spec.name == "logsumexp"  # its result has 1 where the operand has n
    for g in (f, jax.jit(f)):
        assert g(*empty).shape == (*empty[0].shape[:-1], 1 if reduced else empty[0].shape[-1])
        assert g(*empty).dtype == empty[0].dtype
    for x, grad in zip([empty[i] for i in floating(empty)], all_grads(f, empty)(*empty), strict=True):
        np.testing.assert_array_equal(grad, jnp.zeros_like(x))
    mapped = [jnp.stack([x] * 2)[:0] for x in operands]
    assert jax.vmap(f)(*mapped).shape == (0, *operands[0].shape[:-1], 1 if reduced else operands[0].shape[-1])
    assert [g.shape for g in jax.vmap(all_grads(f, operands))(*mapped)] == [mapped[i].shape for i in floating(operands)]
    if spec.name in ("matmul", "gated_linear_unit"):
        return  # their last axes are of two kinds: see test_matmul and test_gated_linear_unit
    no_features = [x[..., :0] if x.ndim else x for x in operands]
    assert f(*no_features).shape == (*no_features[0].shape[:-1], int(reduced))
    all_grads(f, no_features)(*no_features)


@every_way
@some_ops
def test_donation(spec, implementation):
    """Case 56: donating any operand changes nothing, and what is not donated keeps its value."""
    f, reference, operands = both(spec, implementation)
    want = reference(*operands)
    for donated in range(len(operands)):
        mine = [x.copy() for x in operands]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            numerics.close(jax.jit(f, donate_argnums=donated)(*mine), want)
        for i, x in enumerate(mine):
            if i != donated:
                np.testing.assert_array_equal(x, operands[i])


@every_way
@every_op
def test_mixed_dtypes(spec, implementation):
    """Operands of several dtypes: each gradient has its operand's own, whatever the cotangent's; or they are refused."""
    f, reference, operands = both(spec, implementation)
    dtypes = ["bfloat16", "float32", "float16", "bfloat16"]
    operands = [x.astype(d) if x.dtype != bool else x for x, d in zip(operands, dtypes, strict=False)]
    if spec.one_dtype:
        with pytest.raises(TypeError, match="one dtype"):
            f(*operands)
        return
    value = f(*operands)
    assert value.dtype == reference(*operands).dtype
    got, want = (jax.jit(all_grads(g, operands))(*operands) for g in (f, reference))
    assert [g.dtype for g in got] == [operands[i].dtype for i in floating(operands)]
    numerics.close(got, want, 2e-2)


@every_op
def test_x64(spec):
    """Case 57: float64 is right to 1e-10; other dtypes give the same bits with x64 on; weak scalars change nothing."""
    f = function(spec, spec.small)
    before = f(*draw(spec, spec.small))
    with jax.enable_x64(True):
        operands = draw(spec, spec.small, "float64")
        value = truth(spec, spec.small, operands)
        g = cotangent(value.shape, "float64")
        out, grads = value_and_vjp(f, operands, g)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, value, rtol=1e-10, atol=1e-10)
        for grad, want in zip(grads, [w for w in truth_vjp(spec, spec.small, operands, g) if w is not None], strict=True):
            np.testing.assert_allclose(grad, want, rtol=1e-10, atol=1e-10)
        again = f(*draw(spec, spec.small, "float32"))
        assert again.dtype == jnp.float32
        np.testing.assert_array_equal(again, before)
        with pytest.raises(NotImplementedError, match=r'float64.*implementation="xla"'):
            function(spec, spec.small, implementation="interpret")(*operands)


@some_ops
def test_x64_by_kernel(spec):
    f = function(spec, spec.small, implementation="interpret")
    before = f(*draw(spec, spec.small))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(f(*draw(spec, spec.small, "float32")), before)


@some_ops
def test_one_trace_per_signature(spec):
    """Case 57: f(f(x)) and repeated calls trace once."""
    if spec.name == "logsumexp":
        return  # f(x) has another shape than x
    f, _, operands = both(spec, None)
    traces = 0

    @jax.jit
    def g(*operands):
        nonlocal traces
        traces += 1
        return f(*operands)

    x = operands[0]
    for _ in range(3):
        x = g(x, *operands[1:])
        assert not jax.typeof(x).weak_type
    assert traces == 1


@some_ops
def test_remat_names(spec):
    """Case 55: with `{op}_residual` saved, the forward kernel appears once in the gradient; with nothing saved, twice."""
    f, _, operands = both(spec, None)
    if spec.name == "add":
        return  # its backward reads nothing, so there is nothing to save or to run twice
    policies = jax.checkpoint_policies
    kernels = lambda g: lowered.launches(g, *operands)
    inner = lambda policy: lambda *x: jnp.sin(jax.checkpoint(lambda *x: jnp.sin(f(jnp.sin(x[0]), *x[1:])), policy=policy)(*x)).sum()
    backwards = kernels(jax.value_and_grad(lambda *x: jnp.sin(f(jnp.sin(x[0]), *x[1:])).sum())).total() - 1
    assert 0 < backwards <= spec.backward_kernels  # one operand's gradient may need fewer than all
    for policy, forwards in [
        (policies.nothing_saveable, 2),
        (policies.everything_saveable, 1),
        (policies.save_only_these_names(f"{spec.name}_residual"), 1),
        (policies.save_any_names_but_these(f"{spec.name}_residual"), 2),
    ]:
        got = kernels(jax.value_and_grad(inner(policy)))
        assert got.total() == forwards + backwards, (policy, got)
        assert sum(n for name, n in got.items() if name.startswith(f"jtops_{spec.name}_vjp")) == backwards
    saving = inner(policies.save_only_these_names(f"{spec.name}_residual"))
    layers = lambda *x: jax.lax.scan(lambda c, _: (saving(c, *x[1:]) + c, None), x[0], None, length=4)[0].sum()
    assert kernels(jax.value_and_grad(layers)).total() == 1 + backwards


@every_op
def test_residual_memory(spec):
    """A scan over layers keeps what the backward kernel reads and nothing else: not the primals that it does not."""
    layers, x, w, heads = 16, jnp.ones((64, 1024)), jnp.ones((1024,)), jnp.ones((64, 16, 64))
    kept, operands = {  # arrays of the size of the first operand, for each layer
        "add": (0, (x, w)),
        "softmax": (1, (x, None)),
        "log_softmax": (1, (x, None)),
        "logsumexp": (1, (x, None)),
        "layer_norm": (1, (x, w, w)),
        "rms_norm": (1, (x, w)),
        "add_layer_norm": (1, (x, x, w, w)),
        "add_rms_norm": (1, (x, x, w)),
        "matmul": (0, (x, jnp.eye(1024), None, None)),
        "gated_linear_unit": (1 + 1 / layers, (x, jnp.eye(1024), jnp.eye(1024))),  # x; and once, a second cotangent
        "flash_attention": (2, (heads, heads, heads)),
    }[spec.name]
    x, *others = operands
    f = function(spec, dataclasses.replace(spec.small, options={}), implementation="interpret")
    loss = lambda x: (
        jax.lax.scan(lambda c, _: (jnp.broadcast_to(f(c, *others), c.shape), None), x, None, length=layers)[0] ** 2
    ).sum()
    used = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert used <= (layers * kept + 5) * x.nbytes, used / x.nbytes
