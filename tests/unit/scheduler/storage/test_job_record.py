"""What a job spent is counted by states and by the stage servers that it held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.types import JobId, JobState, PeerId

A, B = PeerId("a"), PeerId("b")


def queued() -> JobRecord:
    return JobRecord(JobId("j"), "j", JobState.QUEUED, "", 100.0, 100.0, "{}", JobTokens((), "uint16", 257, 1.0))


def test_each_state_counts_its_seconds_and_only_a_job_at_work_those_of_stage_servers() -> None:
    job = queued().entered(JobState.LOADING, "", 130.0)
    job = replace(job.counted(130.0), peers={A: 0, B: 1}).entered(JobState.RUNNING, "", 140.0)
    job = replace(job.counted(150.0), peers={A: 0})  # one is lost
    job = job.entered(JobState.RUNNING, "another reason", 155.0).entered(JobState.STALLED, "", 160.0)
    assert job.times == {"queued": 30.0, "loading": 10.0, "running": 20.0}
    assert job.peer_s == 2 * 10.0 + 2 * 10.0 + 10.0
    assert job.counted(200.0).times["stalled"] == 40.0
    assert job.counted(200.0).peer_s == job.peer_s


def test_a_job_that_has_ended_spends_nothing_until_it_is_resumed() -> None:
    job = replace(queued(), peers={A: 0}).entered(JobState.RUNNING, "", 100.0).entered(JobState.FAILED, "", 110.0)
    assert job.counted(500.0).times == {"queued": 0.0, "running": 10.0}
    again = job.entered(JobState.QUEUED, "", 600.0).entered(JobState.RUNNING, "", 601.0)
    assert again.times == {"queued": 1.0, "running": 10.0}
    assert again.peer_s == 10.0


@pytest.mark.parametrize("now_s", [50.0, 100.0])
def test_a_clock_that_is_set_back_takes_nothing_away(now_s: float) -> None:
    assert queued().counted(now_s).times == {"queued": 0.0}
