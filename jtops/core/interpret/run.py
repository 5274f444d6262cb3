"""Running a Triton kernel with NumPy on the host, in any thread, without a GPU, torch or an environment variable.

The kernel's own source runs (`rewrite` says with which changes), with other globals: every Triton builtin it can reach is bound to
a semantic that computes with NumPy, every jitted helper is interpreted in turn, everything else is what it was. Nothing of Triton
is patched, so kernels may be compiled and interpreted at the same time. Python's numbers play the part of compile-time constants.

Beyond computing what the GPU would, a run checks what a GPU does not: each load and store must fall inside an operand or a
result, inputs are read-only, and results start as NaN, so that what a kernel forgets to write shows.

It differs from a GPU where GPUs differ: programs run one after the other, sums are taken in another order, float32 products are
exact whatever the `input_precision`, and a number too large for an fp8 format becomes inf or NaN, where some GPUs saturate.
"""

import builtins
import functools
import inspect
import linecache
import threading
import types
from typing import Any

import numpy as np

from jtops._compat import triton as triton_compat
from jtops.core.interpret import rewrite
from jtops.core.interpret.language import Language, map_tuple
from jtops.core.interpret.machine import Memory, make_builder, numpy_type
from jtops.core.types import (
    NUMPY_TYPES,
    Bound,
    Constexpr,
    Descriptor,
    Items,
    Operand,
    Output,
    Scalar,
    array_of,
    leaves,
    told,
    triton_type,
)
from jtops.errors import InterpreterError


def run(kernel, bound: Bound, grid: tuple[int, int, int], inputs, outputs, aliases=(), zeroed=()) -> None:
    """Run every program of `grid`; the arrays `outputs` are written in place, the arrays `inputs` are untouched.

    `aliases` are pairs (input, output): that output starts as a copy of that input, and the kernel writes through its parameter.
    Outputs in `zeroed` start as zeros.
    """
    names = {(isinstance(a, Output), a.index): name for _, name, p in leaves(bound) if (a := array_of(p))}
    memory = Memory(inputs, outputs, names, aliases, zeroed)
    _machine().run(kernel, bound, grid, memory)
    for mine, out in zip(memory.results, outputs, strict=True):
        out[...] = mine


_building = threading.Lock()  # a multi-device program starts its interpreters at once; functools.cache alone would build several


@functools.cache
def _build_machine() -> "_Machine":
    triton_compat.require_triton()
    return _Machine()


def _machine() -> "_Machine":
    with _building:
        return _build_machine()


class _Machine(Language):
    """Triton's language bound to NumPy. There is one per process; what belongs to a run lives in thread-local `state`."""

    def __init__(self):
        tl, base = triton_compat.tl, triton_compat.load_interpreter_module()
        self.state = state = threading.local()
        self.tl, self.handle = tl, base.TensorHandle

        base._get_np_dtype = numpy_type  # in our private copy: bf16 and fp8 are real number formats there, not raw bits
        builder = make_builder(base, state)

        class Semantic(base.TritonSemantic):  # type: ignore[name-defined]
            """Triton's type rules over the NumPy builder, which has what they ask the hardware for."""

            def atomic_max(self, ptr, val, mask, sem, scope):
                ptr, val, mask = self.atom_red_typechecking_impl(ptr, val, mask, "max")
                return self.tensor(builder.atomic(np.fmax, ptr.handle, val.handle, mask.handle), val.type)

            def atomic_min(self, ptr, val, mask, sem, scope):
                ptr, val, mask = self.atom_red_typechecking_impl(ptr, val, mask, "min")
                return self.tensor(builder.atomic(np.fmin, ptr.handle, val.handle, mask.handle), val.type)

            def _has_native_tma(self):
                return True

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
        for name, member in self._bound_members(tl.tensor).items():
            setattr(Tensor, name, member)
        Tensor.T = property(lambda x: x.trans())
        self.descriptor = type("Descriptor", (tl.tensor_descriptor,), self._bound_members(tl.tensor_descriptor))
        self.replaced = {id(f): g for f, g in self.overrides()}  # keyed by identity: one function goes by several names
        self.names = self.builtins()

    def _bound_members(self, cls) -> dict[str, Any]:
        """The methods of a Triton class that ask for a compiler context or are jitted, freed from that need."""
        bound: dict[str, Any] = {}
        for name, member in inspect.getmembers(cls):
            if _is_builtin(member):
                bound[name] = self._bind(member)
            elif _is_jitted(member):
                bound[name] = functools.partialmethod(self._call_helper, member)
        return bound

    # -------------------------------------------------------------------------------------------------------- running

    def run(self, kernel, bound, grid, memory, programs=None):
        """Run these `programs` of the grid, (x, y, z) each; all of them by default."""
        state, tl = self.state, self.tl
        state.functions, state.memory, state.grid_dim = {}, memory, grid

        def value(param):
            if isinstance(param, Constexpr):
                return map_tuple(self.convert, param.value)
            if isinstance(param, Items):
                return param.of(map(value, param.items))
            if isinstance(param, Descriptor):
                sizes = [value(Scalar(n, "i32")) for n in param.shape]
                strides = [value(Scalar(s, "i64")) for s in param.strides[:-1]] + [tl.constexpr(1)]
                block = [tl.constexpr(b) for b in param.block_shape]
                made = self._own(self.semantic.make_tensor_descriptor(value(param.array), sizes, strides, block, param.padding))
                made.handle.round_f32_to_tf32 = param.round_f32_to_tf32
                return made
            if isinstance(param, Operand | Output):
                array = (memory.operands if isinstance(param, Operand) else memory.results)[param.index]
                ty = tl.pointer_type(_tl_type(tl, array.dtype))
                return self.tensor(self.handle(np.array([array.ctypes.data], np.uint64), ty), ty)
            ty = tl.int1 if param.type == "i1" else _tl_type(tl, NUMPY_TYPES[param.type])
            return self.tensor(self.handle(np.array([param.value], numpy_type(ty)), ty), ty)

        arguments = {name: value(param) for name, param in bound}
        function = self.interpreted(kernel)
        try:
            with np.errstate(all="ignore"):
                every = ((x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0]))
                for state.grid_idx in every if programs is None else programs:
                    function(**arguments)
        except Exception as error:
            at = _kernel_line(error, {f.__code__ for f in state.functions.values()})
            given = told((name, _told(p, memory)) for _, name, p in leaves(bound))
            raise InterpreterError(f"kernel {kernel.__name__}, program {state.grid_idx}{at}: {error}\n{given}") from error
        finally:
            del state.functions, state.memory

    def interpreted(self, kernel):
        """The kernel's Python function with globals and closure in which Triton's names compute with NumPy."""
        functions = self.state.functions
        if id(kernel) not in functions:
            plain = kernel.fn
            names = _names(plain.__code__)
            seen = {n: plain.__globals__[n] for n in names if n in plain.__globals__}
            seen |= {n: c.cell_contents for n, c in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)}
            scope = _Scope((n, self.convert(v)) for n, v in seen.items() if triton_compat.may_be_read(v))
            scope.refused = seen.keys() - scope.keys()
            scope.update((n, f) for n, f in self.names.items() if n not in scope and n not in scope.refused)
            scope["__builtins__"] = builtins
            made = rewrite.function(kernel, scope)
            made.__dict__["jit_function"] = kernel
            functions[id(kernel)] = made
        return functions[id(kernel)]

    def _call_helper(self, tensor, helper, *args, **kwargs):
        return self.convert(helper)(tensor, *args, **kwargs)

    def convert(self, value: Any) -> Any:
        """The value that a name inside a kernel stands for."""
        if id(value) in self.replaced:
            return self.replaced[id(value)]
        if _is_jitted(value):
            return _Helper(self, triton_compat.kernel_function(value))
        if _is_builtin(value):
            return self._bind(value)
        if isinstance(value, types.ModuleType):
            return _Module(self, value)
        if callable(value) and getattr(value, "__module__", "").startswith("triton.language.extra"):
            return self._libdevice(value)
        return value

    def _libdevice(self, function):
        """Replace a function of libdevice, which has no body in Python, by NumPy's function of that name, where there is one."""
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
        """Turn a plain tensor, as some builtins make, into ours: it would ask for a compiler context at its next operation."""
        if isinstance(value, tuple):
            return tuple(map(self._own, value))
        if isinstance(value, self.tl.tensor_descriptor) and not isinstance(value, self.descriptor):
            own: Any = object.__new__(self.descriptor)
            own.__dict__.update(vars(value))
            return own
        plain = isinstance(value, self.tl.tensor) and not isinstance(value, self.tensor)
        return self.tensor(value.handle, value.type) if plain else value


class _Scope(dict):
    """The globals of an interpreted kernel, without those that a compiled one may not read."""

    refused: Any = ()

    def __missing__(self, name):
        if name in self.refused:
            raise NameError(
                f"{name} is a variable of Python; a kernel can read those outside it that are constants, "
                f"{name} = tl.constexpr(...), or jitted functions. Pass it as an argument, or make it a constant"
            )
        raise KeyError(name)


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


def _told(param, memory) -> str:
    array = array_of(param)
    if array is None:
        return repr(param.value)
    found = (memory.operands if isinstance(array, Operand) else memory.results)[array.index]
    return f"array {found.dtype}{list(found.shape)}"


def _is_builtin(value) -> bool:
    return callable(value) and getattr(value, "__triton_builtin__", False)


def _is_jitted(value) -> bool:
    return isinstance(value, triton_compat.JITFunction) or type(value).__name__ == "InterpretedFunction"


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


@functools.cache
def _tl_type(tl, dtype):
    short = triton_type(dtype)
    return tl.dtype({"i": "int", "u": "uint"}.get(short[0], short[0]) + short[1:] if short[0] in "iu" else short)


def _kernel_line(error: BaseException, kernels: set[types.CodeType]) -> str:
    """The place in the kernels' sources where `error` arose: the last traceback step that is in one of them, not in Triton."""
    found, step = "", error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if code in kernels and "/triton/" not in code.co_filename:
            source = linecache.getline(code.co_filename, step.tb_lineno).strip()
            found = f", {code.co_filename}:{step.tb_lineno}\n    {source}\n"
        step = step.tb_next
    return found
