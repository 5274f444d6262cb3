"""SPEC: what an op says about itself as data. Conformance tests, the lowering tier and benchmarks are driven by it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jtops.kernels._lib.frame.launch import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """A random operand: normal with `mean` and `std`, or boolean, true with probability `true`."""

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 1.0
    true: float | None = None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """A float64 or bool array."""
        if self.true is not None:
            return rng.random(self.shape) < self.true
        return rng.normal(self.mean, self.std, self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One call that the op must get right; `why` says what it is there to catch."""

    id: str
    inputs: tuple[Input | None, ...]
    why: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config: Config | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """An op as data. `function` is the public function; ``tests/oracles.py`` has the truth under the op's name."""

    name: str
    function: Callable
    operands: tuple[str, ...]  # parameters of `function` that a case's inputs are for
    small: Case  # for transforms
    meshed: Case  # for meshes of 8 devices: the first operand's first and last axis can be split; so can those of its rank
    cases: tuple[Case, ...]  # for values and gradients
    compiled: tuple[Case, ...]  # real sizes, compiled for every supported GPU
    backward_kernels: int  # custom calls that the gradient of `small` adds
    forward_bytes: Callable[..., int]  # (result, *operands): the fewest bytes that the forward must move
    backward_bytes: Callable[..., int]  # the same for the backward, with gradients of all floating operands

    # Of ops bound by arithmetic: (options, *operands) -> floating-point operations that the maths needs.
    forward_flops: Callable[..., int] | None = None
    backward_flops: Callable[..., int] | None = None
    one_dtype: bool = False  # operands of several dtypes are refused
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
