"""What strikes mean for a job: who goes, what is done again, when the job stops."""

from __future__ import annotations

from random import Random

from scheduler.brain.commit.digests import Expel, StartOver
from scheduler.brain.fleet.quarantine import STRIKES_S
from scheduler.brain.outputs import Fail, Struck
from scheduler.brain.parts import Parts
from scheduler.brain.trust.strikes import UNCLEAR_MAX, Strikes
from swarm.job.course import PLAIN
from swarm.types import PeerId
from tests.support.obedient import Swarm

A, B = PeerId("a"), PeerId("b")


def made() -> tuple[Strikes, Parts]:
    swarm = Swarm(("abc",))
    parts = Parts(swarm.settings, Random(0), PLAIN)
    for replica in swarm.replicas.values():
        parts.state.pool.add(swarm.record(replica.peer, replica.stage))
    return Strikes(parts.state), parts


def test_one_that_is_proven_wrong_goes_at_once() -> None:
    strikes, parts = made()
    strikes.counts[A] = 7
    assert strikes.convict(A, "told", 0.0, is_proven=True) == [Expel(A, "wrong numbers: told")]
    assert parts.state.outbox.take() == [Struck(A, "told", True, 7)]


def test_a_second_strike_within_a_day_is_enough() -> None:
    strikes, _ = made()
    assert isinstance(strikes.convict(A, "told", 0.0, is_proven=False)[0], StartOver)
    assert isinstance(strikes.convict(A, "told", STRIKES_S, is_proven=False)[0], StartOver), "a day later"
    assert isinstance(strikes.convict(A, "told", STRIKES_S + 1.0, is_proven=False)[0], Expel)
    assert isinstance(strikes.convict(B, "told", STRIKES_S + 1.0, is_proven=False)[0], StartOver)


def test_the_same_two_may_contradict_each_other_some_times() -> None:
    strikes, _ = made()
    found = [strikes.unclear("told", (A, B)) for _ in range(UNCLEAR_MAX)]
    assert found[:-1] == [None] * (UNCLEAR_MAX - 1)
    assert isinstance(found[-1], Fail)
    assert "a, b contradict each other" in found[-1].message
    assert strikes.unclear("told", (B, PeerId("c"))) is None
