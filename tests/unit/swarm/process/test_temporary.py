"""swarm.process.temporary: a folder goes with its process, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from swarm.process.temporary import temporary_folder

KILLED = """
import os, signal
from swarm.process.temporary import temporary_folder
with temporary_folder("swarm-test-") as folder:
    (folder / "shard").write_bytes(b"x")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    left = Path(killed.stdout.decode().strip())
    assert left.parent == tmp_path
    assert left.is_dir()
    (tmp_path / "swarm-other").mkdir()
    with temporary_folder("swarm-test-") as folder:
        assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "swarm-other", folder])
    assert list(tmp_path.iterdir()) == [tmp_path / "swarm-other"]


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    with temporary_folder("swarm-test-") as first:
        (first / "shard").write_bytes(b"x")
        with temporary_folder("swarm-test-"):
            assert (first / "shard").exists()
    assert not list(tmp_path.iterdir())


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "text").write_text("x")
    (tmp_path / "swarm-test-link").symlink_to(tmp_path / "mine")
    with temporary_folder("swarm-test-"):
        assert (tmp_path / "mine" / "text").exists()
