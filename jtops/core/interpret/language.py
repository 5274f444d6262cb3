"""Replacements in an interpreted kernel for constructs that are no operation of Triton's builder: control flow, Python's own
operators, and what takes a function, such as reductions and scans."""

import functools
from typing import Any

import numpy as np

from jtops._compat import triton as triton_compat
from jtops.core.interpret import rewrite
from jtops.core.interpret.machine import numpy_type


def unwrapped(value):
    """The plain value of a ``tl.constexpr``, anything else as it is."""
    return value.value if type(value).__name__ == "constexpr" else value


def as_tuple(value) -> tuple:
    """A tuple: `value` itself if it is one, else a tuple of it alone."""
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def map_tuple(f, value):
    """Apply `f` to each leaf of nested tuples; the result has the same tuples."""
    if not isinstance(value, tuple):
        return f(value)
    parts = [map_tuple(f, v) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


class Language:
    """The part of the interpreter that is about the language. Its other half makes `tensor`, `semantic` and `handle`."""

    tl: Any
    tensor: Any
    semantic: Any
    handle: Any
    convert: Any
    _bind: Any

    def overrides(self):
        """Pairs of Triton's function and what a kernel calls in its place."""
        tl = self.tl
        same = lambda x, *_, **__: x  # hints to the compiler
        yield from ((hint, same) for hint in (tl.multiple_of, tl.max_contiguous, tl.max_constancy))
        yield from ((tl.range, self._range), (tl.reduce, self._reduce), (tl.associative_scan, self._scan))
        yield tl.core._reduce_with_indices, self._reduce_with_indices
        yield tl.map_elementwise, self._map_elementwise
        yield tl.static_range, lambda *args, **named: range(*(int(unwrapped(a)) for a in (*args, *named.values())))
        formats = lambda x: tl.constexpr(x) if isinstance(x, str) else x  # the one builtin that insists on constexpr
        scaled = self._bind(tl.dot_scaled)
        yield tl.dot_scaled, lambda *a, **named: scaled(*map(formats, a), **{k: formats(v) for k, v in named.items()})
        yield tl.static_print, print
        yield tl.static_assert, self._static_assert
        yield tl.condition, lambda condition, **_: condition

    def builtins(self) -> dict[str, Any]:
        """Python's builtins that mean something else in a kernel, and the functions that `rewrite` calls."""
        tl = self.tl
        return {
            "range": self._range,
            "min": self._min_max(min, tl.minimum),
            "max": self._min_max(max, tl.maximum),
            "print": self._bind(tl.device_print),
            rewrite.VALUE: functools.partial(map_tuple, self._assigned),
            rewrite.UNWRAP: lambda x: x if x is None or isinstance(x, bool | int | float | str | tl.dtype) else x.value,
            rewrite.TEST: self._test,
            rewrite.NOT: lambda x: x.__not__() if isinstance(x, self.tensor) else not x,
            rewrite.AND: functools.partial(self._bool_op, "logical_and"),
            rewrite.OR: functools.partial(self._bool_op, "logical_or"),
        }

    # -------------------------------------------------------------------------------------- Python's statements and operators

    def _assigned(self, value):
        """Turn a number that is given a name, or returned, into a number of the machine."""
        value = unwrapped(value)
        return self.semantic.to_tensor(value) if isinstance(value, bool | int | float) else value

    def _test(self, value):
        if isinstance(value, self.tensor) and value.handle.data.size != 1:
            raise ValueError(f"the truth of a block of shape {tuple(value.handle.data.shape)} is ambiguous; reduce it first")
        return value

    def _bool_op(self, method, *operands):
        """Combine all operands, as compiled code does, unless a constant decides alone."""
        value, tensors = None, []
        for operand in operands:
            value = operand()
            if isinstance(value, self.tensor):
                tensors.append(value)
            elif bool(value) is (method == "logical_or"):
                return value
        return functools.reduce(lambda a, b: getattr(a, method)(b), tensors) if tensors else value

    @staticmethod
    def _static_assert(condition, message=""):
        if not condition:
            raise AssertionError(f"static_assert failed: {message}")

    def _range(self, *bounds, step=None, **_):
        """A range whose counter is a number of the machine, not a constant: kernels call methods on it."""
        limits = [unwrapped(b) for b in ((*bounds, step) if step is not None else bounds)]
        kinds = [self.semantic.to_tensor(b).dtype for b in (limits if len(limits) > 1 else (0, *limits))]
        ty = functools.reduce(self.semantic.integer_promote_impl, kinds)
        for i in range(*map(int, limits)):
            yield self.tensor(self.handle(np.array([i], numpy_type(ty)), ty), ty)

    def _min_max(self, python, builtin):
        both = self._bind(builtin)

        def call(*args, **named):
            if not any(isinstance(a, self.tensor) for a in args):
                return python(*args)
            return functools.reduce(lambda a, b: both(a, b, **named), args)

        return call

    # ------------------------------------------------------------------------------------------- constructs with a function

    def _wrap(self, data: np.ndarray, ty):
        if data.ndim == 0:
            return self.tensor(self.handle(data.reshape(1), ty), ty)
        return self.tensor(self.handle(data, ty), self.tl.block_type(ty, list(data.shape)))

    def _reduce(self, source, axis, combine_fn, keep_dims=False, **_):
        tensors, combine = as_tuple(source), self.convert(combine_fn)
        arrays, kinds = [t.handle.data for t in tensors], [t.dtype for t in tensors]
        rank, axis, keep_dims = arrays[0].ndim, unwrapped(axis), unwrapped(keep_dims)
        if axis is None:
            arrays, axes = [a.reshape(-1) for a in arrays], tuple(range(rank))
        else:
            arrays, axes = [np.moveaxis(a, axis, 0) for a in arrays], (axis % rank,)
        ufunc = self._known(combine) if len(arrays) == 1 else None
        if ufunc is not None:
            arrays = [ufunc.reduce(arrays[0], axis=0, keepdims=True).astype(arrays[0].dtype)]
        while len(arrays[0]) > 1:  # neighbours combine, so order is kept: block sizes are powers of two
            halves = [[self._wrap(a[start::2], ty) for a, ty in zip(arrays, kinds, strict=True)] for start in (0, 1)]
            out = combine(*halves[0], *halves[1])
            arrays = [t.handle.data.reshape(len(arrays[0]) // 2, *arrays[0].shape[1:]) for t in as_tuple(out)]
        arrays = [np.expand_dims(a[0], axes) if keep_dims else a[0] for a in arrays]
        out = tuple(self._wrap(a, ty) for a, ty in zip(arrays, kinds, strict=True))
        return out if isinstance(source, tuple) else out[0]

    def _reduce_with_indices(self, source, axis, combine_fn, keep_dims=False, **_):
        shape, axis = source.handle.data.shape, unwrapped(axis)
        others = tuple(i for i in range(len(shape)) if i != axis % len(shape))
        index = np.broadcast_to(np.expand_dims(np.arange(shape[axis], dtype=np.int32), others), shape)
        return self._reduce((source, self._wrap(index, self.tl.int32)), axis, combine_fn, keep_dims)

    def _scan(self, source, axis, combine_fn, reverse=False, **_):
        tensors, combine = as_tuple(source), self.convert(combine_fn)
        kinds, axis = [t.dtype for t in tensors], unwrapped(axis)
        step = -1 if unwrapped(reverse) else 1
        arrays = [np.moveaxis(t.handle.data, axis, 0)[::step] for t in tensors]
        if len(arrays) == 1 and self._known(combine) is np.add:
            done = [np.cumsum(arrays[0], axis=0, dtype=arrays[0].dtype)]
        else:
            done = [np.array(a) for a in arrays]
            for i in range(1, len(done[0])):
                left, right = ([self._wrap(a[j], ty) for a, ty in zip(done, kinds, strict=True)] for j in (i - 1, i))
                for a, t in zip(done, as_tuple(combine(*left, *right)), strict=True):
                    a[i] = t.handle.data.reshape(a[i].shape)
        out = tuple(self._wrap(np.moveaxis(a[::step], 0, axis), ty) for a, ty in zip(done, kinds, strict=True))
        return out if isinstance(source, tuple) else out[0]

    def _map_elementwise(self, scalar_fn, *blocks, pack=1, **_):
        """Apply `scalar_fn` element by element, because it may branch on each."""
        blocks, pack, function = self.semantic.broadcast_tensors(*blocks), unwrapped(pack), self.convert(scalar_fn)
        arrays, shape = [b.handle.data.reshape(-1, pack) for b in blocks], blocks[0].handle.data.shape
        single, rows, kinds = True, [], []
        for row in zip(*arrays, strict=True):
            got = function(*(self._wrap(x, b.dtype) for b, xs in zip(blocks, row, strict=True) for x in xs))
            single, got = not isinstance(got, tuple), as_tuple(got)
            rows.append([t.handle.data.item() for t in got])
            kinds = [t.dtype for t in got]
        columns = [np.array([r[i : i + pack] for r in rows], numpy_type(kinds[i])) for i in range(0, len(kinds), pack)]
        out = tuple(self._wrap(c.reshape(shape), ty) for c, ty in zip(columns, kinds[::pack], strict=True))
        return out[0] if single and pack == 1 else out

    def _known(self, combine):
        standard = self.tl.standard
        known = (
            (standard._sum_combine, np.add),
            (standard._elementwise_max, np.fmax),  # like the hardware's: NaN loses
            (standard._elementwise_min, np.fmin),
        )
        kernel = getattr(combine, "jit_function", None)
        return next((ufunc for helper, ufunc in known if triton_compat.kernel_function(helper) is kernel), None)
