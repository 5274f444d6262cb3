"""triton_call: binding, grids, results, and errors that teach. Run by the interpreter here and by the GPU there."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jtops
from jtops._compat import triton as triton_compat
from jtops._compat.triton import tl, triton
from jtops.core.interpret import host_call
from jtops.core.types import Constexpr, as_scalar, triton_type
from tests.kernels import lowered

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
modes = pytest.mark.parametrize("interpret", MODES)
call = functools.partial(jtops.triton_call)


@triton.jit
def add_kernel(x_ptr, y_ptr, o_ptr, n, BLOCK: tl.constexpr = 128):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(o_ptr + i, x + tl.load(y_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def two_kernel(x_ptr, a_ptr, b_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(a_ptr + i, x, mask=i < n)
    tl.store(b_ptr + i, x * 2, mask=i < n)


@triton.jit
def scalar_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * n)


@triton.jit
def wide_kernel(x_ptr, o_ptr, n):
    """Asks n for a method, which a constant 1 has not."""
    i = tl.arange(0, 16)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * n.to(tl.int64))


@triton.jit
def grid_kernel(o_ptr, w):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tl.store(o_ptr + (z * tl.num_programs(1) + y) * tl.num_programs(0) + x, x + 10 * y + 100 * z + w)


@triton.jit
def asks_kernel(o_ptr, num_warps: tl.constexpr):
    tl.store(o_ptr, num_warps)


X, Y = jnp.arange(300.0), jnp.linspace(0.0, 1.0, 300)


def added(*args, **kwargs):
    given = {"kernel": add_kernel, "out_type": X, "grid": lambda meta: triton.cdiv(300, meta["BLOCK"])} | kwargs
    return call(*args, **given)


@pytest.mark.spec("positional array/scalar operands *args")
@pytest.mark.spec("keyword operands by kernel parameter name")
@pytest.mark.spec("metaparam defaults from kernel signature")
@pytest.mark.spec("triton.JITFunction")
@modes
def test_operands_by_position_and_name(interpret):
    for got in (
        added(X, Y, n=300, interpret=interpret),
        added(X, y_ptr=Y, n=300, interpret=interpret),
        added(n=300, y_ptr=Y, x_ptr=X, BLOCK=64, interpret=interpret),
        added(np.asarray(X), Y, n=np.int64(300), grid=[3], interpret=interpret),
        jax.jit(lambda x, y: added(x, y, n=300, interpret=interpret))(X, Y),
    ):
        np.testing.assert_array_equal(got, X + Y)


@pytest.mark.spec("out_type pytree of shape/dtype")
@pytest.mark.spec("multiple outputs")
@modes
def test_results_have_the_structure_of_out_type(interpret):
    two = functools.partial(call, X, kernel=two_kernel, n=300, BLOCK=512, grid=1, interpret=interpret)
    kind = jax.ShapeDtypeStruct(X.shape, X.dtype)
    for out_type in ((kind, kind), [kind, kind], {"a": kind, "b": kind}, {"a": X, "b": [kind]}):
        got = two(out_type=out_type)
        assert jax.tree.structure(got) == jax.tree.structure(out_type)
        for leaf, want in zip(jax.tree.leaves(got), (X, X * 2), strict=True):
            np.testing.assert_array_equal(leaf, want)


@pytest.mark.spec("arg == 1 specialization")
@modes
@pytest.mark.parametrize("n", [42, 1, 16, 0, -1, 2, True, 2**40])
def test_integers_whatever_their_value(n, interpret):
    """Case 46: 1 and multiples of 16 are specialised by Triton; the answer must not depend on it."""
    x = jnp.arange(16)
    scale = int(n)
    got = call(x, n=n, kernel=scalar_kernel, out_type=x, grid=1, BLOCK=16, interpret=interpret)
    np.testing.assert_array_equal(got, (np.arange(16) * scale).astype(np.int32))
    if n is not True:
        got = call(x, n=n, kernel=wide_kernel, out_type=x, grid=1, interpret=interpret)
        np.testing.assert_array_equal(got, (np.arange(16) * scale).astype(np.int32))


@modes
def test_integers_that_alternate(interpret):
    """Case 46: no stale specialisation."""
    x = jnp.arange(16)
    for n in (42, 1, 16, 1, 2, 1):
        np.testing.assert_array_equal(call(x, n=n, kernel=scalar_kernel, out_type=x, grid=1, BLOCK=16, interpret=interpret), x * n)


@pytest.mark.spec("scalar np.float32")
@modes
@pytest.mark.parametrize("value", [0.5, np.float32(0.1), 1.0, float("inf"), 1e300])
def test_floats(value, interpret):
    x = jnp.ones(16)
    got = call(x, n=value, kernel=scalar_kernel, out_type=x, grid=1, BLOCK=16, interpret=interpret)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, np.full(16, value, np.float32))


GRIDS = [
    (4, (4, 1, 1)),
    ((2, 3), (2, 3, 1)),
    ([2, 3, 2], (2, 3, 2)),
    (np.int64(4), (4, 1, 1)),
    (np.array([2, 2]), (2, 2, 1)),
    (lambda meta: [2, 2], (2, 2, 1)),
    (lambda meta: meta["w"], (7, 1, 1)),
    ((3, 0), (3, 0, 1)),
    (0, (0, 1, 1)),
    ((0,), (0, 1, 1)),
]


@pytest.mark.spec("grid int / 1-3 tuple / callable(metaparams)")
@pytest.mark.spec("**metaparams → constexpr")
@modes
@pytest.mark.parametrize(("grid", "dims"), GRIDS)
def test_grids(grid, dims, interpret):
    """Case 17: every form of a grid; none of its programs missing; a zero grid launches nothing."""
    x, y, z = dims
    size = max(x * y * z, 1)
    got = call(w=7, kernel=grid_kernel, out_type=jax.ShapeDtypeStruct((size,), jnp.int32), grid=grid, interpret=interpret)
    want = [i + 10 * j + 100 * k + 7 for k in range(z) for j in range(y) for i in range(x)] or [0]
    np.testing.assert_array_equal(got, want)


@pytest.mark.spec("normalize_grid(grid, metaparams)")
@pytest.mark.parametrize(
    ("grid", "error", "match"),
    [
        ((1, 1, 1, 1), ValueError, "one to three dimensions; got 4"),
        ((), ValueError, "one to three dimensions; got 0"),
        (4.0, TypeError, "int or a sequence of up to three ints; got 4.0"),
        ("4", TypeError, "got '4'"),
        (True, TypeError, "got True"),
        (-1, ValueError, "got -1"),
        ((1, 70000), ValueError, "0..65535"),
        (lambda meta: None, TypeError, "got None"),
    ],
)
def test_malformed_grids(grid, error, match):
    with pytest.raises(error, match=match):
        added(X, Y, n=300, grid=grid)


@modes
def test_a_cached_kernel_meets_a_zero_grid(interpret):
    assert added(X, Y, n=300, interpret=interpret)[0] == Y[0]
    np.testing.assert_array_equal(added(X, Y, n=300, grid=(0,), interpret=interpret), jnp.zeros_like(X))


@modes
def test_a_kernel_may_ask_for_its_launch_options(interpret):
    out = jax.ShapeDtypeStruct((1,), jnp.int32)
    assert call(kernel=asks_kernel, out_type=out, grid=1, num_warps=8, interpret=interpret)[0] == 8


@dataclasses.dataclass
class Unhashable:
    size: int


@pytest.mark.spec("strict front door")
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"nn": 3}, TypeError, r"'nn' is neither a parameter of add_kernel\(.*\) nor an option of triton_call. Did you mean 'n'"),
        ({"num_warp": 4}, TypeError, "Did you mean 'num_warps'"),
        ({"out_types": X}, TypeError, "Did you mean 'out_type'"),
        ({"BLOCK": [128]}, TypeError, r"'BLOCK' is a compile-time constant and must be hashable; got \[128\] of type list"),
        ({"BLOCK": {"a": 1}}, TypeError, "'BLOCK'.*of type dict"),
        ({"BLOCK": np.array(128)}, TypeError, "'BLOCK'.*of type ndarray"),
        ({"BLOCK": Unhashable(128)}, TypeError, "'BLOCK'.*of type Unhashable"),
        ({"BLOCK": (1, [2])}, TypeError, "'BLOCK'.*of type tuple"),
        ({"BLOCK": jnp.array(128)}, TypeError, "'BLOCK' is a compile-time constant, but got an array"),
        ({"n": 3 + 4j}, TypeError, r"'n' takes an array, a number, None or a tuple of these; got \(3\+4j\)"),
        ({"n": 2**64}, ValueError, "integer overflow: 18446744073709551616"),
        ({"out_type": (X, X)}, ValueError, "out_type has 2 outputs, but the arguments leave 1 parameters .* unbound: o_ptr"),
        ({"out_type": 3}, TypeError, r"out_type leaves need .* got 3"),
        ({"out_type": jax.ShapeDtypeStruct((3,), jnp.complex64)}, TypeError, "dtype complex64 has no Triton type"),
        ({"kernel": lambda x: x}, TypeError, "kernel must be a @triton.jit function; got <function"),
        ({"num_warps": 4, "backend_options": {"num_warps": 8}}, ValueError, "num_warps=4 but backend_options has num_warps=8"),
        ({"backend_options": {"maxnreg": [1]}}, TypeError, r"backend_options\['maxnreg'\]"),
        ({"compute_capability": "fast"}, ValueError, "GPU target 'fast' is not understood; write an architecture, such as 'sm_90'"),
    ],
)
def test_errors_teach(change, error, match):
    """Case 48: the message names the argument, what it got, and the way out; before anything is compiled."""
    with pytest.raises(error, match=match):
        added(X, Y, **({"n": 300} | change))


def test_missing_and_surplus_operands():
    with pytest.raises(ValueError, match=r"leave 2 parameters .* unbound: y_ptr, o_ptr"):
        added(X, n=300)
    with pytest.raises(TypeError, match="6 positional arguments for add_kernel"):
        added(X, Y, X, 1, 128, 2)
    with pytest.raises(TypeError, match=r"constexpr parameter 'BLOCK' of two_kernel.* has neither a value nor a default"):
        call(X, kernel=two_kernel, n=300, out_type=(X, X), grid=1)


def test_no_retrace_per_call():
    """Case 48: hashable constants, reordered options, NaN constants: one trace."""
    traces = 0

    @jax.jit
    def f(x):
        nonlocal traces
        traces += 1
        return added(x, Y, n=300, BLOCK=64, interpret=True)

    for _ in range(3):
        f(X)
    assert traces == 1
    assert Constexpr(float("nan")) == Constexpr(float("nan"))
    assert len({Constexpr(True), Constexpr(1), Constexpr(1.0)}) == 3


def test_eager_calls_are_lowered_once(monkeypatch):
    """Case 48: a call outside jit is the same program each time, whatever the order of its options."""
    real, keys = host_call.lower, []
    monkeypatch.setattr(host_call, "lower", lambda *args, **kwargs: keys.append(kwargs["key"]) or real(*args, **kwargs))
    for options in ({"maxnreg": 64, "debug": False}, {"debug": False, "maxnreg": 64}) * 2:
        added(X, Y, n=299, BLOCK=64, backend_options=options, interpret=True)
    assert len(keys) == 1


@pytest.mark.spec("jvp/grad")
@pytest.mark.spec("vmap")
def test_transforms_say_what_to_do():
    f = lambda x: added(x, Y, n=300, interpret=True)
    with pytest.raises(NotImplementedError, match=r"triton_call has no derivative\. Wrap it in jax\.custom_vjp"):
        jax.grad(lambda x: f(x).sum())(X)
    with pytest.raises(NotImplementedError, match=r"no vmap rule.*jax.custom_batching.custom_vmap"):
        jax.vmap(f)(jnp.stack([X, X]))


def test_platform_without_kernels():
    with pytest.raises(jtops.UnsupportedError, match=r"add_kernel: lowering for cpu.*Pass interpret=True"):
        added(X, Y, n=300)
    with pytest.raises(jtops.UnsupportedError, match=r'needs to know the GPU.*jtops.config.target\("sm_90"\)'):
        jax.jit(lambda x: added(x, Y, n=300)).trace(X).lower(lowering_platforms=("cuda",))
    with pytest.raises(jtops.UnsupportedError, match="target asked for is gfx942, a rocm GPU"):
        lowered.text(lambda x: added(x, Y, n=300), X, target="gfx942")


@pytest.mark.spec("jit / eager / pmap / shard_map")
def test_shard_map():
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4], axis_types=(AxisType.Auto,))
    one = lambda x, y: call(
        x, y, kernel=add_kernel, out_type=x, n=x.size, grid=lambda m: triton.cdiv(x.size, m["BLOCK"]), interpret=True
    )
    f = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x")))
    np.testing.assert_array_equal(f(X, Y), X + Y)


@modes
def test_scan_and_cond(interpret):
    step = lambda c, _: (added(c, Y, n=300, interpret=interpret), None)
    np.testing.assert_allclose(jax.lax.scan(step, X, None, length=3)[0], X + 3 * Y, rtol=1e-6)
    f = jax.jit(lambda x: jax.lax.cond(x[0] > 0, lambda x: added(x, Y, n=300, interpret=interpret), lambda x: x, x))
    np.testing.assert_array_equal(f(X), X)
    np.testing.assert_array_equal(f(X + 1), X + 1 + Y)


@pytest.mark.spec("name")
@pytest.mark.spec("cost_estimate={'flops','bytes_accessed'}")
@pytest.mark.spec("has_side_effect")
def test_names_and_costs_reach_the_program():
    text = lowered.text(lambda x: added(x, Y, n=300, name="my_add", cost_estimate={"flops": 300, "bytes_accessed": 3600}), X)
    assert re.search(r"flops\S* 300", text)
    assert lowered.launches(lambda x: added(x, Y, n=300, name="my_add"), X) == {"my_add": 1}
    assert "has_side_effect = true" in lowered.text(lambda x: added(x, Y, n=300, has_side_effect=True), X)


@pytest.mark.spec("Python float typing")
@pytest.mark.spec("int typing")
@pytest.mark.spec("bool typing")
def test_types():
    assert triton_type(jnp.bfloat16) == "bf16"
    assert triton_type(jnp.float8_e4m3fn) == "fp8e4nv"
    kinds = {True: "i1", 7: "i32", -1: "i32", 2**31: "u32", 2**32: "i64", 2**63: "u64", 0.5: "fp32", 1e300: "fp64", 1e-40: "fp64"}
    assert {v: as_scalar(v).type for v in kinds} == kinds
    assert as_scalar(np.float32(1e-40)).type == "fp32"
    assert as_scalar("a") is None


@triton.jit
def annotated_kernel(o_ptr, n: tl.int64, scale: tl.float32):
    tl.store(o_ptr, n * 1000000 * scale.to(tl.int64))


@pytest.mark.spec("int typing")
@modes
def test_a_kernels_annotation_decides_the_type(interpret):
    """As in Triton's own launches: a small number does not shrink the arithmetic."""
    out = jax.ShapeDtypeStruct((1,), jnp.float32)
    for n in (1, 5000, 2**40):
        got = call(n=n, scale=2, kernel=annotated_kernel, out_type=out, grid=1, interpret=interpret)
        np.testing.assert_array_equal(got, np.float32(n * 2000000))
    assert [as_scalar(v, "i64").type for v in (1, True, 2**40)] == ["i64"] * 3
    assert as_scalar(3, "fp64") == as_scalar(3.0, "fp64")
    assert as_scalar(3, "i8").type == "i32"  # launches know no such type
    assert as_scalar(0.5, "i32") is None
    with pytest.raises(ValueError, match="integer overflow: -1 does not fit in u32"):
        as_scalar(-1, "u32")


def test_kernel_of_interpreter_mode():
    """TRITON_INTERPRET=1 makes @triton.jit give another class; the kernel is found inside it."""

    class InterpretedFunction:
        def __init__(self, fn):
            self.fn = fn

    wrapped = InterpretedFunction(add_kernel.fn)
    assert triton_compat.kernel_function(wrapped) is triton_compat.kernel_function(wrapped)
    np.testing.assert_array_equal(added(X, Y, n=300, kernel=wrapped, interpret=True), X + Y)
