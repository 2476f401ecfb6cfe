"""What the benchmarks found, kept as JSON: one record per row of the table. Table and plots are made of it alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Value = float | None  # None: it never came to it, as a loss that is not reached


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Where and when a row was measured."""

    date: str
    cores: int
    processor: str
    load_before: float  # runnable processes, mean of the last minute before the row began
    remark: str = ""
    uncommitted: bool | None = None  # whether the source had changes that were not committed; None: not known


@dataclass(frozen=True, slots=True)
class Found:
    """One row as it was measured last: the values of each measure, in the order of their turns."""

    row: str
    quick: bool
    commands: Sequence[str]
    seconds: float
    circumstances: Circumstances
    values: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    fault: str = ""  # why there are none


def read(path: Path) -> dict[str, Found]:
    """The rows by name; none if there is no such file."""
    if not path.exists():
        return {}
    return {
        load["row"]: Found(**load | {"circumstances": _circumstances(load["circumstances"])})
        for load in json.loads(path.read_text())
    }


def _circumstances(kept: Mapping[str, Any]) -> Circumstances:
    """Files of before name a commit, which history may have lost: it is left out."""
    return Circumstances(**{name: value for name, value in kept.items() if name != "commit"})


def write(path: Path, rows: Mapping[str, Found]) -> None:
    path.write_text(json.dumps([asdict(rows[name]) for name in sorted(rows)], indent=1) + "\n")
