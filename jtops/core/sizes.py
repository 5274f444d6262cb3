"""Arithmetic on sizes that launch code needs."""

from collections.abc import Sequence


def cdiv(a: int, b: int) -> int:
    """The quotient ``a / b`` rounded up, for b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def strides_from_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, of a contiguous array of this shape."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))
