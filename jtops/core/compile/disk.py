"""Compiled kernels between processes: Triton's own disk cache, whose entries are sealed here.

Triton's cache writes each file whole or not at all, so processes may share a directory and may be killed. It does not notice a file
that was damaged later, so each entry we make is sealed with checksums, and one that does not match is made anew. The directory is
``TRITON_CACHE_DIR``, read at each compilation.
"""

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

from jtops._compat import triton as triton_compat
from jtops.core import cache
from jtops.errors import KernelCompileError

log = logging.getLogger("jtops.cache")


def load_or_compile(source, target, options: dict[str, Any]):
    """Compile by ``triton.compile``, count it, and make a damaged entry of the disk cache anew."""
    start, runs = time.perf_counter(), []
    triton_compat.when_compiled(source, lambda: runs.append(True))
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
    if not _launchable(compiled):
        raise KernelCompileError(
            f"kernel {source.name}: TRITON_STORE_BINARY_ONLY is set, which keeps Triton from storing PTX, and a launch is made of "
            "that. Unset it."
        )
    if runs:
        triton_compat.cache_manager(compiled.hash).put(json.dumps(_checksums(compiled)), _SEAL, binary=False)
    seconds = time.perf_counter() - start
    cache.count(compiled=len(runs) > 0, disk_hits=not runs, damaged=damage is not None, seconds=seconds)
    return compiled


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError, StopIteration)  # from Triton's reading of damaged files
_SEAL = "jtops.json"
_USED = (".json", ".ptx", ".hsaco")


def _checksums(compiled) -> dict[str, str]:
    files = {n: Path(p) for n, p in compiled.metadata_group.items() if n.endswith(_USED)}
    return {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in sorted(files.items())}


def _launchable(compiled) -> bool:
    """Whether there is what a launch is made of."""
    return "ptx" in compiled.asm or "hsaco" in compiled.asm


def _intact(compiled) -> bool:
    """Whether a loaded entry is what was written. One that Triton made for others has no seal, and is taken if it looks whole."""
    path = triton_compat.cache_manager(compiled.hash).get_file(_SEAL)
    if path is None:
        ptx = compiled.asm.get("ptx")
        return _launchable(compiled) and (ptx is None or (".entry" in ptx and ptx.rstrip().endswith("}")))
    return json.loads(Path(path).read_text()) == _checksums(compiled)
