"""The book that makes every gradient count exactly once."""

from __future__ import annotations

import math

from scheduler.brain.state.ledger import STEPS_KEPT_MIN, STORIES_MAX, STORY_LINES_MAX, Ledger, Verdict
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def hop(peer: PeerId, attempt: int = 1) -> Hop:
    return Hop(peer, 1, attempt, f"at {peer}")


def done(index: int, stage: int = 0, attempt: int = 1, step: int = 0, finite: bool = True) -> Accumulated:
    return Accumulated(Microbatch(0, step, index), stage, attempt, finite, 10.0 + index, 0.1, 0.2, 0.0)


def book(stages: int = 1, microbatches: int = 2, fed: tuple[PeerId, ...] = (A, A)) -> Ledger:
    """A ledger with step 0 open; `fed[index]` has the hop at stage 0, C those behind it."""
    ledger = Ledger(0, stages, microbatches)
    ledger.open(0)
    for peer in fed:
        ledger.feed(0, [hop(peer)] + [hop(C)] * (stages - 1), 0.0)
    return ledger


def test_a_step_is_full_when_every_stage_holds_every_microbatch() -> None:
    ledger = book(stages=2)
    assert (ledger.in_flight(), ledger.outstanding(A), ledger.outstanding(C)) == (2, 2, 2)
    for index, stage, peer in [(0, 0, A), (1, 1, C), (1, 0, A)]:
        assert ledger.accumulated(peer, done(index, stage), 0.0) is Verdict.COUNTED
        assert not ledger.is_full(0)
        ledger.validate()
    assert ledger.in_flight() == 1
    ledger.accumulated(C, done(0, 1), 0.0)
    assert ledger.is_full(0)
    assert ledger.in_flight() == ledger.outstanding(A) == ledger.outstanding(C) == 0
    assert ledger.losses(0) == [10.0, 11.0]
    assert ledger.sets(0) == {A: {0, 1}, C: {0, 1}}


def test_what_is_left_of_a_step_is_in_flight_or_not_fed() -> None:
    ledger = book(microbatches=3)
    ledger.open(1)
    assert (ledger.left(0), ledger.left(1)) == (3, 6)
    ledger.accumulated(A, done(0), 0.0)
    assert (ledger.left(0), ledger.left(1)) == (2, 5)


def test_a_contribution_counts_once_however_often_it_is_told() -> None:
    ledger = book()
    assert [ledger.accumulated(A, done(0), 0.0) for _ in range(3)] == [
        Verdict.COUNTED,
        Verdict.DUPLICATE,
        Verdict.DUPLICATE,
    ]
    assert (ledger.duplicates, ledger.in_flight(), ledger.outstanding(A)) == (2, 1, 1)


def test_a_replica_that_was_never_asked_is_a_violation() -> None:
    ledger = book()
    assert ledger.accumulated(B, done(0), 0.0) is Verdict.UNASKED
    assert ledger.accumulated(A, done(0, attempt=9), 0.0) is Verdict.UNASKED
    assert ledger.accumulated(A, done(7), 0.0) is Verdict.UNASKED
    assert ledger.accumulated(A, done(0, stage=5), 0.0) is Verdict.UNASKED
    assert (ledger.violations, ledger.in_flight()) == (4, 2)


def test_words_about_another_timeline_or_a_closed_step_are_stale() -> None:
    ledger = book()
    assert ledger.accumulated(A, done(0, step=3), 0.0) is Verdict.STALE
    other = Accumulated(Microbatch(1, 0, 0), 0, 1, True, 0.0, 0.1, 0.1, 0.0)
    assert ledger.accumulated(A, other, 0.0) is Verdict.STALE
    assert ledger.holder(0, 0, 0) is None
    ledger.close(0)
    assert ledger.accumulated(A, done(0), 0.0) is Verdict.STALE


def test_void_strikes_all_that_a_replica_did_and_what_it_says_later_about_it() -> None:
    ledger = book(microbatches=3, fed=(A, A, B))
    ledger.accumulated(A, done(0), 0.0)
    ledger.accumulated(B, done(2), 0.0)
    assert ledger.void(0, A, "test", 0.0) == 1
    ledger.validate()
    assert ledger.sets(0) == {B: {2}}
    assert ledger.orphans(0) == [(0, [0]), (1, [0])]
    assert ledger.attempt(0) == 2
    assert ledger.accumulated(A, done(1), 0.0) is Verdict.STALE, "it was on its way when the void was decided"
    assert (sum(ledger.replayed), ledger.outstanding(A), ledger.in_flight()) == (1, 0, 2)
    ledger.reroute(0, 0, 0, hop(A, ledger.next_attempt(0)), "refill", 0.0)
    assert ledger.accumulated(A, done(0, attempt=3), 0.0) is Verdict.COUNTED
    ledger.validate()


def test_a_gone_replica_is_struck_out_of_the_steps_that_can_still_be_redone_only() -> None:
    ledger = book()
    ledger.open(1)
    ledger.feed(1, [hop(A)], 0.0)
    ledger.open(2)
    ledger.feed(2, [hop(B)], 0.0)
    for index in range(2):
        ledger.accumulated(A, done(index), 0.0)
    assert ledger.peer_gone(A, [1, 2], "killed", 0.0) == [1]
    ledger.validate()
    assert ledger.is_full(0), "step 0 was decided: its average is held by others"
    assert ledger.orphans(1) == [(0, [0])]
    assert ledger.orphans(2) == []


def test_two_holders_are_not_full_and_the_smaller_contribution_is_superfluous() -> None:
    ledger = book(microbatches=2, fed=(A, A))
    assert ledger.withdraw(0, A, "suspect", 0.0) == [(0, 0), (0, 1)]
    ledger.next_attempt(0)
    ledger.reroute(0, 0, 0, hop(B, 2), "refill", 0.0)
    ledger.reroute(0, 0, 1, hop(A, 2), "refill", 0.0)
    assert ledger.accumulated(B, done(0, attempt=2), 0.0) is Verdict.COUNTED
    assert ledger.accumulated(A, done(1, attempt=2), 0.0) is Verdict.COUNTED
    assert ledger.is_full(0)
    assert ledger.accumulated(A, done(0, attempt=1), 0.0) is Verdict.SECOND, (
        "it was only suspected, and finished after all"
    )
    assert not ledger.is_full(0)
    ledger.validate()
    assert ledger.superfluous(0) == B
    ledger.void(0, B, "second holder", 0.0)
    ledger.validate()
    assert ledger.is_full(0) is True
    assert ledger.sets(0) == {A: {0, 1}}
    assert ledger.superfluous(0) is None
    # The route still names B, whose cells are gone: neighbours must be told who holds the tensors.
    assert ledger.orphans(0) == [(0, [0])]
    ledger.reroute(0, 0, 0, hop(ledger.holder(0, 0, 0) or B, ledger.next_attempt(0)), "refill", 0.0)
    assert ledger.outstanding(A) == 0, "the holder has nothing to do again"
    ledger.validate()


def test_of_equal_contributions_the_one_on_the_newest_route_stays() -> None:
    for first, second in [(A, B), (B, A)]:
        ledger = book(microbatches=1, fed=(first,))
        ledger.withdraw(0, first, "suspect", 0.0)
        ledger.reroute(0, 0, 0, hop(second, ledger.next_attempt(0)), "refill", 0.0)
        ledger.accumulated(first, done(0, attempt=1), 0.0)
        ledger.accumulated(second, done(0, attempt=2), 0.0)
        assert ledger.superfluous(0) == first


def test_a_displaced_replica_is_listed_until_it_has_accumulated_or_is_void() -> None:
    ledger = book(fed=(A, A))
    ledger.withdraw(0, A, "suspect", 0.0)
    ledger.reroute(0, 0, 0, hop(B, ledger.next_attempt(0)), "refill", 0.0)
    assert ledger.displaced(0, 0) == [A]
    ledger.void(0, A, "test", 0.0)
    assert ledger.displaced(0, 0) == []


def test_a_repeat_under_a_newer_route_is_the_answer_to_it_not_a_duplicate() -> None:
    ledger = book(microbatches=1, fed=(A,))
    ledger.withdraw(0, A, "suspect", 0.0)
    ledger.reroute(0, 0, 0, hop(A, ledger.next_attempt(0)), "refill", 0.0)
    assert ledger.accumulated(A, done(0, attempt=1), 0.0) is Verdict.COUNTED
    assert ledger.accumulated(A, done(0, attempt=2), 0.0) is Verdict.DUPLICATE
    assert ledger.duplicates == 0


def test_what_is_not_finite_is_in_nobodys_set() -> None:
    ledger = book()
    ledger.accumulated(A, done(0), 0.0)
    ledger.accumulated(A, done(1, finite=False), 0.0)
    assert ledger.is_full(0)
    assert not ledger.is_finite(0)
    assert ledger.sets(0) == {A: {0}}


def test_losses_come_in_order_of_the_microbatches_whoever_is_first() -> None:
    ledger = book(stages=2, microbatches=3, fed=(A, A, A))
    for index in (2, 0, 1):
        ledger.accumulated(A, done(index), 0.0)
        ledger.accumulated(C, done(index, stage=1), 0.0)
    assert ledger.losses(0) == [10.0, 11.0, 12.0]
    assert math.isfinite(sum(ledger.losses(0)))


def test_what_committed_steps_hold_is_counted_apart_and_shows_a_loss_or_a_double() -> None:
    ledger = book(stages=2)
    for index, stage, peer in [(0, 0, A), (1, 0, A), (0, 1, C), (1, 1, C)]:
        ledger.accumulated(peer, done(index, stage), 0.0)
    ledger.peer_gone(A, [0], "killed", 0.0)  # its two contributions are done again, by B
    for index in (0, 1):
        ledger.reroute(0, 0, index, hop(B, ledger.attempt(0)), "killed", 0.0)
        ledger.accumulated(B, done(index, attempt=ledger.attempt(0)), 0.0)
    ledger.accumulated(B, done(1, attempt=ledger.attempt(0)), 0.0)
    assert ledger.committed() == (0, 0), "nothing is committed yet"
    ledger.close(0)
    assert ledger.committed() == (2, 2), "each of two microbatches once per stage"


def test_a_step_closed_too_early_or_with_two_holders_is_out_of_balance() -> None:
    early = book()
    early.accumulated(A, done(0), 0.0)
    early.close(0)
    assert early.committed() == (1,), "one of two is lost"

    double = book()
    double.withdraw(0, A, "suspect", 0.0)
    double.next_attempt(0)
    for index in (0, 1):
        double.reroute(0, 0, index, hop(B, 2), "refill", 0.0)
        double.accumulated(B, done(index, attempt=2), 0.0)
    double.accumulated(A, done(0), 0.0)
    double.close(0)
    assert double.committed() == (3,), "one of two is in two sums"


def test_the_story_tells_every_transition_with_its_cause_and_is_bounded() -> None:
    ledger = book()
    ledger.withdraw(0, A, "suspect, silent for 3 s", 1.5)
    ledger.reroute(0, 0, 0, hop(B, ledger.next_attempt(0)), "refill", 1.5)
    ledger.accumulated(B, done(0, attempt=2), 1.5)
    assert ledger.story(0, 0) == [
        "0.000 s fed: stage 0 to a",
        "1.500 s stage 0 taken from a: suspect, silent for 3 s",
        "1.500 s stage 0 given to b (attempt 2): refill",
        "1.500 s stage 0 accumulated at b (attempt 2)",
    ]
    for _ in range(2 * STORY_LINES_MAX):
        ledger.tell(0, 0, "again", 2.0)
    assert len(ledger.story(0, 0)) == STORY_LINES_MAX
    ledger.close(0)
    assert ledger.story(0, 0)[0].endswith("fed: stage 0 to a")
    kept = max(STEPS_KEPT_MIN, STORIES_MAX // ledger.microbatches)
    for step in range(1, kept + 1):
        assert ledger.story(0, 0)
        ledger.open(step)
        ledger.close(step)
    assert ledger.story(0, 0) == [], "only the newest closed steps are kept"


def test_what_a_lost_replica_added_is_void_where_it_can_be_done_again_and_nowhere_else() -> None:
    ledger = book(fed=(A, B))
    ledger.open(1)
    ledger.feed(1, [hop(A)], 0.0)
    for peer, event in ((A, done(0)), (B, done(1)), (A, done(0, step=1))):
        assert ledger.accumulated(peer, event, 0.0) is Verdict.COUNTED
    assert ledger.peer_gone(A, [1], "test", 0.0) == [1]
    assert ledger.is_full(0), "decided: what it added is in the mean that the others hold"
    assert ledger.sets(1) == {}
    assert ledger.orphans(1) == [(0, [0])]
    assert ledger.accumulated(A, done(0, step=1), 0.0) is Verdict.STALE
    assert ledger.peer_gone(B, [1], "test", 0.0) == [], "it had no part in it"
    ledger.validate()


def test_contributions_are_those_of_the_open_and_the_two_last_closed_steps() -> None:
    ledger = book(stages=1, microbatches=2, fed=(A, B))
    ledger.accumulated(A, done(0), 0.0)
    assert ledger.contributions() == {A: 1}
    ledger.accumulated(B, done(1), 0.0)
    ledger.close(0)
    for step in (1, 2):
        assert ledger.contributions() == {A: 1, B: 1}
        ledger.open(step)
        ledger.close(step)
    assert ledger.contributions() == {}
