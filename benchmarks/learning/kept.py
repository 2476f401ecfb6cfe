"""What the runs of a benchmark found, kept after each of them, so that one that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Kept:
    """Results by name, in a JSON file; without one they are kept in memory."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, Any] = json.loads(path.read_text()) if path is not None and path.exists() else {}

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, or gave before under this name: it must become JSON."""
        if name not in self._found:
            self._found[name] = make()
            if self._path is not None:
                part = self._path.with_name(f"{self._path.name}.part")
                part.write_text(json.dumps(self._found, indent=1))
                part.replace(self._path)
        return self._found[name]
