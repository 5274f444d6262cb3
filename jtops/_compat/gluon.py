"""Gluon's device-side names, which differ between versions of Triton: kernels of jtops import them from here.

Without Triton the decorator keeps the Python function, as the Triton module beside this one does, and the names exist.
"""

from jtops._compat import triton as triton_compat
from jtops._compat.versions import parsed

__all__ = [
    "FIRST_NAMED_BARRIER",
    "PROVEN",
    "NVMMASharedLayout",
    "aggregate",
    "allocate_barriers",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "named_barrier_arrive",
    "named_barrier_sync",
    "reinterpret",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "version",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# A block of threads has 16 named barriers. Triton's own code uses 0 for the default partition, 1 to hand over to the workers and
# one more for each worker of several warps: with three such workers this is the first free one.
FIRST_NAMED_BARRIER = 5

PROVEN = {(3, 6), (3, 9)}  # the versions of Triton whose warp specialised kernels were right on a GPU


def version() -> tuple[int, ...]:
    """Triton's version, as `PROVEN` has it."""
    return parsed(triton_compat.triton.__version__)[:2]


if triton_compat.HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.language.core import _aggregate as aggregate

    renamed = hasattr(tma, "async_load")  # triton 3.9 keeps the old names as functions that raise
    tma_load = tma.async_load if renamed else tma.async_copy_global_to_shared
    tma_store = tma.async_store if renamed else tma.async_copy_shared_to_global
    tma_store_wait = tma.store_wait

    if hasattr(tma, "async_atomic_add"):
        tma_reduce_add = tma.async_atomic_add
    else:  # triton 3.6 has the operation but no name for it
        from triton._C.libtriton import ir

        @builtin
        def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
            """Add a block of shared memory to global memory by TMA; callers wait for it as for a store."""
            coord = _semantic._convert_to_ir_values(coord, require_i64=False)
            _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)

    public = hasattr(shared_memory_descriptor, "reinterpret")  # private in triton 3.6
    reinterpreted = shared_memory_descriptor.reinterpret if public else shared_memory_descriptor._reinterpret

    @builtin
    def reinterpret(tile, dtype, shape, layout, _semantic=None):
        """The same shared memory as a tile of another dtype, shape and layout."""
        return reinterpreted(tile, dtype, shape, layout, _semantic=_semantic)

    @gluon.jit
    def allocate_barriers(count: gl.constexpr):
        """`count` uninitialised mbarriers in shared memory."""
        return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())

    @gluon.jit
    def _named_barrier(operation: gl.constexpr, index, threads: gl.constexpr):
        """Run a barrier instruction on each thread of the caller's partition: assembly runs per element, so each thread has one."""
        warps: gl.constexpr = gl.num_warps()
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
        x = gl.full([32 * warps], index, gl.int32, layout=layout)
        gl.inline_asm_elementwise(
            f"bar.{operation} $1, {threads}; mov.u32 $0, 0;", "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1
        )

    @gluon.jit
    def named_barrier_sync(index, threads: gl.constexpr):
        """Wait until `threads` threads, this partition's included, have come to the block's named barrier `index`."""
        _named_barrier("sync", index, threads)

    @gluon.jit
    def named_barrier_arrive(index, threads: gl.constexpr):
        """Arrive at the named barrier without waiting. A partition that arrives twice before the others have come deadlocks."""
        _named_barrier("arrive", index, threads)

else:
    gluon = gl = aggregate = mbarrier = tma_load = tma_store = tma_store_wait = triton_compat.triton
    tma_reduce_add = named_barrier_arrive = named_barrier_sync = triton_compat.triton
    NVMMASharedLayout = fence_async_shared = warpgroup_mma = warpgroup_mma_wait = allocate_barriers = reinterpret = (
        triton_compat.triton
    )
