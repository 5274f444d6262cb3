"""The vmap of a kernel call: one launch per element in a loop, or the batch as one more grid axis, as its author says."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jtops._compat import jax as jax_compat
from jtops.core.launch.binding import GRID_LIMITS
from jtops.core.types import Constexpr, Descriptor, Operand, Output, as_scalar, leaves
from jtops.errors import UnsupportedError


@dataclasses.dataclass(frozen=True)
class GridBatch:
    """The vmap of a kernel by a grid axis: one launch serves the whole batch, and what all elements share is not copied.

    The kernel takes ``program_id(axis)`` for the number of the batch element and moves each pointer by that many batch strides:

        b = tl.program_id(1).to(tl.int64)
        x_ptr += b * x_batch
        o_ptr += b * o_batch

    ``triton_call(..., vmap_method=jtops.GridBatch(axis=1, strides={"x_ptr": "x_batch", "o_ptr": "o_batch"}))`` gives the parameters
    named on the right: the elements between two batch elements, 0 for an operand that all share and where nothing is vmapped.
    The grid has size 1 along `axis` before vmap, and the size of the batch after.

    Nested vmaps make one batch of the product of their sizes. An operand that some but not all of them map is copied to be
    mapped by all: one stride cannot say more.

    Args:
      axis: grid axis, 0, 1 or 2. Axes 1 and 2 hold at most 65535 elements, axis 0 2^31 - 1.
      strides: pointer parameter -> parameter that receives its batch stride, for every result and every operand that may be
        mapped. These parameters are not given in the call.
    """

    axis: int
    strides: Any

    def __post_init__(self):
        if self.axis not in (0, 1, 2):
            raise ValueError(f"GridBatch: axis must be 0, 1 or 2; got {self.axis!r}.")
        strides = dict(self.strides) if isinstance(self.strides, Mapping) else None
        if not strides or not all(isinstance(n, str) for pair in strides.items() for n in pair):
            raise TypeError(
                f"GridBatch: strides must map names of pointer parameters to names of parameters; got {self.strides!r}."
            )
        if len(set(strides.values())) < len(strides):
            raise ValueError(f"GridBatch: each pointer needs a stride parameter of its own; got {strides!r}.")
        object.__setattr__(self, "strides", tuple(sorted(strides.items())))


def with_strides(kernel, method, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Check `method` against the kernel's parameters; return the call's keyword arguments, batch strides included."""
    if method is None or method == "sequential":
        return kwargs
    if not isinstance(method, GridBatch):
        raise ValueError(
            f'triton_call of kernel {kernel.__name__}: vmap_method must be None, "sequential" or a jtops.GridBatch, which says how '
            f"the batch becomes a grid axis; got {method!r}."
        )
    params = [p.name for p in kernel.params]
    for name in (n for pair in method.strides for n in pair):
        if name not in params:
            raise TypeError(f"GridBatch: {name!r} is not a parameter of {kernel.__name__}({', '.join(params)}).")
    for _, stride in method.strides:
        if stride in kwargs:
            raise TypeError(f"kernel {kernel.__name__}: parameter {stride!r} is set by vmap_method; do not give it.")
    return kwargs | {stride: 0 for _, stride in method.strides}


def check(kernel, method, bound, aliases, grid) -> None:
    """Raise a ValueError unless `method` knows every array that vmap is certain to map, and has a grid axis for itself."""
    if not isinstance(method, GridBatch):
        return
    strides, params, written = dict(method.strides), dict(bound), dict(aliases)
    for pointer in strides:
        if not isinstance(params[pointer], Operand | Output):
            raise ValueError(f"kernel {kernel.__name__}: GridBatch has a stride for {pointer!r}, which is no array in this call.")
    for _, name, param in leaves(bound):
        if isinstance(param, Descriptor):
            raise ValueError(
                f"kernel {kernel.__name__}: GridBatch cannot move the tensor descriptor {name!r} by a stride; use a pointer, or "
                'vmap_method="sequential".'
            )
        if (isinstance(param, Output) or (isinstance(param, Operand) and param.index in written)) and name not in strides:
            raise ValueError(f"kernel {kernel.__name__}: GridBatch needs the stride parameter of result {name!r}; got {strides}.")
    if grid[method.axis] != 1:
        raise ValueError(
            f"kernel {kernel.__name__}: GridBatch takes grid axis {method.axis} for the batch, where the call's own grid must be "
            f"1; got grid {grid}."
        )


def batch(bind, args, dims, *, call):
    """Apply the batching rule; `bind(args, call)` binds the primitive."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    if call.vmap_method is None:
        raise UnsupportedError(
            f"kernel {call.name}: triton_call has no vmap rule, because only its author knows what a program of the grid does. Say "
            'it: vmap_method="sequential" (a loop of launches) or vmap_method=jtops.GridBatch(...) (the batch as a grid axis); or '
            "wrap the call in jax.custom_batching.custom_vmap."
        )
    if any(isinstance(jax.typeof(x), jax_compat.AbstractRef) for x in args):
        raise UnsupportedError(
            f"kernel {call.name}: no vmap of a call that changes a Ref; pass its value and alias a result to it."
        )
    if size == 0:
        outs = [jnp.zeros((0, *t.shape), t.dtype) for t in call.out_types]
    else:
        outs = (_sequential if call.vmap_method == "sequential" else _grid)(bind, args, dims, size, call)
    return outs, [0] * len(outs)


def _sequential(bind, args, dims, size, call):
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True) if d is not None]

    def one(own):
        own = iter(own)
        return bind([x if d is None else next(own) for x, d in zip(args, dims, strict=True)], call)

    return jax.lax.map(one, mapped)


def _grid(bind, args, dims, size, call):
    axis, names = call.vmap_method.axis, dict(call.vmap_method.strides)
    lead = 1 if call.batched else 0  # mapped operands and results have one axis for all batches so far
    total, earlier = size * call.grid[axis], [call.grid[axis]] * lead
    if total > GRID_LIMITS[axis]:
        raise ValueError(
            f"kernel {call.name}: a batch of {total} elements on grid axis {axis}, which holds at most {GRID_LIMITS[axis]}. Use "
            'axis 0 for the batch, or vmap_method="sequential".'
        )
    had, written = call.batched or (False,) * len(args), dict(call.aliases)
    batched = tuple(h or d is not None or i in written for i, (h, d) in enumerate(zip(had, dims, strict=True)))

    def collapsed(x, dim, had):
        x = x[None] if dim is None else jnp.moveaxis(x, dim, 0)
        x = x[:, None] if lead and not had else x
        core = x.shape[1 + lead :]
        return jnp.broadcast_to(x, (size, *earlier, *core)).reshape(total, *core)

    args = [collapsed(x, d, h) if b else x for x, d, h, b in zip(args, dims, had, batched, strict=True)]
    elements = {}  # of a batch element, by the parameter that asks
    for _, name, param in leaves(call.bound):
        if isinstance(param, Output):
            elements[names[name]] = math.prod(call.out_types[param.index].shape[lead:])
        if isinstance(param, Operand) and batched[param.index]:
            if name not in names:
                raise UnsupportedError(
                    f"kernel {call.name}: vmap maps operand {name!r}, for which GridBatch has no stride parameter; it has {names}."
                )
            elements[names[name]] = math.prod(args[param.index].shape[1:])
    declared = {p.name: p.annotation_type for p in call.kernel.params}
    number = lambda n, old, value: Constexpr(value) if isinstance(old, Constexpr) else as_scalar(value, declared[n])
    new = dataclasses.replace(
        call,
        bound=tuple((n, number(n, p, elements[n]) if n in elements else p) for n, p in call.bound),
        grid=tuple(total if i == axis else g for i, g in enumerate(call.grid)),
        out_types=tuple(jax.ShapeDtypeStruct((total, *t.shape[lead:]), t.dtype) for t in call.out_types),
        cost=None if call.cost is None else tuple((k, v * size) for k, v in call.cost),
        batched=batched,
    )
    return [o.reshape(size, *t.shape) for o, t in zip(bind(args, new), call.out_types, strict=True)]
