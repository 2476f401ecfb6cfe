"""Texts that people read, as they were recorded: beside a test file lies one text file with a part for each test.

`SWARM_RECORD_GOLDEN=1 python -m pytest -n 0 FILE` records them anew; the change is read before it is committed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

Golden: TypeAlias = Callable[..., None]

_RECORDS = bool(os.environ.get("SWARM_RECORD_GOLDEN"))


def golden_of(path: Path, name: str) -> Golden:
    """Compares texts, each a paragraph, with those that the file has for a test."""

    def check(*texts: object) -> None:
        found = "\n\n".join(re.sub(r"[ ]+$", "", str(text).strip("\n"), flags=re.MULTILINE) for text in texts)
        parts = _read(path)
        if _RECORDS:
            parts[name] = found
            path.write_text("".join(f"=== {name}\n\n{parts[name]}\n\n" for name in sorted(parts)))
        assert found == parts.get(name, ""), f"other than {path.name} says of {name}"

    return check


def _read(path: Path) -> dict[str, str]:
    whole = path.read_text() if path.exists() else ""
    parts = re.split(r"^=== (.*)\n\n", whole, flags=re.MULTILINE)[1:]
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}
