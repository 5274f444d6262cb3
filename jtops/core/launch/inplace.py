"""Outputs that share a buffer with an operand, outputs zeroed before the launch, and Refs: what a kernel changes in place."""

import dataclasses
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtops.core.types import Bound, array_of, leaves


def checked_aliases(kernel, aliases: Mapping[int, int] | None, outs, given) -> dict[int, int]:
    """``input_output_aliases`` as a dict of ints, each output named once and existing; no Ref among what is `given`."""
    pairs = dict(aliases or {})
    if pairs and any(isinstance(x, jax.Ref) for x in jax.tree.leaves(given)):
        raise ValueError(
            f"kernel {kernel.__name__}: input_output_aliases cannot be combined with Ref operands, which are changed in place "
            "already."
        )
    if not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for pair in pairs.items() for i in pair):
        raise TypeError(f"kernel {kernel.__name__}: input_output_aliases maps operand indices to output indices; got {aliases!r}.")
    if len(set(pairs.values())) < len(pairs):
        raise ValueError(f"kernel {kernel.__name__}: input_output_aliases must be a bijection; got {aliases!r}.")
    if bad := [k for k in pairs.values() if not 0 <= k < len(outs)]:
        raise ValueError(f"kernel {kernel.__name__}: input_output_aliases names output {bad[0]}; out_type has {len(outs)}.")
    return {int(i): int(k) for i, k in pairs.items()}


def alias_pairs(kernel, aliases: dict[int, int], operands: Bound, arrays, outs) -> tuple[tuple[int, int], ...]:
    """The pair (array, output) of every alias; `operands` are the bound parameters that were given and are not constexpr.

    Raises:
      ValueError: no such operand, one that is no array, one Ref given twice, or a shape or dtype that differs from the output's.
    """
    what = f"kernel {kernel.__name__}: input_output_aliases"
    refs = [x for x in arrays if isinstance(x, jax.Ref)]
    if len({id(x) for x in refs}) < len(refs):
        raise ValueError(f"kernel {kernel.__name__}: one Ref is given to two parameters; a kernel may write what another reads.")
    flat, pairs = [(name, p) for _, name, p in leaves(operands)], []
    for i, k in aliases.items():
        if not 0 <= i < len(flat):
            raise ValueError(f"{what} names operand {i}; there are {len(flat)}: {', '.join(name for name, _ in flat)}.")
        name, param = flat[i]
        array = array_of(param)
        if array is None:
            raise ValueError(f"{what} names operand {i}, {name}, which is not an array.")
        given = arrays[array.index]
        have, want = jax.ShapeDtypeStruct(np.shape(given), jax.dtypes.canonicalize_dtype(given.dtype)), outs[k]
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            raise ValueError(
                f"{what} gives operand {i}, {name}, to output {k}, but it is {have.dtype}{list(have.shape)} and the output "
                f"{want.dtype}{list(want.shape)}; one buffer has one shape and dtype."
            )
        pairs.append((array.index, k))
    return tuple(sorted(pairs))


def zeroed_indices(kernel, zeroed: Sequence[int] | Callable[[dict], Sequence[int]], meta: dict[str, Any], outs) -> tuple[int, ...]:
    """``zeroed_outputs`` as sorted indices of outputs."""
    indices = tuple(zeroed(meta) if callable(zeroed) else zeroed)
    if not all(isinstance(k, numbers.Integral) and not isinstance(k, bool) and 0 <= k < len(outs) for k in indices):
        raise ValueError(
            f"kernel {kernel.__name__}: zeroed_outputs must be indices of out_type's {len(outs)} outputs; got {indices}."
        )
    return tuple(sorted(map(int, set(indices))))


def without_launch(outs, aliases, zeroed, arrays) -> list:
    """The results of a grid without programs."""
    kept = {k: arrays[i] for i, k in aliases if k not in zeroed}
    return [jnp.asarray(kept[k]) if k in kept else jnp.zeros(t.shape, t.dtype) for k, t in enumerate(outs)]


def discharged(primitive, refs: Mapping[int, Any], *args, call) -> tuple[dict[int, Any], list]:
    """Turn a call with Refs into one on their values: each becomes an operand aliased to a further output, its new value."""
    count = len(call.out_types)
    types = tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in refs.values())
    pairs = tuple((i, count + k) for k, i in enumerate(refs))
    pure = dataclasses.replace(call, out_types=call.out_types + types, aliases=call.aliases + pairs)
    results = primitive.bind(*args, call=pure)
    return dict(zip(refs, results[count:], strict=True)), results[:count]
