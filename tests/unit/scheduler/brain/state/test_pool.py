"""Replicas that leave stay members of what they had begun; attempts to join have reports and pauses."""

from __future__ import annotations

from random import Random

import pytest

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.pool import DONORS_MAX, PAUSE_S, PAUSE_S_MAX, Joiners, Leave, Leaves, choose_donors
from swarm.types import Hop, JobId, PeerId
from swarm.wire.messages import Loaded
from tests.support.situations import Calls, Situation, beside

PEER = PeerId("joiner")


def replica(peer: PeerId) -> ReplicaRecord:
    return ReplicaRecord(peer, 1, "here", 1)


def loaded(number: int, version: int = 3) -> Loaded:
    return Loaded(JobId("job"), 0, 1, version, "digest", (), "", number)


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_replicas_leave_and_join_as_the_text_says(situation: Situation) -> None:
    made = {"Leaves": Leaves, "Leave": Leave, "leavers": list, "Joiners": Joiners, "replica": replica, "loaded": loaded}
    situation.check(Calls(None, **made).play)


def test_a_joiner_that_fails_waits_longer_each_time_until_it_gets_in() -> None:
    joining = Joiners()
    pauses, now_s = [], 0.0
    for _ in range(10):
        joining.begin(replica(PEER), now_s)
        joining.failed(PEER, "out of memory", now_s)
        assert "out of memory" in joining.barred(PEER, now_s)
        pause_s = next(s for s in range(1, 1000) if not joining.barred(PEER, now_s + s))
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses[-1] == PAUSE_S_MAX
    joining.begin(replica(PEER), now_s)
    joining.admitted(PEER)
    assert not joining.barred(PEER, now_s)


def test_hundreds_of_joiners_are_spread_over_the_donors() -> None:
    donors = [Hop(PeerId(f"donor-{n}"), 1, 0, "") for n in range(100)]
    rng, asked = Random(1), dict.fromkeys(donors, 0)
    for _ in range(500):
        few = choose_donors(donors, rng)
        assert len(set(few)) == DONORS_MAX
        for donor in few:
            asked[donor] += 1
    assert max(asked.values()) < 2 * 500 * DONORS_MAX / 100
    assert choose_donors(donors[:3], rng) == tuple(donors[:3])
