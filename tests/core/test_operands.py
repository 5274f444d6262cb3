"""The values that a kernel's parameters take: tuples, strings, constants anywhere, specialised or not; and what a call carries."""

import collections
import functools
import re
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat import jax as jax_compat
from jtops._compat.triton import tl, triton
from tests.core.test_call import modes
from tests.kernels import lowered

call = jtops.triton_call
X = jax.ShapeDtypeStruct((64,), jnp.float32)
Affine = collections.namedtuple("Affine", "scale shift")


@triton.jit
def sum_kernel(parts, factors, o_ptr, BLOCK: tl.constexpr = 64):
    """o = sum of part * factor"""
    i = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(len(parts)):
        acc += tl.load(parts[k] + i) * factors[k]
    tl.store(o_ptr + i, acc)


@triton.jit
def nested_kernel(x, affine, o_ptr, BLOCK: tl.constexpr = 64):
    """o = x * scale + shift, or + 1000 where the mode says so."""
    i = tl.arange(0, BLOCK)
    scale_ptr, n = affine.scale
    y = tl.load(x[0] + i) * tl.load(scale_ptr) * n + affine.shift
    if x[1] == "far":
        y += 1000
    tl.store(o_ptr + i, y)


class Rows(NamedTuple):
    inner: Any
    own: Any


class Mask(NamedTuple):
    limit: Any
    rows: Rows
    size: Any
    causal: Any = False
    weights: Any = None


@triton.jit
def _kept(i, mask):
    if mask.causal:
        return i <= mask.limit
    return i >= mask.limit


@triton.jit
def bundle_kernel(x_ptr, mask, o_ptr):
    """o = x * inner + own where the mask keeps it, times a weight if it has some; else 0."""
    i = tl.arange(0, mask.size)
    y = tl.load(x_ptr + i) * mask.rows.inner + mask.rows.own
    if mask.weights is not None:
        y *= tl.load(mask.weights + i)
    tl.store(o_ptr + i, tl.where(_kept(i, mask), y, 0.0))


@triton.jit
def swap_kernel(pair, BLOCK: tl.constexpr = 64):
    i = tl.arange(0, BLOCK)
    a, b = tl.load(pair[0] + i), tl.load(pair[1] + i)
    tl.store(pair[0] + i, b)
    tl.store(pair[1] + i, a)


@triton.jit
def mode_kernel(x_ptr, mode, BLOCK: tl.constexpr, o_ptr, DOUBLE: tl.constexpr = False):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    if mode == "negate":
        x = -x
    tl.store(o_ptr + i, x * 2 if DOUBLE else x)


def _scale(x_ptr, o_ptr, n, BLOCK: tl.constexpr = 64):
    i = tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * n)


scale_kernel = triton.jit(_scale)
plain_kernel = triton.jit(_scale, do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
unaligned_kernel = triton.jit(_scale, do_not_specialize_on_alignment=["n", "o_ptr"])


@pytest.mark.spec("pytree inputs (tuples in kernel)")
@modes
def test_tuples(interpret):
    """Arrays, numbers and constants in tuples; 1 and multiples of 16 are specialised there as elsewhere."""
    x, y, z = (jnp.arange(64.0) + k for k in range(3))
    f = functools.partial(call, kernel=sum_kernel, out_type=x, grid=1, interpret=interpret)
    np.testing.assert_array_equal(f((x, y, z), (1, 16, 2.5)), x + 16 * y + 2.5 * z)
    np.testing.assert_array_equal(f([x, y], [3, 1]), 3 * x + y)
    np.testing.assert_array_equal(jax.jit(lambda x: f((x,), (2,)))(x), 2 * x)


@pytest.mark.spec("pytree inputs (tuples in kernel)")
@modes
def test_nested_and_named_tuples(interpret):
    x, scale = jnp.arange(64.0), jnp.array([3.0])
    f = functools.partial(call, kernel=nested_kernel, out_type=x, grid=1, interpret=interpret)
    np.testing.assert_array_equal(f((x, "far"), Affine((scale, 2), 0.5)), x * 6 + 1000.5)
    np.testing.assert_array_equal(f((x, "near"), Affine((scale, 1), 7)), x * 3 + 7)


@pytest.mark.spec("pytree inputs (tuples in kernel)")
@modes
def test_tuples_in_place(interpret):
    x, y = jnp.arange(64.0), jnp.ones(64)
    swapped = call((x, y), kernel=swap_kernel, out_type=(x, y), grid=1, input_output_aliases={0: 0, 1: 1}, interpret=interpret)
    np.testing.assert_array_equal(swapped, (y, x))
    refs = jax.new_ref(x), jax.new_ref(y)
    call(refs, kernel=swap_kernel, out_type=(), grid=1, interpret=interpret)
    np.testing.assert_array_equal((refs[0][...], refs[1][...]), (y, x))


@pytest.mark.spec("pytree inputs (tuples in kernel)")
def test_tuples_in_compiled_kernels():
    """The machine code takes the items one by one, without those that are constants."""

    def entry(f):
        (compiled,) = lowered.kernels(f, X)
        return re.findall(
            r"(\w+): (!tt.ptr<f32> {tt.div|i32 {tt.div|i32|f32)", compiled.triton_kernel.asm["ttir"].split("attributes")[0]
        )

    three = lambda x: call((x, x, x), (1, 16, 2.5), kernel=sum_kernel, out_type=x, grid=1)
    pointer, divides = "!tt.ptr<f32> {tt.div", "i32 {tt.div"
    assert [kind for _, kind in entry(three)] == [pointer, pointer, pointer, divides, "f32", pointer]
    nested = lambda x: call((x, "far"), Affine((x, 2), 0.5), kernel=nested_kernel, out_type=x, grid=1)
    assert [kind for _, kind in entry(nested)] == [pointer, pointer, "i32", "f32", pointer]


@pytest.mark.spec("pytree inputs (tuples in kernel)")
@modes
def test_constants_in_tuples(interpret):
    """Fields by name, nested; a constexpr gives a block its size, and a boolean chooses code, in a helper too."""
    x, weights, i = jnp.arange(64.0), jnp.linspace(0, 1, 64), np.arange(64)
    f = functools.partial(call, kernel=bundle_kernel, out_type=x, grid=1, interpret=interpret)
    y, size = np.asarray(x) * 2 + 3, tl.constexpr(64)
    for true in (True, np.True_, tl.constexpr(True)):
        np.testing.assert_array_equal(f(x, Mask(9, Rows(2, 3.0), size, true)), np.where(i <= 9, y, 0))
    np.testing.assert_array_equal(f(x, Mask(1, Rows(2, 3.0), size)), np.where(i >= 1, y, 0))
    weighted = jax.jit(lambda x, w: f(x, Mask(9, Rows(2, 3.0), size, tl.constexpr(False), w)))(x, weights)
    np.testing.assert_allclose(weighted, np.where(i >= 9, y * np.asarray(weights), 0), rtol=1e-6)


@pytest.mark.spec("pytree inputs (tuples in kernel)")
def test_constants_in_tuples_are_compiled_in():
    def compiled(limit, causal):
        mask = Mask(limit, Rows(2, 3.0), tl.constexpr(64), causal)
        (kernel,) = lowered.kernels(lambda x: call(x, mask, kernel=bundle_kernel, out_type=x, grid=1), X)
        return kernel

    causal, other = compiled(9, causal=True), compiled(9, causal=False)
    head = re.search(r"tt.func public @bundle_kernel\((.*?)\) attributes", causal.triton_kernel.asm["ttir"])[1]
    assert re.findall(r"%[\w.]+: (!tt.ptr|i32|f32|i1)", head) == ["!tt.ptr", "i32", "i32", "f32", "!tt.ptr"]
    assert causal.binary != other.binary
    assert compiled(10, causal=True) is causal  # a number is the launch's


def test_tuples_that_are_refused():
    x = jnp.ones(64)
    with pytest.raises(TypeError, match=r"parameter 'mask' is a compile-time constant and must be hashable; got {}"):
        call(x, (1, tl.constexpr({})), kernel=bundle_kernel, out_type=x, grid=1)
    with pytest.raises(TypeError, match="parameter 'mask' is a compile-time constant, but got an array"):
        call(x, (1, tl.constexpr(x)), kernel=bundle_kernel, out_type=x, grid=1)
    with pytest.raises(TypeError, match="parameter 'factors' takes an array, a number, None or a tuple of these; got 3j"):
        call((x,), (3j,), kernel=sum_kernel, out_type=x, grid=1)
    with pytest.raises(TypeError, match=r"parameter 'parts' takes .*got {'a'"):
        call({"a": x}, (3,), kernel=sum_kernel, out_type=x, grid=1)
    with pytest.raises(ValueError, match=r"input_output_aliases names operand 2; there are 2: pair\[0\], pair\[1\]"):
        call((x, x), kernel=swap_kernel, out_type=x, grid=1, input_output_aliases={2: 0})


@pytest.mark.spec("str / constexpr operands")
@pytest.mark.spec("constexpr parameter anywhere in the signature / passed positionally")
@modes
def test_strings_and_constants_anywhere(interpret):
    x = jnp.arange(64.0)
    f = functools.partial(call, kernel=mode_kernel, out_type=x, grid=1, interpret=interpret)
    np.testing.assert_array_equal(f(x, "negate", 64), -x)
    np.testing.assert_array_equal(f(x, "keep", BLOCK=64, DOUBLE=True), 2 * x)
    np.testing.assert_array_equal(f(x, mode=tl.constexpr("negate"), BLOCK=tl.constexpr(64), DOUBLE=tl.constexpr(True)), -2 * x)
    np.testing.assert_array_equal(call(x, n=tl.constexpr(3), kernel=scale_kernel, out_type=x, grid=1, interpret=interpret), 3 * x)


@pytest.mark.spec("pointer 16-byte alignment assumption")
@pytest.mark.spec("do_not_specialize honoured")
@pytest.mark.spec("native_specialize_impl attrs")
@pytest.mark.spec("arg == 1 specialization")
def test_specialisation():
    """Which parameters are known to divide by 16, and whether a 1 is compiled in, by what the kernel declares."""

    def ttir(kernel, n):
        (compiled,) = lowered.kernels(lambda x: call(x, n=n, kernel=kernel, out_type=x, grid=1), X)
        head = re.search(r"tt.func public @_scale\((.*?)\) attributes", compiled.triton_kernel.asm["ttir"])[1]
        found = [name for name, rest in re.findall(r"%(\w+): ([^%]*)", head) if "tt.divisibility = 16" in rest]
        return found, "%n:" in head, "n" in compiled.folded

    assert ttir(scale_kernel, 32) == (["x_ptr", "o_ptr", "n"], True, False)
    assert ttir(scale_kernel, 33) == (["x_ptr", "o_ptr"], True, False)
    assert ttir(scale_kernel, 1) == (["x_ptr", "o_ptr"], False, True)
    for n in (32, 33, 1):
        assert ttir(plain_kernel, n) == (["o_ptr"], True, False)
    assert ttir(unaligned_kernel, 32) == (["x_ptr"], True, False)
    assert ttir(unaligned_kernel, 1) == (["x_ptr"], False, True)


@pytest.mark.spec("do_not_specialize honoured")
def test_specialisation_is_in_the_launch():
    """A pointer whose alignment the kernel does not use may lie anywhere; a 1 that is not compiled in is passed."""

    def record(kernel):
        with jtops.config.launch("ffi"):
            text = lowered.text(lambda x: call(x, n=1, kernel=kernel, out_type=x, grid=1), X)
        return lowered.record(re.search(r'opaque = "((?:[^"\\]|\\.)*)"', text)[1])

    assert record(scale_kernel).count(b"\x10\x10") == record(plain_kernel).count(b"\x10\x10") + 1


@pytest.mark.spec("do_not_specialize honoured")
@modes
def test_unspecialised_kernels_compute_the_same(interpret):
    x = jnp.arange(64.0)
    for kernel in (scale_kernel, plain_kernel, unaligned_kernel):
        for n in (1, 2, 16, True):
            np.testing.assert_array_equal(call(x, n=n, kernel=kernel, out_type=x, grid=1, interpret=interpret), x * n)


@pytest.mark.spec("serialized_metadata bytes")
def test_metadata_reaches_the_launch():
    text = lowered.text(lambda x: call(x, n=2, kernel=scale_kernel, out_type=x, grid=1, serialized_metadata=b"\x00any\xff"), X)
    opaque = re.search(r'opaque = "((?:[^"\\]|\\.)*)"', text)[1]
    raw = re.sub(rb"\\([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), opaque.replace("\\\\", "\\5C").encode("latin-1"))
    assert jax_compat.gpu_triton.get_serialized_metadata(raw) == b"\x00any\xff"


@pytest.mark.spec("never DCE'd at jaxpr level")
@pytest.mark.spec("has_side_effect")
def test_unused_calls_stay():
    """In the jaxpr always, with all operands; in the program and through every transformation with a side effect."""

    def f(x, y, **kwargs):
        call(y, n=2, kernel=scale_kernel, out_type=x, grid=1, **kwargs)
        return x

    count = lambda **kwargs: lowered.launches(jax.jit(functools.partial(f, **kwargs)), X, X).total()
    assert (count(), count(has_side_effect=True)) == (1, 1)
    x = jnp.ones(64)
    pruned = jax.linearize(jax.jit(lambda x: f(x, jnp.ones(64), has_side_effect=True, interpret=True)), x)[0]
    np.testing.assert_array_equal(pruned, x)
    jaxpr = jax.make_jaxpr(f)(x, x)
    kept, used = jax_compat.partial_eval.dce_jaxpr(jaxpr.jaxpr, [False])
    assert [e.primitive.name for e in kept.eqns] == ["triton_call"]
    assert used == [False, True]
    assert not jaxpr.effects
    assert jax.make_jaxpr(functools.partial(f, has_side_effect=True))(x, x).effects
    optimised = lambda **kwargs: jax.jit(functools.partial(f, interpret=True, **kwargs)).lower(x, x).compile().as_text()
    assert "jtops_host_call" in optimised(has_side_effect=True)
    assert "jtops_host_call" not in optimised()


@pytest.mark.spec("has_side_effect")
def test_side_effects_in_loops():
    x = jnp.ones(64)
    step = lambda c, _: (c, call(x, n=2, kernel=scale_kernel, out_type=x, grid=1, has_side_effect=True, interpret=True)[0])
    np.testing.assert_array_equal(jax.lax.scan(step, 0, None, length=3)[1], [2.0] * 3)
    g = jax.checkpoint(lambda y: y * step(0, None)[1])
    assert jax.grad(g)(3.0) == 2.0


@pytest.mark.spec("jit / eager / pmap / shard_map")
def test_pmap():
    x = jnp.arange(4 * 64.0).reshape(4, 64)
    f = jax.pmap(lambda x: call(x, n=3, kernel=scale_kernel, out_type=x, grid=1, interpret=True), devices=jax.devices()[:4])
    np.testing.assert_array_equal(f(x), 3 * x)


@pytest.mark.spec("thread use (kernel call from worker thread)")
@modes
def test_calls_from_threads(interpret):
    x, results = jnp.arange(64.0), {}
    work = lambda n: results.update({n: call(x, n=n, kernel=scale_kernel, out_type=x, grid=1, interpret=interpret)})
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        np.testing.assert_array_equal(results[n], x * n)
