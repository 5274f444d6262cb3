"""What a launcher is told, and how it launches."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtops.core.call import triton_call
from jtops.core.compat import kernel_function
from jtops.core.target import Target


class Config:
    """How a kernel is tiled and launched: its block sizes by name, and the launch options.

    >>> jtops.softmax(x, config=jtops.Config(BLOCK_M=1, BLOCK_N=4096, num_warps=8))

    Immutable and hashable; which blocks an op has is said in its docstring.
    """

    __slots__ = ("_items",)

    def __init__(self, *, num_warps: int = 4, num_stages: int | None = None, cluster_size: int | None = None, **blocks: int):
        if cluster_size is not None and cluster_size not in range(1, 9):
            raise ValueError(f"Config: cluster_size must be an int from 1 to 8; got {cluster_size!r}.")
        powers: dict[str, Any] = {"num_warps": num_warps, **blocks}
        for name, value in powers.items():
            if not isinstance(value, int) or value < 1 or (name != "PROGRAMS" and value & (value - 1)):
                rule = "positive" if name == "PROGRAMS" else "a power of two"
                raise ValueError(f"Config: {name} must be {rule}; got {value!r}.")
        self._items = tuple(sorted({**powers, "num_stages": num_stages, "cluster_size": cluster_size}.items()))

    @property
    def blocks(self) -> dict[str, int]:
        """Block sizes by name."""
        return {k: v for k, v in self._items if k not in ("num_warps", "num_stages", "cluster_size")}

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return dict(self._items)

    def __getitem__(self, name: str):
        return dict(self._items)[name]

    def __eq__(self, other):
        return isinstance(other, Config) and self._items == other._items

    def __hash__(self):
        return hash(self._items)

    def __repr__(self):
        return f"Config({', '.join(f'{k}={v}' for k, v in self._items if v is not None)})"


def stages_that_fit(target: Target, stages: int, nbytes: int) -> int:
    """So many stages, or as many as the target's shared memory holds, where each but one has `nbytes` on their way."""
    spare = 8192  # for reductions
    return max(1, min(stages, 1 + (target.max_shared_bytes - spare) // nbytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How an operand's batch rows serve the rows of a call: row b of the call reads the operand's row ``b // inner % own``.

    ``own == 1`` is an operand that all rows share; ``outer == inner == 1`` one that has a row for each.
    """

    outer: int
    own: int
    inner: int

    def full(self, operand: jax.Array) -> jax.Array:
        """The operand with a row per row of the call, copied if it had fewer: for operands that are rarely shared."""
        if self.outer == self.inner == 1:
            return operand
        core = operand.shape[1:]
        parts = jnp.broadcast_to(operand[None, :, None], (self.outer, self.own, self.inner, *core))
        return parts.reshape(self.outer * self.own * self.inner, *core)

    def sum(self, gradients: jax.Array) -> jax.Array:
        """Sum in float32, over the rows that share one of the operand's, what has a row per row of the call."""
        parts = gradients.reshape(self.outer, self.own, self.inner, *gradients.shape[1:])
        return jnp.sum(parts, (0, 2), dtype=jnp.promote_types(gradients.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One call of a launcher: everything but the arrays. Calling it launches a kernel."""

    op: str
    stage: str
    batch: int
    rows: tuple[Any, ...]  # per operand: Rows, or None where it is absent
    wanted: tuple[bool, ...]  # backward: per operand, is its gradient asked for
    options: Mapping[str, Any]
    config: Config | None
    target: Target
    interpret: bool

    @property
    def residuals(self) -> bool:
        """Forward: are the residuals asked for?"""
        return self.stage == "fwd"

    def __call__(self, kernel, *args, out_type, grid, config: Config, name: str = "", flops: int = 0, **kwargs):
        """`triton_call` with the name, target, mode and cost of this launch."""
        arrays = [x for x in (*args, *kwargs.values(), *jax.tree.leaves(out_type)) if hasattr(x, "shape") and hasattr(x, "dtype")]
        names = kernel_function(kernel).arg_names
        moved = sum(int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize for x in arrays)
        return triton_call(
            *args,
            kernel=kernel,
            out_type=out_type,
            grid=grid,
            name=f"jtops_{self.op}_{name or self.stage}",
            compute_capability=str(self.target),
            interpret=self.interpret,
            cost_estimate={"flops": flops, "bytes_accessed": moved},
            **{k: v for k, v in config.kwargs.items() if k not in config.blocks or k in names},  # others size the grid
            **kwargs,
        )
