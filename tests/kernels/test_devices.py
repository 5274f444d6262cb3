"""Case 59: the device of the data runs the kernel. Here by interpreted kernels on forced devices, with two GPUs by the kernels."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.triton import tl, triton
from tests.specs import draw, function, some_ops, value_and_vjp

everywhere = pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.multigpu)])


@triton.jit
def scale_kernel(x_ptr, o_ptr, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def count_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(o_ptr + (i * 0), tl.load(x_ptr + i, mask=i < n, other=0.0), mask=i < n)


def scaled(x, factor, interpret):
    grid = (jtops.cdiv(x.size, 256),)
    return jtops.triton_call(x, n=x.size, factor=factor, kernel=scale_kernel, out_type=x, grid=grid, BLOCK=256, interpret=interpret)


def on(device, tree):
    return jax.tree.map(lambda x: jax.device_put(x, device), tree)


def where(tree):
    return {frozenset(x.devices()) for x in jax.tree.leaves(tree)}


@everywhere
@some_ops
def test_ops_run_where_their_data_is(spec, case, implementation):
    """First on device 0, then on device 1 with the same jitted function: forward and gradients."""
    operands = draw(spec, case)
    f = function(spec, case, implementation=implementation)
    g = jnp.ones(jax.eval_shape(f, *operands).shape)
    both = jax.jit(lambda operands, g: value_and_vjp(f, operands, g))
    results = []
    for device in jax.devices()[:2]:
        got = both(on(device, operands), on(device, g))
        assert where(got) == {frozenset([device])}
        results.append(jax.tree.map(np.asarray, got))
    jax.tree.map(np.testing.assert_array_equal, *results)


@everywhere
@pytest.mark.spec("the device of the data; threads compile and launch at once")
def test_triton_call_runs_where_its_data_is(implementation):
    """Jitted, eager, and with an output that is zeroed before the launch, after the default device was used."""
    interpret, device = implementation == "interpret", jax.devices()[1]
    x = np.arange(1000, dtype=np.float32)
    f = jax.jit(functools.partial(scaled, factor=3.0, interpret=interpret))
    f(jnp.asarray(x))
    for run in (f, functools.partial(scaled, factor=3.0, interpret=interpret)):
        got = run(on(device, x))
        assert got.devices() == {device}
        np.testing.assert_array_equal(got, 3 * x)
    total = jax.jit(
        lambda x: jtops.triton_call(
            x,
            n=x.size,
            kernel=count_kernel,
            out_type=jax.ShapeDtypeStruct((1,), jnp.float32),
            grid=4,
            BLOCK=256,
            zeroed_outputs=(0,),
            interpret=interpret,
        )
    )
    for _ in range(3):
        got = total(on(device, x))
        assert got.devices() == {device}
        assert got[0] == x.sum()


@everywhere
def test_two_devices_at_once_from_two_threads(implementation):
    """Each thread keeps its device busy with a kernel of its own constant; neither meets the other's data or code."""
    interpret, start, failures = implementation == "interpret", threading.Barrier(2), []
    x = np.arange(5000, dtype=np.float32)

    def work(device, factor):
        try:
            mine = on(device, x + factor)
            f = jax.jit(lambda x: jtops.softmax(scaled(x, factor, interpret), implementation=implementation))
            want = jax.nn.softmax((x + factor) * factor)
            start.wait()
            for _ in range(5):
                got = f(mine)
                assert got.devices() == {device}
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(d, 2.0 + i)) for i, d in enumerate(jax.devices()[:2])]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


@everywhere
def test_a_default_device_of_ones_own(implementation):
    """`jax.default_device` moves the work; operands on two devices are refused by JAX, not read across."""
    interpret = implementation == "interpret"
    first, second = jax.devices()[:2]
    with jax.default_device(second):
        got = jax.jit(functools.partial(scaled, factor=2.0, interpret=interpret))(np.ones(300, np.float32))
    assert got.devices() == {second}
    with pytest.raises(ValueError, match="incompatible devices"):
        jtops.add(on(first, jnp.ones(4)), on(second, jnp.ones(4)), implementation=implementation)
