"""What a kernel changes in place: aliased outputs, zeroed outputs, Refs. Run by the interpreter here and by the GPU there."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jtops
from jtops._compat.triton import tl, triton
from tests.core.test_call import modes
from tests.kernels import lowered

call = jtops.triton_call


@triton.jit
def add_to_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr = 16):
    """y += x"""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(y_ptr + i, mask=i < n) + tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, y, mask=i < n)


@triton.jit
def mixed_kernel(x_ptr, double_ptr, n, triple_ptr, BLOCK: tl.constexpr = 64):
    """x += 1, with twice and three times the old x on the side."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(x_ptr + i, x + 1, mask=i < n)
    tl.store(double_ptr + i, x * 2, mask=i < n)
    tl.store(triple_ptr + i, x * 3, mask=i < n)


@triton.jit
def backwards_kernel(o_ptr, x_ptr, p_ptr, y_ptr, BLOCK: tl.constexpr = 64):
    """Outputs stand before operands."""
    i = tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * 2)
    tl.store(p_ptr + i, tl.load(y_ptr + i) * 3)


@triton.jit
def count_kernel(x_ptr, count_ptr, BLOCK: tl.constexpr = 16):
    x = tl.load(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))
    tl.atomic_add(count_ptr, tl.sum(x))


@triton.jit
def reverse_kernel(x_ptr, o_ptr, rows, BLOCK: tl.constexpr = 16):
    i = tl.arange(0, BLOCK)
    tl.store(o_ptr + (rows - 1 - tl.program_id(0)) * BLOCK + i, tl.load(x_ptr + tl.program_id(0) * BLOCK + i))


X, Y = np.arange(40.0, dtype=np.float32), np.linspace(0, 1, 40).astype(np.float32)


def fresh():
    return jnp.array(X), jnp.array(Y)


def add_to(x, y, **kwargs):
    given = {"kernel": add_to_kernel, "out_type": y, "n": x.size, "grid": 3, "input_output_aliases": {1: 0}} | kwargs
    return call(x, y, **given)


def mixed(x, place, **kwargs):
    """(changed x, 2 x, 3 x), with the aliased output at `place` of out_type."""
    got = list(call(x, n=40, kernel=mixed_kernel, out_type=(x,) * 3, grid=1, input_output_aliases={0: place}, **kwargs))
    return got.pop(place), *got


@pytest.mark.spec("input_output_aliases={in:out}")
@modes
def test_an_aliased_output_is_its_operand_changed(interpret):
    """Case 56: an operand that was not donated stays as it was, eagerly and in one program with its successor."""
    x, y = fresh()
    np.testing.assert_array_equal(add_to(x, y, interpret=interpret), X + Y)
    before, after = jax.jit(lambda x, y: (y, add_to(x, y, interpret=interpret)))(x, y)
    np.testing.assert_array_equal(before, Y)
    np.testing.assert_array_equal(after, X + Y)
    twice = jax.jit(lambda x, y: add_to(x, add_to(x, y, interpret=interpret), interpret=interpret))
    np.testing.assert_array_equal(twice(x, y), X + (X + Y))
    np.testing.assert_array_equal(add_to(x, x, interpret=interpret), X + X)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


@pytest.mark.spec("input_output_aliases={in:out}")
@modes
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_aliased_output_among_others(place, interpret):
    """Whatever its place in out_type, it takes no parameter from the others."""
    for got in (mixed(jnp.array(X), place, interpret=interpret), jax.jit(lambda x: mixed(x, place, interpret=interpret))(X)):
        np.testing.assert_array_equal(got, (X + 1, X * 2, X * 3))


@modes
def test_outputs_may_stand_before_operands(interpret):
    x, y = jnp.arange(64.0), jnp.ones(64)
    got = call(x_ptr=x, y_ptr=y, kernel=backwards_kernel, out_type=(x, x), grid=1, interpret=interpret)
    np.testing.assert_array_equal(got, (x * 2, y * 3))


def aliases(text):
    """(result, operand) pairs of the one launch in `text`, and what it takes and gives."""
    found = re.findall(r"output_operand_alias<output_tuple_indices = \[(\d*)\], operand_index = (\d+)", text)
    types = re.search(lowered.CALL + r"\((.*?)\).*\) -> (.*)", text)
    return [(int(o or 0), int(i)) for o, i in found], types[1].count("%"), types[2].count("tensor<")


def test_order_of_buffers_on_a_gpu():
    """A launch gives operands, then results, to the kernel's pointers one after the other; shared buffers count once."""
    x = jax.ShapeDtypeStruct((40,), jnp.float32)
    assert aliases(lowered.text(add_to, x, x)) == ([(0, 1)], 2, 1)
    for place in range(3):  # the results without parameter come last
        assert aliases(lowered.text(lambda x: mixed(x, place), x)) == ([(2, 0)], 1, 3)
    backwards = lambda x, y: call(x_ptr=x, y_ptr=y, kernel=backwards_kernel, out_type=(x, x), grid=1)
    assert aliases(lowered.text(backwards, x, x)) == ([(0, 0), (1, 2)], 4, 2)
    text = lowered.text(lambda r: call(r, n=40, x_ptr=jnp.ones(40), kernel=add_to_kernel, out_type=(), grid=3), jax.new_ref(X))
    assert aliases(text) == ([(0, 1)], 2, 1)


@pytest.mark.spec("donate_argnames with jit")
@modes
def test_donation(interpret):
    """Case 56: a donated operand is changed where it lies, and its reuse is JAX's own error."""
    x, y = fresh()
    f = jax.jit(functools.partial(add_to, interpret=interpret), donate_argnames="y")
    where = y.unsafe_buffer_pointer()
    got = f(x, y=y)
    np.testing.assert_array_equal(got, X + Y)
    assert got.unsafe_buffer_pointer() == where
    with pytest.raises(RuntimeError, match="deleted"):
        y + 1
    for order in ((1, 0), (0, 1)):  # the donated operand, another output and the operand that stays, in either order
        g = jax.jit(lambda x, y: tuple((add_to(x, y, interpret=interpret), x * 2)[k] for k in order), donate_argnames="y")
        x, y = fresh()
        got = g(x, y=y)
        np.testing.assert_array_equal(got[order[0]], X + Y)
        np.testing.assert_array_equal(x, X)


@modes
def test_a_chain_of_reversals(interpret):
    """Case 56: rows are read and written in another order, so an output must not be given its operand's buffer unasked."""
    x = jnp.arange(8 * 16.0).reshape(8, 16)
    reverse = lambda x: call(x, rows=8, kernel=reverse_kernel, out_type=x, grid=8, interpret=interpret)
    chain = lambda x: functools.reduce(lambda x, _: reverse(x), range(9), x)
    np.testing.assert_array_equal(jax.jit(chain)(x), x[::-1])
    np.testing.assert_array_equal(jax.jit(chain, donate_argnums=0)(jnp.array(x)), x[::-1])


@pytest.mark.gpu
def test_a_chain_of_reversals_often():
    """Case 56 where it was seen: in a long process, under memory pressure."""
    x = jax.random.normal(jax.random.key(0), (512, 16))
    chain = jax.jit(
        lambda x: functools.reduce(lambda x, _: call(x, rows=512, kernel=reverse_kernel, out_type=x, grid=512), range(10), x + 0)
    )
    results = [chain(x + k) for k in range(200)]
    for k, got in enumerate(results):
        np.testing.assert_array_equal(got, x + k)


@pytest.mark.spec("zeroed_outputs seq / callable(metaparams)")
@modes
def test_zeroed_outputs(interpret):
    """Case 41: before every launch, not once."""
    x, one = jnp.ones(1008), jax.ShapeDtypeStruct((1,), jnp.float32)
    count = lambda x, **kwargs: call(x, kernel=count_kernel, out_type=one, grid=63, interpret=interpret, **kwargs)[0]
    eager, jitted = count, jax.jit(lambda x: count(x, zeroed_outputs=lambda meta: [0] if meta["BLOCK"] == 16 else []))
    for _ in range(3):
        assert eager(x, zeroed_outputs=(0,)) == 1008
        assert jitted(x) == 1008
    scanned = jax.lax.scan(lambda c, _: (c, count(x, zeroed_outputs=[0])), 0, None, length=4)[1]
    np.testing.assert_array_equal(scanned, [1008] * 4)


@pytest.mark.spec("zeroed_outputs seq / callable(metaparams)")
@modes
def test_zeroed_aliased_outputs(interpret):
    x, y = fresh()
    np.testing.assert_array_equal(add_to(x, y, zeroed_outputs=(0,), interpret=interpret), X)
    np.testing.assert_array_equal(y, Y)


def test_zeroing_is_in_the_launch_record():
    """160 bytes of zeros for an operand or a result, 16 bytes of alignment for all."""
    x = jax.ShapeDtypeStruct((40,), jnp.float32)
    record = lambda f: lowered.record(re.search(r'opaque = "((?:[^"\\]|\\.)*)"', lowered.text(f, x, x))[1])
    array = lambda size: b"\x0a" + bytes([len(body := b"\x08" + size + b"\x10\x10")]) + body
    with jtops.config.launch("ffi"):
        plain, zeroed = (record(lambda x, y: add_to(x, y, zeroed_outputs=z)) for z in ((), (0,)))
    assert len(zeroed) > len(plain)
    assert array(b"\xa0\x01") in zeroed
    assert array(b"\xa0\x01") not in plain


@pytest.mark.spec("Ref operands (jax.new_ref) in-place")
@modes
def test_refs(interpret):
    """Eagerly, jitted, in loops, and without jit: read and written in place; the array it was made from stays."""
    x, y = fresh()
    ref = jax.new_ref(y)
    step = lambda ref, x: call(x, ref, n=40, kernel=add_to_kernel, out_type=(), grid=3, interpret=interpret)
    assert step(ref, x) == ()
    np.testing.assert_array_equal(ref[...], X + Y)
    jax.jit(step)(ref, x)
    with jax.disable_jit():
        step(ref, x)
    np.testing.assert_allclose(ref[...], 3 * X + Y, rtol=1e-6)
    jax.lax.scan(lambda c, x: (step(ref, x), None), (), jnp.stack([x, x]))
    np.testing.assert_allclose(ref[...], 5 * X + Y, rtol=1e-6)

    @jax.jit
    def inside(x, y):
        ref = jax.new_ref(y)
        jax.lax.fori_loop(0, 3, lambda _, c: step(ref, x), ())
        return ref[...] * 2

    np.testing.assert_allclose(inside(x, y), 2 * (3 * X + Y), rtol=1e-6)
    np.testing.assert_array_equal(y, Y)


@modes
def test_refs_beside_outputs(interpret):
    x, _ = fresh()
    ref = jax.new_ref(x)
    double, triple = jax.jit(lambda r: call(r, n=40, kernel=mixed_kernel, out_type=(x, x), grid=1, interpret=interpret))(ref)
    np.testing.assert_array_equal((ref[...], double, triple), (X + 1, X * 2, X * 3))


def test_refs_in_shard_map():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))

    def one(x, y):
        ref = jax.new_ref(y)
        call(x, ref, n=10, kernel=add_to_kernel, out_type=(), grid=1, interpret=True)
        return ref[...]

    f = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x")))
    np.testing.assert_array_equal(f(X, Y), X + Y)
    shared = jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    with pytest.raises(ValueError, match="a Ref that is the same along mesh axes"):
        jax.jit(shared)(X, Y[:10])


@modes
def test_a_grid_without_programs_changes_nothing(interpret):
    x, y = fresh()
    np.testing.assert_array_equal(add_to(x, y, grid=0, interpret=interpret), Y)
    np.testing.assert_array_equal(add_to(x, y, grid=0, zeroed_outputs=(0,), interpret=interpret), jnp.zeros(40))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"input_output_aliases": {1: 0, 0: 0}}, ValueError, r"must be a bijection; got \{1: 0, 0: 0\}"),
        ({"input_output_aliases": {1: 1}}, ValueError, "names output 1; out_type has 1"),
        ({"input_output_aliases": {3: 0}}, ValueError, "names operand 3; there are 3: x_ptr, y_ptr, n"),
        ({"input_output_aliases": {2: 0}}, ValueError, "names operand 2, n, which is not an array"),
        ({"input_output_aliases": {"y_ptr": 0}}, TypeError, "maps operand indices to output indices"),
        ({"out_type": jax.ShapeDtypeStruct((3,), jnp.float32)}, ValueError, r"operand 1, y_ptr, .* float32\[40\] .*float32\[3\]"),
        ({"out_type": jax.ShapeDtypeStruct((40,), jnp.int32)}, ValueError, r"float32\[40\] and the output int32\[40\]"),
        ({"out_type": (X, X)}, ValueError, "out_type has 1 unaliased outputs, but the arguments leave 0 parameters"),
        ({"zeroed_outputs": (1,)}, ValueError, r"zeroed_outputs must be indices of out_type's 1 outputs; got \(1,\)"),
        ({"zeroed_outputs": lambda meta: ("a",)}, ValueError, r"got \('a',\)"),
    ],
)
def test_errors_teach(change, error, match):
    with pytest.raises(error, match=match):
        add_to(*fresh(), **change)


@triton.jit
def old_kernel(x_ptr, y_ptr, n, o_ptr, BLOCK: tl.constexpr = 16):
    """The aliased output listed once more."""


def test_other_errors_teach():
    x, y = fresh()
    with pytest.raises(ValueError, match=r"unbound: o_ptr.* An aliased output has none: the kernel writes through its operand's"):
        add_to(x, y, kernel=old_kernel)
    with pytest.raises(ValueError, match="cannot be combined with Ref operands"):
        add_to(jax.new_ref(x), y, interpret=True)
    with pytest.raises(ValueError, match="one Ref is given to two parameters"):
        call(*[jax.new_ref(y)] * 2, n=20, kernel=add_to_kernel, out_type=(), grid=1)
    with pytest.raises(TypeError, match="'y_ptr' takes a whole Ref; got a part of one"):
        jax.jit(lambda r: call(x, r.at[:20], n=20, kernel=add_to_kernel, out_type=(), grid=1))(jax.new_ref(y))
    with pytest.raises(jtops.UnsupportedError, match="no vmap rule"):
        jax.vmap(lambda x, y: add_to(x, y, n=10, grid=1, interpret=True))(X.reshape(4, 10), Y.reshape(4, 10))
