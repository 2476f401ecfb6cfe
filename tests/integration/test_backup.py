"""A scheduler is restored from a backup that was taken while it worked (docs/checkpoints.md), with real processes."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.processes import Cluster
from tests.support.scenes import Task


def back_up(data_dir: Path, copy: Path) -> None:
    """What the document says: the database first, the folder after it."""
    copy.mkdir()
    with (
        closing(sqlite3.connect(data_dir / "scheduler.db")) as living,
        closing(sqlite3.connect(copy / "scheduler.db")) as kept,
    ):
        living.backup(kept)
    shutil.copytree(data_dir, copy, ignore=shutil.ignore_patterns("scheduler.db*"), dirs_exist_ok=True)


@pytest.mark.timeout(900)
def test_a_job_goes_on_from_a_backup_with_the_bits_of_one_process(tmp_path: Path) -> None:
    task = Task.make(tmp_path, training__steps=72, checkpoint__every_steps=12)
    with Cluster(tmp_path) as cluster:
        peers = cluster.add_servers(2)
        job = cluster.submit(task.spec, task.tokens.manifest).id
        cluster.wait_for_step(job, 18)
        back_up(tmp_path / "scheduler", tmp_path / "copy")
        cluster.restart_scheduler()  # a start that the copy does not know of
        cluster.wait_for_step(job, 36)
        cluster.scheduler.kill()
        for server in cluster.servers.values():
            server.kill()
            server.stop()
        shutil.rmtree(tmp_path / "scheduler")
        shutil.copytree(tmp_path / "copy", tmp_path / "scheduler")
        cluster.restart_scheduler()
        for number, peer in enumerate(peers):
            cluster.servers[peer] = cluster.start_server(number)
        assert cluster.succeeds(job).weights_sha256 == task.sha256
