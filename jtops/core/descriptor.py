"""Tensor descriptors made on the host: how a kernel's TMA loads and stores see an array."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jtops._compat import triton as triton_compat
from jtops.core.sizes import strides_from_shape
from jtops.core.types import Descriptor, triton_type

_MAX_RANK, _MAX_STRIDE_BYTES, _ALIGNMENT = 5, 2**40, 16  # of a CUtensorMap (CUDA driver API, cuTensorMapEncodeTiled)


@jax.tree_util.register_pytree_node_class
class TensorDescriptor:
    """An array seen as `shape` with `strides`, of which a kernel loads or stores blocks of `block_shape` by TMA.

    Pass it to `triton_call` in an array's place, or as a leaf of `out_type` (over a ``jax.ShapeDtypeStruct``) for an output that
    the kernel writes by TMA; that leaf's result is an array. Blocks that overhang the shape read as padding and are clipped
    when written.

    Args:
      base: array, or for an output anything with ``.shape`` and ``.dtype``.
      shape: sizes seen by the kernel, rank 1 to 5; need not be the array's own, but must stay inside it.
      strides: counted in elements; the last is 1, the others multiples of 16 bytes.
      block_shape: powers of two.
      layout: shared-memory layout, for Gluon kernels alone; None: Gluon's default for the block and dtype.
      padding: "zero", or "nan" for floating dtypes.
      round_f32_to_tf32: loads of float32 round to TF32.

    Raises:
      ValueError, TypeError: the rule that a field breaks, with its value.
    """

    __slots__ = ("base", "block_shape", "layout", "padding", "round_f32_to_tf32", "shape", "strides")

    def __init__(
        self,
        base: Any,
        shape: Sequence[int],
        strides: Sequence[int],
        block_shape: Sequence[int],
        layout: Any = None,
        padding: str = "zero",
        round_f32_to_tf32: bool = False,
    ):
        self.base, self.layout, self.padding, self.round_f32_to_tf32 = base, layout, padding, round_f32_to_tf32
        self.shape, self.strides, self.block_shape = tuple(map(int, shape)), tuple(map(int, strides)), tuple(map(int, block_shape))
        self._check()

    @classmethod
    def from_array(cls, base: Any, block_shape: Sequence[int], layout: Any = None, **options: Any) -> "TensorDescriptor":
        """A descriptor of the whole array, row-major."""
        return cls(base, base.shape, strides_from_shape(base.shape), block_shape, layout, **options)

    @property
    def dtype(self) -> np.dtype:
        """Type of the array's elements."""
        return np.dtype(self.base.dtype)

    def _check(self):
        say = f"TensorDescriptor of {self.base.dtype}{list(self.base.shape)}"
        rank, floating = len(self.shape), jax.numpy.issubdtype(self.dtype, jax.numpy.floating)
        if not (1 <= rank <= _MAX_RANK and len(self.strides) == len(self.block_shape) == rank):
            raise ValueError(
                f"{say}: shape, strides and block_shape must have one rank, 1 to {_MAX_RANK}; got {self.shape}, {self.strides}, "
                f"{self.block_shape}."
            )
        if triton_type(self.dtype) == "i1":
            raise TypeError(f"{say}: TMA has no boolean elements; pass the array as uint8.")
        if min(self.shape) < 1:
            raise ValueError(f"{say}: sizes must be positive; got shape {self.shape}.")
        wide = [s * self.dtype.itemsize for s in self.strides[:-1]]
        if self.strides[-1] != 1 or any(s % _ALIGNMENT or not 0 < s < _MAX_STRIDE_BYTES for s in wide):
            raise ValueError(
                f"{say}: the last stride must be 1 and the others multiples of {_ALIGNMENT} bytes below 2^40; got strides "
                f"{self.strides} of {self.dtype.itemsize}-byte elements. Pad the rows of the array."
            )
        if (last := sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))) >= math.prod(self.base.shape):
            raise ValueError(f"{say}: shape {self.shape} with strides {self.strides} reaches element {last}, beyond its end.")
        if any(b < 1 or b & (b - 1) for b in self.block_shape):
            raise ValueError(f"{say}: block sizes must be powers of two; got {self.block_shape}.")
        if self.padding not in ("zero", "nan") or (self.padding == "nan" and not floating):
            raise ValueError(f'{say}: padding must be "zero", or "nan" for a floating dtype; got {self.padding!r}.')
        if self.round_f32_to_tf32 and self.dtype != np.float32:
            raise TypeError(f"{say}: round_f32_to_tf32 is for float32.")

    def tree_flatten(self):
        """The array is the child; the rest is static."""
        rest = (self.shape, self.strides, self.block_shape, self.layout, self.padding, self.round_f32_to_tf32)
        return (self.base,), rest

    @classmethod
    def tree_unflatten(cls, rest, children):
        """Make a descriptor without checks: JAX puts placeholders in an array's place."""
        self = object.__new__(cls)
        (self.base,) = children
        self.shape, self.strides, self.block_shape, self.layout, self.padding, self.round_f32_to_tf32 = rest
        return self

    def __repr__(self):
        return f"TensorDescriptor({self.base!r}, {self.shape}, {self.strides}, {self.block_shape}, {self.layout!r})"


def bound_descriptor(given: TensorDescriptor, array, gluon: bool, what: str) -> Descriptor:
    """The record of a descriptor over operand or result `array` of a kernel."""
    if given.layout is not None and not gluon:
        raise TypeError(f"{what}: layout is for Gluon kernels; a Triton kernel's compiler chooses its own. Got {given.layout!r}.")
    layout = given.layout
    if gluon and layout is None:
        layout = triton_compat.default_shared_layout(given.block_shape, triton_type(given.dtype))
    return Descriptor(array, given.shape, given.strides, given.block_shape, layout, given.padding, given.round_f32_to_tf32)


def descriptor_type(param: Descriptor, dtype) -> str:
    """Triton's name of the parameter's type."""
    layout = "" if param.layout is None else f",{param.layout!r}"
    return f"tensordesc<{triton_type(dtype)}[{', '.join(map(str, param.block_shape))}]{layout}>"


def launch_parameters(lib, param: Descriptor, meta: dict | None) -> list:
    """jaxlib's parameters for one descriptor: what the compiled kernel declares in its place.

    With TMA (`meta` is the compiler's record of the descriptor): a CUtensorMap, sizes and strides. On a GPU without TMA: the
    pointer, sizes, strides, kind of padding and rounding that a load needs, then sizes and strides once more, which nothing reads.
    """
    sizes = [lib.create_scalar_parameter(n, "i32") for n in param.shape]
    strides = [lib.create_scalar_parameter(s, "i64") for s in param.strides]
    nan = param.padding == "nan"
    if meta is None:
        wide = [lib.create_scalar_parameter(n, "i64") for n in (*param.shape, *param.strides)]
        flags = [lib.create_scalar_parameter(f, "i1") for f in triton_compat.descriptor_flags(nan, param.round_f32_to_tf32)]
        return [lib.create_array_parameter(0, 16), *wide, *flags, *sizes, *strides]
    tma = lib.create_tma_descriptor_parameter(
        elem_type=triton_compat.tma_data_type(meta["elem_type"], param.round_f32_to_tf32),
        swizzle=meta["swizzle"],
        shape=param.shape,
        strides=param.strides,
        block_shape=tuple(meta["block_size"]),
        oob_fill=int(nan),
    )
    return [tma, *sizes, *strides]
