"""What lowering decides about each kernel, for a listener in this thread; only `explain` listens."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

_local = threading.local()


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """One decision. `call` and `compiled` are the bound call and its machine code where there are such."""

    name: str
    path: str
    reason: str
    platform: str
    call: Any = None
    compiled: Any = None


@contextlib.contextmanager
def setting(local: threading.local, name: str, value: Any) -> Iterator[Any]:
    """Context manager that gives this thread's `local` an attribute and restores what it was before."""
    before = getattr(local, name, None)
    setattr(local, name, value)
    try:
        yield value
    finally:
        setattr(local, name, before)


def listening() -> contextlib.AbstractContextManager[list[Note]]:
    """Context manager that collects the notes of this thread's lowering."""
    return setting(_local, "notes", [])


def config_from(source: str, variant: str = "") -> contextlib.AbstractContextManager[tuple[str, str]]:
    """Context manager in which calls bound by this thread record `source` as the origin of their config, and the op's variant."""
    return setting(_local, "origin", (source, variant))


def origin() -> tuple[str, str]:
    """The origin of the config of a call that is bound now, and its op's variant; "" for a call of the user's own."""
    return getattr(_local, "origin", None) or ("", "")


def add_partitioned(name: str, platform: str) -> None:
    """Tell the listener that what each device launches is decided later."""
    why = "each device's part is lowered, by its own shapes, while XLA splits the program"
    add(name, "decided by XLA's partitioner", why, platform)


def add(name: str, path: str, reason: str, platform: str, call: Any = None, compiled: Any = None) -> None:
    """Tell the listener, if there is one."""
    if (notes := getattr(_local, "notes", None)) is not None:
        notes.append(Note(name, path, reason, platform, call, compiled))
