"""A scheduler is restored from a backup that was taken while it worked (docs/checkpoints.md), with real processes."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from swarm.job.resolve import Basis, resolve
from swarm.reference.trainer import train_local
from tests.support.processes import Cluster
from tests.support.simulated import Tokens, small_spec, write_text


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
    draft = small_spec(write_text(tmp_path), pipeline__stages=2, training__steps=120, checkpoint__every_steps=20)
    spec = resolve(draft, Basis(257))
    tokens = Tokens.make(tmp_path / "data", spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    with Cluster(tmp_path) as cluster:
        peers = cluster.add_servers(2)
        job = cluster.submit(spec, tokens.manifest).id
        cluster.wait_for_step(job, 30)
        back_up(tmp_path / "scheduler", tmp_path / "copy")
        cluster.restart_scheduler()  # a start that the copy does not know of
        cluster.wait_for_step(job, 60)
        cluster.scheduler.kill()
        for server in cluster.servers.values():
            server.kill()
            server.stop()
        shutil.rmtree(tmp_path / "scheduler")
        shutil.copytree(tmp_path / "copy", tmp_path / "scheduler")
        cluster.restart_scheduler()
        for number, peer in enumerate(peers):
            cluster.servers[peer] = cluster.start_server(number)
        ended = cluster.succeeds(job)
        assert ended.weights_sha256 == expected.sha256
