"""swarm.process.cores: a quota of the container counts as cores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from swarm.process.cores import cores


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/pod/x\n", {"pod/cpu.max": "300000 100000\n", "pod/x/cpu.max": "max 100000\n"}, 3),
        (
            "4:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu,cpuacct:/gone\n", {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("2:memory:/\n", {"cpu.max": "x"}, 64),
        ("", {}, 64),
    ],
)
def test_a_quota_of_the_container_is_a_number_of_cores(
    own: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod of 2 CPUs on a node of 64 cores started 64 threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert cores(tmp_path / "groups", tmp_path / "own") == expected
