"""The accuracy of computations. Products of float32 are float32-accurate by default; JAX's own default on GPUs is TF32."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_HIGHEST = {"highest", "float32", "f32_f32_f32", "tf32_tf32_f32_x3"}
_LESS = {
    "default",
    "high",
    "fastest",
    "bfloat16",
    "tensorfloat32",
    "bfloat16_3x",
    "bf16_bf16_f32",
    "bf16_bf16_f32_x3",
    "tf32_tf32_f32",
}


def accumulator(*dtypes) -> jnp.dtype:
    """The dtype that references compute in: float64 where any is float64, float32 for every shorter float."""
    return jnp.dtype(jnp.float64 if any(jnp.dtype(d) == jnp.float64 for d in dtypes) else jnp.float32)


def result_dtype(op: str, asked: Any, otherwise) -> jnp.dtype:
    """The dtype that `preferred_element_type` asks for; TypeError if it is none, or not floating."""
    if asked is None:
        return jnp.dtype(otherwise)
    try:
        dtype = jax.dtypes.canonicalize_dtype(asked)
    except TypeError:
        raise TypeError(f"{op}: preferred_element_type must be a dtype or None; got {asked!r}.") from None
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"{op}: preferred_element_type must be a floating dtype; got {dtype}. Cast the result.")
    return dtype


def resolve(op: str, precision, dtype=None) -> str:
    """``"highest"`` or ``"tf32"``: what a call asks for, else what ``jax_default_matmul_precision`` says, else float32 accuracy.

    It is always "tf32" for a `dtype` shorter than float32: its products are exact, so what is asked for makes no difference.
    """
    resolved = _resolved(op, precision)
    return resolved if dtype is None or jnp.dtype(dtype).itemsize >= 4 else "tf32"


def _resolved(op: str, precision) -> str:
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
    if precision is None:
        return "highest"
    name = precision.name if isinstance(precision, lax.Precision) else str(precision)
    if name.lower() in _HIGHEST:
        return "highest"
    if name.lower() in _LESS:
        return "tf32"
    raise ValueError(f'{op}: precision must be a jax.lax.Precision or a name such as "highest" or "default"; got {precision!r}.')


def lax_precision(resolved: str) -> lax.Precision:
    """The precision of the reference's products."""
    return lax.Precision.HIGHEST if resolved == "highest" else lax.Precision.DEFAULT


def dot_precision(resolved: str, target) -> str:
    """The precision for ``tl.dot``: three TF32 products where tensor cores have TF32, else float32 arithmetic."""
    if target.platform == "rocm":
        return "ieee"
    return "tf32x3" if resolved == "highest" else "tf32"
