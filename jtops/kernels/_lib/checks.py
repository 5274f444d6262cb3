"""Argument checks of public functions. Every message names the rule, the values received and the way out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

KERNEL_FLOATS = tuple(np.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def array(op: str, name: str, x: Any, *, floating: bool = True) -> jax.Array:
    """`x` as a strongly typed array; TypeError if it cannot be one, or is not of a floating dtype where one is needed."""
    value = x
    if not isinstance(x, jax.Array):
        try:
            value = jnp.asarray(x)
        except (TypeError, ValueError):
            raise TypeError(f"{op}: {name} must be an array; got {x!r} of type {type(x).__name__}.") from None
    if floating and not jnp.issubdtype(value.dtype, jnp.floating):
        cast = "" if jnp.issubdtype(value.dtype, jnp.complexfloating) else f" Cast it, e.g. {name}.astype('float32')."
        raise TypeError(f"{op}: {name} must have a floating dtype; got {value.dtype} {value.shape}.{cast}")
    return jnp.asarray(value, dtype=value.dtype) if jax.typeof(value).weak_type else value


def boolean(op: str, name: str, x: Any) -> jax.Array:
    """`x` as a boolean array; TypeError otherwise."""
    value = array(op, name, x, floating=False)
    if value.dtype != jnp.bool_:
        raise TypeError(
            f"{op}: {name} must be boolean; got {value.dtype} {value.shape}. Compare it with something, e.g. {name} != 0."
        )
    return value


def axes(op: str, **arrays: tuple[jax.Array | None, str]) -> dict[str, int]:
    """Bind axis letters to sizes: ``axes("layer_norm", x=(x, "... n"), scale=(scale, "n"))``; ValueError where they disagree.

    A leading ``...`` stands for any number of axes. Arrays that are None are left out.
    """
    sizes: dict[str, int] = {}
    for name, (value, spec) in arrays.items():
        if value is None:
            continue
        letters = spec.split()
        free = letters[:1] == ["..."]
        core = letters[1:] if free else letters
        if value.ndim < len(core) or (not free and value.ndim != len(core)):
            raise ValueError(f"{op}: {name} must have shape [{spec.replace(' ', ', ')}]; got {value.shape}.")
        for letter, size in zip(core, value.shape[value.ndim - len(core) :], strict=True):
            if sizes.setdefault(letter, size) != size:
                got = ", ".join(f"{n} {v.shape}" for n, (v, _) in arrays.items() if v is not None)
                raise ValueError(f"{op}: axis {letter} is {sizes[letter]} elsewhere but {size} in {name}; got {got}.")
    return sizes


def static_float(op: str, name: str, value: Any) -> float:
    """A number known when tracing, as a Python float; TypeError for a traced value."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{op}: {name} is compiled into the kernel and must be a plain number; got a traced value {value}.")
    if np.ndim(value) != 0 or isinstance(value, str | bytes):
        raise TypeError(f"{op}: {name} must be a number; got {value!r}.")
    return float(value)


def axis_index(op: str, axis: Any, ndim: int) -> int:
    """`axis` as an index in ``0..ndim-1``; ValueError if there is no such axis."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise TypeError(f"{op}: axis must be an int or a tuple of ints; got {axis!r}.")
    if not -ndim <= axis < ndim:
        raise ValueError(f"{op}: axis {axis} does not exist in an array of {ndim} dimensions.")
    return int(axis) % ndim


def kernel_floats(*operands: Any, **_: Any) -> str | None:
    """The limit of kernels that serve float32, bfloat16 and float16: the reason against these operands, if any."""
    wrong = {
        str(x.dtype) for x in operands if x is not None and jnp.issubdtype(x.dtype, jnp.floating) and x.dtype not in KERNEL_FLOATS
    }
    return f"no kernel for dtype {', '.join(sorted(wrong))} (only float32, bfloat16, float16)" if wrong else None


def broadcast(op: str, what: str, **shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that these broadcast to; ValueError if they do not."""
    try:
        return jnp.broadcast_shapes(*shapes.values())
    except ValueError:
        got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{op}: {what} must broadcast together; got {got}.") from None
