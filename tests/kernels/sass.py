"""Machine code of kernels compiled for GPUs that are not there: what the assembler warns of, and what the loops hold."""

import collections
import re
import subprocess
import tempfile
from pathlib import Path

from jtops._compat import triton as triton_compat


def assembled(kernel) -> tuple[str, str]:
    """(ptxas' log, machine code as text) of a compiled kernel for sm_90."""
    assembler = Path(triton_compat.ptxas(90))
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(str(kernel.binary))
        command = [assembler, "-v", "-arch=sm_90a", source, "-o", cubin]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        text = subprocess.run([assembler.with_name("nvdisasm"), "-c", cubin], capture_output=True, text=True, check=True).stdout
    return log, text


def product_loops(text: str) -> list[collections.Counter]:
    """How often each operation stands in the innermost loops that hold products (HGMMA)."""
    operations, labels, loops = [], {}, []
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(operations)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[0-9T]+\s+)?(.*?);", line):
            operations.append(found[1])
            target = re.match(r"BRA.*`\((\.L_x_\d+)\)", found[1])
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(operations)))
    # A back edge may also lead out of line, to where a warp that waited comes back: that is no loop of the program's.
    found = [
        (a, b)
        for a, b in loops
        if sum("HGMMA" in x for x in operations[a:b]) and not any("SETMAXREG" in x for x in operations[a:b])
    ]
    inner = [x for x in found if not any(y != x and y[0] >= x[0] and y[1] <= x[1] for y in found)]
    return [collections.Counter(x.split()[0].split(".")[0] for x in operations[a:b]) for a, b in inner]
