"""What this process keeps of compiled kernels and decisions, which one `clear` forgets, and the counts of both."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """Counts since the process began or since `clear`: kernels compiled, found in memory, found on disk and found damaged on disk;
    and the `seconds` spent compiling or loading.
    """

    compiled: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    damaged: int = 0
    seconds: float = 0.0


_lock = threading.Lock()
_counts = Statistics()
_stores: list[dict] = []


def store(memory: dict) -> dict:
    """Register a dict that `clear` empties."""
    _stores.append(memory)
    return memory


def statistics() -> Statistics:
    """The counts so far."""
    return _counts


def clear() -> None:
    """Forget compiled kernels, tuning decisions and counts of this process. Files stay, and so do programs JAX has compiled."""
    global _counts  # noqa: PLW0603
    with _lock:
        for memory in _stores:
            memory.clear()
        _counts = Statistics()


def count(**more: float) -> None:
    """Add to the counts."""
    global _counts  # noqa: PLW0603
    with _lock:
        _counts = dataclasses.replace(_counts, **{k: getattr(_counts, k) + v for k, v in more.items()})


def once(memory: dict, key: Any, make: Callable[[], Any], found: Callable[[], None] = lambda: None) -> Any:
    """``make()``, whose result `memory` keeps under `key`; ``found()`` is called where another call makes or made it.

    Threads that ask for one key at the same time share the result, or the error, which is not kept.
    """
    with _lock:  # never held while making
        future, mine = (memory[key], False) if key in memory else (memory.setdefault(key, Future()), True)
    if not mine:
        found()
        return future.result()
    try:
        future.set_result(make())
    except BaseException as error:
        with _lock:
            memory.pop(key, None)
        future.set_exception(error)
    return future.result()
