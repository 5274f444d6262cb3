"""What a launcher is told, and how it launches."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtops._compat.triton import kernel_function
from jtops.core import notes
from jtops.core.call import triton_call
from jtops.core.target import Target
from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame import tuned
from jtops.kernels._lib.frame.config import Config

__all__ = ["Config", "Launch", "Rows", "stages_that_fit"]


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
    device: str | None  # the kind of the GPU that will run it; None where only its architecture is known, or it is interpreted
    interpret: bool

    def choose(self, heuristic: Config, kernels: tuple, arrays: Sequence, sizes: Mapping[str, int], name="", **flags) -> Config:
        """The config of a kernel: what the call asks for, else what a table has for such a problem, else `heuristic`.

        A table's entry is taken for all sizes that round up to the same powers of two, if all else is equal. So whatever else makes
        another kernel of a config, or lets it take more shared memory, has to be among the flags, alignments above all.

        Args:
          heuristic: valid for every such problem.
          kernels: those that the config may launch; an entry that was measured with others is not taken.
          arrays: what they read; the dtypes matter, and which are None.
          sizes: by name.
          name: tells the choices of one stage apart, or makes one of two stages' that launch the same; the stage's by default.
          **flags: by name; None, booleans, numbers, text and tuples of these.
        """
        problem = tuned.Problem.of(self.op, name or self.stage, arrays, sizes, flags)
        choice = tuned.Choice(problem, heuristic, kernels, None if self.interpret else str(self.target), self.device)
        if self.config is not None:
            return choice.settled(self.config.said_by("explicit"))
        return choice.settled(tuned.forced(problem) or tuned.lookup(choice) or heuristic)

    @property
    def residuals(self) -> bool:
        """Forward: are the residuals asked for?"""
        return self.stage == "fwd"

    def __call__(self, kernel, *args, out_type, grid, config: Config, name: str = "", flops: int = 0, **kwargs):
        """`triton_call` with the name, target, mode and cost of this launch."""
        arrays = [x for x in (*args, *kwargs.values(), *jax.tree.leaves(out_type)) if hasattr(x, "shape") and hasattr(x, "dtype")]
        names = kernel_function(kernel).arg_names
        if (config["cluster_size"] or 1) > 1 and "CLUSTER" not in names:
            raise UnsupportedError(
                f"{self.op}: {config!r} asks for clusters, which {kernel_function(kernel).__name__} does not use: rows that "
                "BLOCK_N * cluster_size does not hold are read twice, and only softmax and norms along the last axis share rows."
            )
        moved = sum(int(np.prod(x.shape, dtype=np.int64)) * np.dtype(x.dtype).itemsize for x in arrays)
        with notes.config_from(config.source):
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
