"""The record of what a caller of triton_call asks for."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jtops import config
from jtops.core.launch.vmap import GridBatch
from jtops.core.target import Target
from jtops.core.types import is_shaped

Grid = int | Sequence[int]
GridOrFn = Grid | Callable[[dict[str, Any]], Grid]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Request:
    """The arguments of `triton_call`, which explains them.

    It is a pytree of all of them. Code that decides something about a call, such as the config of a tuned kernel, hands on another
    request that says so.
    """

    args: tuple
    kwargs: dict[str, Any]  # the kernel's parameters by name
    kernel: Any
    out_type: Any
    grid: GridOrFn | None
    name: str
    num_warps: int | None
    num_stages: int | None
    num_ctas: int | None
    cluster_size: int | None
    compute_capability: int | str | Target | None
    backend_options: Mapping[str, Any] | None
    input_output_aliases: Mapping[int, int] | None
    zeroed_outputs: Sequence[int] | Callable[[dict[str, Any]], Sequence[int]]
    interpret: bool | None
    debug: bool
    has_side_effect: bool
    cost_estimate: Mapping[str, int] | None
    serialized_metadata: bytes
    vmap_method: str | GridBatch | None
    sharding_rule: Any

    def interpreted(self) -> bool:
        """Whether NumPy runs the kernel, as the call or the user's setting says."""
        return config.implementation.value == "interpret" if self.interpret is None else bool(self.interpret)

    def results(self) -> tuple[list, Any]:
        """The leaves of `out_type`, and its structure."""
        return jax.tree.flatten(self.out_type, is_leaf=is_shaped)


OPTIONS = tuple(field.name for field in dataclasses.fields(Request) if field.name not in ("args", "kwargs"))
