"""What tells kernels, their helpers and their constants apart: their content, the same in every process."""

import inspect
import re
import types
from typing import Any

from jtops._compat import triton as triton_compat


def key_of(kernel, error_class: type[Exception], what: str) -> str:
    """`kernel_key`; where Triton cannot read a source that names what it does not know, an error of this class that says where."""
    try:
        return triton_compat.kernel_key(kernel)
    except Exception as error:
        named = re.search(r"<function (?:.*\.)?(\w+) at ", str(error))
        calls = re.compile(rf"\b{named[1]}\(" if named else "(?!)")
        offset = next((i for i, text in enumerate(kernel.raw_src) if calls.search(text)), None)
        at = f"{inspect.getsourcefile(kernel.fn)}:{kernel.starting_line_number + (offset or 0)}"
        source = "" if offset is None else f"\n    {kernel.raw_src[offset].strip()}"
        said = f"stage: reading its source; at {at}{source}\nTriton says: {error}"
        raise error_class(f"kernel {kernel.__name__} {what}; {said}") from error


def constant_text(value) -> str:
    """The text of a compile-time constant: its content, the same in every process."""
    if isinstance(value, tuple):
        return f"({', '.join(map(constant_text, value))})"
    if isinstance(value, triton_compat.JITFunction):
        return f"{value.__name__}:{triton_compat.kernel_key(value)[:16]}"
    text = repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__) if " at 0x" in text else text


def _reached(*kernels):
    """Each kernel and helper that `kernels` name, directly or not, with all that it names; tuples of them are looked into."""
    seen, todo = set(), list(kernels)
    while todo:
        function = todo.pop()
        todo += function if isinstance(function, tuple) else ()
        if id(function) in seen or not isinstance(function, triton_compat.JITFunction):
            continue
        seen.add(id(function))
        names = function.fn.__code__.co_names
        scope = [function.fn.__globals__.get(n) for n in names] + [c.cell_contents for c in function.fn.__closure__ or ()]
        for module in [m for m in scope if isinstance(m, types.ModuleType) and not m.__name__.startswith("triton")]:
            scope += [getattr(module, n, None) for n in names]
        todo += scope
        yield function, scope


def content(kernels) -> str:
    """The text of kernels, their helpers and the constants they see: the same anywhere in a file, and in every Triton."""
    texts = []
    for function, scope in _reached(*kernels):
        if not function.__module__.startswith("triton."):
            texts.append("".join([*function.raw_src, *(repr(v.value) for v in scope if isinstance(v, triton_compat.tl.constexpr))]))
    return "".join(sorted(texts))


def distinct_helpers(kernel, constants=()) -> str:
    """Tell apart the helpers of `kernel` that differ but share a module and name, as a factory's do; return their new names.

    Helpers are those that it names and those among its `constants`, tuples included.

    Triton compiles a helper once for each such name, so the second one would silently run the first one's code.
    """
    same: dict[str, dict[str, Any]] = {}
    for function, _ in _reached(kernel, *constants):
        own = vars(function).setdefault("_jtops_qualname", function.fn.__qualname__)
        same.setdefault(f"{function.__module__}.{own}", {})[triton_compat.kernel_key(function)] = function
    renamed = []
    for twins in same.values():
        for key, function in twins.items() if len(twins) > 1 else ():
            if function is not kernel:
                # A helper that is passed to another one goes by the second of these names.
                function.__qualname__ = function.fn.__qualname__ = f"{function._jtops_qualname}.{key[:16]}"
                renamed.append(function.__qualname__)
    return " ".join(sorted(renamed))
