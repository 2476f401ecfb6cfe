"""Small text files that a person names: a job file, a profile, a line to join with."""

from __future__ import annotations

import os
import stat
from pathlib import Path

BYTES_MAX = 1 << 20


def read_small(path: Path, bytes_max: int = BYTES_MAX) -> str:
    """The text, without a byte-order mark, as editors on Windows write it in front.

    Raises OSError if the file cannot be read, ValueError (UnicodeDecodeError is one) if it is no regular file, holds
    more than `bytes_max`, or is not UTF-8. A device or a pipe is never read: it might not end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise ValueError(f"it holds more than {bytes_max >> 20} MiB")
    return content.decode("utf-8-sig")


def _open_at_once(path: str, flags: int) -> int:
    """Otherwise the open of a pipe waits for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)
