"""What a delivery that failed makes of the hops at its ends: moved, void, or left alone. What there is to feed."""

from __future__ import annotations

import pytest

from scheduler.brain.outputs import Output
from scheduler.brain.state.links import LINK_AVOIDED_S, LINK_DEAD_S
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire.messages import LoadStage, Route, Undelivered, Void
from tests.support.brain import A, B, C, D, Swarm, routes_in, sends

NOBODY_ELSE = {A: 0, C: 1, D: 1}  # one replica of stage 0


def begun(stage_of: dict[PeerId, int] | None = None) -> Swarm:
    """A job that was fed and in which nobody has answered yet."""
    swarm = Swarm(stage_of, recover=True)
    swarm.answer(LoadStage)
    return swarm


def through(swarm: Swarm, *peers: PeerId, number: int = 0) -> Route:
    """A route on which these peers are, in order of feeding."""
    routes = dict.fromkeys(command for _, command in swarm.inbox if isinstance(command, Route))
    return [route for route in routes if set(peers) <= {hop.peer for hop in route.hops}][number]


def accumulated(swarm: Swarm, route: Route, peer: PeerId) -> None:
    done = swarm.reply(peer, route)
    assert done is not None
    swarm.hear(peer, done)


def unreached(swarm: Swarm, by: PeerId, route: Route, to: PeerId) -> list[Output]:
    """`by` says that it cannot reach the next or the previous hop of the route."""
    stage = swarm.stage_of[to]
    return swarm.hear(by, Undelivered(route.microbatch, stage, to, route.hops[stage].attempt, "no answer"))


def hops_of(outputs: list[Output], microbatch: Microbatch) -> tuple[Hop, ...]:
    """The microbatch's new route."""
    return next(route.hops for _, route in routes_in(outputs) if route.microbatch == microbatch)


def test_the_end_that_has_not_done_its_hop_is_moved_the_far_one_first() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    assert [hop.peer for hop in hops_of(unreached(swarm, A, route, C), route.microbatch)] == [A, D]

    swarm = begun()
    route = through(swarm, A, C)
    accumulated(swarm, route, C)
    outputs = unreached(swarm, A, route, C)
    assert [hop.peer for hop in hops_of(outputs, route.microbatch)] == [B, C], "what c has done is kept"
    assert not sends(outputs, Void)


def test_a_lost_receipt_changes_nothing() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    accumulated(swarm, route, C)
    accumulated(swarm, route, A)
    for now_s in (swarm.now_s, swarm.now_s + LINK_DEAD_S):
        swarm.now_s = now_s
        assert unreached(swarm, C, route, A) == [], "a could not have done it without what c sent"


def test_a_holder_that_nobody_of_the_next_stage_can_reach_is_void() -> None:
    swarm = begun()
    done, undone = through(swarm, A, C), through(swarm, A, C, number=1)
    accumulated(swarm, done, A)
    accumulated(swarm, undone, A)
    moved = hops_of(unreached(swarm, C, undone, A), undone.microbatch)
    assert [hop.peer for hop in moved] == [A, D]
    again = Undelivered(undone.microbatch, 0, A, moved[0].attempt, "no answer")
    assert swarm.hear(D, again) == [], "the link may come back"
    swarm.now_s += LINK_DEAD_S
    outputs = swarm.hear(D, again)
    assert [one.peer for one in sends(outputs, Void)] == [A]
    assert hops_of(outputs, undone.microbatch)[0].peer == B
    assert hops_of(outputs, done.microbatch)[0].peer == B, "void is all that it did for the step"


def test_a_sender_whose_only_possible_receiver_is_out_of_reach_is_void() -> None:
    swarm = begun(NOBODY_ELSE)
    route = through(swarm, A, C)
    accumulated(swarm, route, C)
    assert unreached(swarm, C, route, A) == [], "the link may come back"
    swarm.now_s += LINK_DEAD_S
    outputs = unreached(swarm, C, route, A)
    assert [one.peer for one in sends(outputs, Void)] == [C]
    assert [hop.peer for hop in hops_of(outputs, route.microbatch)] == [A, D]


def test_where_no_end_has_another_replica_the_hop_stays() -> None:
    swarm = begun({A: 0, C: 1})
    route = through(swarm, A, C)
    assert unreached(swarm, A, route, C) == []


def test_a_link_that_failed_long_ago_is_tried_again() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    accumulated(swarm, route, A)
    moved = hops_of(unreached(swarm, C, route, A), route.microbatch)
    swarm.now_s += LINK_AVOIDED_S + 1.0
    outputs = swarm.hear(D, Undelivered(route.microbatch, 0, A, moved[0].attempt, "no answer"))
    assert not sends(outputs, Void)
    assert [hop.peer for hop in hops_of(outputs, route.microbatch)] == [A, C]


def test_what_is_said_of_a_hop_that_has_moved_since_changes_nothing() -> None:
    swarm = begun()
    route = through(swarm, A, C)
    unreached(swarm, A, route, C)
    assert unreached(swarm, A, route, C) == [], "c is not on the route any more"
    assert unreached(swarm, C, route, A) == [], "nor does it matter what c cannot reach"


@pytest.mark.parametrize(
    ("overlap", "steps", "to_feed"),
    [(0, 2, 3), (1, 2, 4), (4, 2, 7), (4, 1, 3)],
    ids=["none", "part", "all", "last step"],
)
def test_what_can_be_fed_before_the_next_commit_is_counted(overlap: int, steps: int, to_feed: int) -> None:
    """Of four microbatches of a step one is in flight; those that overlap belong to the next step."""
    swarm = Swarm(max_in_flight=1, overlap=overlap, steps=steps)
    swarm.answer(LoadStage)
    assert swarm.brain._parts.dispatch._to_feed() == to_feed
