"""What ``@triton.autotune`` and ``@triton.heuristics`` say about a call, as a list of candidates. Nothing is timed or compiled
here.
"""

import contextlib
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jtops._compat import triton as triton_compat
from jtops.core.compile.content import constant_text
from jtops.core.descriptor import TensorDescriptor
from jtops.core.sizes import strides_from_shape
from jtops.errors import UnsupportedError

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")


class ArrayArgument:
    """What hooks, heuristics and pruning functions see of an array: its shape and type, by JAX's names and by PyTorch's."""

    def __init__(self, shape, dtype):
        self.shape, self.dtype, self.zeroed = tuple(shape), np.dtype(dtype), False
        self.ndim, self.size = len(self.shape), int(np.prod(self.shape, dtype=np.int64))

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Number of elements."""
        return self.size

    def stride(self, axis: int | None = None):
        """Row-major strides in elements, of `axis` or all."""
        strides = strides_from_shape(self.shape)
        return strides if axis is None else strides[axis]

    def is_contiguous(self) -> bool:
        """True, because JAX's arrays are row-major for a kernel."""
        return True

    def zero_(self) -> "ArrayArgument":
        """Ask for zeros in this array when the kernel starts."""
        self.zeroed = True
        return self

    def fill_(self, value) -> "ArrayArgument":
        """The same for ``fill_(0)``."""
        if value != 0:
            raise UnsupportedError(f"a pre_hook may zero an array, not fill it with {value!r}; pass an input that holds it.")
        return self.zero_()


class Named(dict):
    """A kernel's arguments by name; `read` collects the names that were asked for."""

    def __init__(self, values: Mapping[str, Any], read: set[str]):
        super().__init__(values)
        self.read = read

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        """The argument's value, as ``dict.get`` gives it."""
        self.read.add(name)
        return super().get(name, default)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """One way to launch: what it adds to the call."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    replaced: dict[str, Any] = dataclasses.field(default_factory=dict)  # arguments that a pre_hook changed, such as descriptors
    zeroed: frozenset[str] = frozenset()  # parameters that must hold zeros when the kernel starts

    @property
    def label(self) -> str:
        """A text that is the same for the same choice, in every process."""
        return ", ".join(f"{k}={constant_text(v)}" for k, v in sorted((self.values | self.options).items()))


def is_array(value) -> bool:
    """Whether `value` becomes a pointer of the launch."""
    return isinstance(value, jax.Array | np.ndarray | jax.Ref)


class Plan:
    """A call of a decorated kernel: the plain kernel, the arguments by name, and the candidates in the author's order."""

    def __init__(self, kernel, args: tuple, kwargs: dict[str, Any], explicit: dict[str, Any], outs: list, filled: set[str]):
        layers = []
        while isinstance(kernel, triton_compat.Autotuner | triton_compat.Heuristics):
            layers.append(kernel)
            kernel = kernel.fn
        self.function = triton_compat.kernel_function(kernel)
        self.explicit, self.read = explicit, set[str]()
        self.tuners = [layer for layer in layers if isinstance(layer, triton_compat.Autotuner)]
        tuned = {k for layer in self.tuners for c in layer.configs for k in c.kwargs}
        tuned |= {k for layer in layers if isinstance(layer, triton_compat.Heuristics) for k in layer.values}
        self.params = {p.name: p for p in self.function.params}
        names = [n for n in self.params if n not in kwargs]
        slots = [n for n in names if n not in tuned]
        fits = len(args) <= len(slots) - len(outs)
        self.slots = slots if fits else names  # more values than that: tuned ones are given by position, too
        self.given = dict(zip(self.slots, args, strict=False)) | kwargs
        free = [n for n, p in self.params.items() if n not in self.given and n not in tuned | filled and not p.has_default]
        self.outputs = dict(zip([n for n in free if not self.params[n].is_constexpr], outs, strict=False))
        defaults = {n: p.default for n, p in self.params.items() if p.has_default and n not in self.given}
        self.named = defaults | {n: getattr(v, "value", v) if _is_constexpr(v) else v for n, v in self.given.items()} | self.outputs
        found = [Candidate(options=dict(explicit))]
        for layer in layers:
            expand = self._configs if isinstance(layer, triton_compat.Autotuner) else self._heuristics
            found = list(itertools.chain.from_iterable(expand(layer, c) for c in found))
        first: dict[str, Candidate] = {}
        for candidate in found:
            first.setdefault(candidate.label, candidate)
        self.candidates = list(first.values())
        self.args = args
        self.kwargs = {k: v for k, v in kwargs.items() if k in self.params or k not in self.read}

    def arguments(self, candidate: Candidate) -> tuple[tuple, dict[str, Any]]:
        """The arguments to call the plain kernel with."""
        positional = dict(zip(self.slots, self.args, strict=False))
        args = (*(candidate.replaced.get(n, v) for n, v in positional.items()), *self.args[len(positional) :])
        changed = {n: v for n, v in candidate.replaced.items() if n in self.given}
        extra = {n: v for n, v in (candidate.values | changed).items() if n not in positional}
        return args, self.kwargs | extra

    def _view(self, candidate: Candidate) -> Named:
        views = {n: _shown(v, n in self.outputs) for n, v in self.named.items()}
        return Named(views | candidate.options | candidate.values, self.read)

    def _heuristics(self, layer, candidate: Candidate) -> list[Candidate]:
        values, options = dict(candidate.values), dict(candidate.options)
        for name, rule in layer.values.items():
            if name in self.given or name in self.explicit:
                continue  # the caller's word is the last
            view = self._view(dataclasses.replace(candidate, values=values, options=options))
            try:
                with self._blamed(f"the heuristic for {name!r}", "look at shape, dtype and strides"):
                    value = rule(view)
            except KeyError as error:
                raise KeyError(
                    f"kernel {self.function.__name__}: the heuristic for {name!r} asks for {error}, but is given "
                    f"{', '.join(map(repr, sorted(view)))}."
                ) from None
            (options if name in LAUNCH_OPTIONS else values)[name] = value
        return [dataclasses.replace(candidate, values=values, options=options)]

    def _configs(self, layer, candidate: Candidate) -> list[Candidate]:
        fixed = {n: v for n, v in self.named.items() if n in self.given} | candidate.values
        configs = [c for c in layer.configs if all(_same(fixed[k], v) for k, v in c.kwargs.items() if k in fixed)]
        if not configs:
            said = {k: fixed[k] for c in layer.configs for k in c.kwargs if k in fixed}
            raise ValueError(
                f"kernel {self.function.__name__}: no config of its @triton.autotune has {_pairs(said)}; they are "
                f"{'; '.join(str(c) for c in layer.configs)}. Give one of those values, or call the kernel without the decorator."
            )
        configs = self._pruned(layer, configs, candidate)
        return [self._hooked(layer, c, candidate) for c in configs]

    @contextlib.contextmanager
    def _blamed(self, who: str, may: str) -> Iterator[None]:
        """Tell those who ask an array for its address or device, which it lacks while a call is traced, what there is."""
        try:
            yield
        except AttributeError as error:
            if not isinstance(error.obj, ArrayArgument):
                raise
            raise UnsupportedError(
                f"kernel {self.function.__name__}: {who} uses {error.name!r} of an array, which has none while a call is traced; "
                f"here it may {may}."
            ) from error

    def _pruned(self, layer, configs: list, candidate: Candidate) -> list:
        with self._blamed("early_config_prune or perf_model", "look at shape, dtype and strides"):
            return self._pruned_by(layer, configs, candidate)

    def _pruned_by(self, layer, configs: list, candidate: Candidate) -> list:
        view = self._view(candidate)
        keywords = {n: dict(view)[n] for n in [*self.given, *candidate.values] if n not in self.slots}
        if layer.early_config_prune:
            configs = list(layer.early_config_prune(configs, view, **self._taken(layer.early_config_prune, keywords, 2)))
            if not configs:
                raise ValueError(f"kernel {self.function.__name__}: early_config_prune left no config.")
        if layer.perf_model:
            top_k = layer.configs_top_k
            if isinstance(top_k, float) and top_k <= 1.0:
                top_k = int(len(layer.configs) * top_k)
            elif not isinstance(top_k, int):
                raise TypeError(f"kernel {self.function.__name__}: top_k must be an int, or a float up to 1.0; got {top_k!r}.")
            if len(configs) > top_k:
                cost = lambda c: layer.perf_model(**self._taken(layer.perf_model, dict(view) | c.all_kwargs(), 0))
                configs = sorted(configs, key=cost)[: max(top_k, 1)]
        return configs

    def _taken(self, function: Callable, keywords: dict[str, Any], skip: int) -> dict[str, Any]:
        """The `keywords` that `function` takes, beside its first `skip` parameters."""
        params = list(inspect.signature(function).parameters.values())[skip:]
        named = {p.name for p in params if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
        self.read |= named
        return keywords if any(p.kind is p.VAR_KEYWORD for p in params) else {k: v for k, v in keywords.items() if k in named}

    def _hooked(self, layer, config, candidate: Candidate) -> Candidate:
        """`candidate` with a config: outer heuristics and the caller overrule its launch options; its hooks have run."""
        options = {k: v for k in LAUNCH_OPTIONS if (v := getattr(config, k, None)) is not None}
        new = dataclasses.replace(candidate, values=candidate.values | config.kwargs, options=options | candidate.options)
        mutable = {n: copy.copy(v) for n, v in self.named.items() if isinstance(v, TensorDescriptor)} if config.pre_hook else {}
        cleared = self._run_hook(config.pre_hook, new, mutable) if config.pre_hook else frozenset()
        if layer.user_defined_pre_hook:
            cleared |= self._run_hook(layer.pre_hook, new, mutable, reset_only=False) & self.outputs.keys()
        for name in (*layer.reset_to_zero, *layer.restore_value):
            if name not in self.params:
                raise ValueError(f"kernel {self.function.__name__}: reset_to_zero or restore_value names {name!r}, no parameter.")
        # The decorator's own hook and reset_to_zero speak of trials only. Those work on arrays made for them, so an argument needs
        # neither reset nor restoring; but a result has no earlier value to keep: a kernel that wants it reset counts on zeros.
        cleared |= {n for n in layer.reset_to_zero if n in self.outputs}
        fields = TensorDescriptor.__slots__
        changed = {n: TensorDescriptor(**{f: getattr(v, f) for f in fields}) for n, v in mutable.items()}  # checked once more
        return dataclasses.replace(new, zeroed=candidate.zeroed | cleared, replaced=candidate.replaced | changed)

    def _run_hook(self, hook: Callable, candidate: Candidate, mutable: dict[str, Any], **keywords) -> frozenset[str]:
        """Run a pre_hook on stand-ins of the arrays and copies of the descriptors; return the arrays that it zeroed."""
        view = self._view(candidate)
        view.update(mutable)
        with self._blamed("its pre_hook", "look at shape and dtype, call zero_(), and change the block shapes of descriptors"):
            hook(view, **keywords)
        return frozenset(n for n, v in view.items() if isinstance(v, ArrayArgument) and v.zeroed)


def _shown(value, output: bool):
    """What hooks and heuristics see of an argument or an output."""
    if isinstance(value, tuple):
        return tuple(_shown(v, output) for v in value)
    shaped = hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, TensorDescriptor)
    return ArrayArgument(value.shape, value.dtype) if is_array(value) or (output and shaped) else value


def _is_constexpr(value) -> bool:
    return type(value).__name__ == "constexpr"


def _same(a, b) -> bool:
    return a is b or (not is_array(a) and a == b)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in values.items())
