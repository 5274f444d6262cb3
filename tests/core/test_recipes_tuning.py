"""How kernels are tuned in other projects' documents, each pattern as a program of ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops._compat.gluon import gl, gluon
from jtops._compat.triton import tl, triton
from jtops.core import cache, target
from jtops.core.tuning import settle, timing
from tests.core.test_autotune import GPU, settled
from tests.kernels import lowered

X, Y = jnp.arange(1000.0), jnp.linspace(-1.0, 1.0, 1000)
SIZES = (64, 128, 256)


def choices():
    return [triton.Config(kwargs={"BLOCK_SIZE": size}) for size in SIZES]


@pytest.fixture(autouse=True)
def _own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("JTOPS_TUNING_DIR", str(tmp_path))
    cache.clear()


@pytest.fixture
def timed(monkeypatch):
    """A GPU that is not there; -> what was timed on it. The last config is the fastest."""
    names = []

    def measure(calls, avals, device, updated):
        names.append(list(calls))
        return {name: 1.0 / (i + 1) for i, name in enumerate(calls)}

    monkeypatch.setattr(target, "present", lambda: GPU)
    monkeypatch.setattr(timing, "measure", measure)
    return names


@triton.autotune(configs=choices(), key=["n"])
@triton.jit
def half_kernel(input_ptr, output_ptr, n: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The size is a compile-time constant, the block is tuned."""
    i = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(output_ptr + i, tl.load(input_ptr + i, mask=i < n) / 2, mask=i < n)


def halved(x, **fixed):
    return jtops.triton_call(
        x, kernel=half_kernel, out_type=x, grid=lambda meta: jtops.cdiv(x.size, meta["BLOCK_SIZE"]), n=x.shape[0], **fixed
    )


def test_the_tuner_chooses(timed):
    assert settled(halved, X)[0]["BLOCK_SIZE"] == 256
    assert len(timed[0]) == 3
    np.testing.assert_array_equal(jax.jit(lambda x: halved(x, interpret=True))(X), X / 2)


def test_the_caller_fixes_the_block(timed):
    """Only the config with that block is compiled, and nothing is timed."""
    (kernel,) = lowered.kernels(lambda x: halved(x, BLOCK_SIZE=128), X)
    assert timed == []
    assert settle.decisions() == ()
    assert kernel.target.arch == 90
    np.testing.assert_array_equal(halved(X, BLOCK_SIZE=128, interpret=True), X / 2)


def test_a_generic_and_an_optimised_caller(timed):
    """One kernel, tuned for one caller and fixed by another."""
    assert settled(halved, X)[0]["BLOCK_SIZE"] == 256
    assert settled(lambda x: halved(x, BLOCK_SIZE=64), X)[0]["BLOCK_SIZE"] == 64
    assert len(timed) == 1


@triton.autotune(
    configs=[triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w) for m, n, w in ((16, 16, 1), (32, 64, 4))],
    key=["n"],
)
@triton.jit
def square_matmul_kernel(a_ptr, b_ptr, c_ptr, n: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, n, 16):
        k = start + tl.arange(0, 16)
        a = tl.load(a_ptr + rows[:, None] * n + k[None, :], mask=rows[:, None] < n, other=0.0)
        b = tl.load(b_ptr + k[:, None] * n + columns[None, :], mask=columns[None, :] < n, other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(c_ptr + rows[:, None] * n + columns[None, :], acc, mask=(rows[:, None] < n) & (columns[None, :] < n))


def test_a_tuned_matmul(timed):
    """The grid follows the blocks of the config."""

    def matmul(a, b, n, **how):
        return jtops.triton_call(
            a,
            b,
            kernel=square_matmul_kernel,
            out_type=jax.ShapeDtypeStruct((n, n), jnp.float32),
            grid=lambda meta: (jtops.cdiv(n, meta["BLOCK_M"]), jtops.cdiv(n, meta["BLOCK_N"])),
            n=n,
            **how,
        )

    a, b = (jax.random.normal(key, (64, 64), jnp.float16) for key in jax.random.split(jax.random.key(0)))
    np.testing.assert_allclose(
        matmul(a, b, 64, interpret=True), a.astype(jnp.float32) @ b.astype(jnp.float32), rtol=1e-2, atol=1e-2
    )
    with jtops.config.target("sm_90"):
        call = jax.make_jaxpr(lambda a, b: matmul(a, b, 64))(a, b).eqns[-1].params["call"]
    assert (call.grid, dict(call.options)["num_warps"]) == ((2, 1, 1), 4)


@triton.heuristics({"num_warps": lambda args: 4 if args["n"] < 1024 else 8})
@triton.jit
def negate_kernel(input_ptr, output_ptr, n: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    i = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(output_ptr + i, -tl.load(input_ptr + i, mask=i < n), mask=i < n)


@pytest.mark.parametrize(("n", "warps"), [(100, 4), (10_000, 8)])
def test_warps_by_size(n, warps):
    x = jnp.ones(n)
    given = {"kernel": negate_kernel, "out_type": x, "grid": jtops.cdiv(n, 128), "n": n, "BLOCK_SIZE": 128}
    (kernel,) = lowered.kernels(lambda x: jtops.triton_call(x, **given), x)
    assert kernel.num_warps == warps
    np.testing.assert_array_equal(jtops.triton_call(x, interpret=True, **given), -x)


@triton.autotune(configs=choices(), key=["n"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK_SIZE"] == 0})
@triton.jit
def masked_kernel(x_ptr, y_ptr, o_ptr, n, BLOCK_SIZE: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    if EVEN:
        tl.store(o_ptr + i, tl.load(x_ptr + i) + tl.load(y_ptr + i))
    else:
        tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n) + tl.load(y_ptr + i, mask=i < n), mask=i < n)


@pytest.mark.parametrize("n", [1000, 512, 64])
def test_a_heuristic_under_a_tuner(n):
    """It is evaluated for each config."""
    x, y = X[:n], Y[:n]
    for size in SIZES:
        add = lambda x, y: jtops.triton_call(
            x, y, kernel=masked_kernel, out_type=x, grid=jtops.cdiv(n, size), n=n, BLOCK_SIZE=size, interpret=True
        )
        np.testing.assert_array_equal(add(x, y), x + y)
        call = jax.make_jaxpr(add)(x, y).eqns[-1].params["call"]
        assert dict(call.bound)["EVEN"].value is (n % size == 0)


@triton.heuristics({"BLOCK_SIZE": lambda args: 128 if args["n"] < 1024 else 256})
@gluon.jit
def gluon_kernel(x_ptr, y_ptr, o_ptr, n, BLOCK_SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.program_id(0) * BLOCK_SIZE + gl.arange(0, BLOCK_SIZE, layout=layout)
    gl.store(o_ptr + i, gl.load(x_ptr + i, mask=i < n) + gl.load(y_ptr + i, mask=i < n), mask=i < n)


def gluon_added(x, y):
    grid = lambda meta: jtops.cdiv(x.size, meta["BLOCK_SIZE"])
    return jtops.triton_call(x, y, kernel=gluon_kernel, out_type=x, n=x.size, grid=grid)


@pytest.mark.parametrize(("n", "programs"), [(1000, 8), (2048, 8), (4096, 16)])
def test_a_gluon_kernel_with_a_heuristic(n, programs):
    """Block sizes by size, in the dialect as it is: explicit layouts, loads and stores."""
    x = jax.ShapeDtypeStruct((n,), jnp.float32)
    (kernel,) = lowered.kernels(gluon_added, x, x)
    assert ".entry gluon_kernel" in kernel.binary
    call = jax.make_jaxpr(gluon_added)(x, x).eqns[-1].params["call"]
    assert call.grid == (programs, 1, 1)


@pytest.mark.gpu
def test_on_the_gpu():
    np.testing.assert_array_equal(jax.jit(halved)(X), X / 2)
    np.testing.assert_array_equal(jax.jit(gluon_added)(X, Y), X + Y)
    f = lambda x, y: jtops.triton_call(
        x, y, kernel=masked_kernel, out_type=x, grid=lambda meta: jtops.cdiv(1000, meta["BLOCK_SIZE"]), n=1000
    )
    np.testing.assert_array_equal(jax.jit(f)(X, Y), X + Y)
