"""Edits of a kernel's PTX text."""

import re

from jtops.errors import KernelCompileError


def in_clusters(kernel, ptx: str, size: int) -> str:
    """Write the cluster shape into the PTX entry, so that no launch path has to know about clusters."""
    if size == 1:
        return ptx
    asked, count = re.subn(r"^(\s*\.reqntid [\d, ]+)$", rf"\1\n.explicitcluster\n.reqnctapercluster {size}, 1, 1", ptx, flags=re.M)
    if count != 1:
        raise KernelCompileError(f"kernel {kernel.__name__}: cluster_size={size} needs PTX of one kernel; this has {count}.")
    return asked


_DEBUG_LINE = re.compile(r"^\s*(?:\.(?:loc|file)\s.*|\$L__(?:tmp|func_begin|func_end)\d+:|//.*)$")
_IDLE = ((" \t", " "), ("\n\t", "\n"), ("\t", " "), (", ", ","))  # strings, which pragmas alone have, hold none of these


def strip_ptx(ptx: str) -> str:
    """Strip line tables, comments and idle blanks: `ptx` gets smaller, and the same on every host (line tables hold paths)."""
    code = ptx.split("\n\t.section\t.debug", 1)[0]  # LLVM writes debug sections last
    lines = (line.split("//", 1)[0].rstrip() for line in code.split("\n") if not _DEBUG_LINE.match(line))
    text = "\n".join(line for line in lines if line) + "\n"
    for idle, kept in _IDLE:
        text = text.replace(idle, kept)
    return text
