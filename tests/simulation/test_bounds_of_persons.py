"""What one person may open, in a scheduler with its database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NoReturn

import pytest

from scheduler.api.job_service import JobService
from scheduler.brain.members import persons
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.jobs import removal
from scheduler.jobs.job import Job
from swarm.errors import InvalidConfig, QuotaReached
from swarm.pki.names import Role
from swarm.wire import jobs_pb2 as pb
from tests.support.scenes import Desk, make_spec, of_desk

ANN, BOB = (Person(Role.SUBMITTER, name) for name in ("ann", "bob"))


class Context:
    """A call that is refused raises what its caller is told."""

    async def abort(self, code: Any, details: str, trailing_metadata: Any = ()) -> NoReturn:
        raise PermissionError(details)


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persons, "SUBMITS_OF_ONE_AT_ONCE", 2)


@pytest.mark.usefixtures("two_at_once")  # before the scheduler starts
@of_desk(0)
async def test_who_submitted_often_waits_for_his_next_submit_and_nobody_else_does(desk: Desk) -> None:
    jobs = desk.rig.jobs
    with pytest.raises(InvalidConfig):
        await desk.submit(desk.spec.model_copy(update={"name": "-"}), by=ANN)
    job = await desk.submit(by=ANN)
    await jobs.cancel(job, "no more")
    with pytest.raises(QuotaReached, match="may submit 60 an hour") as caught:
        await desk.submit(by=ANN)
    assert caught.value.hint.startswith("the next one may come in ")
    with pytest.raises(QuotaReached):
        await jobs.check(desk.spec, desk.tokens.of_job(), ANN)
    for person in (BOB, ANYBODY, ANYBODY, ANYBODY):
        await jobs.check(desk.spec, desk.tokens.of_job(), person)
        await desk.submit(by=person)


@of_desk(0)
async def test_the_oldest_ended_job_without_weights_goes_when_another_of_its_owner_ends(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's ended jobs were kept for ever, so memory and database grew with each one."""
    monkeypatch.setattr(removal, "ENDED_OF_ONE_MAX", 2)
    jobs = desk.rig.jobs
    await jobs.removal.load()

    async def ended(by: Person) -> Job:
        job = await desk.submit(by=by)
        await jobs.cancel(job, "no more")
        return job

    bobs, nobodys = await ended(BOB), [await ended(ANYBODY) for _ in range(3)]
    open_one = await desk.submit(by=ANN)
    anns = [await ended(ANN) for _ in range(3)]
    listed = {record.id for record in await jobs.stores.database.jobs()}
    assert listed == {job.record.id for job in (bobs, *nobodys, open_one, *anns[1:])}
    assert {job.record.id for job in jobs.registry.all()} == listed
    assert f"job {anns[0].record.id} was removed: the newest 2 ended jobs" in desk.said(anns[2])
    assert "was removed" not in desk.said(anns[1])

    anns.append(await ended(ANN))
    anns.append(await desk.submit(by=ANN))
    monkeypatch.setattr(removal, "ENDED_OF_ONE_MAX", 1)
    await jobs.removal.tidy_once()
    assert jobs.registry.get(anns[2].record.id) is None, "what an earlier start left is removed too"
    assert jobs.registry.get(anns[3].record.id) is anns[3]


@of_desk(0)
async def test_who_pauses_and_resumes_in_turn_writes_so_many_rows_and_may_then_wait(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each turn wrote rows with the whole spec of the job, as fast as the disk took them."""
    monkeypatch.setattr(persons, "CHANGES_OF_ONE_AT_ONCE", 5)
    rig, context = desk.rig, Context()
    by = [ANN]
    service: Any = JobService(rig.jobs, rig.membership, "0", lambda: 0.0, asks=lambda: by[0])
    job = await desk.submit(by=ANN)
    request = pb.JobRequest(job=job.record.id)
    for call in (service.Pause, service.Resume) * 2:
        await call(pb.ResumeRequest(job=job.record.id) if call == service.Resume else request, context)
    await service.Cancel(pb.CancelRequest(job=job.record.id), context)
    ended = job.record
    resumed = pb.ResumeRequest(job=job.record.id)
    with pytest.raises(PermissionError, match="times in a short time, and may do it 60 times a minute"):
        await service.Resume(resumed, context)
    assert job.record is ended
    by[0] = BOB
    with pytest.raises(PermissionError, match="is for the person who submitted"):
        await service.Resume(resumed, context)
    other = await desk.submit(by=BOB)
    await service.Pause(pb.JobRequest(job=other.record.id), context)
    by[0] = ANN
    await asyncio.sleep(1.0)
    await service.Resume(resumed, context)


def _late(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a caller sent is looked at for a while, as on the threads of a real scheduler."""
    aside = desk.rig.jobs.aside

    async def late(work: Any) -> Any:
        await asyncio.sleep(0.1)
        return await aside(work)

    monkeypatch.setattr(desk.rig.jobs, "aside", late)


async def _counted(*opening: Any) -> list[str]:
    """What became of calls at the same time: "open", or the error."""
    done = await asyncio.gather(*opening, return_exceptions=True)
    return ["open" if not isinstance(found, BaseException) else str(found) for found in done]


@of_desk(0)
async def test_jobs_that_are_opened_at_the_same_time_count_together(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A person submitted a hundred jobs at once, and each was counted before any of the others was open."""
    monkeypatch.setattr(persons, "JOBS_OPEN_OF_ONE_MAX", 3)
    _late(desk, monkeypatch)
    bad = make_spec(tmp_path, checkpoint__resume_from="nobody:latest")
    told = await _counted(*(desk.submit(spec, by=ANN) for spec in (bad, desk.spec, desk.spec, desk.spec)))
    assert [answer == "open" for answer in told] == [False, True, True, False], "one that fails counts until then"
    assert "you have 3 open jobs" in told[3]
    told = await _counted(*(desk.submit(by=person) for person in (ANN, ANN, BOB)))
    assert [answer == "open" for answer in told] == [True, False, True]


@of_desk(0)
async def test_a_job_that_is_resumed_is_one_more_that_is_open(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person cancelled his jobs, submitted others and resumed the first: all were open."""
    monkeypatch.setattr(persons, "JOBS_OPEN_OF_ONE_MAX", 2)
    jobs, ended = desk.rig.jobs, []
    _late(desk, monkeypatch)
    for _ in range(3):
        ended.append(await desk.submit(by=ANN))
        await jobs.cancel(ended[-1], "no more")
    told = await _counted(*(jobs.resume(job, "latest", desk.spec) for job in ended))
    assert [answer == "open" for answer in told] == [True, True, False]
    assert "you have 2 open jobs" in told[2]
    assert [job.record.state.is_final for job in ended] == [False, False, True]
    with pytest.raises(QuotaReached):
        await desk.submit(by=ANN)
    await jobs.pause(ended[0], "paused by its user")
    await jobs.resume(ended[0], "latest", None)  # one that is paused is open already
    await jobs.cancel(ended[1], "no more")
    await jobs.resume(ended[2], "latest", desk.spec)
    await desk.submit(by=BOB)
