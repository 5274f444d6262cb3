"""Each JAX transform once per op, on its small case: by default (the primitive over the reference) and by kernel."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtops.kernels._lib.spec import floating, with_gradients
from tests import numerics
from tests.kernels import lowered
from tests.specs import SPECS, cotangent, draw, every_op, function, some_ops, those, truth, truth_vjp, value_and_vjp

every_way = pytest.mark.parametrize("implementation", [None, "interpret", pytest.param("triton", marks=pytest.mark.gpu)])


def loss(f):
    return lambda *operands: (f(*operands).astype(jnp.float32) ** 2).sum()


def all_grads(f, operands):
    return jax.grad(loss(f), floating(operands))


def tangents(operands):
    return [jnp.cos(x) if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0) for x in operands]


def both(spec, case, implementation):
    """(function of the case's operands, the same by plain jax.numpy, operands)"""
    f, reference = (function(spec, case, implementation=i) for i in (implementation, "xla"))
    return f, reference, draw(spec, case)


def like(y, x):
    """A result that may lack x's last axes, spread over them."""
    return jnp.broadcast_to(y.reshape(y.shape + (1,) * (x.ndim - y.ndim)), x.shape)


def scanned(f, n=3):
    """The first operand carried through `n` steps."""

    def g(*operands):
        step = lambda x, _: (like(f(x, *operands[1:]), x) + x, None)
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


def calls():
    for op, spec in SPECS.items():
        for i, case in enumerate(spec.small):
            named = f"{op}-{case.id}" if i else op
            for name in TRANSFORMS:
                for way in (None, "interpret"):
                    at_once = name in AT_ONCE and (i == 0 or way == "interpret")  # of a further case what its operands change
                    at_once = (at_once or (i == 0 and spec.model and way == "interpret")) and not spec.alike
                    yield pytest.param(spec, i, name, way, id=f"{named}-{name}-{way}", marks=() if at_once else pytest.mark.slow)
                yield pytest.param(spec, i, name, "triton", id=f"{named}-{name}-triton", marks=pytest.mark.gpu)


@pytest.mark.parametrize(("spec", "i", "name", "implementation"), list(calls()))
def test_transform(spec, i, name, implementation):
    """Cases 53 and 55: forward mode, any order, checkpoint and scan give what the plain reference does."""
    f, _, operands = both(spec, spec.small[i], implementation)
    got = jax.jit(TRANSFORMS[name](f, operands))(*operands)
    numerics.close(got, by_reference(spec.name, i, name), 1e-4)


@functools.cache
def by_reference(op, i, name):
    _, reference, operands = both(SPECS[op], SPECS[op].small[i], None)
    return jax.jit(TRANSFORMS[name](reference, operands))(*operands)


@some_ops
@pytest.mark.parametrize("name", ["value", "grad", "jvp", pytest.param("hvp", marks=pytest.mark.slow)])
def test_without_jit(spec, case, name):
    f, reference, operands = both(spec, case, None)
    got, want = (TRANSFORMS[name](g, operands)(*operands) for g in (f, reference))
    numerics.close(got, want, 1e-4)
    with jax.disable_jit():
        numerics.close(TRANSFORMS[name](f, operands)(*operands), want, 1e-4)


BATCHES = {  # which operands have a mapped axis, and where
    "all_first": lambda x: [0] * len(x),
    "first_only": lambda x: [0] + [None] * (len(x) - 1),
    "last_only": lambda x: [None] * (len(x) - 1) + [0],
    "axis_1": lambda x: [1] + [0] * (len(x) - 1),
    "axis_last": lambda x: [-1] * len(x),
    "floating": lambda x: [0 if i in floating(x) else None for i in range(len(x))],
    "others": lambda x: [None if i in floating(x) else 0 for i in range(len(x))],  # masks, ids, lengths
}


def batches():
    """Each for every case that it says something else of than those before it. Further cases at once by kernel alone."""
    for param in those("small", lambda spec, i: spec.model or i):
        spec, case = param.values
        seen = [[None] * len(case.given)]
        for name, of in BATCHES.items():
            if (axes := of(case.types("float32"))) in seen:
                continue
            seen.append(axes)
            for way in (None, "interpret", "triton"):
                marks = [*param.marks, *([pytest.mark.gpu] if way == "triton" else [])]
                marks += [pytest.mark.slow] if way is None and not spec.model else []
                yield pytest.param(spec, case, axes, way, id=f"{param.id}-{name}-{way}", marks=marks)


@pytest.mark.parametrize(("spec", "case", "in_axes", "implementation"), list(batches()))
def test_vmap(spec, case, in_axes, implementation):
    f, reference, operands = both(spec, case, implementation)
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
def test_nested_vmap(spec, case, implementation):
    _, _, operands = both(spec, case, implementation)
    n = len(operands)
    f, reference, _ = both(spec, case, implementation)
    spread = lambda x, m: x + jnp.arange(m, dtype=x.dtype).reshape(m, *[1] * x.ndim) if x.dtype != bool else jnp.stack([x] * m)
    operands = [spread(spread(operands[0], 2), 3), *(spread(x, 2) for x in operands[1:])]  # [3, 2, ...] and [2, ...]
    nest = lambda f: jax.vmap(jax.vmap(f), [0] + [None] * (n - 1))
    uses = lambda f: lambda *x: (nest(f)(*x), all_grads(nest(f), x)(*x))
    got, want = (jax.jit(uses(g))(*operands) for g in (f, reference))
    numerics.close(got, want, 1e-4)


@every_way
@every_op
def test_empty(spec, case, implementation):
    """Case 17: size 0 of any axis, and of a mapped one; right shape, dtype and gradients, no launch."""
    f, reference, operands = both(spec, case, implementation)
    named, result = case.named_axes()
    sizes = {a: n for names, x in zip(named, operands, strict=True) for a, n in zip(names, x.shape, strict=True)}
    shape = lambda **new: tuple(int(a) if a.isdigit() else {**sizes, **new}[a] for a in result)
    for axis in (a for a in sizes if not a.isdigit()):
        empty = draw(spec, case.resized(axis, 0))
        value, grads = jax.jit(with_gradients(f))(*empty)
        assert (value.shape, value.dtype) == (shape(**{axis: 0}), jnp.dtype(spec.result_dtype or empty[0].dtype))
        for x, grad in zip([empty[i] for i in floating(empty)], grads, strict=True):
            assert grad.shape == x.shape
            if axis in result:  # so there is no cotangent
                np.testing.assert_array_equal(grad, jnp.zeros_like(x))
        if axis not in result:
            numerics.close((value, grads), jax.jit(with_gradients(reference))(*empty), 1e-6)
    empty = draw(spec, case.resized(named[0][0], 0))
    assert f(*empty).shape == shape(**{named[0][0]: 0})  # not under jit
    mapped = [jnp.stack([x] * 2)[:0] for x in operands]
    assert jax.vmap(f)(*mapped).shape == (0, *shape())
    assert [g.shape for g in jax.vmap(all_grads(f, operands))(*mapped)] == [mapped[i].shape for i in floating(operands)]


@every_way
@some_ops
def test_donation(spec, case, implementation):
    """Case 56: donating any operand changes nothing, and what is not donated keeps its value."""
    f, reference, operands = both(spec, case, implementation)
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
def test_mixed_dtypes(spec, case, implementation):
    """Operands of several dtypes: each gradient has its operand's own, whatever the cotangent's; or they are refused."""
    f, reference, operands = both(spec, case, implementation)
    dtypes = ["bfloat16", "float32", "float16", "bfloat16"]
    operands = [x.astype(d) if i in floating(operands) else x for i, (x, d) in enumerate(zip(operands, itertools.cycle(dtypes)))]
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
def test_x64(spec, case):
    """Case 57: float64 is right to 1e-10; other dtypes give the same bits with x64 on; weak scalars change nothing."""
    f = function(spec, case)
    before = f(*draw(spec, case))
    with jax.enable_x64(True):
        operands = draw(spec, case, "float64")
        value = truth(spec, case, operands)
        g = cotangent(value.shape, "float64")
        out, grads = value_and_vjp(f, operands, g)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, value, rtol=1e-10, atol=1e-10)
        for grad, want in zip(grads, truth_vjp(spec, case, operands, g), strict=True):
            np.testing.assert_allclose(grad, want, rtol=1e-10, atol=1e-10)
        again = f(*draw(spec, case, "float32"))
        assert again.dtype == jnp.float32
        np.testing.assert_array_equal(again, before)
        with pytest.raises(NotImplementedError, match=r'float64.*implementation="xla"'):
            function(spec, case, implementation="interpret")(*operands)


@some_ops
def test_x64_by_kernel(spec, case):
    f = function(spec, case, implementation="interpret")
    before = f(*draw(spec, case))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(f(*draw(spec, case, "float32")), before)


@some_ops
def test_one_trace_per_signature(spec, case):
    """Case 57: f(f(x)), where that has the shape of x, and repeated calls trace once."""
    f, _, operands = both(spec, case, None)
    traces = 0

    @jax.jit
    def g(*operands):
        nonlocal traces
        traces += 1
        return f(*operands)

    x = operands[0]
    for _ in range(3):
        y = g(x, *operands[1:])
        assert not jax.typeof(y).weak_type
        x = y if y.shape == x.shape else x
    assert traces == 1


@some_ops
def test_remat_names(spec, case):
    """Case 55: with `{op}_residual` saved, the forward kernel appears once in the gradient; with nothing saved, twice."""
    if not spec.kept:
        pytest.skip("its backward reads nothing, so there is nothing to save or to run twice")
    f, _, operands = both(spec, case, None)
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


@pytest.mark.parametrize("spec", [pytest.param(s, id=name, marks=pytest.mark.slow if s.alike else ()) for name, s in SPECS.items()])
def test_residual_memory(spec):
    """A scan over layers keeps what the backward kernel reads and nothing else: not the primals that it does not."""
    layers, case = 16, spec.small[0]
    first = case.named_axes()[0][0][0]
    x, *others = case.resized(first, 1024).types("float32")  # so large that what is small does not count
    f = function(spec, case, implementation="interpret")
    loss = lambda x, *others: (jax.lax.scan(lambda c, _: (like(f(c, *others), c), None), x, None, length=layers)[0] ** 2).sum()
    used, size = jax.jit(jax.grad(loss)).lower(x, *others).compile().memory_analysis().temp_size_in_bytes, x.size * x.dtype.itemsize
    assert used <= (layers * (spec.kept + 0.3) + 5) * size, used / size  # statistics: one or two numbers of a row
    assert used > (layers * spec.kept - 1) * size, used / size
