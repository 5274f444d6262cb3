"""The launch of a kernel by an op's launcher, and what the launcher is told."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jtops._compat.triton import kernel_function
from jtops.core import notes
from jtops.core.call import triton_call
from jtops.core.descriptor import TensorDescriptor
from jtops.core.sizes import next_power_of_2
from jtops.core.target import Target
from jtops.errors import UnsupportedError
from jtops.kernels._lib.frame import tuned
from jtops.kernels._lib.frame.config import Config

__all__ = ["Config", "Launch", "Rows", "stages_that_fit"]


def stages_that_fit(target: Target, stages: int, nbytes: int) -> int:
    """The largest pipeline depth up to `stages` whose buffers fit shared memory: `nbytes` for each stage but one."""
    spare = 8192  # for reductions
    return max(1, min(stages, 1 + (target.max_shared_bytes - spare) // nbytes))


class Rows(NamedTuple):
    """How an operand's batch rows serve the rows of a call: row b of the call reads the operand's row ``b // inner % own``.

    ``own == 1`` is an operand that all rows share. A kernel takes it as one parameter, a tuple of two numbers; `row` of
    `jtops.kernels._lib.device.rows` is the formula.
    """

    inner: int
    own: int

    def sum(self, gradients: jax.Array) -> jax.Array:
        """Sum an array with a row per row of the call, in float32, over the rows that share one of the operand's."""
        parts = gradients.reshape(-1, self.own, self.inner, *gradients.shape[1:])
        return jnp.sum(parts, (0, 2), dtype=jnp.promote_types(gradients.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One call of a launcher: everything but the arrays. Calling it launches a kernel."""

    op: str
    stage: str
    batch: int
    rows: Any  # NamedTuple by operand: Rows, or None where it is absent
    wanted: Any  # NamedTuple by operand: whether its gradient is asked for; in a forward, of none
    options: Mapping[str, Any]
    config: Config | None
    target: Target
    device: str | None  # the kind of the GPU that will run it; None where only its architecture is known, or it is interpreted
    interpret: bool
    variant: str | None = None  # which one, where the stage has several
    why: str = ""  # for `explain`: why the variants before that one did not fit

    @property
    def residuals(self) -> bool:
        """Whether a forward's residuals are asked for."""
        return self.stage == "fwd"

    @property
    def clusters(self) -> bool:
        """Whether programs can be launched as clusters: not in the interpreter, where one runs after the other."""
        return not self.interpret and self.target.platform == "cuda" and int(self.target.arch) >= 90

    def _check_clusters(self, kernel: str, parameters: Iterable[str], config: Config) -> None:
        """Raise an UnsupportedError where `config` asks for clusters that this launch cannot have."""
        size = config["cluster_size"]
        if size == 1:
            return
        asked = self.config or config  # as the caller has it, with what this kernel lacks
        if "CLUSTER" not in parameters:
            raise UnsupportedError(
                f"{self.op}: {asked!r} asks for clusters, which {kernel} does not use: rows that "
                "BLOCK_N * cluster_size does not hold are read twice, and only softmax and norms along the last axis share rows."
            )
        if not self.clusters:
            where = "the interpreter" if self.interpret else self.target
            raise UnsupportedError(f"{self.op}: cluster_size={size} needs clusters, from sm_90 on; running in {where}.")
        if config["BLOCK_M"] > 1:
            raise UnsupportedError(f"{self.op}: programs of a cluster share one row at a time: BLOCK_M must be 1; got {asked!r}.")

    def full(self, operand: str, array: jax.Array) -> jax.Array:
        """`array`, which has the rows of that operand, with a row per row of the call: copied if it had fewer."""
        rows = getattr(self.rows, operand)
        if rows.own == self.batch:
            return array
        core = array.shape[1:]
        parts = (self.batch // (rows.own * rows.inner), rows.own, rows.inner)
        return jnp.broadcast_to(array[None, :, None], (*parts, *core)).reshape(self.batch, *core)

    def choose(
        self,
        heuristic: Config,
        kernels: tuple,
        arguments: Mapping[str, Any],
        *,
        name: str = "",
        rounded: Iterable[str] = (),
        aligned: Iterable[str] = (),
        **flags: Any,
    ) -> Config:
        """The config of a kernel: what the call asks for, else what a table has for such a problem, else `heuristic`.

        The table's key is read off the arguments: the dtypes of arrays, what is None, constants, and integers. An integer counts
        with its very value unless it is named in `rounded` (all that round up to one power of two are alike), in `aligned` (all
        that 16 divides alike), or in both. Floats and `Rows` make no difference. So whatever else makes another kernel of
        a config, or lets it take more shared memory, has to be among the flags.

        Args:
          heuristic: valid for every such problem.
          kernels: those that the config may launch; an entry that was measured with others is not taken.
          arguments: the launch's arguments by parameter, without those that follow from the config itself.
          rounded, aligned: names of integers; ``mask.left`` is the field of a bundle.
          name: tells the choices of one stage apart, or makes one of two stages' that launch the same; the stage's by default.
            A variant's name comes before it.
          **flags: by name; None, booleans, numbers, text and tuples of these.
        """
        name = f"{self.variant}.{name or self.stage}" if self.variant else name or self.stage
        problem = tuned.Problem(self.op, name, _key(kernels, arguments, frozenset(rounded), frozenset(aligned), flags))
        choice = tuned.Choice(problem, heuristic, kernels, None if self.interpret else str(self.target), self.device)
        if self.config is not None:
            return choice.settled(self.config.said_by("explicit"))
        return choice.settled(tuned.forced(problem) or tuned.lookup(choice) or heuristic)

    def __call__(
        self,
        kernel: Any,
        *,
        outputs: Mapping[str, jax.ShapeDtypeStruct | TensorDescriptor | None],
        zeroed: Sequence[str] = (),
        in_place: Sequence[str] = (),
        grid: Any,
        config: Config,
        name: str = "",
        flops: int = 0,
        **arguments: Any,
    ) -> dict[str, Any]:
        """`triton_call` with the name, target, mode and cost of this launch.

        Args:
          kernel: its parameters are the arguments, the outputs and the blocks of `config`.
          outputs: the output parameters by name; None is one that the kernel shall not write.
          zeroed: those of them to set to zero before the launch.
          in_place: names of arguments (``inputs.sums`` is the field of a bundle) whose arrays the kernel changes.
          grid: as for `triton_call`.
          config: blocks that the kernel lacks are an error; see `Config.without`.
          name: the launch is called ``jtops_{op}_{name}``; the stage by default.
          flops: what it computes.
          **arguments: by parameter, and options of `triton_call`.

        Returns:
          A dict by parameter, as `outputs` is, of arrays, and None where there is none; with an entry for each array changed
          `in_place`.
        """
        names = kernel_function(kernel).arg_names
        self._check_clusters(kernel_function(kernel).__name__, names, config)
        if lacks := [n for n in (*outputs, *config.blocks) if n not in names]:
            raise TypeError(
                f"{self.op}: kernel {kernel_function(kernel).__name__} has no parameter {', '.join(lacks)}; it has "
                f"{', '.join(names)}. A config's blocks that another kernel needs are left out by config.without(...)."
            )
        arguments |= {n: None for n, t in outputs.items() if t is None}
        params = [n for n, constant in _params((kernel,)).items() if n in arguments and not constant]
        places = enumerate(leaf for n in params for leaf in _leaves(n, arguments[n]))
        changed = {n: (place, jax.ShapeDtypeStruct(x.shape, x.dtype)) for place, (n, x) in places if n in in_place}
        written = {n: outputs[n] for n in names if outputs.get(n) is not None}
        types = {n: t for n, (_, t) in changed.items()} | written
        options: dict[str, Any] = {}
        if changed:
            options["input_output_aliases"] = {place: i for i, (place, _) in enumerate(changed.values())}
        if zeroed:
            options["zeroed_outputs"] = [i for i, n in enumerate(types) if n in zeroed]
        arrays = [x for x in jax.tree.leaves((arguments, written)) if hasattr(x, "shape") and hasattr(x, "dtype")]
        moved = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in arrays)
        with notes.config_from(config.source, self.why):
            out = triton_call(
                kernel=kernel,
                out_type=list(types.values()),
                grid=grid,
                name=f"jtops_{self.op}_{name or self.stage}",
                compute_capability=str(self.target),
                interpret=self.interpret,
                cost_estimate={"flops": flops, "bytes_accessed": moved},
                **config.kwargs,
                **options,
                **(arguments | {n: _single(arguments[n]) for n in params}),
            )
        return dict.fromkeys(outputs) | dict(zip(types, out, strict=True))


def _single(value: Any) -> Any:
    """A float as float32, in which kernels compute: Triton would make a float64 of one that only float64 holds."""
    if isinstance(value, tuple):
        parts = map(_single, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    with np.errstate(over="ignore"):
        return np.float32(value) if isinstance(value, float) else value


def _params(kernels: tuple) -> dict[str, bool]:
    """The parameters by name, in order, and whether each is a compile-time constant."""
    return {p.name: p.is_constexpr for kernel in kernels for p in kernel_function(kernel).params}


def _leaves(name: str, value: Any, rows: bool = True) -> Iterator[tuple[str, Any]]:
    """An argument by name, a bundle taken apart: ``mask.left``, ``x[0]``; with or without the numbers of `Rows`."""
    if isinstance(value, Rows) and not rows:
        return
    if not isinstance(value, tuple):
        yield name, value.base if isinstance(value, TensorDescriptor) else value
        return
    fields = getattr(value, "_fields", None)
    for i, item in enumerate(value):
        yield from _leaves(f"{name}.{fields[i]}" if fields else f"{name}[{i}]", item, rows)


def _key(kernels: tuple, arguments: Mapping[str, Any], rounded: frozenset[str], aligned: frozenset[str], flags) -> str:
    """The key of `Launch.choose` in a table: dtypes first, then the rest by name."""
    params = _params(kernels)
    given = {name: value for name, value in arguments.items() if name in params}
    constants = [f"{name}={_said(value)}" for name, value in given.items() if params[name]]
    dtypes: list[str] = []
    numbers: list[str] = []
    for name, value in (leaf for n, x in given.items() if not params[n] for leaf in _leaves(n, x, rows=False)):
        if value is None:
            dtypes.append("-")
        elif hasattr(value, "dtype"):
            dtypes.append(str(value.dtype))
        elif isinstance(value, bool | str):
            numbers.append(f"{name}={value}")
        elif isinstance(value, int):
            parts = [str(next_power_of_2(value))] * (name in rounded) + [f"16|{math.gcd(value, 16)}"] * (name in aligned)
            numbers.append(f"{name}={'/'.join(parts) or value}")
    return " ".join([",".join(dtypes), *numbers, *constants, *(f"{name}={_said(value)}" for name, value in flags.items())])


def _said(value: Any) -> str:
    """A constant in words without blanks."""
    if isinstance(value, tuple):
        return ",".join(map(_said, value))
    return str(getattr(value, "__name__", value)).replace(" ", "")
