"""What tuning found, on disk.

Of decorated kernels there is one small JSON file for each kernel, problem and device: a decision. Of the library's ops there is one
file for each kind of GPU: a table of entries, which `jtops.tune` writes and launchers look into. The directory is
``$JTOPS_TUNING_DIR``, by default ``jtops/tuning`` in the user's cache directory; tables are below, in ``ops``.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where there is nothing to tune
    fcntl = None  # type: ignore[assignment]

from jtops._compat import triton as triton_compat
from jtops.core import cache
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


_parsed: dict[Path, tuple[Any, Any]] = cache.store({})


def read(path: Path, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of a file's text, again only if the file has changed. None without a file, or if it is damaged."""
    try:
        status = path.stat()
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if (known := _parsed.get(path)) is None or known[0] != stamp:
            _parsed[path] = known = stamp, parse(path.read_text())
        return known[1]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        say_once(f"{path} is ignored, as if it were not there, and written anew by the next tuning: {error!r}")
        return None


def _read(path: Path) -> dict[str, Any] | None:
    return read(path, lambda text: _checked(json.loads(text)))


@functools.cache
def say_once(text: str) -> None:
    """Warn, unless this process has said so before."""
    log.warning("%s", text)


# --------------------------------------------------------------------------------------------------------------- decisions


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


# ------------------------------------------------------------------------------------------------------------------ tables


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What a choice is for. `text` has the dtypes, the sizes rounded up, and the flags."""

    op: str
    choice: str
    text: str

    def __str__(self):
        return f"{self.op} {self.choice} {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A config that was measured: seconds of the stage with it and with the heuristic's. `kernels` is a fingerprint."""

    problem: Problem
    config: Mapping[str, Any]
    kernels: str
    seconds: float
    heuristic_seconds: float

    def __str__(self):
        us = [round(s * 1e6, 2) for s in (self.seconds, self.heuristic_seconds)]
        what = {"op": self.problem.op, "choice": self.problem.choice, "problem": self.problem.text}
        return json.dumps(what | {"config": dict(self.config), "us": us, "kernels": self.kernels})


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """One file: entries for a kind of GPU and its architecture. `triton` is the version that compiled what was measured."""

    path: Path
    device: str
    target: str
    triton: str
    entries: Mapping[Problem, Entry]

    @property
    def current(self) -> bool:
        """Is it of this Triton? What another makes of a config may not fit."""
        return self.triton.split(".")[:2] == triton_compat.triton.__version__.split(".")[:2]


def parsed(path: Path, text: str) -> Table:
    """The table of a file's text; ValueError, KeyError or TypeError if it is none."""
    raw = json.loads(text)
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r} is not {FORMAT}")
    entries = [
        Entry(Problem(e["op"], e["choice"], e["problem"]), dict(e["config"]), e["kernels"], *(us / 1e6 for us in e["us"]))
        for e in raw["entries"]
    ]
    return Table(path, raw["device"], raw["target"], raw["triton"], {e.problem: e for e in entries})


def update(path: Path, device: str, target: str, entries: Sequence[Entry], dropped: Sequence[Problem] = ()) -> None:
    """Put entries into the table at `path`, in place of those it has for the same problems, and take those for `dropped` out.

    The file is whole at any time, and processes that write at once all find their entries in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            old = parsed(path, path.read_text())
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            old = None
        kept = old.entries if old and old.device == device and old.current else {}
        kept = {p: e for p, e in kept.items() if p not in dropped} | {e.problem: e for e in entries}
        head = json.dumps({"format": FORMAT, "device": device, "target": target, "triton": triton_compat.triton.__version__})
        lines = ",\n".join(str(kept[p]) for p in sorted(kept))
        written_whole(path, f'{head[:-1]}, "entries": [\n{lines}\n]}}\n')


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One process at a time."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
