"""The claim: nobody can say what cannot be checked without end, and those who agree are believed."""

from __future__ import annotations

from scheduler.brain.commit.rounds import ALONE_MAX, SETS_MAX, TOGETHER_S, WINDOW_S, FailureBudget
from swarm.types import PeerId

A, B = PeerId("a"), PeerId("b")


def blamed(excuses: FailureBudget, peer: PeerId, now_s: float) -> bool:
    excuses.blames_relays(peer, now_s)
    return excuses.excuses(peer, now_s)


def test_one_that_alone_blames_relays_is_excused_some_times_in_a_while() -> None:
    excuses = FailureBudget()
    assert all(blamed(excuses, A, float(number)) for number in range(ALONE_MAX))
    assert not blamed(excuses, A, ALONE_MAX + 0.0)
    assert blamed(excuses, A, ALONE_MAX + WINDOW_S + 1.0)


def test_two_that_blame_relays_are_excused_without_end() -> None:
    excuses = FailureBudget()
    for number in range(5 * ALONE_MAX):
        assert blamed(excuses, A, 5.0 * number)
        excuses.blames_relays(B, 5.0 * number)
    now_s = 25.0 * ALONE_MAX
    assert all(blamed(excuses, A, now_s + TOGETHER_S) for _ in range(ALONE_MAX - 1)), "the first was alone"
    assert not blamed(excuses, A, now_s + TOGETHER_S), "the other one has stopped saying so"


def test_another_set_than_the_ledger_has_is_believed_some_times() -> None:
    excuses = FailureBudget()
    assert all(excuses.other_set(A, 0.0) for _ in range(SETS_MAX))
    assert not excuses.other_set(A, 1.0)
    assert excuses.other_set(B, 1.0)
    assert excuses.other_set(A, WINDOW_S + 2.0)
