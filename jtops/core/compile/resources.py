"""What a compiled kernel takes of its processor: registers, spilled bytes, shared memory; as the assembler reports them."""

import re
import subprocess
import tempfile
from pathlib import Path

from jtops._compat import triton as triton_compat
from jtops.core.compile.kernel import CompiledKernel


def used(kernel: CompiledKernel) -> dict[str, int]:
    """Registers per thread, spilled bytes per thread and shared bytes per program. For CUDA, this assembles what jtops ships."""
    if kernel.target.platform == "rocm":
        asm = kernel.triton_kernel.asm["amdgcn"]
        read = lambda key: max(map(int, re.findall(rf"\.{key}:\s*(\d+)", asm)), default=0)
        return {"registers": read("vgpr_count"), "spill_bytes": 4 * read("vgpr_spill_count"), "shared_bytes": kernel.shared_bytes}
    capability = int(kernel.target.arch)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(str(kernel.binary))
        arch = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [triton_compat.ptxas(capability), "-v", f"-arch={arch}", str(source), "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.search(r"Used (\d+) registers", log)
    if found is None:
        raise RuntimeError(f"ptxas did not say how many registers {kernel.name} uses: {log}")
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    return {"registers": int(found[1]), "spill_bytes": sum(map(int, spills)), "shared_bytes": kernel.shared_bytes}
