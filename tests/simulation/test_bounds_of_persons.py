"""What one person may open, in a scheduler with its database."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.brain.members import persons
from scheduler.brain.members.persons import ANYBODY, Person
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
