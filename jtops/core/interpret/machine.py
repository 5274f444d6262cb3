"""What an interpreted kernel stands on: checked memory, and Triton's IR builder over NumPy with every number format real."""

from typing import Any

import numpy as np

from jtops._compat import triton as triton_compat
from jtops.core.types import NUMPY_TYPES

_GUARD_BYTES = 512  # between any two buffers, so that running off one does not land in the next


class Memory:
    """Private copies of the buffers of one launch; every access is checked to lie inside them.

    `names` maps (is a result, index) to the name of the parameter that points there; `aliases` are pairs (operand, result) of one
    buffer; results in `zeroed` start as zeros.
    """

    def __init__(self, inputs, outputs, names, aliases=(), zeroed=()):
        shared = {result: operand for operand, result in aliases}
        self.operands = [self._place(a, a.tobytes()) for a in inputs]
        self.results = [
            self.operands[shared[i]] if i in shared else self._place(a, b"\xff" * a.nbytes)  # NaN in every float format but fnuz
            for i, a in enumerate(outputs)
        ]
        for i in zeroed:
            self.results[i].reshape(-1).view(np.uint8)[:] = 0
        named = [(a, names[False, i], i in dict(aliases)) for i, a in enumerate(self.operands)]
        named += [(a, names[True, i], True) for i, a in enumerate(self.results) if i not in shared]
        named.sort(key=lambda entry: entry[0].ctypes.data)
        self.bytes = [a.reshape(-1).view(np.uint8) for a, *_ in named]
        self.starts = np.array([a.ctypes.data for a, *_ in named], np.uint64)
        self.ends = self.starts + np.array([a.nbytes for a, *_ in named], np.uint64)
        self.names, self.writable = [name for _, name, _ in named], np.array([writes for *_, writes in named])

    def _place(self, like: np.ndarray, content: bytes) -> np.ndarray:
        raw = np.zeros(like.nbytes + 2 * _GUARD_BYTES, np.uint8)
        start = _GUARD_BYTES + -raw.ctypes.data % 16  # aligned as XLA's buffers are
        body = raw[start : start + like.nbytes]
        body[:] = np.frombuffer(content, np.uint8)
        return body.view(like.dtype).reshape(like.shape)

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray) -> np.ndarray:
        """The elements at `addresses`, and `other` where the mask is false; the dtype is that of `other`."""
        addresses, mask, other = np.broadcast_arrays(addresses, mask, other)
        values = np.array(other)
        which = self.find(addresses[mask], values.dtype.itemsize, "load")
        found = np.empty(which.shape, values.dtype)
        for buffer, there, index in self._pieces(addresses[mask], which, values.dtype):
            found[there] = buffer[index]
        values[mask] = found
        return values

    def store(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray) -> None:
        """Write `values` where the mask is true; of several values for one address, one stays."""
        addresses, values, mask = np.broadcast_arrays(addresses, values, mask)
        which = self.find(addresses[mask], values.dtype.itemsize, "store")
        for buffer, there, index in self._pieces(addresses[mask], which, values.dtype):
            buffer[index] = values[mask][there]

    def update(self, addresses: np.ndarray, values: np.ndarray, mask: np.ndarray, change) -> np.ndarray:
        """Replace what lies at `addresses` by ``change(it, value)`` where the mask is true, one lane after the other, and return
        what each lane found (zero where the mask is false)."""
        addresses, values, mask = np.broadcast_arrays(addresses, values, mask)
        found = np.zeros(values.shape, values.dtype)
        which = self.find(addresses[mask], values.dtype.itemsize, "atomic")
        old, new = np.empty(which.shape, values.dtype), values[mask]
        for buffer, there, index in self._pieces(addresses[mask], which, values.dtype):
            if len(np.unique(index)) == len(index):
                old[there] = buffer[index]
                buffer[index] = change(old[there], new[there])
                continue
            for lane, i in zip(np.flatnonzero(there), index, strict=True):  # lanes that meet in one place
                old[lane] = buffer[i]
                buffer[i] = change(old[lane : lane + 1], new[lane : lane + 1])[0]
        found[mask] = old
        return found

    def find(self, addresses: np.ndarray, itemsize: int, verb: str) -> np.ndarray:
        """The buffer of each address; IndexError unless each lies in one, and in a result if it is not only loaded."""
        which = np.searchsorted(self.starts, addresses, "right").astype(np.int64) - 1
        inside = (
            (which >= 0) & (addresses + np.uint64(itemsize) <= self.ends[which]) if len(self.names) else np.zeros(which.shape, bool)
        )
        if not inside.all():
            at = int(np.flatnonzero(~inside)[0])
            near = max(int(which[at]), 0)
            offset = (int(addresses[at]) - int(self.starts[near])) // itemsize if self.names else int(addresses[at])
            raise IndexError(
                f"{verb} out of bounds: {int(np.sum(~inside))} of {addresses.size} addresses lie in no buffer, the first {offset} "
                f"elements from the start of {self.names[near] if self.names else 'nothing'}"
            )
        if verb != "load" and not self.writable[which].all():
            raise IndexError(f"{verb} into {self.names[which[np.flatnonzero(~self.writable[which])[0]]]}, which is an input")
        return which

    def _pieces(self, addresses, which, dtype):
        """The buffers that accesses meet: for each its elements, which accesses meet it, and at what index."""
        for b in np.unique(which):
            there = which == b
            offset = (addresses[there] - self.starts[b]).astype(np.int64)
            if (offset % dtype.itemsize).any():
                raise IndexError(f"access to {self.names[b]} is not aligned to its {dtype.itemsize} bytes")
            elements = self.bytes[b][: len(self.bytes[b]) // dtype.itemsize * dtype.itemsize].view(dtype)
            yield elements, there, offset // dtype.itemsize


def numpy_type(ty) -> np.dtype:
    """The NumPy dtype of a Triton type, block or scalar; pointers are addresses."""
    ty = getattr(ty, "scalar", ty)
    return np.dtype(np.uint64) if ty.is_ptr() else np.dtype(bool) if ty.is_int1() else NUMPY_TYPES[short_name(ty)]


def short_name(ty) -> str:
    """Triton's short name ('fp32', 'i32') of a scalar type, whose own name is 'fp32' or 'int32'."""
    return ty.name.replace("uint", "u").replace("int", "i")


_CHANGES = {
    "ADD": np.add, "FADD": np.add, "AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor, "INC": np.add,
    "MAX": np.maximum, "UMAX": np.maximum, "MIN": np.minimum, "UMIN": np.minimum, "XCHG": lambda old, new: new,
}  # fmt: skip


def scaled(data: np.ndarray, kind: str, packed: int, scale: Any, transposed: bool = False) -> np.ndarray:
    """The float32 values of an operand in an OCP microscaling format: fp4 are two to a byte along axis `packed`, the first in the
    lower bits; each number of `scale`, a power of two given by its exponent, is for a group of elements of the axis that is summed.
    """
    if kind == "E2M1":
        low, high = np.moveaxis(data & 15, packed, -1), np.moveaxis(data >> 4, packed, -1)
        data = np.moveaxis(np.stack([low, high], -1).reshape(*low.shape[:-1], -1), -1, packed)
        data = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)[data]
    values = data.astype(np.float32)
    if scale is None:
        return values
    factors = scale.data
    if factors.dtype.kind in "iu":
        exponent = factors.astype(np.uint8).astype(np.int32) - 127
        factors = np.where(exponent == 128, np.nan, np.ldexp(np.float32(1), exponent))
    values = np.swapaxes(values, -1, -2) if transposed else values
    values = values * np.repeat(factors.astype(np.float32), values.shape[-1] // factors.shape[-1], -1)
    return np.swapaxes(values, -1, -2) if transposed else values


def make_builder(base: Any, state: Any) -> Any:
    """Triton's NumPy builder with true bf16 and fp8 arithmetic, checked memory, and its position per thread."""

    handle = base.TensorHandle
    low = ("bf16", "fp8")
    plain = lambda x: x.data if isinstance(x, handle) else x

    class Builder(base.InterpreterBuilder):
        grid_idx = property(lambda self: state.grid_idx, lambda self, value: setattr(state, "grid_idx", value))
        grid_dim = property(lambda self: state.grid_dim, lambda self, value: setattr(state, "grid_dim", value))

        def __init__(self):
            super().__init__()
            # The kernel's own assertions are checked. Integers wrap as on GPUs: looking for overflow would triple the work.
            self.options: Any = base.InterpreterOptions(debug=True, sanitize_overflow=False)
            self.codegen_fns["min_dot_size"] = triton_compat.min_dot_size

        def __getattr__(self, name):
            if not name.startswith(("create_", "get_")):
                raise AttributeError(name)
            raise NotImplementedError(f"{name.split('_', 1)[1]} has no interpreter; run the kernel on a GPU")

        def get_bf16(self, value):
            return handle(np.array([value], numpy_type(base.tl.bfloat16)), base.tl.bfloat16)

        def create_masked_load(self, ptrs, mask, other, *_, **__):
            element = ptrs.get_element_ty()
            fill = np.zeros((), numpy_type(element)) if other is None else other.data
            return handle(state.memory.load(ptrs.data, plain(mask), fill), element)

        def create_masked_store(self, ptrs, value, mask, *_, **__):
            state.memory.store(ptrs.data, value.data.astype(numpy_type(ptrs.get_element_ty()), copy=False), plain(mask))

        def atomic(self, change, ptr, val, mask):
            values = val.data.astype(numpy_type(ptr.get_element_ty()), copy=False)
            return handle(state.memory.update(ptr.data, values, plain(mask), change), val.dtype.scalar)

        def create_atomic_rmw(self, op, ptr, val, mask, *_):
            return self.atomic(_CHANGES[op.name], ptr, val, mask)

        def create_atomic_cas(self, ptr, cmp, val, *_):
            bits = lambda x: np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
            wanted, new = np.broadcast_arrays(ptr.data, cmp.data)[1], np.broadcast_arrays(ptr.data, val.data)[1]
            found, every = np.empty(wanted.shape, wanted.dtype), np.ones(1, bool)
            for at in np.ndindex(ptr.data.shape):  # each lane may see what an earlier one wrote
                swap = lambda old, value: np.where(bits(old) == bits(wanted[at].reshape(1)), value, old)
                found[at] = state.memory.update(ptr.data[at].reshape(1), new[at].reshape(1), every, swap)[0]
            return handle(found, cmp.dtype.scalar)

        def create_descriptor_load(self, desc, *args):
            out = super().create_descriptor_load(desc, *args)
            if getattr(desc, "round_f32_to_tf32", False):  # 13 bits less of the fraction
                bits = np.ascontiguousarray(out.data).view(np.uint32)
                near = (bits + np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))) & np.uint32(0xFFFFE000)
                out.data = np.where(np.isfinite(out.data), near.view(np.float32), out.data)
            return out

        def create_descriptor_reduce(self, kind, desc, value, indices):
            ptrs, mask = desc.materialize_pointers(indices)
            self.atomic(_CHANGES[kind.name], ptrs, value, mask)

        def cast_impl(self, src, dst_type):
            return handle(src.data.astype(numpy_type(dst_type)), dst_type.scalar)

        def create_fp_to_fp(self, src, dst_type, rounding_mode):
            out = self.cast_impl(src, dst_type)  # ml_dtypes rounds to nearest even
            if getattr(rounding_mode, "name", "") == "RTZ":
                bits = out.data.view(f"u{out.data.dtype.itemsize}")
                away = np.abs(out.data.astype(np.float64)) > np.abs(src.data.astype(np.float64))
                out.data = np.where(away, bits - bits.dtype.type(1), bits).view(out.data.dtype)
            return out

        def binary_op(self, lhs, rhs, op):
            if lhs.data.dtype == rhs.data.dtype == np.bool_:  # one bit, which wraps; NumPy saturates
                return handle((op(lhs.data.astype(np.int8), rhs.data.astype(np.int8)) & 1).astype(bool), lhs.dtype.scalar)
            return super().binary_op(lhs, rhs, op)

        def create_umulhi(self, lhs, rhs):
            kind = np.dtype(f"u{lhs.data.dtype.itemsize}")
            wide = lambda x: np.ascontiguousarray(x.data).view(kind).astype(object if kind.itemsize == 8 else np.uint64)
            high = (wide(lhs) * wide(rhs)) >> (8 * kind.itemsize)
            return handle(high.astype(kind).view(lhs.data.dtype), lhs.dtype.scalar)

        def create_fma(self, x, y, z):
            kind = z.data.dtype
            wide = [a.data.astype(np.float64, copy=False) for a in (x, y, z)]  # holds a product of two float32 exactly
            return handle((wide[0] * wide[1] + wide[2]).astype(kind), z.dtype.scalar)

        def create_clampf(self, arg, low, high, propagate_nan):
            if propagate_nan.name == "NONE":
                return self.binary_op(self.binary_op(arg, low, np.fmax), high, np.fmin)
            return self.ternary_op(arg, low, high, np.clip)

        def create_histogram(self, data, bins, mask):
            counted = (data.data >= 0) & (data.data < bins) & (True if mask is None else plain(mask))
            return handle(np.bincount(data.data[counted].astype(np.int64), minlength=bins).astype(np.int32), base.tl.int32)

        def create_print(self, prefix, as_hex, values, *_):
            for value in values:
                bits = np.ascontiguousarray(value.data).view(f"u{value.data.dtype.itemsize}")
                text = np.array2string(bits, formatter={"int": "{:#x}".format}) if as_hex else str(value.data)
                print(f"{self.grid_idx} {prefix.strip()} {text}")
            if not values:
                print(f"{self.grid_idx} {prefix.strip()}")

        def create_assert(self, condition, message):
            if not condition.data.all():
                raise AssertionError(f"device_assert failed: {message}")

        def create_assume(self, condition):
            if not condition.data.all():
                raise AssertionError("tl.assume was told something false")

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

        def create_dot_scaled(self, a, a_scale, a_format, b, b_scale, b_format, _, a_k_pack, b_k_pack, acc):
            left = scaled(plain(a), a_format.name, -1 if a_k_pack else -2, a_scale)
            right = scaled(plain(b), b_format.name, -2 if b_k_pack else -1, b_scale, transposed=True)
            return handle(np.matmul(left, right) + acc.data, acc.dtype.scalar)

        def create_inline_asm(self, *_):
            raise NotImplementedError(
                "inline assembly has no interpreter; run the kernel on a GPU, or give it a plain path to take here"
            )

        def create_extern_elementwise(self, *_):
            raise NotImplementedError("functions of libdevice that NumPy lacks have no interpreter; run the kernel on a GPU")

    return Builder()
