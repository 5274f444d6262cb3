"""Gluon's device-side names, which differ between versions of Triton: kernels of jtops import them from here.

Without Triton the decorator keeps the Python function, as the Triton module beside this one does, and the names exist.
"""

from jtops._compat import triton as triton_compat

__all__ = [
    "NVMMASharedLayout",
    "aggregate",
    "allocate_barriers",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "tma_load",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

if triton_compat.HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language import NVMMASharedLayout
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

    @gluon.jit
    def allocate_barriers(count: gl.constexpr):
        """`count` uninitialised mbarriers in shared memory."""
        return gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())

else:
    gluon = gl = aggregate = mbarrier = tma_load = tma_store = tma_store_wait = triton_compat.triton
    NVMMASharedLayout = fence_async_shared = warpgroup_mma = warpgroup_mma_wait = allocate_barriers = triton_compat.triton
