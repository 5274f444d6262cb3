"""What a record says about where it was made."""

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path

import jax

RESULTS = Path(__file__).parent / "results"


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def lacks_gpu() -> str | None:
    """Why nothing can be measured on this machine; None if it has an NVIDIA GPU. JAX is not asked: it would take the memory."""
    listed = (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False) if shutil.which("nvidia-smi") else None
    )
    has = listed is not None and listed.returncode == 0 and listed.stdout.startswith("GPU")
    return None if has else "This needs an NVIDIA GPU, and nvidia-smi lists none on this machine."


def need_gpu() -> None:
    """End the program with one line where there is no GPU."""
    if (why := lacks_gpu()) is not None:
        raise SystemExit(why)


def commit() -> str | None:
    """The commit measured, marked if the tree differs from it."""
    try:
        run = lambda *args: subprocess.run(["git", *args], capture_output=True, text=True, check=True, cwd=RESULTS).stdout.strip()
        return run("rev-parse", "--short", "HEAD") + ("+changes" if run("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def describe() -> dict:
    devices = jax.devices()
    return {
        "date": datetime.date.today().isoformat(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "triton", "flax", "numpy")},
    }


def record_path(what: str, about: dict) -> Path:
    """``h200-x2-2026-11-30-what.json``."""
    kind = about["device"].lower().removeprefix("nvidia ").replace(" ", "-")
    many = f"-x{about['devices']}" if about["devices"] > 1 else ""
    RESULTS.mkdir(parents=True, exist_ok=True)
    return RESULTS / f"{kind}{many}-{about['date']}-{what}.json"
