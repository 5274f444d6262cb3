"""What a compiled kernel takes: registers, spilled bytes, shared memory; as ptxas and AMD's assembler report them."""

import re
import subprocess
import tempfile
from pathlib import Path

from triton.backends.nvidia.compiler import get_ptxas


def of(kernel) -> dict[str, int]:
    """Assembles what jtops ships, which for CUDA is the stripped PTX."""
    if kernel.target.platform == "rocm":
        asm = kernel.triton_kernel.asm["amdgcn"]
        read = lambda key: max(map(int, re.findall(rf"\.{key}:\s*(\d+)", asm)), default=0)
        return {"registers": read("vgpr_count"), "spill_bytes": 4 * read("vgpr_spill_count"), "shared_bytes": kernel.shared_bytes}
    arch = f"sm_{kernel.target.arch}{'a' if kernel.target.arch >= 90 else ''}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.binary)
        command = [get_ptxas(kernel.target.arch).path, "-v", f"-arch={arch}", source, "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spill_bytes": sum(spills),
        "shared_bytes": kernel.shared_bytes,
    }
