"""Edits of a kernel's PTX text."""

import re

from jtops.errors import KernelCompileError


def in_clusters(kernel, ptx: str, size: int) -> str:
    """`ptx` whose kernel says of itself that its launches form clusters: so does every launch path, knowing nothing of it."""
    if size == 1:
        return ptx
    asked, count = re.subn(r"^(\s*\.reqntid [\d, ]+)$", rf"\1\n.explicitcluster\n.reqnctapercluster {size}, 1, 1", ptx, flags=re.M)
    if count != 1:
        raise KernelCompileError(f"kernel {kernel.__name__}: cluster_size={size} needs PTX of one kernel; this has {count}.")
    return asked


_PTX_DEBUG_LINE = re.compile(r"^\s*(?:\.(?:loc|file)\s.*|\$L__(?:tmp|func_begin|func_end)\d+:|//.*)$")


def strip_ptx(ptx: str) -> str:
    """`ptx` without line tables and comments: smaller, quicker to launch, and the same on every host (line tables hold paths)."""
    code = ptx.split("\n\t.section\t.debug", 1)[0]  # LLVM writes debug sections last
    lines = (line.split("//", 1)[0].rstrip() for line in code.split("\n") if not _PTX_DEBUG_LINE.match(line))
    return "\n".join(line for line in lines if line) + "\n"
