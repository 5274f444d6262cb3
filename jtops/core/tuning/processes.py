"""One answer for all processes of a program: process 0 decides, the others ask it through jax.distributed's key-value store."""

import json
import threading
from collections.abc import Callable
from typing import Any

import jax

from jtops.errors import JtopsError

TIMEOUT_SECONDS = 600  # how long a process waits for process 0, which may have to compile and time

_asked: dict[str, list[str]] = {}  # question -> fingerprints of the kernels it was asked for, in order: a factory makes several
_lock = threading.Lock()


def of_process_0(shared: tuple[Any, int], name: str, kernel: str, fingerprint: str, decide: Callable[[], Any]) -> Any:
    """Return what ``decide()`` returns, in process 0, which publishes it under `name`; in the others the ``config`` of that.

    Args:
      shared: the store's client and the number of this process.
      name: the same in every process for the same question, whatever version of the kernel it has.
      kernel: for errors.
      fingerprint: of the kernel's content and its configs, which must be the same everywhere.
      decide: called in process 0 alone.

    Raises:
      JtopsError: process 0 says nothing in `TIMEOUT_SECONDS`, failed, or has another version of the kernel.
    """
    client, process = shared
    with _lock:
        versions = _asked.setdefault(name, [])
        if fingerprint not in versions:
            versions.append(fingerprint)
        key = f"{name}/{versions.index(fingerprint)}"
    publish = lambda **what: client.key_value_set(key, json.dumps(what), allow_overwrite=True)
    if process == 0:
        try:
            made = decide()
        except Exception as error:
            publish(error=str(error))
            raise
        publish(fingerprint=fingerprint, config=made.config)
        return made
    try:
        said = json.loads(client.blocking_key_value_get(key, TIMEOUT_SECONDS * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise JtopsError(
            f"kernel {kernel}: process {process} heard no config from process 0 in {TIMEOUT_SECONDS} s: every process must trace "
            "the same calls. A call that only some make takes its config by keyword."
        ) from error
    if "error" in said:
        raise JtopsError(f"kernel {kernel}: process 0 found no config: {said['error']}")
    if said["fingerprint"] != fingerprint:
        raise JtopsError(
            f"kernel {kernel}: process 0 runs another version of it than process {process} (source, configs or Triton differ: "
            f"{said['fingerprint']}, {fingerprint}). Install the same code on every host."
        )
    return said["config"]
