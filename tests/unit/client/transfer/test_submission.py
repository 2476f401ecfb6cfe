"""What `swarm submit` asks the scheduler before it tokenises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from client.records import Peer
from client.transfer.submission import look_ahead, slow_text
from swarm.errors import InvalidConfig, NotFound
from tests.support.simulated import small_spec


class Jobs:
    """A scheduler with one job."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, job: str) -> None:
        self.asked.append(job)
        if job != "demo-1":
            raise NotFound(f'there is no job "{job}"')


def test_a_job_that_does_not_exist_is_no_start(tmp_path: Path) -> None:
    """An unknown --resume-from was found out after minutes of tokenising and uploading."""
    scheduler: Any = Jobs()
    here: Any = object()  # a checkpoint on this machine
    look_ahead(scheduler, small_spec(tmp_path), None)
    look_ahead(scheduler, small_spec(tmp_path, checkpoint__resume_from="demo-1:latest"), None)
    look_ahead(scheduler, small_spec(tmp_path, checkpoint__resume_from="other:500"), here)
    assert scheduler.asked == ["demo-1"]
    with pytest.raises(NotFound, match='there is no job "other"'):
        look_ahead(scheduler, small_spec(tmp_path, checkpoint__resume_from="other:500"), None)


@pytest.mark.parametrize("where", ["runs", "./runs", "file://runs"])
def test_a_relative_folder_for_checkpoints_is_of_no_use_to_a_scheduler(tmp_path: Path, where: str) -> None:
    scheduler: Any = Jobs()
    with pytest.raises(InvalidConfig, match="is relative, and the scheduler has no folder of yours"):
        look_ahead(scheduler, small_spec(tmp_path, checkpoint__dir=where), None)
    for fine in ("", "/mnt/runs", "s3://bucket/runs"):
        look_ahead(scheduler, small_spec(tmp_path, checkpoint__dir=fine), None)


def test_who_chooses_bfloat16_for_cpus_without_it_is_warned_before_the_job_starts() -> None:
    """Only the stage servers' logs said that the job was twenty times as slow as it could be."""
    slow, fast = Peer(id="a", state="idle", slow_bfloat16=True), Peer(id="b", state="serving")
    assert slow_text("bfloat16", [slow, fast]).startswith("1 of 2 stage servers have no bfloat16 instructions")
    assert slow_text("bfloat16", [fast]) == ""
    assert slow_text("bfloat16", [fast, Peer(id="c", state="gone", slow_bfloat16=True)]) == ""
