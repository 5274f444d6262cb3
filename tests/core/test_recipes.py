"""Whole small programs, as users write them: each is a pattern that people bring from other bridges. The interpreter runs them."""

import functools
import importlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import jtops as jt
from tests.kernels import lowered

pytestmark = pytest.mark.spec(
    "recipes: vector add; jit add; multi-output split; in-place + donation; strides to kernel; "
    "autotune with fixed BLOCK_SIZE; autotune+override; heuristics; Gluon add/heuristics/constexpr/reductions; custom_vmap via "
    "lax.map; loop batching; custom_vjp; jax.grad through it; flash-attention wrapper (4 outputs: L, m, tmp, o) + "
    "triton.testing perf_report benchmark; IR dump analysis; import styles"
)


@pytest.fixture(autouse=True)
def interpreted():
    with jt.config.interpret():
        yield


# ---------------------------------------------------------------------------------------------------------------- adding


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n, block_size: tl.constexpr):
    offsets = tl.program_id(axis=0) * block_size + tl.arange(0, block_size)
    mask = offsets < n
    total = tl.load(x_ptr + offsets, mask=mask) + tl.load(y_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, total, mask=mask)


def add(x, y):
    out_shape = jax.ShapeDtypeStruct(shape=x.shape, dtype=x.dtype)
    return jt.triton_call(
        x, y, n=x.size, kernel=add_kernel, out_shape=out_shape, grid=(jt.cdiv(x.size, 8),), block_size=8, enable_fp_fusion=True
    )


def test_vector_add():
    x, y = jnp.arange(8.0), jnp.arange(8.0, 16.0)
    np.testing.assert_array_equal(add(x, y), x + y)
    np.testing.assert_array_equal(jax.jit(add)(x, y), x + y)


def test_grid_from_metaparameters():
    x, y = jnp.arange(100.0), jnp.ones(100)
    seen = []

    def grid(meta):
        seen.append(meta["block_size"])
        return (triton.cdiv(meta["n"], meta["block_size"]),)

    got = jt.triton_call(x, y, kernel=add_kernel, out_shape=x, grid=grid, n=100, block_size=64)
    np.testing.assert_array_equal(got, x + y)
    assert seen == [64]


@triton.jit
def split_kernel(input_ptr, out1_ptr, out2_ptr, block_size: tl.constexpr):
    offsets = tl.program_id(axis=0) * block_size + tl.arange(0, block_size)
    data = tl.load(input_ptr + offsets)
    tl.store(out1_ptr + offsets, data)
    tl.store(out2_ptr + offsets, data * 2.0)


def test_two_outputs():
    x = jnp.arange(16, dtype=jnp.float32)
    kinds = [jax.ShapeDtypeStruct(shape=x.shape, dtype=x.dtype)] * 2
    one, two = jt.triton_call(x, kernel=split_kernel, out_shape=kinds, grid=(jt.cdiv(x.size, 8),), block_size=8)
    np.testing.assert_array_equal(one, x)
    np.testing.assert_array_equal(two, x * 2)


@triton.jit
def add_inplace_kernel(x_ptr, y_ptr, block_size: tl.constexpr):
    """The sum goes where y was: no third pointer."""
    offsets = tl.program_id(axis=0) * block_size + tl.arange(0, block_size)
    tl.store(y_ptr + offsets, tl.load(y_ptr + offsets) + tl.load(x_ptr + offsets))


@triton.jit
def add_inplace_listed_kernel(x_ptr, y_ptr, output_ptr, block_size: tl.constexpr):
    """The older convention: the aliased output is listed once more."""


@functools.partial(jax.jit, donate_argnames="y", static_argnames="kernel")
def add_inplace(x, y, kernel=add_inplace_kernel):
    grid = (jt.cdiv(x.size, 256),)
    return jt.triton_call(x, y, kernel=kernel, out_shape=x, input_output_aliases={1: 0}, grid=grid, block_size=256)


def test_in_place_with_donation():
    x, y = jnp.arange(1024), jnp.arange(1024, 2048)
    np.testing.assert_array_equal(add_inplace(x, y=y), np.arange(1024, 3072, 2))
    assert y.is_deleted()
    assert not x.is_deleted()
    with pytest.raises(ValueError, match=r"unbound: output_ptr.*An aliased output has none"):
        add_inplace(x, y=jnp.arange(1024), kernel=add_inplace_listed_kernel)


@triton.jit
def row_sums_kernel(data_ptr, out_ptr, input_stride, n_cols, block_size: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, block_size)
    data = tl.load(data_ptr + row * input_stride + columns, mask=columns < n_cols, other=0.0)
    tl.store(out_ptr + row, tl.sum(data))


def test_strides_for_a_kernel():
    data = jnp.arange(20.0 * 37).reshape(20, 37)
    strides = jt.strides_from_shape(data.shape)
    got = jt.triton_call(
        data,
        kernel=row_sums_kernel,
        out_shape=jax.ShapeDtypeStruct((20,), data.dtype),
        grid=(data.shape[0],),
        input_stride=strides[0],
        n_cols=data.shape[1],
        block_size=jt.next_power_of_2(data.shape[1]),
    )
    np.testing.assert_allclose(got, data.sum(1), rtol=1e-6)


# ------------------------------------------------------------------------------------------------------------ transforms


@triton.jit
def scale_kernel(x_ptr, out_ptr, factor, block_size: tl.constexpr):
    offsets = tl.program_id(0) * block_size + tl.arange(0, block_size)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * factor)


@triton.jit
def multiply_kernel(x_ptr, y_ptr, out_ptr, block_size: tl.constexpr):
    offsets = tl.program_id(0) * block_size + tl.arange(0, block_size)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * tl.load(y_ptr + offsets))


def scale(x):
    return jt.triton_call(x, kernel=scale_kernel, out_shape=x, grid=(x.size // 16,), factor=3.0, block_size=16)


def multiply(x, y):
    return jt.triton_call(x, y, kernel=multiply_kernel, out_shape=x, grid=(x.size // 16,), block_size=16)


def test_batching_by_a_loop():
    batch = jnp.arange(4.0 * 32).reshape(4, 32)
    looped = lambda batch: jnp.stack([scale(x) for x in batch])
    np.testing.assert_array_equal(looped(batch), batch * 3)
    np.testing.assert_array_equal(jax.jit(looped)(batch), batch * 3)


@jax.custom_batching.custom_vmap
def batched(x, y):
    return multiply(x, y)


@batched.def_vmap
def _batched_rule(axis_size, in_batched, x, y):
    """One kernel call per element of the batch; an operand that has no batch axis is shared."""
    spread = [a if has else jnp.broadcast_to(a, (axis_size, *a.shape)) for a, has in zip((x, y), in_batched, strict=True)]
    return jax.lax.map(lambda pair: batched(*pair), tuple(spread)), True


def test_batching_by_a_rule():
    x, y = jnp.arange(4.0 * 32).reshape(4, 32), jnp.linspace(0, 1, 32)
    np.testing.assert_array_equal(jax.vmap(batched, (0, None))(x, y), x * y)
    np.testing.assert_array_equal(jax.vmap(jax.vmap(batched))(x.reshape(2, 2, 32), x.reshape(2, 2, 32)), (x * x).reshape(2, 2, 32))


@jax.custom_vjp
def product(x, y):
    return multiply(x, y)


product.defvjp(lambda x, y: (multiply(x, y), (x, y)), lambda saved, g: (multiply(g, saved[1]), multiply(g, saved[0])))


def test_gradient_by_kernels():
    x, y = jnp.arange(32.0), jnp.linspace(0, 1, 32)
    loss = lambda x, y: jnp.sum(product(x, y) ** 2)
    for got, want in zip(jax.jit(jax.grad(loss, (0, 1)))(x, y), (2 * x * y**2, 2 * x**2 * y), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


# -------------------------------------------------------------------------------------------------------------- attention


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, l_ptr, m_ptr, tmp_ptr, out_ptr,
    stride_qz, stride_qh, stride_qm, stride_qk, stride_kz, stride_kh, stride_kk, stride_kn,
    stride_vz, stride_vh, stride_vk, stride_vn, stride_oz, stride_oh, stride_om, stride_on,
    Z, H, N_CTX, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DMODEL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, causal, with sums l and maxima m of the rows; tmp holds a row's last rescaling."""
    rows, head = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1)
    d, n = tl.arange(0, BLOCK_DMODEL), tl.arange(0, BLOCK_N)
    z, h = head // H, head % H
    q = tl.load(q_ptr + z * stride_qz + h * stride_qh + rows[:, None] * stride_qm + d[None, :] * stride_qk)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, BLOCK_DMODEL), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BLOCK_M, BLOCK_N):
        columns = start + n
        k = tl.load(k_ptr + z * stride_kz + h * stride_kh + d[:, None] * stride_kk + columns[None, :] * stride_kn)
        v = tl.load(v_ptr + z * stride_vz + h * stride_vh + columns[:, None] * stride_vk + d[None, :] * stride_vn)
        s = tl.where(rows[:, None] >= columns[None, :], tl.dot(q, k), float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        p, shrink = tl.exp(s - new[:, None]), tl.exp(m - new)
        tl.store(tmp_ptr + head * N_CTX + rows, shrink)
        l = l * shrink + tl.sum(p, 1)  # noqa: E741
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        m = new
    tl.store(l_ptr + head * N_CTX + rows, l)
    tl.store(m_ptr + head * N_CTX + rows, m)
    at = out_ptr + z * stride_oz + h * stride_oh + rows[:, None] * stride_om + d[None, :] * stride_on
    tl.store(at, (acc / l[:, None]).to(out_ptr.dtype.element_ty))


@functools.partial(jax.jit, static_argnames="block")
def attention(q, k, v, block=16):
    """q, v: [batch, head, length, depth]; k: [batch, head, depth, length]."""
    rows = SimpleNamespace(shape=(q.shape[0] * q.shape[1], q.shape[2]), dtype=jnp.float32)
    out_shape = [rows, rows, rows, SimpleNamespace(shape=q.shape, dtype=q.dtype)]
    axes = {"q": ("zhmk", q), "k": ("zhkn", k), "v": ("zhkn", v), "o": ("zhmn", q)}
    strides = {
        f"stride_{name}{axis}": stride
        for name, (letters, array) in axes.items()
        for axis, stride in zip(letters, jt.strides_from_shape(array.shape), strict=True)
    }
    metaparams = {"BLOCK_M": block, "BLOCK_N": block, "BLOCK_DMODEL": q.shape[3]}
    metaparams |= {"Z": q.shape[0], "H": q.shape[1], "N_CTX": q.shape[2]}
    grid = lambda _: (triton.cdiv(q.shape[2], block), q.shape[0] * q.shape[1])
    *_, out = jt.triton_call(
        q, k, v, kernel=attention_kernel, out_shape=out_shape, grid=grid, num_warps=4, num_stages=1, **strides, **metaparams
    )
    return out


def test_attention_with_four_outputs():
    q, k, v = (jax.random.normal(key, (1, 2, 32, 16)) for key in jax.random.split(jax.random.key(0), 3))
    got = attention(q, k.swapaxes(2, 3), v)
    want = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), scale=1.0, is_causal=True).swapaxes(1, 2)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_benchmark_table():
    """Triton's own description of a benchmark drives a function that times a JAX call."""
    config = triton.testing.Benchmark(
        x_names=["N_CTX"], x_vals=[16, 32], line_arg="provider", line_vals=["kernel", "xla"], line_names=["kernel", "XLA"],
        styles=[("red", "-"), ("blue", "-")], ylabel="ms", plot_name="attention", args={"depth": 16},
    )  # fmt: skip

    @triton.testing.perf_report([config])
    def bench(N_CTX, provider, depth):
        q = jnp.ones((1, 1, N_CTX, depth))
        run = {"kernel": lambda: attention(q, q.swapaxes(2, 3), q), "xla": lambda: jax.nn.dot_product_attention(q, q, q)}[provider]
        return jax.block_until_ready(run()).size / 1e6

    (described,) = bench.benchmarks
    rows = [
        [bench.fn(**{described.x_names[0]: n, described.line_arg: line}, **described.args) for line in described.line_vals]
        for n in described.x_vals
    ]
    assert rows == [[16 * 16 / 1e6] * 2, [32 * 16 / 1e6] * 2]


# ------------------------------------------------------------------------------------------------------------------ tools


def test_reading_what_a_kernel_became(tmp_path, monkeypatch, capsys):
    """The Triton IR shows a kernel's structure, the PTX its instructions."""
    monkeypatch.setenv("JAX_TRITON_DUMP_DIR", str(tmp_path))
    x = jax.ShapeDtypeStruct((4096,), jnp.float32)
    call = lambda x: jt.triton_call(x, kernel=scale_kernel, out_shape=x, grid=(16,), factor=3.0, block_size=256, debug=True)
    with jt.config.implementation("triton"):
        lowered.text(call, x)
    (folder,) = tmp_path.iterdir()
    ir, code = (folder / "kernel.ttir").read_text(), (folder / "kernel.ptx").read_text()
    assert (ir.count("tt.load"), ir.count("tt.store")) == (1, 1)
    assert "ld.global" in code
    assert "st.global" in code
    assert ir in capsys.readouterr().out


def test_import_styles():
    import jtops.utils  # noqa: PLC0415
    from jtops import cdiv, next_power_of_2, strides_from_shape, triton_call, utils  # noqa: PLC0415
    from jtops.core.legacy import names as legacy  # noqa: PLC0415
    from jtops.utils import cdiv as same  # noqa: PLC0415

    assert triton_call is jt.triton_call
    assert cdiv is same is jt.cdiv is utils.cdiv is jtops.utils.cdiv
    assert strides_from_shape((3, 4)) == utils.strides_from_shape((3, 4)) == (4, 1)
    assert next_power_of_2(33) == jt.next_power_of_2(33) == 64
    assert legacy.JTJITFunction(add_kernel).arg_names == ["x_ptr", "y_ptr", "output_ptr", "n", "block_size"]
    assert importlib.import_module("jtops.utils") is utils
