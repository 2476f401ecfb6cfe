"""Keys on disk: written whole or not at all, for their owner alone, and not read if others could."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from swarm.errors import InvalidConfig


def write_private(path: Path, content: bytes) -> None:
    """Replace the file at once, mode 0600, in a folder of mode 0700; InvalidConfig if that fails."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be written: {error.strerror or error}") from error


def read_private(path: Path) -> bytes:
    """The content; InvalidConfig if it cannot be read, or if others can read it too."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise InvalidConfig(f"others can read the key {path}", hint=f"chmod 600 {path}")
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}") from error
