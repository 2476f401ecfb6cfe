"""Which jobs may be removed, and in which order old ones go."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.retention import HeldJob, check_removable, expired, kept_for_s, surplus
from swarm.errors import NotAllowed, UsageError
from swarm.types import JobId, JobState

DONE, FAILED, RUNNING = JobState.SUCCEEDED, JobState.FAILED, JobState.RUNNING


def job(id_: str, state: JobState = DONE, *, at: float, begins_at: str = "", where: str = "") -> HeldJob:
    return HeldJob(JobId(id_), id_.partition("-")[0], state, at + 0.5, at, begins_at, where)


@pytest.mark.parametrize("state", [state for state in JobState if not state.is_final])
def test_a_job_that_has_not_ended_stays(state: JobState) -> None:
    with pytest.raises(NotAllowed, match=f"job a-1 is {state}; only a job that has ended") as caught:
        check_removable(job("a-1", state, at=1), [])
    assert "swarm cancel a-1" in caught.value.hint


OLD = job("a-1", at=1)
NEEDS = {
    "the job at work that began at it": job("b-1", RUNNING, at=2, begins_at="a-1"),
    "a failed one, which can be resumed": job("b-1", FAILED, at=2, begins_at="a-1"),
    "a paused one": job("b-1", JobState.PAUSED, at=2, begins_at="a-1"),
    "one that named it by name": job("b-1", RUNNING, at=2, begins_at="a"),
    "one that named the beginning of its id": job("b-1", RUNNING, at=2, begins_at="a-"),
    "one whose timeline starts in its folder": job("b-1", RUNNING, at=2, where="/data/jobs/a-1/checkpoints"),
    "one whose timeline starts at its URL": job("b-1", FAILED, at=2, where="s3://bucket/runs/a-1"),
}
FREE = {
    "itself": OLD,
    "one that has succeeded": job("b-1", DONE, at=2, begins_at="a-1", where="/data/jobs/a-1/checkpoints"),
    "one that began at another": job("b-1", RUNNING, at=2, begins_at="c-1", where="/data/jobs/a-11/checkpoints"),
    "one that began at nothing": job("b-1", RUNNING, at=2),
    "one that is older": job("b-1", RUNNING, at=0, begins_at="a"),
    "one that starts at its own checkpoint": job("a-2", FAILED, at=2, where="/data/jobs/a-2/checkpoints"),
}


@pytest.mark.parametrize("why", NEEDS)
def test_a_job_stays_while_another_may_begin_at_it(why: str) -> None:
    with pytest.raises(NotAllowed, match="job b-1 began at job a-1 and") as caught:
        check_removable(OLD, [OLD, NEEDS[why]])
    assert "swarm rm b-1" in caught.value.hint


@pytest.mark.parametrize("why", FREE)
def test_a_job_goes_if_no_other_needs_it(why: str) -> None:
    check_removable(OLD, [OLD, FREE[why]])


def test_a_job_stays_while_its_folder_holds_the_checkpoints_of_another() -> None:
    outer = replace(OLD, checkpoint_dir="/mnt/runs")
    for where, stays in (("/mnt/runs/a-1", True), ("/mnt/runs/a-1/deep", True), ("/mnt/runs", False), ("", False)):
        inner = replace(job("b-1", at=2), checkpoint_dir=where)
        if stays:
            with pytest.raises(NotAllowed, match="job b-1 keeps its checkpoints in the folder of job a-1"):
                check_removable(outer, [outer, inner])
        else:
            check_removable(outer, [outer, inner])
        check_removable(OLD, [OLD, inner])


def test_old_jobs_go_and_those_that_began_at_others_go_first() -> None:
    jobs = [
        job("a-1", at=1),
        job("b-1", FAILED, at=2, begins_at="a-1"),
        job("c-1", at=3),
        job("d-1", RUNNING, at=4, begins_at="c-1"),
        job("e-1", at=90),
        job("f-1", JobState.PAUSED, at=1),
    ]
    assert expired(jobs, 50.0, now_unix_s=100.0) == ["b-1", "a-1"]
    assert expired(jobs, 5.0, now_unix_s=100.0) == ["e-1", "b-1", "a-1"]
    assert expired(jobs, 500.0, now_unix_s=100.0) == []


def test_jobs_are_kept_for_an_hour_at_least_or_for_ever() -> None:
    assert [kept_for_s(text) for text in ("", "1h", "30d", "90m")] == [0.0, 3600.0, 2_592_000.0, 5400.0]
    for text in ("0", "0d", "30", "59m", "a month", "-1d", "1e9d", "nan"):
        with pytest.raises(UsageError, match="--keep-jobs is a time of at least 1h"):
            kept_for_s(text)


def test_the_oldest_ended_jobs_without_weights_go_beyond_so_many_of_one_person() -> None:
    """A person's ended jobs were kept for ever, so memory and database grew with each one."""

    def of(owner: str, *jobs: HeldJob) -> list[HeldJob]:
        return [replace(job, owner=owner) for job in jobs]

    anns = of("submitter/ann", *(job(f"a-{at}", FAILED, at=at) for at in (3, 1, 2, 4)))
    assert surplus(anns, 4) == []
    assert surplus(anns, 2) == ["a-1", "a-2"]
    others = of("submitter/bob", job("b-1", FAILED, at=0)) + of("", *(job(f"p-{n}", FAILED, at=n) for n in range(9)))
    assert surplus([*anns, *others], 2) == ["a-1", "a-2"]
    trained = [replace(anns[1], has_weights=True), anns[0], *anns[2:]]
    assert surplus(trained, 2) == ["a-2"]
    at_work = [replace(anns[1], state=RUNNING), anns[0], *anns[2:]]
    assert surplus(at_work, 2) == ["a-2"]
    needed = of("submitter/bob", job("c-1", RUNNING, at=9, begins_at="a-1"))
    assert surplus([*anns, *needed], 2) == ["a-2", "a-3"]
