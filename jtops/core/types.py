"""The records that describe one kernel call, and how JAX dtypes and Python scalars are named in Triton."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

TRITON_TYPES = {
    np.dtype(jax_type): name
    for jax_type, name in {
        jnp.bool_: "i1",
        jnp.int8: "i8",
        jnp.int16: "i16",
        jnp.int32: "i32",
        jnp.int64: "i64",
        jnp.uint8: "u8",
        jnp.uint16: "u16",
        jnp.uint32: "u32",
        jnp.uint64: "u64",
        jnp.float16: "fp16",
        jnp.bfloat16: "bf16",
        jnp.float32: "fp32",
        jnp.float64: "fp64",
        jnp.float8_e4m3fn: "fp8e4nv",
        jnp.float8_e5m2: "fp8e5",
        jnp.float8_e4m3fnuz: "fp8e4b8",
        jnp.float8_e5m2fnuz: "fp8e5b16",
    }.items()
}
NUMPY_TYPES = {name: dtype for dtype, name in TRITON_TYPES.items()}


# What one kernel parameter is bound to. A call is a tuple of these, in the order of the kernel's parameters.


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """The call's array operand number `index`."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """The call's output number `index`."""

    index: int


def _same_number(value: Any) -> Any:
    """A key, equal where a kernel cannot tell constants apart: Python has 0.0 == -0.0, 1 == 1.0 == True, and no equal NaN."""
    if isinstance(value, tuple):
        return type(value), tuple(map(_same_number, value))
    return type(value), str(value) if isinstance(value, float | np.floating) else value


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Scalar:
    """A number known when the call is traced; the launch carries it, the compiled kernel does not depend on it."""

    value: bool | int | float
    type: str

    def __eq__(self, other):
        return isinstance(other, Scalar) and (self.type, _same_number(self.value)) == (other.type, _same_number(other.value))

    def __hash__(self):
        return hash((self.type, self.value if self.value == self.value else "nan"))


class Constexpr:
    """A compile-time constant. Equal only to a constant of the same type: True, 1 and 1.0 are three kernels, in tuples too."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any):
        self.value = value
        self.key = _same_number(value)

    def __eq__(self, other):
        return isinstance(other, Constexpr) and self.key == other.key

    def __hash__(self):
        return hash(self.key)

    def __repr__(self):
        return f"Constexpr({self.value!r})"


@dataclasses.dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor descriptor of operand or result `array`, made on the host; see core.descriptor.TensorDescriptor."""

    array: Operand | Output
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any
    padding: str
    round_f32_to_tf32: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """A tuple; the kernel gets one of the same structure. `kind` is tuple, or a namedtuple's class."""

    items: tuple["Param", ...]
    kind: Any

    def of(self, values):
        """The tuple with `values` for its items."""
        return tuple(values) if self.kind is tuple else self.kind(*values)


Param = Operand | Output | Scalar | Constexpr | Descriptor | Items
Bound = tuple[tuple[str, Param], ...]


def leaves(bound: Bound) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Yield every parameter that is no tuple, and every item of those that are: (path of indices, name such as ``x[1]``, Param)."""
    for i, (name, param) in enumerate(bound):
        yield from _leaves((i,), name, param)


def _leaves(path, name, param):
    if not isinstance(param, Items):
        yield path, name, param
        return
    for i, item in enumerate(param.items):
        yield from _leaves((*path, i), name + (f"[{i}]" if param.kind is tuple else f".{param.kind._fields[i]}"), item)


def told(given: Iterable[tuple[str, str]]) -> str:
    """The words of errors for what each parameter of a kernel was given, by name."""
    given = list(given)
    loads = any(text.startswith(("array", "*")) for _, text in given)
    advice = " (An array is a pointer in a kernel, one without dims too: tl.load(p) is its number.)" if loads else ""
    if any("[" in name for name, _ in given):
        advice += " (A tuple or list is a tuple in a kernel; jnp.array makes an array of numbers.)"
    return f"Parameters: {', '.join(f'{name}: {text}' for name, text in given)}.{advice}"


def is_shaped(value: Any) -> bool:
    """Whether it is an array, or describes one."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def triton_type(dtype) -> str:
    """Triton's name of a JAX dtype; TypeError for a dtype Triton does not have."""
    try:
        return TRITON_TYPES[np.dtype(dtype)]
    except (KeyError, TypeError):
        supported = ", ".join(str(d) for d in TRITON_TYPES)
        raise TypeError(f"dtype {dtype} has no Triton type; supported are {supported}.") from None


def array_of(param: Param) -> Operand | Output | None:
    """The operand or result that a parameter points to, if it does."""
    param = param.array if isinstance(param, Descriptor) else param
    return param if isinstance(param, Operand | Output) else None


_RANGES = {"i32": (-(2**31), 2**31), "u32": (0, 2**32), "i64": (-(2**63), 2**63), "u64": (0, 2**64)}


def as_scalar(value: Any, annotation: str = "") -> Scalar | None:
    """The typed scalar of a Python or NumPy number, None for anything else.

    The kernel's own annotation of the parameter (``n: tl.int64``) decides where it names a type that launches know. Else integers
    take the first of i32, u32, i64, u64 that holds them; a float is fp32 unless only fp64 holds it (Triton's rule); a NumPy
    scalar keeps the width of its own type where launches know it.
    """
    if isinstance(value, np.generic):
        if isinstance(value, np.float32):
            return Scalar(float(value), "fp32")
        value = value.item()
    if annotation in ("fp32", "fp64") and isinstance(value, int | float):
        return Scalar(float(value), annotation)
    if isinstance(value, bool) and annotation not in _RANGES:  # before int: bool is one
        return Scalar(value, "i1")
    if isinstance(value, int):
        for name in [annotation] if annotation in _RANGES else _RANGES:
            low, high = _RANGES[name]
            if low <= value < high:
                return Scalar(int(value), name)  # launches refuse subclasses of int
        raise ValueError(f"integer overflow: {value} does not fit in {annotation if annotation in _RANGES else '64 bits'}.")
    if isinstance(value, float) and annotation not in _RANGES:
        value = float(value)
        tiny, largest = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
        fits = value == 0 or not math.isfinite(value) or tiny <= abs(value) <= largest
        return Scalar(value, "fp32" if fits else "fp64")
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """What a launch and its compiler know of one parameter, or of one item of a tuple."""

    path: tuple[int, ...]  # number of the kernel's parameter, then of the item in each tuple
    name: str  # such as x[1] or mask.left
    value: Operand | Output | Scalar | Constexpr | Descriptor
    type: str  # Triton's; "constexpr" for a constant
    aligned: bool  # Triton is told that it divides by 16: arrays, because XLA aligns them, and such numbers
    folds: bool  # an integer 1, which Triton compiles in rather than taking it at a launch


def parameters(kernel, bound: Bound, type_of_array: Callable[[str, Any], str]) -> tuple[Parameter, ...]:
    """All parameters of a bound kernel; ``type_of_array(name, value)`` is Triton's type of what points to an array.

    The kernel's own declaration may forbid to compile for alignment, for the value 1, or for both.
    """
    made, declared = [], kernel.params
    for path, name, value in leaves(bound):
        own = declared[path[0]]
        if isinstance(value, Constexpr):
            made.append(Parameter(path, name, value, "constexpr", aligned=False, folds=False))
            continue
        number = isinstance(value, Scalar) and value.type not in ("i1", "fp32", "fp64")
        divides = isinstance(value, Operand | Output) or (number and value.value % 16 == 0)
        aligned = divides and not (own.do_not_specialize or own.do_not_specialize_on_alignment)
        one = number and value.type == "i32" and value.value == 1
        kind = value.type if isinstance(value, Scalar) else type_of_array(name, value)
        made.append(Parameter(path, name, value, kind, aligned, folds=one and not own.do_not_specialize))
    return tuple(made)
