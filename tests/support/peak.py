"""How much memory processes take, as the kernel sees it. Linux only."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from swarm.process.malloc import trim_malloc

NOW, PEAK = "VmRSS", "VmHWM"


def resident(pid: int, key: str) -> int:
    """Bytes of resident memory: now, or the most since the process began or `set_back` was called."""
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, f"/proc tells no {key}: this needs Linux"
    return int(found[1]) * 1024


def set_back(pid: int) -> None:
    """Let the peak begin anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the resident memory of this process exceeds what it was before, at the most; results count too."""
    trim_malloc()
    set_back(os.getpid())
    before = resident(os.getpid(), NOW)
    work()
    return resident(os.getpid(), PEAK) - before
