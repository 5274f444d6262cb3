"""Config: the block sizes and launch options of one kernel launch."""

import functools
from collections.abc import Collection
from typing import Any

import numpy as np

_OPTIONS = {"num_warps": 4, "num_stages": None, "cluster_size": 1, "variant": None}  # and their defaults


class Config:
    """How a kernel is tiled and launched: its block sizes by name, and the launch options.

    >>> jtops.softmax(x, config=jtops.Config(BLOCK_M=1, BLOCK_N=4096, num_warps=8))

    It is immutable and hashable; the op's docstring says which blocks it has. ``PROGRAMS``, where an op has it, is the number of
    programs that share the work, and None is one for each tile. ``variant`` names one of several kernels, where an op has such: it
    is taken, or an error says why it does not fit; with no blocks beside it, its tiles are the usual ones. `source` says where a
    config comes from, for `jtops.explain`, and makes no difference to anything else.
    """

    __slots__ = ("_items", "source")

    _items: tuple[tuple[str, Any], ...]
    source: str

    def __init__(
        self,
        *,
        num_warps: int = 4,
        num_stages: int | None = None,
        cluster_size: int | None = 1,
        variant: str | None = None,
        source: str = "heuristic",
        **blocks: int | None,
    ):
        cluster_size = 1 if cluster_size is None else cluster_size
        if cluster_size not in range(1, 9):
            raise ValueError(f"Config: cluster_size must be an int from 1 to 8; got {cluster_size!r}.")
        plain = lambda value: int(value) if isinstance(value, np.integer) else value
        num_stages, cluster_size = plain(num_stages), int(cluster_size)
        powers: dict[str, Any] = {name: plain(value) for name, value in {"num_warps": num_warps, **blocks}.items()}
        for name, value in powers.items():
            if name == "PROGRAMS" and value is None:
                continue
            power = name not in ("PROGRAMS", "WARPGROUPS")  # a block is one of these; a number of workers need not be
            if not isinstance(value, int) or value < 1 or (power and value & (value - 1)):
                rule = "a power of two" if power else "positive, or None" if name == "PROGRAMS" else "positive"
                raise ValueError(f"Config: {name} must be {rule}; got {value!r}.")
        if variant is not None and not isinstance(variant, str):
            raise TypeError(f"Config: variant must be a name or None; got {variant!r}.")
        items = tuple(sorted({**powers, "num_stages": num_stages, "cluster_size": cluster_size, "variant": variant}.items()))
        object.__setattr__(self, "_items", items)
        object.__setattr__(self, "source", source)

    def __setattr__(self, name, value):
        raise AttributeError(f"a Config cannot be changed: make another one to have another {name}.")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def said_by(self, source: str) -> "Config":
        """The same config with another source."""
        return Config(**dict(self._items), source=source)

    def plain(self) -> "Config":
        """The same config without the name of a variant."""
        return Config(**self.kwargs, source=self.source)

    def concerns(self, variant: str, blocks: Collection[str]) -> bool:
        """Whether it is for a variant of this name with these blocks."""
        return self["variant"] in (None, variant) and (self.blocks.keys() == set(blocks) or self.names_only)

    @property
    def names_only(self) -> bool:
        """Whether it names a variant and says nothing else."""
        return self["variant"] is not None and self == Config(variant=self["variant"])

    def without(self, *names: str) -> "Config":
        """The same config without these blocks: a launch takes no blocks that its kernel lacks."""
        return Config(**{k: v for k, v in self._items if k not in names}, source=self.source)

    @property
    def blocks(self) -> dict[str, int | None]:
        """Block sizes by name."""
        return {k: v for k, v in self._items if k not in _OPTIONS}

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {k: v for k, v in self._items if k != "variant"}

    def __getitem__(self, name: str):
        return dict(self._items)[name]

    def __eq__(self, other):
        return isinstance(other, Config) and self._items == other._items

    def __hash__(self):
        return hash(self._items)

    def __repr__(self):
        said = (f"{k}={v}" for k, v in self._items if k not in _OPTIONS or k == "num_warps" or v != _OPTIONS[k])
        return f"Config({', '.join(said)})"

    def __reduce__(self):
        return functools.partial(Config, **dict(self._items), source=self.source), ()
