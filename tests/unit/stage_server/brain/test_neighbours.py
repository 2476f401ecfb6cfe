"""Only the neighbours on the route deliver and ask, at exactly the route's attempt."""

from __future__ import annotations

import pytest

from stage_server.brain.early_inputs import Claim
from stage_server.brain.neighbours import EARLY_ASKERS_MAX, Neighbours, Standing
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
    for one in routes:
        made.learn(one)
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
    assert neighbours.judge(AT, F, Claim.of(stranger)) is Standing.FALSE
    assert neighbours.judge(AT, F, Claim.of(hop("p", 2))) is Standing.NAMED
    assert neighbours.judge(AT, B, Claim.of(hop("n", 2))) is Standing.NAMED
    assert neighbours.asks(AT, B, stranger) is Standing.FALSE
    assert neighbours.asks(AT, B, hop("p", 2)) is Standing.NAMED


def test_what_no_route_has_settled_yet_is_early() -> None:
    neighbours = middle()
    assert neighbours.judge(AT, F, Claim.of(hop("p"))) is Standing.EARLY
    assert neighbours.named(AT) == {}
    neighbours.learn(route())
    assert neighbours.judge(AT, F, Claim.of(hop("q", 2))) is Standing.EARLY
    assert neighbours.named(AT) == {F: Claim.of(hop("p")), B: Claim.of(hop("n"))}
    neighbours.learn(route(before=3))
    assert neighbours.judge(AT, F, Claim.of(hop("q", 2))) is Standing.FALSE


def test_an_older_route_that_comes_again_takes_nobodys_place() -> None:
    neighbours = middle(route(before=3), route(before=1))
    assert neighbours.judge(AT, F, Claim.of(hop("p", 3))) is Standing.NAMED
    assert neighbours.judge(AT, F, Claim.of(hop("p", 1))) is Standing.FALSE


def test_a_stage_at_an_end_has_no_neighbour_beyond_it() -> None:
    first = Neighbours(0)
    first.learn(Route(AT, 0, (hop("me"), hop("n"))))
    assert first.judge(AT, F, Claim.of(hop("me"))) is Standing.FALSE
    assert first.judge(AT, B, Claim.of(hop("n"))) is Standing.NAMED


def test_a_question_that_comes_before_its_route_is_told_with_it() -> None:
    neighbours = middle(route())
    assert neighbours.asks(AT, F, hop("n", 2)) is Standing.EARLY
    assert neighbours.asks(AT, B, hop("p", 4)) is Standing.EARLY
    assert neighbours.learn(route(behind=2)) == [(F, hop("n", 2))]
    assert neighbours.learn(route(before=4, behind=2)) == [(B, hop("p", 4))]
    assert neighbours.learn(route(before=5, behind=2)) == []


def test_questions_of_strangers_are_bounded_and_forgotten() -> None:
    neighbours = middle()
    for number in range(10 * EARLY_ASKERS_MAX):
        assert neighbours.asks(AT, F, hop(f"x{number}", 2)) is Standing.EARLY
    assert len(neighbours) == 0
    neighbours.learn(route())
    for number in range(10 * EARLY_ASKERS_MAX):
        assert neighbours.asks(AT, F, hop(f"x{number}", 2)) is Standing.EARLY
    assert neighbours.learn(route(behind=2)) == []
    assert neighbours.asks(AT, F, hop("n", 3)) is Standing.EARLY, "the strangers are gone"
    assert neighbours.learn(route(behind=3)) == [(F, hop("n", 3))]


def test_a_committed_step_is_forgotten() -> None:
    neighbours = middle(route(), route(at=Microbatch(0, 1, 0)))
    neighbours.forget(0)
    assert len(neighbours) == 1
