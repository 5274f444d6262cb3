"""vmap of triton_call: a loop of launches, or the batch as a grid axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from tests.kernels import lowered

MODES = [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
modes = pytest.mark.parametrize("interpret", MODES)


@triton.jit
def axpy_kernel(
    x_ptr, y_ptr, o_ptr, s_ptr, n, x_batch, y_batch, o_batch: tl.int64, s_batch: tl.constexpr, BLOCK: tl.constexpr = 64
):
    """o = 2 x + y; s = the number of the block: two results of different sizes."""
    b = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b * x_batch + i, mask=i < n)
    y = tl.load(y_ptr + b * y_batch + i, mask=i < n)
    tl.store(o_ptr + b * o_batch + i, 2 * x + y, mask=i < n)
    tl.store(s_ptr + b * s_batch + tl.program_id(0), tl.program_id(0))


@triton.jit
def double_kernel(x_ptr, o_ptr, x_batch, o_batch):
    b = tl.program_id(0).to(tl.int64)
    tl.store(o_ptr + b * o_batch, tl.load(x_ptr + b * x_batch) * 2)


@triton.jit
def grow_kernel(x_ptr, y_ptr, n, x_batch, y_batch, BLOCK: tl.constexpr = 128):
    """x += y, in place."""
    b, i = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + b * x_batch + i, mask=i < n)
    tl.store(x_ptr + b * x_batch + i, x + tl.load(y_ptr + b * y_batch + i, mask=i < n), mask=i < n)


STRIDES = {"x_ptr": "x_batch", "y_ptr": "y_batch", "o_ptr": "o_batch", "s_ptr": "s_batch"}
GRID = jtops.GridBatch(axis=1, strides=STRIDES)
N = 100
BLOCKS = np.arange(2)


def axpy(x, y, interpret=True, method=GRID):
    out = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((2,), jnp.int32))
    given = {"n": x.size} | ({} if isinstance(method, jtops.GridBatch) else dict.fromkeys(STRIDES.values(), 0))
    return jtops.triton_call(x, y, kernel=axpy_kernel, out_type=out, grid=2, vmap_method=method, interpret=interpret, **given)


def wanted(x, y):
    return 2 * x + y, jnp.asarray(BLOCKS)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


NESTINGS = {  # shapes of x and y, in_axes from the outermost vmap to the innermost
    "both": ((3, N), (3, N), [(0, 0)]),
    "shared": ((3, N), (N,), [(0, None)]),
    "last axis": ((N, 3), (3, N), [(1, 0)]),
    "one": ((1, N), (1, N), [(0, 0)]),
    "twice": ((2, 3, N), (2, 3, N), [(0, 0), (0, 0)]),
    "twice, shared": ((2, 3, N), (N,), [(0, None), (0, None)]),
    "outer only": ((2, 3, N), (2, N), [(0, 0), (0, None)]),
    "inner only": ((3, N), (2, 3, N), [(None, 0), (0, 0)]),
    "each its own": ((2, N), (3, N), [(0, None), (None, 0)]),
    "thrice": ((2, 1, 3, N), (1, N), [(0, None), (0, 0), (0, None)]),
    "empty": ((0, N), (0, N), [(0, 0)]),
}


FEW = ("shared", "outer only", "empty")
CASES = [pytest.param(n, GRID, id=f"{n}, grid") for n in NESTINGS] + [
    pytest.param(n, "sequential", id=f"{n}, sequential", marks=() if n in FEW else pytest.mark.slow) for n in NESTINGS
]


@modes
@pytest.mark.spec("vmap_method and sharding_rule")
@pytest.mark.parametrize(("nesting", "method"), CASES)
def test_nestings(nesting, method, interpret):
    x_shape, y_shape, axes = NESTINGS[nesting]
    f, want = functools.partial(axpy, method=method, interpret=interpret), wanted
    for in_axes in reversed(axes):
        f, want = jax.vmap(f, in_axes), jax.vmap(want, in_axes)
    x, y = draw(*x_shape), draw(*y_shape) + 1
    for got, expected in zip(jax.jit(f)(x, y), want(x, y), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_grid_is_one_launch_and_shared_operands_are_not_copied():
    f = jax.vmap(functools.partial(axpy, interpret=False), (0, None))
    operands = jax.ShapeDtypeStruct((7, N), jnp.float32), jax.ShapeDtypeStruct((N,), jnp.float32)
    assert lowered.launches(f, *operands) == {"axpy_kernel": 1}
    text = lowered.text(f, *operands)
    assert "broadcast" not in text
    assert "(tensor<7x100xf32>, tensor<100xf32>) -> (tensor<7x100xf32>, tensor<7x2xi32>)" in text
    call = jax.make_jaxpr(f)(*operands).eqns[-1].params["call"]
    assert call.grid == (2, 7, 1)
    assert {n: p.value for n, p in call.bound if n.endswith("_batch")} == {"x_batch": N, "y_batch": 0, "o_batch": N, "s_batch": 2}
    assert dict(call.bound)["x_batch"].type == "i32"
    assert dict(call.bound)["o_batch"].type == "i64"  # as the kernel says


def test_sequential_is_a_loop():
    text = lowered.text(jax.vmap(functools.partial(axpy, interpret=False, method="sequential"), (0, None)), draw(7, N), draw(N))
    assert "stablehlo.while" in text


GROW = jtops.GridBatch(1, {"x_ptr": "x_batch", "y_ptr": "y_batch"})


def grow(x, y, interpret=True, method=GROW):
    given = {"interpret": interpret} | ({} if isinstance(method, jtops.GridBatch) else {"x_batch": 0, "y_batch": 0})
    aliases = {"input_output_aliases": {0: 0}}
    return jtops.triton_call(x, y, n=N, kernel=grow_kernel, out_type=x, grid=1, vmap_method=method, **aliases, **given)


@modes
@pytest.mark.parametrize("method", [GROW, "sequential"], ids=["grid", "sequential"])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)])
def test_operands_changed_in_place(in_axes, method, interpret):
    """One that all elements share is copied for each: each has a result of its own."""
    x, y = (draw(N) if a is None else draw(3, N) for a in in_axes)
    f = jax.jit(jax.vmap(lambda x, y: grow(x, y, interpret, method), in_axes))
    kept = np.asarray(x)
    np.testing.assert_allclose(f(x, y), jax.vmap(jnp.add, in_axes)(x, y), rtol=1e-6)
    np.testing.assert_array_equal(x, kept)


def test_refs_are_refused():
    def f(y):
        ref = jax.new_ref(jnp.zeros(N))
        jtops.triton_call(ref, y, n=N, kernel=grow_kernel, out_type=(), grid=1, vmap_method=GROW, interpret=True)
        return ref[...]

    with pytest.raises(jtops.UnsupportedError, match="no vmap of a call that changes a Ref; pass its value"):
        jax.vmap(f)(draw(3, N))


def double(x, **kwargs):
    given = {"vmap_method": jtops.GridBatch(0, {"x_ptr": "x_batch", "o_ptr": "o_batch"}), "grid": 1} | kwargs
    return jtops.triton_call(x, kernel=double_kernel, out_type=x, interpret=True, **given)


def test_limits_of_the_grid():
    """Axis 0 holds what axes 1 and 2 do not."""
    x = jnp.arange(70000.0)
    jaxpr = jax.make_jaxpr(jax.vmap(double))(x)
    assert jaxpr.eqns[-1].params["call"].grid == (70000, 1, 1)
    with pytest.raises(ValueError, match=r"a batch of 70000 elements on grid axis 1, which holds at most 65535\. Use axis 0"):
        jax.make_jaxpr(jax.vmap(axpy, (0, None)))(jax.ShapeDtypeStruct((70000, N), jnp.float32), draw(N))
    with pytest.raises(ValueError, match="a batch of 80000 elements on grid axis 1"):
        jax.make_jaxpr(jax.vmap(jax.vmap(axpy, (0, None)), (0, None)))(jax.ShapeDtypeStruct((2, 40000, N), jnp.float32), draw(N))


X = jnp.ones(())


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"vmap_method": "grid"}, ValueError, r"must be None, \"sequential\" or a jtops.GridBatch.*got 'grid'"),
        ({"vmap_method": jtops.GridBatch(0, {"x_ptr": "b"})}, TypeError, r"'b' is not a parameter of double_kernel\(x_ptr, o_ptr"),
        ({"x_batch": 0}, TypeError, "'x_batch' is set by vmap_method"),
        ({"vmap_method": jtops.GridBatch(0, {"x_ptr": "x_batch"}), "o_batch": 0}, ValueError, "stride parameter of result 'o_ptr'"),
        (
            {"vmap_method": jtops.GridBatch(0, {"o_ptr": "x_batch", "x_batch": "o_batch"})},
            ValueError,
            "has a stride for 'x_batch', which is no array",
        ),
        (
            {"grid": (3, 1)},
            ValueError,
            r"takes grid axis 0 for the batch, where the call's own grid must be 1; got grid \(3, 1, 1\)",
        ),
    ],
)
def test_errors_of_the_call(change, error, match):
    with pytest.raises(error, match=match):
        double(X, **change)


def test_errors_of_the_method_and_of_vmap():
    with pytest.raises(ValueError, match="axis must be 0, 1 or 2; got 3"):
        jtops.GridBatch(3, {"x_ptr": "x_batch"})
    with pytest.raises(TypeError, match="strides must map names"):
        jtops.GridBatch(1, {"x_ptr": 4})
    with pytest.raises(ValueError, match="a stride parameter of its own"):
        jtops.GridBatch(1, {"x_ptr": "b", "o_ptr": "b"})
    with pytest.raises(jtops.UnsupportedError, match="vmap maps operand 'x_ptr', for which GridBatch has no stride parameter"):
        jax.vmap(lambda x: double(x, vmap_method=jtops.GridBatch(0, {"o_ptr": "o_batch"}), x_batch=0))(draw(3))
    with pytest.raises(jtops.UnsupportedError, match=r'vmap_method="sequential" .* or vmap_method=jtops.GridBatch'):
        jax.vmap(lambda x: double(x, vmap_method=None, x_batch=0, o_batch=0))(draw(3))
