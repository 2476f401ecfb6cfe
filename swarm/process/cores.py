"""How many CPU cores this process may use: its affinity, and the quota of its container (cgroup v1 and v2).

Without a look at the quota, a container of 2 CPUs on a machine of 64 cores starts 64 threads, which wait for each
other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores(root: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """At least 1; a part of a core counts as one."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([there, *(math.ceil(quota) for quota in _quotas(root, own))]))


def _quotas(root: Path, own: Path) -> Iterator[float]:
    """Each quota that holds here, in cores: also of the groups around ours."""
    for line in _read(own).splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        mounts = (root,) if not controllers else (root / controllers, root / "cpu")
        if controllers and "cpu" not in controllers.split(","):
            continue
        path = PurePosixPath("/", group.lstrip("/"))
        for inside in (path, *path.parents):
            for mount in mounts:
                yield from _quota(mount / str(inside).lstrip("/"))


def _quota(folder: Path) -> Iterator[float]:
    words = _read(folder / "cpu.max").split()
    words = words or [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
    if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):  # else "max", or -1: no quota
        yield int(words[0]) / int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
