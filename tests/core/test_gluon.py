"""Gluon kernels, tensor descriptors, TMA, warp specialisation and clusters: binding and compiling here, running on a GPU."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtops
from jtops import TensorDescriptor
from jtops._compat import triton as triton_compat
from jtops._compat.gluon import (
    allocate_barriers,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from jtops._compat.triton import tl, triton
from tests.kernels import lowered

sds = jax.ShapeDtypeStruct
gpu = pytest.mark.gpu


@gluon.jit
def add_kernel(x_ptr, y_ptr, o_ptr, n, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    gl.store(o_ptr + i, gl.load(x_ptr + i, mask=i < n) + gl.load(y_ptr + i, mask=i < n), mask=i < n)


class Ends(NamedTuple):
    x_ptr: Any
    y_ptr: Any
    doubled: Any


class Factors(NamedTuple):
    a: Any
    b: Any


@gluon.jit
def add_bundle_kernel(ends, o_ptr, n, BLOCK: gl.constexpr):
    """o = x + y, or twice that."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    z = gl.load(ends.x_ptr + i, mask=i < n) + gl.load(ends.y_ptr + i, mask=i < n)
    if ends.doubled:
        z = z * 2
    gl.store(o_ptr + i, z, mask=i < n)


@gluon.jit
def sum_kernel(x_ptr, o_ptr, n, N: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows = gl.arange(0, 4, layout=gl.SliceLayout(1, layout))
    x = gl.load(x_ptr + rows[:, None] * n + gl.arange(0, N, layout=gl.SliceLayout(0, layout))[None, :])
    gl.store(o_ptr + rows, gl.sum(x, axis=1))


@gluon.jit
def copy_kernel(x_desc, o_desc):
    """TMA in and out, through shared memory: program (i, j) owns block i, j."""
    BM: gl.constexpr = x_desc.block_type.shape[0]
    BN: gl.constexpr = x_desc.block_type.shape[1]
    tile = gl.allocate_shared_memory(x_desc.dtype, [BM, BN], x_desc.layout)
    full = allocate_barriers(1)
    mbarrier.init(full.index(0), count=1)
    at = [gl.program_id(0) * BM, gl.program_id(1) * BN]
    mbarrier.expect(full.index(0), x_desc.block_type.nbytes)
    tma_load(x_desc, at, full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    tma_store(o_desc, at, tile)
    tma_store_wait(0)


@gluon.jit
def _producer(a_desc, b_desc, a_tile, b_tile, full, empty, row, col, k, BK: gl.constexpr, STAGES: gl.constexpr):
    for i in range(gl.cdiv(k, BK)):
        s = i % STAGES
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [row, i * BK], full.index(s), a_tile.index(s))
        tma_load(b_desc, [i * BK, col], full.index(s), b_tile.index(s))


@gluon.jit
def _consumer(c_desc, a_tile, b_tile, c_tile, full, empty, row, col, k, BK: gl.constexpr, STAGES: gl.constexpr):
    BM: gl.constexpr = c_desc.block_type.shape[0]
    BN: gl.constexpr = c_desc.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    acc = gl.zeros([BM, BN], gl.float32, layout=layout)
    for i in range(gl.cdiv(k, BK)):
        s = i % STAGES
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        acc = warpgroup_mma(a_tile.index(s), b_tile.index(s), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(s), count=1)
    c_tile.store(acc.to(c_desc.dtype))
    fence_async_shared()
    tma_store(c_desc, [row, col], c_tile)
    tma_store_wait(0)


@gluon.jit
def _matmul(a_desc, b_desc, c_desc, k, BK: gl.constexpr, STAGES: gl.constexpr):
    """c = a @ b: one warp fills a ring of tiles by TMA, four multiply them by wgmma."""
    BM: gl.constexpr = c_desc.block_type.shape[0]
    BN: gl.constexpr = c_desc.block_type.shape[1]
    a_tile = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BM, BK], a_desc.layout)
    b_tile = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BK, BN], b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, [BM, BN], c_desc.layout)
    full, empty = allocate_barriers(STAGES), allocate_barriers(STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    row, col = gl.program_id(0) * BM, gl.program_id(1) * BN
    gl.warp_specialize(
        [
            (_consumer, (c_desc, a_tile, b_tile, c_tile, full, empty, row, col, k, BK, STAGES)),
            (_producer, (a_desc, b_desc, a_tile, b_tile, full, empty, row, col, k, BK, STAGES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def matmul_kernel(a_desc, b_desc, c_desc, k, BK: gl.constexpr, STAGES: gl.constexpr):
    _matmul(a_desc, b_desc, c_desc, k, BK, STAGES)


@gluon.jit
def matmul_bundle_kernel(factors, c_desc, k, BK: gl.constexpr, STAGES: gl.constexpr):
    _matmul(factors.a, factors.b, c_desc, k, BK, STAGES)


@triton.jit
def triton_copy_kernel(x_desc, o_desc, BM: tl.constexpr, BN: tl.constexpr):
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    o_desc.store(at, x_desc.load(at))


@triton.jit
def device_descriptor_kernel(x_ptr, o_ptr, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Descriptors made by the kernel itself, in scratch memory that the launch provides."""
    x = tl.make_tensor_descriptor(x_ptr, [m, n], [n, 1], [BM, BN])
    o = tl.make_tensor_descriptor(o_ptr, [m, n], [n, 1], [BM, BN])
    at = [tl.program_id(0) * BM, tl.program_id(1) * BN]
    o.store(at, x.load(at) * 2)


@triton.jit
def cluster_kernel(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(o_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def copied(x, kernel=copy_kernel, block=(64, 64), **kwargs):
    m, n = x.shape
    return jtops.triton_call(
        TensorDescriptor.from_array(x, block),
        kernel=kernel,
        out_type=TensorDescriptor.from_array(sds(x.shape, x.dtype), block),
        grid=(jtops.cdiv(m, block[0]), jtops.cdiv(n, block[1])),
        **kwargs,
    )


def triton_copied(x, block=(64, 64), **kwargs):
    return copied(x, triton_copy_kernel, block, BM=block[0], BN=block[1], **kwargs)


def product(a, b, block=(64, 128, 64), stages=3, bundled=False):
    (m, k), n, (bm, bn, bk) = a.shape, b.shape[1], block
    factors = TensorDescriptor.from_array(a, (bm, bk)), TensorDescriptor.from_array(b, (bk, bn))
    return jtops.triton_call(
        *([Factors(*factors)] if bundled else factors),
        k=k,
        kernel=matmul_bundle_kernel if bundled else matmul_kernel,
        name="product",
        out_type=TensorDescriptor.from_array(sds((m, n), a.dtype), (bm, bn)),
        grid=(jtops.cdiv(m, bm), jtops.cdiv(n, bn)),
        BK=bk,
        STAGES=stages,
        num_warps=4,
    )


def twice_by_device_descriptors(x, block=(32, 64)):
    m, n = x.shape
    grid = (jtops.cdiv(m, block[0]), jtops.cdiv(n, block[1]))
    return jtops.triton_call(x, m=m, n=n, kernel=device_descriptor_kernel, out_type=x, grid=grid, BM=block[0], BN=block[1])


def gluon_add(x, y):
    return jtops.triton_call(x, y, n=x.size, kernel=add_kernel, out_type=x, grid=jtops.cdiv(x.size, 256), BLOCK=256)


def gluon_add_bundle(x, y, doubled):
    ends = Ends(x, y, doubled)
    return jtops.triton_call(ends, n=x.size, kernel=add_bundle_kernel, out_type=x, grid=jtops.cdiv(x.size, 256), BLOCK=256)


def clustered(x, num_ctas=2):
    grid = jtops.cdiv(x.size, 512)
    return jtops.triton_call(x, n=x.size, kernel=cluster_kernel, out_type=x, grid=grid, BLOCK=512, num_ctas=num_ctas)


def draw(*shape, dtype=jnp.bfloat16, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# ----------------------------------------------------------------------------------------------------------------- binding


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"shape": (7, 64)}, ValueError, "reaches element"),
        ({"strides": (60, 1)}, ValueError, "multiples of 16 bytes"),
        ({"strides": (1, 64)}, ValueError, "last stride must be 1"),
        ({"block_shape": (3, 64)}, ValueError, "powers of two"),
        ({"block_shape": (64,)}, ValueError, "one rank"),
        ({"shape": (0, 64)}, ValueError, "positive"),
        ({"padding": "edge"}, ValueError, "padding"),
        ({"round_f32_to_tf32": True}, TypeError, "float32"),
    ],
)
def test_malformed_descriptors_say_why(change, error, says):
    given = {"shape": (6, 64), "strides": (64, 1), "block_shape": (4, 64)} | change
    with pytest.raises(error, match=says):
        TensorDescriptor(jnp.zeros((6, 64), jnp.bfloat16), **given)


def test_nan_padding_and_booleans_are_refused_where_tma_has_none():
    with pytest.raises(ValueError, match="padding"):
        TensorDescriptor.from_array(jnp.zeros((8, 64), jnp.int32), (8, 64), padding="nan")
    with pytest.raises(TypeError, match="boolean"):
        TensorDescriptor.from_array(jnp.zeros((8, 64), bool), (8, 64))


def test_layout_is_for_gluon():
    x = jnp.zeros((64, 64), jnp.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    with pytest.raises(TypeError, match="layout is for Gluon"):
        jtops.triton_call(
            TensorDescriptor.from_array(x, (64, 64), layout), kernel=triton_copy_kernel, out_type=x, grid=1, BM=64, BN=64
        )


def test_a_descriptor_is_a_pytree():
    x = TensorDescriptor.from_array(draw(8, 64), (8, 64), padding="nan")
    doubled = jax.jit(lambda d: jax.tree.map(lambda a: a * 2, d))(x)
    assert isinstance(doubled, TensorDescriptor)
    assert (doubled.block_shape, doubled.padding) == ((8, 64), "nan")
    np.testing.assert_array_equal(doubled.base, x.base * 2)


# --------------------------------------------------------------------------------------------------------------- compiling


def only(f, *args, **how):
    (kernel,) = lowered.kernels(functools.partial(f), *args, **how)  # a new function: JAX remembers what it lowered
    return kernel


def record_of(f, *args) -> bytes:
    with jtops.config.launch("ffi"):
        return lowered.record(re.search(r'opaque = "((?:[^"\\]|\\.)*)"', lowered.text(functools.partial(f), *args))[1])


@pytest.mark.spec("Gluon kernels (GluonJITFunction/GluonASTSource)")
def test_warp_specialisation_raises_the_number_of_warps():
    kernel = only(product, sds((256, 192), jnp.bfloat16), sds((192, 256), jnp.bfloat16))
    assert kernel.num_warps == 8  # four asked for, one for the producer, padded to warpgroups
    assert len(kernel.descriptors) == 3
    assert "wgmma.mma_async" in kernel.binary
    assert "cp.async.bulk.tensor" in kernel.binary


@pytest.mark.spec("pytree inputs (tuples in kernel)")
def test_tuples_of_descriptors():
    """A NamedTuple of descriptors is the same kernel and the same launch as its fields one by one."""
    arrays = sds((256, 192), jnp.bfloat16), sds((192, 256), jnp.bfloat16)
    flat, bundled = only(product, *arrays), only(functools.partial(product, bundled=True), *arrays)
    assert [tuple(d["block_size"]) for d in flat.descriptors] == [(64, 64), (64, 64), (64, 64)]
    assert bundled.descriptors == flat.descriptors
    assert bundled.binary.replace("matmul_bundle_kernel", "matmul_kernel") == flat.binary
    records = [record_of(functools.partial(product, bundled=b), *arrays) for b in (False, True)]
    parameters = [r.split(k.binary.encode())[1] for r, k in zip(records, (flat, bundled), strict=True)]
    assert parameters[1].replace(b"matmul_bundle_kernel", b"matmul_kernel") == parameters[0]


@pytest.mark.spec("pytree inputs (tuples in kernel)")
def test_tuples_in_gluon_kernels():
    """Fields by name; a boolean is a constant, which chooses code."""
    x = sds((1000,), jnp.float32)
    plain, doubled = (only(functools.partial(gluon_add_bundle, doubled=d), x, x) for d in (False, True))
    assert "add.f32 " in plain.binary
    assert len(doubled.binary) > len(plain.binary)
    assert plain.binary.split(")")[0].count(".param") == doubled.binary.split(")")[0].count(".param") == 4 + 2


@pytest.mark.spec("host-side TensorDescriptor(base,shape,strides,block_shape,layout,padding,round_f32_to_tf32), .from_array")
def test_triton_kernels_take_host_descriptors_with_and_without_tma():
    x = sds((100, 96), jnp.bfloat16)
    assert len(only(triton_copied, x).descriptors) == 2
    assert "cp.async.bulk.tensor" in only(triton_copied, x).binary
    older = only(triton_copied, x, target="sm_80")
    assert not older.descriptors
    # Pointer, sizes and strides, flags, sizes and strides once more, for each; two pointers of the runtime.
    flags = len(triton_compat.descriptor_flags(nan=False, tf32=False))
    assert older.binary.split(")")[0].count(".param") == 2 * (1 + 4 + flags + 4) + 2


@pytest.mark.spec("device-side TMA descriptors (global scratch)")
def test_device_descriptors_ask_for_scratch():
    assert only(twice_by_device_descriptors, sds((100, 96), jnp.float32)).scratch_bytes > 0


@pytest.mark.spec("clusters (num_ctas), TMEM limit check (512)")
def test_clusters():
    kernel = only(clustered, sds((5000,), jnp.float32))
    assert kernel.num_ctas == 2
    assert ".reqnctapercluster" in kernel.binary
    with pytest.raises(ValueError, match=r"num_ctas=2 .* sm_80"):
        only(clustered, sds((5000,), jnp.float32), target="sm_80")
    with pytest.raises(ValueError, match="num_ctas must be at most 8"):
        clustered(jnp.zeros(5000), num_ctas=16)


def test_descriptors_lower_to_one_text():
    def text():
        return lowered.text(functools.partial(product), sds((256, 192), jnp.bfloat16), sds((192, 256), jnp.bfloat16))

    assert text() == text()


def test_gluon_kernels_are_not_interpreted():
    """Case 115: refused when traced."""
    call = lambda x: jtops.triton_call(x, x, n=9, kernel=add_kernel, out_type=x, grid=1, BLOCK=16, interpret=True)
    with pytest.raises(jtops.UnsupportedError, match="kernel add_kernel: Gluon kernels have no interpreter"):
        jax.make_jaxpr(call)(jnp.ones(9))


# ----------------------------------------------------------------------------------------------------------------- running

SHAPES = [(64, 64), (100, 96), (1, 8), (257, 520)]


@pytest.mark.spec("host-side TensorDescriptor(base,shape,strides,block_shape,layout,padding,round_f32_to_tf32), .from_array")
@pytest.mark.parametrize("interpret", [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=gpu)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float16, jnp.int32, jnp.int8])
def test_host_descriptors(dtype, interpret):
    x = (100 * draw(100, 96, dtype=jnp.float32)).astype(dtype)
    np.testing.assert_array_equal(jax.jit(lambda x: triton_copied(x, interpret=interpret))(x), x)


@pytest.mark.parametrize("interpret", [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=gpu)])
def test_padding_shows_in_overhanging_blocks(interpret):
    @triton.jit
    def sums_kernel(x_desc, o_ptr, BM: tl.constexpr, BN: tl.constexpr):
        x = x_desc.load([0, 0])
        tl.store(o_ptr + tl.arange(0, BM), tl.sum(x, 1))

    def sums(padding):
        x = TensorDescriptor.from_array(jnp.ones((3, 20), jnp.float32), (4, 32), padding=padding)
        return jtops.triton_call(x, kernel=sums_kernel, out_type=sds((4,), jnp.float32), grid=1, BM=4, BN=32, interpret=interpret)

    np.testing.assert_array_equal(sums("zero"), [20, 20, 20, 0])
    assert np.isnan(sums("nan")).all()


@pytest.mark.parametrize("interpret", [pytest.param(True, id="interpret"), pytest.param(False, id="gpu", marks=gpu)])
def test_a_view_of_other_shape_and_strides(interpret):
    """Every second row of [2, 6, 64] as [2, 3, 64], by rank-3 blocks."""

    @triton.jit
    def view_kernel(x_desc, o_desc):
        o_desc.store([tl.program_id(0), 0, 0], x_desc.load([tl.program_id(0), 0, 0]))

    x = draw(2, 6, 64)
    view = TensorDescriptor(x, (2, 3, 64), (384, 128, 1), (1, 4, 64))
    out = TensorDescriptor.from_array(sds((2, 3, 64), x.dtype), (1, 4, 64))
    got = jtops.triton_call(view, kernel=view_kernel, out_type={"o": out}, grid=2, interpret=interpret)
    np.testing.assert_array_equal(got["o"], x[:, ::2])


@pytest.mark.spec("Gluon kernels (GluonJITFunction/GluonASTSource)")
@gpu
@pytest.mark.parametrize("n", [1, 256, 5000])
def test_gluon_add(n):
    x, y = draw(n, dtype=jnp.float32), draw(n, dtype=jnp.float32, seed=1)
    np.testing.assert_array_equal(jax.jit(gluon_add)(x, y), x + y)


@gpu
@pytest.mark.parametrize("doubled", [False, True])
def test_gluon_takes_named_tuples(doubled):
    x, y = draw(1000, dtype=jnp.float32), draw(1000, dtype=jnp.float32, seed=1)
    f = jax.jit(functools.partial(gluon_add_bundle, doubled=doubled))
    np.testing.assert_array_equal(f(x, y), (x + y) * (1 + doubled))


@gpu
def test_gluon_reduction():
    x = jnp.arange(4 * 128, dtype=jnp.float32).reshape(4, 128)
    out = jtops.triton_call(x, n=128, N=128, kernel=sum_kernel, out_type=sds((4,), jnp.float32), grid=1)
    np.testing.assert_array_equal(out, x.sum(1))


@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.uint8])
def test_gluon_tma_copy(shape, dtype):
    if shape[1] * jnp.dtype(dtype).itemsize % 16:
        shape = (shape[0], 16)
    x = (100 * draw(*shape, dtype=jnp.float32)).astype(dtype)
    block = (64, 64) if dtype != jnp.float32 else (32, 32)
    np.testing.assert_array_equal(jax.jit(lambda x: copied(x, block=block))(x), x)


@gpu
@pytest.mark.parametrize(("m", "n", "k"), [(64, 128, 64), (128, 256, 32), (200, 264, 456), (512, 512, 2048)])
def test_warp_specialised_matmul(m, n, k):
    a, b = draw(m, k), draw(k, n, seed=1)
    want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    got = np.asarray(jax.jit(product)(a, b), np.float64)
    assert np.abs(got - want).max() <= 2**-7 * np.abs(want).max()
    for bundled in (False, True):
        again = jax.jit(functools.partial(product, bundled=bundled))(a, b)
        np.testing.assert_array_equal(got, np.asarray(again, np.float64))


@pytest.mark.spec("device-side TMA descriptors (global scratch)")
@gpu
@pytest.mark.parametrize("shape", [(32, 64), (100, 96)])
def test_device_descriptors(shape):
    x = draw(*shape, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(twice_by_device_descriptors)(x), 2 * x)


@gpu
@pytest.mark.parametrize("num_ctas", [1, 2, 4])
def test_clusters_cover_the_grid(num_ctas):
    x = draw(5000, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(lambda x: clustered(x, num_ctas))(x), x + 1)


@gpu
def test_descriptors_in_a_loop_and_in_a_captured_graph():
    x = draw(128, 128)
    f = jax.jit(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: copied(triton_copied(y)) + 1, x))
    np.testing.assert_array_equal(f(x), jax.lax.fori_loop(0, 10, lambda _, y: y + 1, x))


@gpu
def test_tf32_rounding():
    @triton.jit
    def load_kernel(x_desc, o_desc, BM: tl.constexpr, BN: tl.constexpr):
        o_desc.store([0, 0], x_desc.load([0, 0]))

    x = draw(16, 16, dtype=jnp.float32)
    rounded = TensorDescriptor.from_array(x, (16, 16), round_f32_to_tf32=True)
    out = TensorDescriptor.from_array(x, (16, 16))
    got = np.asarray(jtops.triton_call(rounded, kernel=load_kernel, out_type=out, grid=1, BM=16, BN=16))
    assert np.all(got.view(np.uint32) & 0x1FFF == 0)
    np.testing.assert_allclose(got, x, rtol=2**-10)
