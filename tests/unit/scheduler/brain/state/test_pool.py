"""Replicas that leave stay members of what they had begun; attempts to join have reports and pauses."""

from __future__ import annotations

from random import Random

from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.settings import ON_ITS_WAY_S_MAX
from scheduler.brain.state.pool import (
    DONORS_MAX,
    PAUSE_S,
    PAUSE_S_MAX,
    Joiners,
    Leave,
    Leaves,
    choose_donors,
)
from swarm.types import Hop, JobId, PeerId
from swarm.wire.messages import Loaded

A, B, C = (PeerId(name) for name in "abc")


def test_a_replica_takes_part_in_what_was_open_and_is_then_released() -> None:
    leaves = Leaves()
    assert leaves.ask(A, Leave("drained"))
    assert not leaves.ask(A, Leave("drained")), "asking twice is the same as once"
    assert A not in leaves, "nothing happens before it begins"
    assert leaves.begin([A, B], [], until=5) == [A]
    assert A in leaves
    assert [leaves.takes_part(A, step) for step in (4, 5)] == [True, False]
    assert leaves.takes_part(B, 5)
    assert leaves.due(4) == []
    assert leaves.due(5) == [A]
    assert leaves.done(A, 0.0) == Leave("drained", None, 5)
    assert A not in leaves
    assert not leaves


def test_a_stage_is_never_emptied() -> None:
    leaves = Leaves()
    for peer in (A, B, C):
        leaves.ask(peer, Leave("drained"))
    assert leaves.begin([A, B, C], [], until=1) == [A, B]
    assert leaves.begin([A, B, C], [], until=2) == []
    leaves.forget(C)
    # The one that stayed is lost: the others stay in its place, and leave again when somebody has come.
    assert leaves.stay([A, B]) == {A: 1, B: 1}
    assert leaves.begin([A, B], [], until=2) == [A]
    assert leaves.begin([B], [], until=3) == []
    assert leaves.begin([B, C], [C], until=3) == [], "a suspect does not count"


def test_a_moving_replica_stays_for_good_if_its_stage_needs_it() -> None:
    leaves = Leaves()
    leaves.ask(A, Leave("it limits", target=1))
    leaves.begin([A, B], [], until=4)
    assert leaves.moving(0.0) == {A: 1}
    assert leaves.stay([A]) == {A: 4}
    assert not leaves
    assert leaves.moving(0.0) == {}


def test_to_be_drained_is_stronger_than_to_be_moved() -> None:
    leaves = Leaves()
    leaves.ask(A, Leave("it limits", target=1))
    leaves.begin([A, B], [], until=4)
    assert leaves.ask(A, Leave("drained"))
    assert leaves.done(A, 0.0) == Leave("drained", None, 4), "what was begun goes on"
    assert leaves.destination(A, 0.0) is None


def test_a_replica_released_for_another_stage_is_on_its_way_for_a_while() -> None:
    leaves = Leaves()
    leaves.ask(A, Leave("it limits", target=1))
    leaves.begin([A, B], [], until=4)
    leaves.done(A, 10.0)
    assert leaves.destination(A, 10.0) == Leave("it limits", 1, 4)
    assert leaves.moving(10.0 + ON_ITS_WAY_S_MAX) == {A: 1}
    assert leaves.moving(10.1 + ON_ITS_WAY_S_MAX) == {}
    assert leaves.destination(A, 10.1 + ON_ITS_WAY_S_MAX) is None


def test_a_replica_that_is_no_member_of_the_open_agreement_cannot_stay() -> None:
    leaves = Leaves()
    for peer in (A, B):
        leaves.ask(peer, Leave("drained"))
    leaves.begin([A, C], [], until=1)
    leaves.begin([B, C], [], until=3)
    assert leaves.stay([A, B], agreed=2) == {B: 3}
    assert A in leaves
    assert leaves.stay([], agreed=2) == {}


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
