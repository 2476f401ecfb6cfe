"""What one person may open, in a scheduler with its database."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.brain.members import persons
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.jobs import removal
from scheduler.jobs.job import Job
from swarm.errors import InvalidConfig, QuotaReached
from swarm.pki.names import Role
from tests.support.scenes import Desk, at_desk, make_spec
from tests.support.simulated import Tokens

ANN, BOB = (Person(Role.SUBMITTER, name) for name in ("ann", "bob"))


def test_who_submitted_often_waits_for_his_next_submit_and_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(persons, "SUBMITS_OF_ONE_AT_ONCE", 2)
    spec = make_spec(tmp_path)
    tokens = Tokens.make(tmp_path, spec)

    async def act(desk: Desk) -> None:
        jobs = desk.rig.jobs
        with pytest.raises(InvalidConfig):
            await jobs.submit(spec.model_copy(update={"name": "-"}), tokens.of_job(), {}, by=ANN)
        job = await jobs.submit(spec, tokens.of_job(), {}, by=ANN)
        await jobs.cancel(job, "no more")
        with pytest.raises(QuotaReached, match="may submit 60 an hour") as caught:
            await jobs.submit(spec, tokens.of_job(), {}, by=ANN)
        assert caught.value.hint.startswith("the next one may come in ")
        with pytest.raises(QuotaReached):
            await jobs.check(spec, tokens.of_job(), ANN)
        for person in (BOB, ANYBODY, ANYBODY, ANYBODY):
            await jobs.check(spec, tokens.of_job(), person)
            await jobs.submit(spec, tokens.of_job(), {}, by=person)

    at_desk(tokens, act, peers=0)


def test_the_oldest_ended_job_without_weights_goes_when_another_of_its_owner_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's ended jobs were kept for ever, so memory and database grew with each one."""
    monkeypatch.setattr(removal, "ENDED_OF_ONE_MAX", 2)
    spec = make_spec(tmp_path)
    tokens = Tokens.make(tmp_path, spec)

    async def act(desk: Desk) -> None:
        jobs = desk.rig.jobs
        await jobs.removal.load()

        async def ended(by: Person) -> Job:
            job = await jobs.submit(spec, tokens.of_job(), {}, by=by)
            await jobs.cancel(job, "no more")
            return job

        bobs, nobodys = await ended(BOB), [await ended(ANYBODY) for _ in range(3)]
        open_one = await jobs.submit(spec, tokens.of_job(), {}, by=ANN)
        anns = [await ended(ANN) for _ in range(3)]
        listed = {record.id for record in await jobs.stores.database.jobs()}
        assert listed == {one.record.id for one in (bobs, *nobodys, open_one, *anns[1:])}
        assert {one.record.id for one in jobs.registry.all()} == listed
        assert f"job {anns[0].record.id} was removed: the newest 2 ended jobs" in desk.said(anns[2])
        assert "was removed" not in desk.said(anns[1])

        anns.append(await ended(ANN))
        anns.append(await jobs.submit(spec, tokens.of_job(), {}, by=ANN))
        monkeypatch.setattr(removal, "ENDED_OF_ONE_MAX", 1)
        await jobs.removal.tidy_once()
        assert jobs.registry.get(anns[2].record.id) is None, "what an earlier start left is removed too"
        assert jobs.registry.get(anns[3].record.id) is anns[3]

    at_desk(tokens, act, peers=0)
