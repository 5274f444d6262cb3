"""What a compiled kernel takes: registers, spilled bytes, shared memory; as ptxas and AMD's assembler report them."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton


def _ptxas(arch: int) -> Path:
    name = "ptxas-blackwell" if arch >= 100 else "ptxas"
    folder = Path(triton.__file__).parent / "backends/nvidia/bin"
    return folder / name if (folder / name).exists() else folder / "ptxas"


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
        command = [_ptxas(kernel.target.arch), "-v", f"-arch={arch}", source, "-o", f"{folder}/kernel.cubin"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    return {
        "registers": int(re.search(r"Used (\d+) registers", log)[1]),
        "spill_bytes": sum(spills),
        "shared_bytes": kernel.shared_bytes,
    }
