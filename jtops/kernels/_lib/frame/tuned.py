"""Tables of measured configs: where a launcher looks before it takes its heuristic's. `jtops.tune` writes them, nothing else does.

A table is one JSON file per kind of GPU. The library ships some, in ``jtops/kernels/tuned``; a user's own, in ``ops`` in the
directory of `jtops.core.tuning.table`, come before them. A table of the very GPU comes before those of others of its architecture,
which serve where it has none, and where a program is lowered for a GPU that is only named: then the table is the same on every
machine. All hosts of a program should see the same tables.

What is looked up is settled when a program is lowered; programs that JAX has compiled keep what they have.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where there is nothing to tune
    fcntl = None  # type: ignore[assignment]

from jtops._compat import triton as triton_compat
from jtops.core import cache, notes
from jtops.core.compile.content import content
from jtops.core.files import written_whole
from jtops.core.tuning import table as tuning_table
from jtops.core.tuning.table import say_once
from jtops.errors import JtopsError
from jtops.kernels._lib.frame.config import Config

FORMAT = 1
SHIPPED = Path(__file__).parents[1] / "tuned"
_local = threading.local()


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What a choice is for. `text` has the dtypes, the sizes rounded up, and the flags."""

    op: str
    choice: str
    text: str

    def __str__(self):
        return f"{self.op} {self.choice} {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """A choice that a launcher makes. `target` is None where nothing is compiled: tables are of GPUs."""

    problem: Problem
    heuristic: Config
    kernels: tuple
    target: str | None
    device: str | None

    @property
    def fingerprint(self) -> str:
        """Of the kernels' content."""
        return _fingerprint(tuple(map(_Same, self.kernels)))

    def settled(self, config: Config) -> Config:
        """Tell `choices`, if it listens, and hand `config` on."""
        if (told := getattr(_local, "choices", None)) is not None:
            told.append((self, config))
        return config


@dataclasses.dataclass(frozen=True, slots=True)
class _Same:
    """A kernel, compared by identity: Triton's own hash of one takes its source apart."""

    kernel: Any = dataclasses.field(hash=False)

    def __hash__(self):
        return id(self.kernel)

    def __eq__(self, other):
        return self.kernel is other.kernel


@functools.lru_cache(1024)
def _fingerprint(kernels: tuple[_Same, ...]) -> str:
    return tuning_table.digest(content([k.kernel for k in kernels]))


def choices() -> contextlib.AbstractContextManager[list[tuple[Choice, Config]]]:
    """Collect the choices that launchers make in this thread meanwhile, with what each settled on."""
    return notes.setting(_local, "choices", [])


def forcing(problem: Problem, config: Config) -> contextlib.AbstractContextManager[dict[Problem, Config]]:
    """In this thread that one choice is `config` meanwhile, whatever the tables say; an explicit one stays."""
    return notes.setting(_local, "forced", _forced() | {problem: config.said_by("trial")})


def forced(problem: Problem) -> Config | None:
    """What `forcing` asks for."""
    return _forced().get(problem)


def _forced() -> dict[Problem, Config]:
    return getattr(_local, "forced", None) or {}


# ------------------------------------------------------------------------------------------------------------------ tables


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A config that was measured: seconds of the stage with it and with the heuristic's. `kernels` is a fingerprint."""

    problem: Problem
    config: Mapping[str, Any]
    kernels: str
    seconds: float
    heuristic_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """One file. `source` is "user" or "shipped", `triton` the version that compiled what was measured."""

    source: str
    path: Path
    device: str
    target: str
    triton: str
    entries: Mapping[Problem, Entry]


def user_directory() -> Path:
    """Of the user's tables."""
    return tuning_table.directory() / "ops"


def file_name(device: str) -> str:
    """Of a device kind's table."""
    return re.sub(r"[^A-Za-z0-9]+", "_", device) + ".json"


def lookup(choice: Choice) -> Config | None:
    """The config of the first table that has one for this choice, measured with these kernels.

    Raises:
      JtopsError: it is no config, or has other blocks than the launcher's.
    """
    if choice.target is None:
        return None
    for table in tables(choice.target, choice.device):
        if (entry := table.entries.get(choice.problem)) is None:
            continue
        if entry.kernels == choice.fingerprint:
            return _config(table, entry, choice.heuristic)
        op = choice.problem.op
        say_once(f"{table.path}: {op} has changed since it was tuned; entries are ignored until `python -m jtops.tune {op}`.")
    return None


def _config(table: Table, entry: Entry, heuristic: Config) -> Config:
    try:
        config = Config(**entry.config)
    except (TypeError, ValueError) as error:
        raise JtopsError(f"{table.path}: the config of {entry.problem} is none: {error} Correct or delete the entry.") from error
    if config.blocks.keys() != heuristic.blocks.keys():
        raise JtopsError(
            f"{table.path}: {config} of {entry.problem} must have the blocks {', '.join(heuristic.blocks)}. Correct or delete it."
        )
    return config.said_by(f"tuned table ({table.source})")


def tables(target: str, device: str | None) -> list[Table]:
    """Those for an architecture, in the order in which they are asked: of this very device first, user's before shipped ones."""
    found = [t for source in ("user", "shipped") for t in _directory(source) if t.target == target]
    return sorted(found, key=lambda t: (t.device != device, t.source != "user", t.device))


def _directory(source: str) -> Iterator[Table]:
    directory = user_directory() if source == "user" else SHIPPED
    try:
        paths = sorted(Path(f.path) for f in os.scandir(directory) if f.name.endswith(".json"))
    except OSError:
        return
    for path in paths:
        if (table := _read(path, source)) is not None:
            yield table


_parsed: dict[Path, tuple[Any, Table | None]] = cache.store({})


def _read(path: Path, source: str) -> Table | None:
    """The table in a file, parsed again only if the file has changed; None if there is none in it."""
    try:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        known = _parsed.get(path)
        if known is None or known[0] != stamp:
            _parsed[path] = known = (stamp, _parse(path, source))
        return known[1]
    except FileNotFoundError:
        return None
    except OSError as error:
        say_once(f"{path} is ignored: {error}")
        return None


def _parse(path: Path, source: str) -> Table | None:
    try:
        table = load(path, source)
    except (ValueError, KeyError, TypeError) as error:
        if source == "shipped":
            raise JtopsError(f"{path} is damaged: {error!r}. Install jtops anew.") from error
        say_once(f"{path} is ignored, as if it were not there, and written anew by the next tuning: {error!r}")
        return None
    # What another Triton makes of a config may not fit. Shipped tables are tested with every Triton that jtops supports.
    if source == "user" and _minor(table.triton) != _minor(triton_compat.triton.__version__):
        say_once(f"{path} is ignored: it is of Triton {table.triton}, this is {triton_compat.triton.__version__}. Tune again.")
        return None
    return table


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def load(path: Path, source: str) -> Table:
    """Read a file; ValueError, KeyError or TypeError if it is no table."""
    raw = json.loads(path.read_text())
    if raw["format"] != FORMAT:
        raise ValueError(f"format {raw['format']!r} is not {FORMAT}")
    entries = [
        Entry(Problem(e["op"], e["choice"], e["problem"]), dict(e["config"]), e["kernels"], *(us / 1e6 for us in e["us"]))
        for e in raw["entries"]
    ]
    return Table(source, path, raw["device"], raw["target"], raw["triton"], {e.problem: e for e in entries})


def store(path: Path, device: str, target: str, entries: Sequence[Entry], dropped: Sequence[Problem] = ()) -> None:
    """Put entries into the table at `path`, in place of those it has for the same problems, and take those for `dropped` out.

    The file is whole at any time, and processes that write at once all find their entries in it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        try:
            old = load(path, "")
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            old = None
        kept = (
            dict(old.entries)
            if old and old.device == device and _minor(old.triton) == _minor(triton_compat.triton.__version__)
            else {}
        )
        kept = {p: e for p, e in kept.items() if p not in dropped} | {e.problem: e for e in entries}
        written_whole(path, _text(device, target, [kept[p] for p in sorted(kept)]))


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


def _text(device: str, target: str, entries: Sequence[Entry]) -> str:
    head = {"format": FORMAT, "device": device, "target": target, "triton": triton_compat.triton.__version__}
    lines = ",\n".join(
        json.dumps(
            {"op": e.problem.op, "choice": e.problem.choice, "problem": e.problem.text, "config": dict(e.config)}
            | {"us": [round(e.seconds * 1e6, 2), round(e.heuristic_seconds * 1e6, 2)], "kernels": e.kernels}
        )
        for e in entries
    )
    return f'{json.dumps(head)[:-1]}, "entries": [\n{lines}\n]}}\n'
