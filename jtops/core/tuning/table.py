"""What tuning found, on disk: one small JSON file for each kernel, problem and device, so that processes never share a file.

The directory is ``$JTOPS_TUNING_DIR``, by default ``jtops/tuning`` in the user's cache directory.
"""

import functools
import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

from jtops.core.files import written_whole

FORMAT = 1
log = logging.getLogger("jtops.tuning")


def directory() -> Path:
    """Where this process reads and writes decisions."""
    if named := os.environ.get("JTOPS_TUNING_DIR"):
        return Path(named)
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home: nothing is found in a place that is no directory, and writing there says what to do
        cache = Path(os.devnull)
    return cache / "jtops" / "tuning"


def digest(text: str) -> str:
    """Sixteen characters that tell `text` from others."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _stem(kernel: str, problem: str) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_]+', '-', kernel)[-60:]}-{digest(kernel + problem)}"


def _path(entry: dict[str, Any]) -> Path:
    return directory() / f"{_stem(entry['kernel'], entry['problem'])}-{entry['fingerprint']}-{digest(entry['device'])}.json"


_FIELDS = {"format": int, "kernel": str, "problem": str, "fingerprint": str, "device": str, "config": str, "seconds": dict}


def _checked(entry: Any) -> dict[str, Any]:
    """`entry` if it is one; ValueError otherwise."""
    if not isinstance(entry, dict) or entry.get("format") != FORMAT:
        raise ValueError(f"not a decision of format {FORMAT}: {entry!r:.100}")
    if wrong := [k for k, kind in _FIELDS.items() if not isinstance(entry.get(k), kind)]:
        raise ValueError(f"a decision lacks {', '.join(wrong)}: {entry!r:.100}")
    if not re.fullmatch("[0-9a-f]{16}", entry["fingerprint"]):  # it becomes part of a file's name
        raise ValueError(f"a decision's fingerprint must be 16 hexadecimal digits; got {entry['fingerprint']!r:.100}")
    return entry


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return _checked(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:  # damaged: as if it were not there, and written anew after the next tuning
        say_once(f"{path} is ignored: {error}")
        return None


@functools.cache
def say_once(text: str) -> None:
    """Warn, unless this process has said so before."""
    log.warning("%s", text)


def load(kernel: str, problem: str, fingerprint: str, device: str | None) -> dict[str, Any] | None:
    """The decision for a kernel of this content; `device` None takes that of any device of the problem's architecture."""
    stem = _stem(kernel, problem)
    one = directory() / f"{stem}-{fingerprint}-{'*' if device is None else digest(device)}.json"
    paths = sorted(one.parent.glob(one.name)) if device is None else [one]
    found = next((entry for path in paths if (entry := _read(path))), None)
    if found is None and any(
        entry["fingerprint"] != fingerprint for entry in map(_read, directory().glob(f"{stem}-*.json")) if entry
    ):
        say_once(f"kernel {kernel} has changed since it was tuned: the table's entry is ignored.")
    return found


def store(entry: dict[str, Any]) -> None:
    """Write a decision: whole or not at all, whatever else writes at the same time."""
    path = _path(_checked(entry))
    try:
        written_whole(path, json.dumps(entry, indent=1, sort_keys=True))
    except OSError as error:
        say_once(
            f"{path.parent} cannot be written, so what tuning finds is lost when this process ends: {error}. Set JTOPS_TUNING_DIR."
        )


def export_table(path: str | os.PathLike) -> int:
    """Write every decision of the table into one JSON file; returns how many."""
    entries = [entry for file in sorted(directory().glob("*.json")) if (entry := _read(file))]
    written_whole(Path(path), json.dumps({"format": FORMAT, "decisions": entries}, indent=1, sort_keys=True) + "\n")
    return len(entries)


def import_table(path: str | os.PathLike) -> int:
    """Add the decisions of an exported file to the table, replacing those it has for the same kernels; returns how many.

    Raises:
      ValueError: the file is not an exported table. Nothing is added then.
    """
    table = json.loads(Path(path).read_text())
    if not isinstance(table, dict) or not isinstance(table.get("decisions"), list):
        raise ValueError(f"{path} is not a table that export_table wrote.")
    entries = [_checked(entry) for entry in table["decisions"]]
    for entry in entries:
        store(entry)
    return len(entries)
