"""Arithmetic on sizes, by the module name that older bridges from Triton to JAX give it; the same as in `jtops` itself."""

from jtops.core.sizes import cdiv, next_power_of_2, strides_from_shape

__all__ = ["cdiv", "next_power_of_2", "strides_from_shape"]
