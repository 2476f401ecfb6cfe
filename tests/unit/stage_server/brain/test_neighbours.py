"""Only the neighbours on the route deliver and ask, at exactly the route's attempt."""

from __future__ import annotations

import pytest

from stage_server.brain.neighbours import (
    EARLY_ASKERS_MAX,
    EARLY_BYTES_MAX,
    EARLY_BYTES_OF_SENDER_MAX,
    EARLY_MAX,
    EARLY_OF_SENDER_MAX,
    Claim,
    ClaimStatus,
    EarlyInputs,
    Neighbours,
)
from swarm.types import Direction, Hop, Microbatch, PeerId
from swarm.wire.messages import Route

F, B = Direction.FORWARD, Direction.BACKWARD
AT = Microbatch(0, 0, 0)


def hop(peer: str, attempt: int = 1, incarnation: int = 1) -> Hop:
    return Hop(PeerId(peer), incarnation, attempt, f"at {peer}")


def route(before: int = 1, mine: int = 1, behind: int = 1, at: Microbatch = AT) -> Route:
    return Route(at, at.step, (hop("p", before), hop("me", mine), hop("n", behind)))


def middle(*routes: Route) -> Neighbours:
    made = Neighbours(1)
    for route in routes:
        made.learn(route)
    return made


@pytest.mark.parametrize(
    "stranger",
    [hop("x", 2), hop("n", 2), hop("p", 2, incarnation=2), hop("p", 1), hop("p", 0), hop("me", 2)],
    ids=["another", "the other side", "another incarnation", "older", "none", "we"],
)
def test_an_input_of_anybody_but_the_neighbour_at_the_routes_attempt_is_false(stranger: Hop) -> None:
    """Whoever knew the job and the step could put an activation of any attempt into a cell. The true one was then a
    duplicate, and all replicas agreed on the wrong weights."""
    neighbours = middle(route(before=2, mine=2, behind=2))
    assert neighbours.judge(AT, F, Claim.of(stranger)) is ClaimStatus.FALSE
    assert neighbours.judge(AT, F, Claim.of(hop("p", 2))) is ClaimStatus.NAMED
    assert neighbours.judge(AT, B, Claim.of(hop("n", 2))) is ClaimStatus.NAMED
    assert neighbours.asks(AT, B, stranger) is ClaimStatus.FALSE
    assert neighbours.asks(AT, B, hop("p", 2)) is ClaimStatus.NAMED


def test_what_no_route_has_settled_yet_is_early() -> None:
    neighbours = middle()
    assert neighbours.judge(AT, F, Claim.of(hop("p"))) is ClaimStatus.EARLY
    assert neighbours.named(AT) == {}
    neighbours.learn(route())
    assert neighbours.judge(AT, F, Claim.of(hop("q", 2))) is ClaimStatus.EARLY
    assert neighbours.named(AT) == {F: Claim.of(hop("p")), B: Claim.of(hop("n"))}
    neighbours.learn(route(before=3))
    assert neighbours.judge(AT, F, Claim.of(hop("q", 2))) is ClaimStatus.FALSE


def test_an_older_route_that_comes_again_takes_nobodys_place() -> None:
    neighbours = middle(route(before=3), route(before=1))
    assert neighbours.judge(AT, F, Claim.of(hop("p", 3))) is ClaimStatus.NAMED
    assert neighbours.judge(AT, F, Claim.of(hop("p", 1))) is ClaimStatus.FALSE


def test_a_stage_at_an_end_has_no_neighbour_beyond_it() -> None:
    first = Neighbours(0)
    first.learn(Route(AT, 0, (hop("me"), hop("n"))))
    assert first.judge(AT, F, Claim.of(hop("me"))) is ClaimStatus.FALSE
    assert first.judge(AT, B, Claim.of(hop("n"))) is ClaimStatus.NAMED


def test_a_question_that_comes_before_its_route_is_told_with_it() -> None:
    neighbours = middle(route())
    assert neighbours.asks(AT, F, hop("n", 2)) is ClaimStatus.EARLY
    assert neighbours.asks(AT, B, hop("p", 4)) is ClaimStatus.EARLY
    assert neighbours.learn(route(behind=2)) == [(F, hop("n", 2))]
    assert neighbours.learn(route(before=4, behind=2)) == [(B, hop("p", 4))]
    assert neighbours.learn(route(before=5, behind=2)) == []


def test_questions_of_strangers_are_bounded_and_forgotten() -> None:
    neighbours = middle()
    for number in range(10 * EARLY_ASKERS_MAX):
        assert neighbours.asks(AT, F, hop(f"x{number}", 2)) is ClaimStatus.EARLY
    assert len(neighbours) == 0
    neighbours.learn(route())
    for number in range(10 * EARLY_ASKERS_MAX):
        assert neighbours.asks(AT, F, hop(f"x{number}", 2)) is ClaimStatus.EARLY
    assert neighbours.learn(route(behind=2)) == []
    assert neighbours.asks(AT, F, hop("n", 3)) is ClaimStatus.EARLY, "the strangers are gone"
    assert neighbours.learn(route(behind=3)) == [(F, hop("n", 3))]


def test_a_committed_step_is_forgotten() -> None:
    neighbours = middle(route(), route(at=Microbatch(0, 1, 0)))
    neighbours.forget(0)
    assert len(neighbours) == 1


TRUE = Claim(PeerId("true"), 17, 3)


def subject(index: int, step: int = 0) -> tuple[Microbatch, str]:
    return Microbatch(0, step, index), Direction.FORWARD


def stranger(number: int, attempt: int = 3) -> Claim:
    return Claim(PeerId(f"x{number}"), number, attempt)


def early() -> EarlyInputs[tuple[Microbatch, str], str]:
    return EarlyInputs(lambda subject: subject)


def test_each_claim_has_a_place_of_its_own_and_the_first_input_of_a_claim_stays() -> None:
    held = early()
    for other in (Claim(PeerId("true"), 18, 3), Claim(PeerId("true"), 17, 4), stranger(1)):
        assert held.put(subject(0), other, "false", 8, is_known=False)
    assert held.put(subject(0), TRUE, "true", 8, is_known=True)
    assert held.put(subject(0), TRUE, "again", 8, is_known=True)
    assert held.take(subject(0), Claim.of(Hop(PeerId("true"), 17, 3, "at true"))) == "true"
    assert held.take(subject(0), TRUE) is None
    assert (len(held), held.size_bytes) == (3, 24)
    held.drop(lambda _, claim: claim.attempt == 3)
    assert (len(held), held.size_bytes) == (1, 8)


def test_one_sender_has_a_share_and_keeps_what_is_due_first() -> None:
    held, each = early(), EARLY_BYTES_OF_SENDER_MAX // 4
    for index in (3, 2, 4, 1):
        assert held.put(subject(index), TRUE, str(index), each, is_known=False)
    assert not held.put(subject(5), TRUE, "5", each, is_known=False)
    assert held.put(subject(0), TRUE, "0", each, is_known=False)
    assert [held.take(subject(index), TRUE) for index in range(6)] == ["0", "1", "2", "3", None, None]
    for index in range(2 * EARLY_OF_SENDER_MAX):
        held.put(subject(index), TRUE, "", 1, is_known=False)
    assert len(held) == EARLY_OF_SENDER_MAX


def test_a_flood_under_many_names_is_bounded_and_gives_way_to_peers_that_a_route_has_named() -> None:
    held, each = early(), EARLY_BYTES_MAX // 64
    for number in range(500):
        held.put(subject(0), stranger(number), "false", each, is_known=False)
    assert held.size_bytes <= EARLY_BYTES_MAX
    for index in range(4):
        assert held.put(subject(index, step=1), TRUE, f"true {index}", each, is_known=True)
    for number in range(500):
        held.put(subject(0), stranger(number, 9), "false", each, is_known=False)
    assert [held.take(subject(index, step=1), TRUE) for index in range(4)] == [f"true {index}" for index in range(4)]
    assert held.size_bytes <= EARLY_BYTES_MAX
    held.drop(lambda *_: True)
    assert (len(held), held.size_bytes) == (0, 0)


def test_inputs_without_bytes_are_bounded_by_their_number() -> None:
    held = early()
    for number in range(2 * EARLY_MAX):
        held.put(subject(number), stranger(number), "", 1, is_known=False)
    assert len(held) == EARLY_MAX


def test_an_input_that_is_larger_than_the_bounds_has_room_alone() -> None:
    held = early()
    assert held.put(subject(1), TRUE, "large", 2 * EARLY_BYTES_MAX, is_known=False)
    assert not held.put(subject(2), TRUE, "second", 2 * EARLY_BYTES_MAX, is_known=False)
    assert held.put(subject(0), TRUE, "first", 2 * EARLY_BYTES_MAX, is_known=False)
    assert held.take(subject(1), TRUE) is None
