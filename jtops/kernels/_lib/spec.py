"""SPEC: what an op says about itself as data. Conformance tests, the lowering tier, benchmarks and tuning are driven by it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jtops.kernels._lib.frame.launch import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A random operand: its shape, its dtype, and how its elements are drawn.

    `dtype` is None where the operand has the floating dtype that the case is run in. `values` takes a NumPy generator, or what has
    its methods ``normal``, ``random`` and ``integers``, and a shape.
    """

    shape: tuple[int, ...]
    dtype: str | None
    values: Callable[[Any, tuple[int, ...]], Any]

    def draw(self, rng: Any) -> Any:
        """Draw an array, of float64 or of the input's own dtype."""
        values = self.values(rng, self.shape)
        return values if self.dtype is None else values.astype(self.dtype)

    def type(self, dtype: str) -> jax.ShapeDtypeStruct:
        """The shape and dtype in a run of the case in `dtype`."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype or dtype))


def normal(shape: tuple[int, ...], mean: float = 0.0, std: float = 1.0) -> Input:
    """Floating numbers."""
    return Input(shape, None, lambda rng, shape: rng.normal(mean, std, shape))


def mask(shape: tuple[int, ...], p: float) -> Input:
    """Booleans, true with probability `p`."""
    return Input(shape, "bool", lambda rng, shape: rng.random(shape) < p)


def ids(shape: tuple[int, ...], segments: int, padding: int = 0) -> Input:
    """Up to `segments` segments of random lengths, one after another along the last axis; its last `padding` elements are -1."""

    def values(rng, shape):
        drawn = np.sort(rng.integers(0, segments, shape), -1)
        drawn[..., shape[-1] - padding :] = -1
        return drawn

    return Input(shape, "int32", values)


def lengths(shape: tuple[int, ...], upto: int, least: int = 0) -> Input:
    """Whole numbers from `least` to `upto`."""
    return Input(shape, "int32", lambda rng, shape: rng.integers(least, upto + 1, shape))


def labels(shape: tuple[int, ...], n: int) -> Input:
    """Indices below `n`."""
    return Input(shape, "int32", lambda rng, shape: rng.integers(0, n, shape))


def partition(total: int, parts: int) -> Input:
    """The sizes of `parts` groups, some of them maybe empty, that make up `total`."""

    def values(rng, shape):
        cuts = np.sort(rng.integers(0, total + 1, shape[0] - 1))
        return np.diff(cuts, prepend=0, append=total)

    return Input((parts,), "int32", values)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One call that the op must get right; `why` says what it is there to catch.

    `inputs` are the operands that are given, by the public function's names; where that takes a pair of arrays, a pair. Tests and
    tools have a case's operands in a row, in the order of `inputs`, the arrays of a pair one by one.
    """

    id: str
    inputs: Mapping[str, Any]
    why: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Config | None = None
    backward_kernels: int | None = None  # of a `small` case whose gradient adds another number of custom calls than the first's
    axes: str = ""  # of `small` and `meshed` cases: names of the operands' axes and the first result's, "b m n, n -> b m n"

    @property
    def given(self) -> list[Input]:
        """The operands that are given, in a row."""
        return jax.tree.leaves(tuple(self.inputs.values()))

    def keywords(self, operands: Sequence) -> dict[str, Any]:
        """Operands that come in a row, by the names of `inputs`."""
        tree = jax.tree.structure(tuple(self.inputs.values()))
        return dict(zip(self.inputs, jax.tree.unflatten(tree, operands), strict=True))

    def types(self, dtype: str) -> list[jax.ShapeDtypeStruct]:
        """The operands' shapes and dtypes."""
        return [i.type(dtype) for i in self.given]

    def named_axes(self) -> tuple[list[list[str]], list[str]]:
        """The axes of each operand, and of the first result; a number in place of a name is an axis of that size, whatever the
        others have.
        """
        operands, _, result = self.axes.partition("->")
        named = [text.split() for text in operands.split(",")]
        shapes = [i.shape for i in self.given]
        if not result or [len(n) for n in named] != [len(s) for s in shapes]:
            raise ValueError(f"case {self.id!r}: the axes {self.axes!r} are not those of operands {shapes}.")
        return named, result.split()

    def resized(self, axis: str, size: int) -> "Case":
        """The case with another size of an axis, in all operands that have it."""
        named = iter(self.named_axes()[0])
        new = lambda i: dataclasses.replace(
            i, shape=tuple(size if a == axis else n for a, n in zip(next(named), i.shape, strict=True))
        )
        return dataclasses.replace(self, inputs={k: jax.tree.map(new, i) for k, i in self.inputs.items()})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Meshed(Case):
    """A case for meshes of up to 8 devices; they divide every axis that has a name, of which each is one of these."""

    split: str  # axes that devices share out: nothing moves between them in the forward
    gathered: str = ""  # axes that a device must hold in full: they are gathered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """An op as data. `function` is the public function; ``tests/oracles.py`` has the truth under the op's name."""

    name: str
    function: Callable
    small: tuple[Case, ...]  # for transforms; the plainest first
    meshed: tuple[Meshed, ...]  # for meshes; the plainest first
    cases: tuple[Case, ...]  # for values and gradients
    compiled: tuple[Case, ...]  # real sizes, compiled for every supported GPU
    backward_kernels: int  # custom calls that the gradient of the first of `small` adds
    kept: int  # arrays of the first operand's size that are kept for its gradient, in the first of `small`
    forward_bytes: Callable[..., int]  # (result, **operands): the fewest bytes that the forward must move
    backward_bytes: Callable[..., int]  # the same for the backward, with gradients of all floating operands

    # For ops bound by arithmetic: (options, **operands) -> floating-point operations that the maths needs.
    forward_flops: Callable[..., int] | None = None
    backward_flops: Callable[..., int] | None = None
    result_dtype: str | None = None  # of results that do not have the operands'; float64 for float64 operands
    one_dtype: bool = False  # operands of several dtypes are refused
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    tuned: tuple[Case, ...] = ()  # sizes of models, the most valuable first: what `jtops.tune` begins with
    launches: str = ""  # the op whose launches it makes, where that is another
    alike: str = ""  # an op that runs the same kernels: what that op is tested for at once, this one is in `make test-all`
    model: bool = False  # stands for all ops in those tests of the frame that run for some ops at once

    @property
    def sizes(self) -> tuple[Case, ...]:
        """The real ones."""
        return (*self.tuned, *(case for case in self.compiled if case not in self.tuned))

    @property
    def operands(self) -> dict[str, Any]:
        """What the cases give as inputs, in the order of the function's parameters, each as the first case that gives it."""
        found: dict[str, Any] = {}
        for case in (*self.compiled, *self.small, *self.meshed, *self.cases):
            found = {**case.inputs, **found}
        return {name: found[name] for name in inspect.signature(self.function).parameters if name in found}

    def call(self, case: Case, **more: Any) -> Callable:
        """The op with the options of a case, and `more`: a function of its operands in a row."""
        config = {} if case.config is None or more.get("implementation") == "xla" else {"config": case.config}
        options = {**case.options, **config, **more}
        return lambda *operands: self.function(**case.keywords(operands), **options)


def floating(operands: Sequence) -> tuple[int, ...]:
    """Positions of the operands that have gradients."""
    return tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))


def with_gradients(f: Callable) -> Callable:
    """A program of `f`: ``(*operands, cotangent=None) -> (f(*operands), gradients of the floating operands)``.

    The cotangent of a program that is only compiled or timed does not matter: where none is given, the value serves as its own.
    """

    def program(*operands, cotangent=None):
        where = floating(operands)

        def of(*moved):
            full = list(operands)
            for i, x in zip(where, moved, strict=True):
                full[i] = x
            return f(*full)

        value, pullback = jax.vjp(of, *(operands[i] for i in where))
        return value, pullback(value if cotangent is None else cotangent)

    return program
