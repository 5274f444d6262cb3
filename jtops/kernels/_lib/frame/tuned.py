"""Tables of measured configs, in which a launcher looks before it takes its heuristic's. Only `jtops.tune` writes them.

A table is one JSON file per kind of GPU. The library ships some, in ``jtops/kernels/tuned``; a user's own, in ``ops`` in the
directory of `jtops.core.tuning.table`, come before them. A table of the very GPU comes before those of others of its architecture,
which serve where it has none, and where a program is lowered for a GPU that is only named: then the table is the same on every
machine. All hosts of a program should see the same tables.

What is looked up is settled when a program is lowered; programs that JAX has compiled keep what they have.
"""

import contextlib
import dataclasses
import functools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from jtops._compat import triton as triton_compat
from jtops.core import cache, notes
from jtops.core.compile.content import content
from jtops.core.tuning import table as tuning_table
from jtops.core.tuning.table import Entry, Problem, Table, say_once
from jtops.errors import JtopsError
from jtops.kernels._lib.frame.config import Config

SHIPPED = Path(__file__).parents[2] / "tuned"
_local = threading.local()
_fingerprints: dict[tuple[int, ...], tuple[tuple, str]] = cache.store({})  # by identity, of kernels that stay: see `fingerprint`


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
        """The digest of the kernels' content, kept by identity: Triton's own hash of a kernel takes its source apart."""
        key = tuple(map(id, self.kernels))
        if key not in _fingerprints:
            _fingerprints[key] = self.kernels, tuning_table.digest(content(list(self.kernels)))
        return _fingerprints[key][1]

    def settled(self, config: Config) -> Config:
        """Tell `choices`, if it listens, and hand `config` on."""
        if (told := getattr(_local, "choices", None)) is not None:
            told.append((self, config))
        return config


def choices() -> contextlib.AbstractContextManager[list[tuple[Choice, Config]]]:
    """Context manager that collects the choices of this thread's launchers, with what each settled on."""
    return notes.setting(_local, "choices", [])


def forcing(problem: Problem, config: Config) -> contextlib.AbstractContextManager[dict[Problem, Config]]:
    """Context manager in which one choice of this thread is `config`, whatever the tables say; an explicit one stays."""
    return notes.setting(_local, "forced", _forced() | {problem: config.said_by("trial")})


def forced(problem: Problem) -> Config | None:
    """What `forcing` asks for."""
    return _forced().get(problem)


def _forced() -> dict[Problem, Config]:
    return getattr(_local, "forced", None) or {}


# ------------------------------------------------------------------------------------------------------------------ tables


def user_directory() -> Path:
    """The directory of the user's tables."""
    return tuning_table.directory() / "ops"


def file_name(device: str) -> str:
    """The file name of a device kind's table."""
    return re.sub(r"[^A-Za-z0-9]+", "_", device) + ".json"


def lookup(choice: Choice) -> Config | None:
    """The config of the first table that has one for this choice, measured with these kernels.

    Raises:
      JtopsError: it is no config, or has other blocks than the launcher's.
    """
    if choice.target is None:
        return None
    for source, table in tables(choice.target, choice.device):
        if (entry := table.entries.get(choice.problem)) is None:
            continue
        if entry.kernels == choice.fingerprint:
            return _config(source, table, entry, choice.heuristic)
        op = choice.problem.op
        say_once(f"{table.path}: {op} has changed since it was tuned; entries are ignored until `python -m jtops.tune {op}`.")
    return None


def _config(source: str, table: Table, entry: Entry, heuristic: Config) -> Config:
    try:
        named = Config(**entry.config)
    except (TypeError, ValueError) as error:
        raise JtopsError(f"{table.path}: the config of {entry.problem} is none: {error} Correct or delete the entry.") from error
    config, variant = named.plain(), named["variant"]
    if variant is not None and not entry.problem.choice.startswith(f"{variant}."):
        raise JtopsError(f"{table.path}: {named} of {entry.problem} is for kernels of another name. Correct or delete the entry.")
    if config.blocks.keys() != heuristic.blocks.keys():
        raise JtopsError(
            f"{table.path}: {config} of {entry.problem} must have the blocks {', '.join(heuristic.blocks)}. Correct or delete it."
        )
    return config.said_by(f"tuned table ({source})")


def tables(target: str, device: str | None) -> list[tuple[str, Table]]:
    """The tables for an architecture, in the order in which they are asked: this very device's first, "user" before "shipped"."""
    found = [(source, t) for source in ("user", "shipped") for t in _directory(source) if t.target == target]
    return sorted(found, key=lambda f: (f[1].device != device, f[0] != "user", f[1].device))


def _directory(source: str) -> Iterator[Table]:
    try:
        paths = sorted(
            Path(f.path) for f in os.scandir(user_directory() if source == "user" else SHIPPED) if f.name.endswith(".json")
        )
    except OSError:
        return
    for path in paths:
        if (table := tuning_table.read(path, functools.partial(_parsed, source, path))) is not None:
            yield table


def _parsed(source: str, path: Path, text: str) -> Table | None:
    try:
        table = tuning_table.parsed(path, text)
    except (ValueError, KeyError, TypeError) as error:
        if source == "user":
            raise
        raise JtopsError(f"{path} is damaged: {error!r}. Install jtops anew.") from error
    if source == "user" and not table.current:  # shipped ones are tested with every Triton that jtops supports
        say_once(f"{path} is ignored: it is of Triton {table.triton}, this is {triton_compat.triton.__version__}. Tune again.")
        return None
    return table
