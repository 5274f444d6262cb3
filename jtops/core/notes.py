"""What lowering decides about each kernel, told to whoever listens in this thread; nobody does but `explain`."""

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
    """Give this thread's `local` an attribute meanwhile; what it was before comes back."""
    before = getattr(local, name, None)
    setattr(local, name, value)
    try:
        yield value
    finally:
        setattr(local, name, before)


def listening() -> contextlib.AbstractContextManager[list[Note]]:
    """Collect the notes that this thread's lowering makes meanwhile."""
    return setting(_local, "notes", [])


def config_from(source: str, variant: str = "") -> contextlib.AbstractContextManager[tuple[str, str]]:
    """Inside the context, calls that this thread binds record `source` as the origin of their config, and their op's variant."""
    return setting(_local, "origin", (source, variant))


def origin() -> tuple[str, str]:
    """Where the config of a call that is bound now comes from, and its op's variant; "" for a call of the user's own."""
    return getattr(_local, "origin", None) or ("", "")


def add_partitioned(name: str, platform: str) -> None:
    """Tell the listener that what each device launches is decided later."""
    why = "each device's part is lowered, by its own shapes, while XLA splits the program"
    add(name, "decided by XLA's partitioner", why, platform)


def add(name: str, path: str, reason: str, platform: str, call: Any = None, compiled: Any = None) -> None:
    """Tell the listener, if there is one."""
    if (notes := getattr(_local, "notes", None)) is not None:
        notes.append(Note(name, path, reason, platform, call, compiled))
