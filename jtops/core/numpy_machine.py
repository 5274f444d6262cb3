"""What an interpreted kernel stands on: checked memory, and Triton's IR builder over NumPy with every number format real."""

from typing import Any

import numpy as np

from jtops.core import compat
from jtops.core.types import NUMPY_TYPES

_GUARD_BYTES = 512  # between any two buffers, so that running off one does not land in the next


class Memory:
    """Private copies of the buffers of one launch, and the check that every access stays inside them."""

    def __init__(self, inputs, outputs):
        self.operands = [self._place(a, a.tobytes()) for a in inputs]
        self.results = [self._place(a, b"\xff" * a.nbytes) for a in outputs]  # all ones: NaN in every float format but fnuz
        spans = [(a.ctypes.data, a.nbytes, f"operand {i}", False) for i, a in enumerate(self.operands)]
        spans += [(a.ctypes.data, a.nbytes, f"result {i}", True) for i, a in enumerate(self.results)]
        spans.sort()
        self.starts = np.array([s[0] for s in spans], np.uint64)
        self.ends = np.array([s[0] + s[1] for s in spans], np.uint64)
        self.names, self.writable = [s[2] for s in spans], np.array([s[3] for s in spans])

    def _place(self, like: np.ndarray, content: bytes) -> np.ndarray:
        raw = np.zeros(like.nbytes + 2 * _GUARD_BYTES, np.uint8)
        start = _GUARD_BYTES + -raw.ctypes.data % 16  # aligned as XLA's buffers are
        body = raw[start : start + like.nbytes]
        body[:] = np.frombuffer(content, np.uint8)
        return body.view(like.dtype).reshape(like.shape)

    def check(self, addresses: np.ndarray, itemsize: int, mask: np.ndarray, writes: bool) -> None:
        """IndexError unless every live address lies in a buffer, and in a result if it is written."""
        live = np.broadcast_to(addresses, mask.shape)[mask] if mask.shape else addresses[np.broadcast_to(mask, addresses.shape)]
        if not live.size:
            return
        which = np.searchsorted(self.starts, live, "right").astype(np.int64) - 1
        inside = (which >= 0) & (live + np.uint64(itemsize) <= self.ends[which])
        verb = "store" if writes else "load"
        if not inside.all():
            at = int(np.flatnonzero(~inside)[0])
            start = int(self.starts[max(which[at], 0)])
            raise IndexError(
                f"{verb} out of bounds: {int(np.sum(~inside))} of {live.size} addresses lie in no buffer, the first "
                f"{(int(live[at]) - start) // itemsize} elements from the start of {self.names[max(which[at], 0)]}"
            )
        if writes and not self.writable[which].all():
            raise IndexError(f"store into {self.names[which[np.flatnonzero(~self.writable[which])[0]]]}, which is an input")


def numpy_type(ty) -> np.dtype:
    """The NumPy dtype of a Triton type, block or scalar; pointers are addresses."""
    ty = getattr(ty, "scalar", ty)
    return np.dtype(np.uint64) if ty.is_ptr() else np.dtype(bool) if ty.is_int1() else NUMPY_TYPES[short_name(ty)]


def short_name(ty) -> str:
    """Triton's short name ('fp32', 'i32') of a scalar type, whose own name is 'fp32' or 'int32'."""
    return ty.name.replace("uint", "u").replace("int", "i")


def make_builder(base: Any, state: Any) -> Any:
    """Triton's NumPy builder with true bf16 and fp8 arithmetic, checked memory, and its position per thread."""

    handle, tl = base.TensorHandle, compat.tl
    low = ("bf16", "fp8")

    class Builder(base.InterpreterBuilder):
        grid_idx = property(lambda self: state.grid_idx, lambda self, value: setattr(state, "grid_idx", value))
        grid_dim = property(lambda self: state.grid_dim, lambda self, value: setattr(state, "grid_dim", value))

        def create_masked_load(self, ptrs, mask, other, *rest):
            mask = mask if isinstance(mask, handle) else handle(mask, tl.int1)
            state.memory.check(ptrs.data, numpy_type(ptrs.get_element_ty()).itemsize, mask.data, writes=False)
            return super().create_masked_load(ptrs, mask, other, *rest)

        def create_masked_store(self, ptrs, value, mask, *rest):
            mask = mask if isinstance(mask, handle) else handle(mask, tl.int1)
            state.memory.check(ptrs.data, numpy_type(ptrs.get_element_ty()).itemsize, mask.data, writes=True)
            return super().create_masked_store(ptrs, value, mask, *rest)

        def create_atomic_rmw(self, op, ptr, val, mask, *rest):
            state.memory.check(ptr.data, val.data.dtype.itemsize, mask.data, writes=True)
            return super().create_atomic_rmw(op, ptr, val, mask, *rest)

        def create_atomic_cas(self, ptr, *rest):
            state.memory.check(ptr.data, rest[0].data.dtype.itemsize, np.ones(ptr.data.shape, bool), writes=True)
            return super().create_atomic_cas(ptr, *rest)

        def cast_impl(self, src, dst_type):
            return handle(src.data.astype(numpy_type(dst_type)), dst_type.scalar)

        def create_fp_to_fp(self, src, dst_type, rounding_mode):
            return self.cast_impl(src, dst_type)  # ml_dtypes rounds to nearest even

        def create_fp_to_ui(self, src, dst_type):
            signed = numpy_type(dst_type)  # the IR type has lost its sign
            return handle(src.data.astype(f"u{signed.itemsize}").view(signed), dst_type.scalar)

        def create_bitcast(self, src, dst_type):
            return handle(np.ascontiguousarray(src.data).view(numpy_type(dst_type)), dst_type.scalar)

        def create_fabs(self, arg):
            return handle(np.abs(arg.data), arg.dtype.scalar)

        def create_fneg(self, arg):
            return handle(-arg.data, arg.dtype.scalar)

        def create_minnumf(self, lhs, rhs):
            return self.binary_op(lhs, rhs, np.fmin)

        def create_maxnumf(self, lhs, rhs):
            return self.binary_op(lhs, rhs, np.fmax)

        def create_dot(self, a, b, d, *rest):
            wide = [x.data.astype(np.float32) if short_name(x.dtype.scalar).startswith(low) else x.data for x in (a, b)]
            product = np.matmul(*wide, dtype=np.float32 if d.data.dtype.kind == "f" and d.data.itemsize < 8 else d.data.dtype)
            return handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)

        def create_inline_asm(self, *_):
            raise NotImplementedError("inline assembly has no interpreter")

        def create_extern_elementwise(self, *_):
            raise NotImplementedError("functions of libdevice have no interpreter")

    return Builder()
