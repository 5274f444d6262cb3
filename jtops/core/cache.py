"""Compiled kernels between calls and between processes: memory first, then Triton's own disk cache, and a count of both.

Triton's cache writes each file whole or not at all, so processes may share a directory and may be killed. What it does not
notice is a file that was damaged later: each entry we make is sealed with checksums, and one that does not match is made anew.
The directory is ``TRITON_CACHE_DIR``, read at each compilation.
"""

import dataclasses
import hashlib
import json
import logging
import threading
import time
import types
from pathlib import Path
from typing import Any

from jtops._compat import triton as triton_compat

log = logging.getLogger("jtops.cache")


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Since the process began or `clear`: kernels compiled, found in memory, found on disk, found damaged on disk; `seconds`
    spent compiling or loading."""

    compiled: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    damaged: int = 0
    seconds: float = 0.0


_lock = threading.Lock()
_counts = Statistics()
_stores: list[dict] = []


def store(memory: dict) -> dict:
    """Register a dict that `clear` empties."""
    _stores.append(memory)
    return memory


def statistics() -> Statistics:
    """The counts so far."""
    return _counts


def clear() -> None:
    """Forget compiled kernels, tuning decisions and counts of this process. Files stay, and so do programs JAX has compiled."""
    global _counts  # noqa: PLW0603
    with _lock:
        for memory in _stores:
            memory.clear()
        _counts = Statistics()


def count(**more: float) -> None:
    """Add to the counts."""
    global _counts  # noqa: PLW0603
    with _lock:
        _counts = dataclasses.replace(_counts, **{k: getattr(_counts, k) + v for k, v in more.items()})


def load_or_compile(source, target, options: dict[str, Any]):
    """``triton.compile`` that counts, and does not trust a damaged entry of the disk cache."""
    start, runs = time.perf_counter(), []
    make_ir = source.make_ir

    def noted(*args, **kwargs):  # Triton asks for the IR only where its disk cache has no entry
        runs.append(True)
        return make_ir(*args, **kwargs)

    source.make_ir = noted
    damage: str | None = None
    try:
        compiled = triton_compat.compile_source(source, target, options)
        damage = None if runs or _intact(compiled) else "its checksum differs"
    except _UNREADABLE as error:
        if runs:
            raise
        damage = str(error)
    if damage is not None:
        triton_compat.forget_on_disk(source, target, options)  # raises what is wrong with `options`, if that was it
        log.warning("kernel %s: its entry in Triton's disk cache is damaged (%s); compiled anew.", source.name, damage)
        compiled = triton_compat.compile_source(source, target, options)
    if runs:
        triton_compat.cache_manager(compiled.hash).put(json.dumps(_checksums(compiled)), _SEAL, binary=False)
    seconds = time.perf_counter() - start
    count(compiled=len(runs) > 0, disk_hits=not runs, damaged=damage is not None, seconds=seconds)
    return compiled


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, StopIteration)  # from Triton's reading of damaged files
_SEAL = "jtops.json"
_USED = (".json", ".ptx", ".hsaco")


def _checksums(compiled) -> dict[str, str]:
    files = {n: Path(p) for n, p in compiled.metadata_group.items() if n.endswith(_USED)}
    return {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in sorted(files.items())}


def _intact(compiled) -> bool:
    """Whether a loaded entry is what was written. One that Triton made for others has no seal, and is taken if it looks whole."""
    path = triton_compat.cache_manager(compiled.hash).get_file(_SEAL)
    if path is None:
        ptx = compiled.asm.get("ptx")
        return "hsaco" in compiled.asm if ptx is None else ".entry" in ptx and ptx.rstrip().endswith("}")
    return json.loads(Path(path).read_text()) == _checksums(compiled)


def constant_text(value) -> str:
    """A compile-time constant by content, the same in every process."""
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
    """Kernels, their helpers and the constants they see, as text: the same wherever in a file they stand, and in every Triton."""
    texts = []
    for function, scope in _reached(*kernels):
        if not function.__module__.startswith("triton."):
            texts.append("".join([*function.raw_src, *(repr(v.value) for v in scope if isinstance(v, triton_compat.tl.constexpr))]))
    return "".join(sorted(texts))


def distinct_helpers(kernel, constants=()) -> str:
    """Tell apart the helpers of `kernel` that differ and share a module and name, as those of a factory do; -> their new names.

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
                # The second is what names a helper that is passed to another one.
                function.__qualname__ = function.fn.__qualname__ = f"{function._jtops_qualname}.{key[:16]}"
                renamed.append(function.__qualname__)
    return " ".join(sorted(renamed))
