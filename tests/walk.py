"""Walk: single programs of a launch of real size, run by the interpreter over a memory that holds no data but checks each address.

What a kernel does at the edges of 32 bits shows without the gigabytes: every access has to lie in its buffer, and is counted.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

from jtops.core.interpret import host_call
from jtops.core.interpret import run as interpreter
from jtops.core.interpret.machine import Memory
from jtops.core.types import Output, array_of, leaves

_APART = 1 << 44  # bytes between buffers: no offset that has wrapped ends in another


@dataclasses.dataclass
class Touched:
    """What a walk met of one buffer, in elements."""

    first: int | None = None
    last: int | None = None
    count: int = 0

    def add(self, offsets: np.ndarray) -> None:
        if offsets.size:
            low, high = int(offsets.min()), int(offsets.max())
            self.first = low if self.first is None else min(self.first, low)
            self.last = high if self.last is None else max(self.last, high)
            self.count += offsets.size


class Hollow(Memory):
    """Buffers of these types that are nowhere: every load finds zeros. `loaded` and `stored` say by parameter what was met."""

    def __init__(self, inputs, outputs, names):
        place = iter(range(_APART, 1 << 62, _APART))
        made = lambda avals: [
            SimpleNamespace(
                shape=a.shape,
                dtype=np.dtype(a.dtype),
                nbytes=a.size * np.dtype(a.dtype).itemsize,
                ctypes=SimpleNamespace(data=at),
            )
            for a, at in zip(avals, place, strict=False)
        ]
        self.operands, self.results = made(inputs), made(outputs)
        every = [*self.operands, *self.results]
        self.starts = np.array([b.ctypes.data for b in every], np.uint64)
        self.ends = self.starts + np.array([b.nbytes for b in every], np.uint64)
        index = [(False, i) for i in range(len(inputs))] + [(True, i) for i in range(len(outputs))]
        self.names = [names.get(i, "") for i in index]
        self.writable = np.arange(len(every)) >= len(inputs)
        self.loaded: dict[str, Touched] = {name: Touched() for name in self.names}
        self.stored: dict[str, Touched] = {name: Touched() for name in self.names}

    def _note(self, touched, addresses, which, itemsize):
        for b in np.unique(which):
            touched[self.names[b]].add((addresses[which == b] - self.starts[b]).astype(np.int64) // itemsize)

    def load(self, addresses, mask, other):
        addresses, mask, other = np.broadcast_arrays(addresses, mask, other)
        values = np.array(other)
        which = self.find(addresses[mask], values.dtype.itemsize, "load")
        self._note(self.loaded, addresses[mask], which, values.dtype.itemsize)
        values[mask] = 0
        return values

    def store(self, addresses, values, mask):
        addresses, values, mask = np.broadcast_arrays(addresses, values, mask)
        which = self.find(addresses[mask], values.dtype.itemsize, "store")
        self._note(self.stored, addresses[mask], which, values.dtype.itemsize)

    def update(self, addresses, values, mask, change):
        raise NotImplementedError("a walk has no atomic operations")


@dataclasses.dataclass(frozen=True)
class Walked:
    """A launch that can be walked: ``grid`` programs, of which `walk` runs some."""

    kernel: Any
    bound: Any
    grid: tuple[int, int, int]
    inputs: tuple
    outputs: tuple

    @property
    def name(self) -> str:
        return self.kernel.__name__

    def walk(self, *programs: int) -> Hollow:
        """Run these programs; negative ones count from the last."""
        names = {(isinstance(a, Output), a.index): name for _, name, p in leaves(self.bound) if (a := array_of(p))}
        memory = Hollow(self.inputs, self.outputs, names)
        chosen = [(p % self.grid[0], 0, 0) for p in programs]
        interpreter._machine().run(self.kernel, self.bound, self.grid, memory, chosen)
        return memory


def launches(f, *operands: jax.ShapeDtypeStruct) -> list[Walked]:
    """The interpreted launches of a program, of operands of any size."""
    found = []

    def noted(ctx, *values, key, function, **more):
        run: functools.partial = function
        kernel, bound, grid = run.args
        found.append(Walked(kernel, bound, grid, tuple(ctx.avals_in), tuple(ctx.avals_out)))
        return lower(ctx, *values, key=key, function=function, **more)

    lower = host_call.lower
    with mock.patch.object(host_call, "lower", noted):
        jax.jit(f).trace(*operands).lower(lowering_platforms=("cpu",))
    return found
