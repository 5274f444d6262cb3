"""Files that other processes may read while they are written."""

import os
import uuid
from pathlib import Path


def written_whole(path: Path, content: str | bytes) -> None:
    """Write a file, and its folder if need be: a reader finds all of it or what was there before. The umask decides the mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
