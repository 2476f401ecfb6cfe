"""scheduler.brain.state.joiners: attempts, reports, pauses; and how the brain judges a report."""

from __future__ import annotations

from random import Random

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.joiners import DONORS_MAX, PAUSE_S, PAUSE_S_MAX, Joiners, choose_donors
from swarm.types import Hop, JobId, PeerId
from swarm.wire.messages import Loaded

PEER = PeerId("joiner")


def loaded(number: int, version: int = 3) -> Loaded:
    return Loaded(JobId("job"), 0, 1, version, "digest", (), "", number)


def test_a_report_belongs_to_its_attempt() -> None:
    joining = Joiners()
    first = joining.begin(ReplicaRecord(PEER, 1, "here", 1), 0.0)
    assert PEER in joining
    second = joining.begin(ReplicaRecord(PEER, 1, "here", 1), 1.0)
    assert not joining.reported(PEER, loaded(first.number)), "that is news of an earlier life"
    assert joining.reported(PEER, loaded(second.number))
    assert second.report is not None
    joining.answer(second)
    assert (second.report, second.answered) == (None, 1)
    assert joining.admitted(PEER) is second
    assert PEER not in joining
    assert not joining.reported(PEER, loaded(second.number))


def test_a_joiner_that_fails_waits_longer_each_time_until_it_gets_in() -> None:
    joining = Joiners()
    pauses, now_s = [], 0.0
    for _ in range(10):
        joining.begin(ReplicaRecord(PEER, 1, "here", 1), now_s)
        joining.failed(PEER, "out of memory", now_s)
        assert "out of memory" in joining.barred(PEER, now_s)
        pause_s = next(s for s in range(1, 1000) if not joining.barred(PEER, now_s + s))
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:3] == [PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S]
    assert pauses[-1] == PAUSE_S_MAX
    joining.begin(ReplicaRecord(PEER, 1, "here", 1), now_s)
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


def test_a_report_that_is_said_again_in_a_new_session_is_answered_once() -> None:
    """The joiner counts answers: one too many, and it would not keep its next report until that is answered."""
    joining = Joiners()
    joiner = joining.begin(ReplicaRecord(PEER, 1, "here", 1), 0.0)
    assert joining.reported(PEER, loaded(joiner.number, 3))
    assert joining.reported(PEER, loaded(joiner.number, 3)), "it waits still"
    joining.answer(joiner)
    assert not joining.reported(PEER, loaded(joiner.number, 3))
    assert joining.reported(PEER, loaded(joiner.number, 5))
    joining.answer(joiner)
    assert joiner.answered == 2
