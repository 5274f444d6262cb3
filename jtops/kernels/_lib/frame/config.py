"""Config: the block sizes and launch options of one kernel launch."""

from typing import Any


class Config:
    """How a kernel is tiled and launched: its block sizes by name, and the launch options.

    >>> jtops.softmax(x, config=jtops.Config(BLOCK_M=1, BLOCK_N=4096, num_warps=8))

    Immutable and hashable; which blocks an op has is said in its docstring. `source` says where it came from, for `jtops.explain`,
    and makes no difference to anything else.
    """

    __slots__ = ("_items", "source")

    def __init__(self, *, num_warps: int = 4, num_stages: int | None = None, cluster_size: int | None = None, **blocks: int):
        if cluster_size is not None and cluster_size not in range(1, 9):
            raise ValueError(f"Config: cluster_size must be an int from 1 to 8; got {cluster_size!r}.")
        powers: dict[str, Any] = {"num_warps": num_warps, **blocks}
        for name, value in powers.items():
            power = name not in ("PROGRAMS", "WARPGROUPS")  # a block is one of these; a number of workers need not be
            if not isinstance(value, int) or value < 1 or (power and value & (value - 1)):
                rule = "a power of two" if power else "positive"
                raise ValueError(f"Config: {name} must be {rule}; got {value!r}.")
        self._items = tuple(sorted({**powers, "num_stages": num_stages, "cluster_size": cluster_size}.items()))
        self.source = "heuristic"

    def said_by(self, source: str) -> "Config":
        """The same config, from `source`."""
        same = Config(**self.kwargs)
        same.source = source
        return same

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
