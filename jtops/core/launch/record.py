"""The record of one bound call."""

import dataclasses
from typing import Any

import jax

from jtops.core.launch.vmap import GridBatch
from jtops.core.target import Target
from jtops.core.types import Bound


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCall:
    """Everything about a call but its arrays. It is hashable, because it is the primitive's one parameter and part of JAX's cache
    keys.
    """

    kernel: Any = dataclasses.field(hash=False)  # compared by identity; Triton's hash of it would parse its source each time
    bound: Bound
    grid: tuple[int, int, int]
    out_types: tuple[jax.ShapeDtypeStruct, ...]
    name: str
    options: tuple[tuple[str, Any], ...]
    target: Target | None  # the one asked for; None: this process' own GPU
    interpret: bool
    has_side_effect: bool
    cost: tuple[tuple[str, int], ...] | None
    metadata: bytes
    aliases: tuple[tuple[int, int], ...] = ()  # (array operand, output) that are one buffer; the output has no parameter
    zeroed: tuple[int, ...] = ()  # outputs set to zero before each launch
    launch: str | None = None  # the launch path asked for
    vmap_method: str | GridBatch | None = None
    batched: tuple[bool, ...] = ()  # GridBatch: which operands have a batch axis, once vmap has given one
    origin: tuple[str, str] = dataclasses.field(default=("", ""), compare=False)  # see `notes.origin`; changes nothing
