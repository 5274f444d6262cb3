"""Running a Triton kernel with NumPy on the host: no GPU, no torch, no environment variable, any thread.

The kernel's own code object runs, with other globals: every Triton builtin it can reach is bound to a semantic that computes
with NumPy, every jitted helper is interpreted in turn, everything else is what it was. Nothing of Triton is patched, so kernels
may be compiled and interpreted at the same time. Python integers and floats play the part of Triton's compile-time constants.

Beyond computing what the GPU would, a run checks what a GPU does not: each load and store must fall inside an operand or a
result, inputs are read-only, and results start as NaN, so that what a kernel forgets to write shows.
"""

import builtins
import functools
import inspect
import linecache
import os
import threading
import types
from typing import Any

import numpy as np

from jtops.core import compat
from jtops.core.numpy_machine import Memory, make_builder, numpy_type
from jtops.core.types import (
    NUMPY_TYPES,
    Bound,
    Constexpr,
    Descriptor,
    Items,
    Operand,
    Result,
    Scalar,
    array_of,
    leaves,
    triton_type,
)
from jtops.errors import InterpreterError, UnsupportedError


def run(kernel, bound: Bound, grid: tuple[int, int, int], inputs, outputs, aliases=(), zeroed=()) -> None:
    """Run every program of `grid`; the arrays `outputs` are written in place, the arrays `inputs` are untouched.

    `aliases` are pairs (input, output): that output starts as a copy of that input, and the kernel writes through its parameter.
    Outputs in `zeroed` start as zeros.
    """
    if compat.is_gluon(kernel):
        raise UnsupportedError(f"kernel {kernel.__name__}: Gluon kernels have no interpreter; run it on a GPU.")
    names = {(isinstance(a, Result), a.index): name for _, name, p in leaves(bound) if (a := array_of(p))}
    memory = Memory(inputs, outputs, names, aliases, zeroed)
    _machine().run(kernel, bound, grid, memory)
    for mine, out in zip(memory.results, outputs, strict=True):
        out[...] = mine


_building = threading.Lock()  # a multi-device program starts its interpreters at once; functools.cache alone would build several


@functools.cache
def _build_machine() -> "_Machine":
    compat.require_triton()
    return _Machine()


def _machine() -> "_Machine":
    with _building:
        return _build_machine()


class _Machine:
    """Triton's language bound to NumPy. One per process; what belongs to a run lives in thread-local `state`."""

    def __init__(self):
        tl, base = compat.tl, compat.load_interpreter_module()
        self.state = state = threading.local()
        self.tl, self.handle = tl, base.TensorHandle

        base._get_np_dtype = numpy_type  # in our private copy: bf16 and fp8 are real number formats there, not raw bits
        builder = make_builder(base, state)

        class Semantic(base.TritonSemantic):  # type: ignore[name-defined]
            """Triton's type rules over the NumPy builder."""

        class Tensor(tl.tensor):  # type: ignore[name-defined]
            """A Triton tensor whose methods need no compiler context."""

            def __init__(self, handle, ty):
                # Triton's IR has no unsigned integers and comparisons keep their operands' type: restore both from the type.
                scalar = ty.scalar
                if isinstance(handle, base.TensorHandle):
                    if scalar.is_int_unsigned() and handle.data.dtype.kind == "i":
                        handle = base.TensorHandle(handle.data.view(numpy_type(scalar)), scalar)
                    elif handle.dtype != scalar:
                        handle = base.TensorHandle(handle.data, scalar)
                super().__init__(handle, ty)

            def __index__(self):
                return int(self.handle.data.item())

            def __bool__(self):
                return bool(self.handle.data.item()) if self.handle.data.size == 1 else True  # Triton's own code asks `if mask`

            def __repr__(self):
                return repr(self.handle.data)

            __str__ = __repr__

        Semantic.tensor = Tensor
        self.semantic, self.tensor = Semantic(builder), Tensor
        for name, member in inspect.getmembers(tl.tensor):
            if _is_builtin(member):
                setattr(Tensor, name, self._bind(member))
            elif isinstance(member, compat.JITFunction) or type(member).__name__ == "InterpretedFunction":
                setattr(Tensor, name, functools.partialmethod(self._call_helper, member))
        Tensor.T = property(lambda x: x.trans())
        self.overrides = {id(f): g for f, g in self._overrides()}  # keyed by identity: one function goes by several names
        self.builtins = {"range": self._range, "min": self._min_max(min, tl.minimum), "max": self._min_max(max, tl.maximum)}

    # -------------------------------------------------------------------------------------------------------- running

    def run(self, kernel, bound, grid, memory):
        state, tl = self.state, self.tl
        state.functions, state.memory, state.grid_dim = {}, memory, grid

        def value(param):
            if isinstance(param, Constexpr):
                return param.value
            if isinstance(param, Items):
                return param.of(map(value, param.items))
            if isinstance(param, Descriptor):
                sizes = [value(Scalar(n, "i32")) for n in param.shape]
                strides = [value(Scalar(s, "i64")) for s in param.strides[:-1]] + [tl.constexpr(1)]
                block = [tl.constexpr(b) for b in param.block_shape]
                return self.semantic.make_tensor_descriptor(value(param.array), sizes, strides, block, param.padding)
            if isinstance(param, Operand | Result):
                array = (memory.operands if isinstance(param, Operand) else memory.results)[param.index]
                ty = tl.pointer_type(_tl_type(tl, array.dtype))
                return self.tensor(self.handle(np.array([array.ctypes.data], np.uint64), ty), ty)
            ty = tl.int1 if param.type == "i1" else _tl_type(tl, NUMPY_TYPES[param.type])
            return self.tensor(self.handle(np.array([param.value], numpy_type(ty)), ty), ty)

        arguments = {name: value(param) for name, param in bound}
        function = self.interpreted(kernel)
        try:
            with np.errstate(all="ignore"):
                for z in range(grid[2]):
                    for y in range(grid[1]):
                        for x in range(grid[0]):
                            state.grid_idx = (x, y, z)
                            function(**arguments)
        except Exception as error:
            raise InterpreterError(f"kernel {kernel.__name__}, program {state.grid_idx}{_user_line(error)}: {error}") from error
        finally:
            del state.functions, state.memory

    def interpreted(self, kernel):
        """The kernel's Python function with globals and closure in which Triton's names compute with NumPy."""
        functions = self.state.functions
        if id(kernel) not in functions:
            plain = kernel.fn
            names = _names(plain.__code__)
            scope = {n: self.convert(plain.__globals__[n]) for n in names if n in plain.__globals__}
            scope |= {n: f for n, f in self.builtins.items() if n in names and n not in scope}
            cells = tuple(types.CellType(self.convert(c.cell_contents)) for c in plain.__closure__ or ())
            made = types.FunctionType(plain.__code__, scope | {"__builtins__": builtins}, plain.__name__, None, cells)
            made.__defaults__ = tuple(getattr(d, "value", d) for d in plain.__defaults__ or ()) or None
            made.__kwdefaults__ = {n: getattr(d, "value", d) for n, d in (plain.__kwdefaults__ or {}).items()}
            made.__dict__["jit_function"] = kernel
            functions[id(kernel)] = made
        return functions[id(kernel)]

    def _call_helper(self, tensor, helper, *args, **kwargs):
        return self.convert(helper)(tensor, *args, **kwargs)

    def convert(self, value: Any) -> Any:
        """What a name inside a kernel stands for."""
        if id(value) in self.overrides:
            return self.overrides[id(value)]
        if isinstance(value, compat.JITFunction) or type(value).__name__ == "InterpretedFunction":
            return _Helper(self, compat.kernel_function(value))
        if _is_builtin(value):
            return self._bind(value)
        if isinstance(value, types.ModuleType):
            return _Module(self, value)
        if callable(value) and getattr(value, "__module__", "").startswith("triton.language.extra"):
            return self._libdevice(value)
        return value

    def _libdevice(self, function):
        """A function of libdevice, which has no body in Python: NumPy's of the same name, where there is one."""
        ufunc = getattr(np, function.__name__, None)

        def call(*args):
            if not isinstance(ufunc, np.ufunc):
                raise NotImplementedError(f"libdevice.{function.__name__} has no interpreter")
            tensors = [self.semantic.to_tensor(a) for a in args]
            return self._wrap(ufunc(*(t.handle.data for t in tensors)).astype(tensors[0].handle.data.dtype), tensors[0].dtype)

        return call

    def _bind(self, builtin):
        @functools.wraps(builtin)
        def bound(*args, **kwargs):
            return self._own(builtin(*args, **(kwargs | {"_semantic": self.semantic})))

        return bound

    def _own(self, value):
        """Some builtins make plain tensors; those would ask for a compiler context at their next operation."""
        if isinstance(value, tuple):
            return tuple(map(self._own, value))
        plain = isinstance(value, self.tl.tensor) and not isinstance(value, self.tensor)
        return self.tensor(value.handle, value.type) if plain else value

    # ------------------------------------------------------------------------------- what has no meaning as a builder op

    def _overrides(self):
        tl = self.tl
        same = lambda x, *_, **__: x  # hints to the compiler
        yield from ((hint, same) for hint in (tl.multiple_of, tl.max_contiguous, tl.max_constancy))
        yield from ((tl.range, self._range), (tl.reduce, self._reduce), (tl.associative_scan, self._scan))
        yield tl.core._reduce_with_indices, self._reduce_with_indices
        yield tl.static_range, lambda *args, **_: range(*map(int, args))
        yield tl.static_print, print
        yield tl.static_assert, self._static_assert

    @staticmethod
    def _static_assert(condition, message=""):
        if not condition:
            raise AssertionError(f"static_assert failed: {message}")

    def _range(self, *bounds, step=None, **_):
        """A loop counter is a number of the machine, not a constant: kernels call methods on it."""
        bounds = (*bounds, step) if step is not None else bounds
        wide = any(isinstance(b, self.tensor) and b.dtype.primitive_bitwidth == 64 for b in bounds)
        ty = self.tl.int64 if wide else self.tl.int32
        for i in range(*(int(getattr(b, "value", b)) for b in bounds)):
            yield self.tensor(self.handle(np.array([i], numpy_type(ty)), ty), ty)

    def _min_max(self, python, builtin):
        both = self._bind(builtin)
        return lambda *args: both(*args) if any(isinstance(a, self.tensor) for a in args) else python(*args)

    def _wrap(self, data: np.ndarray, ty):
        if data.ndim == 0:
            return self.tensor(self.handle(data.reshape(1), ty), ty)
        return self.tensor(self.handle(data, ty), self.tl.block_type(ty, list(data.shape)))

    def _reduce(self, source, axis, combine_fn, keep_dims=False, **_):
        tensors = source if isinstance(source, tuple) else (source,)
        arrays, kinds = [t.handle.data for t in tensors], [t.dtype for t in tensors]
        rank = arrays[0].ndim
        axis = getattr(axis, "value", axis)
        if axis is None:
            arrays, axes = [a.reshape(-1) for a in arrays], tuple(range(rank))
        else:
            arrays, axes = [np.moveaxis(a, axis, 0) for a in arrays], (axis % rank,)
        ufunc = self._known(combine_fn) if len(arrays) == 1 else None
        if ufunc is not None:
            arrays = [ufunc.reduce(arrays[0], axis=0, keepdims=True).astype(arrays[0].dtype)]
        while len(arrays[0]) > 1:  # neighbours combine, so order is kept: block sizes are powers of two
            halves = [[self._wrap(a[start::2], ty) for a, ty in zip(arrays, kinds, strict=True)] for start in (0, 1)]
            out = combine_fn(*halves[0], *halves[1])
            arrays = [t.handle.data.reshape(len(arrays[0]) // 2, *arrays[0].shape[1:]) for t in _tuple(out)]
        arrays = [np.expand_dims(a[0], axes) if keep_dims else a[0] for a in arrays]
        out = tuple(self._wrap(a, ty) for a, ty in zip(arrays, kinds, strict=True))
        return out if isinstance(source, tuple) else out[0]

    def _reduce_with_indices(self, source, axis, combine_fn, keep_dims=False, **_):
        shape, axis = source.handle.data.shape, getattr(axis, "value", axis)
        index = np.expand_dims(
            np.arange(shape[axis], dtype=np.int32), tuple(i for i in range(len(shape)) if i != axis % len(shape))
        )
        return self._reduce((source, self._wrap(np.broadcast_to(index, shape), self.tl.int32)), axis, combine_fn, keep_dims)

    def _scan(self, source, axis, combine_fn, reverse=False, **_):
        tensors = source if isinstance(source, tuple) else (source,)
        kinds, axis = [t.dtype for t in tensors], getattr(axis, "value", axis)
        step = -1 if getattr(reverse, "value", reverse) else 1
        arrays = [np.moveaxis(t.handle.data, axis, 0)[::step] for t in tensors]
        ufunc = self._known(combine_fn) if len(arrays) == 1 else None
        if ufunc is np.add:
            done = [np.cumsum(arrays[0], axis=0, dtype=arrays[0].dtype)]
        else:
            done = [np.array(a) for a in arrays]
            for i in range(1, len(done[0])):
                left, right = ([self._wrap(a[j], ty) for a, ty in zip(done, kinds, strict=True)] for j in (i - 1, i))
                for a, t in zip(done, _tuple(combine_fn(*left, *right)), strict=True):
                    a[i] = t.handle.data.reshape(a[i].shape)
        out = tuple(self._wrap(np.moveaxis(a[::step], 0, axis), ty) for a, ty in zip(done, kinds, strict=True))
        return out if isinstance(source, tuple) else out[0]

    def _known(self, combine_fn):
        standard = self.tl.standard
        known = (
            (standard._sum_combine, np.add),
            (standard._elementwise_max, np.fmax),  # as the hardware's: NaN loses
            (standard._elementwise_min, np.fmin),
        )
        kernel = getattr(combine_fn, "jit_function", None)
        return next((ufunc for helper, ufunc in known if compat.kernel_function(helper) is kernel), None)


class _Helper:
    """A jitted helper seen from inside an interpreted kernel."""

    def __init__(self, machine, kernel):
        self.machine, self.jit_function = machine, kernel

    def __call__(self, *args, **kwargs):
        return self.machine.interpreted(self.jit_function)(*args, **kwargs)


class _Module:
    """A module seen from inside an interpreted kernel."""

    def __init__(self, machine, module):
        self.__dict__.update(_machine=machine, _module=module)

    def __getattr__(self, name):
        return self._machine.convert(getattr(self._module, name))


def _is_builtin(value) -> bool:
    return callable(value) and getattr(value, "__triton_builtin__", False)


def _tuple(value):
    return value if isinstance(value, tuple | list) else (value,)


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


@functools.cache
def _tl_type(tl, dtype):
    short = triton_type(dtype)
    return tl.dtype({"i": "int", "u": "uint"}.get(short[0], short[0]) + short[1:] if short[0] in "iu" else short)


def _user_line(error: BaseException) -> str:
    """Where in the kernels' sources `error` arose: the last traceback frame that is neither Triton's nor ours."""
    ours, found = os.path.dirname(__file__), ""
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not code.co_filename.startswith(ours) and "/triton/" not in code.co_filename and "/numpy/" not in code.co_filename:
            source = linecache.getline(code.co_filename, step.tb_lineno).strip()
            found = f", {code.co_filename}:{step.tb_lineno}\n    {source}\n"
        step = step.tb_next
    return found
