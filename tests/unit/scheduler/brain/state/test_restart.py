"""Links that fail, and the census after a restart."""

from __future__ import annotations

from scheduler.brain.state.links import LINK_AVOIDED_S, Links, Troubles
from scheduler.brain.state.restart import RestartCensus
from swarm.types import JobId, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Hello, ReportedCell

A, B, C = (PeerId(name) for name in "abc")


def hello(peer: PeerId, *cells: ReportedCell, stage: int = 0) -> Hello:
    return Hello(peer, 1, 1, "0", "", "", "cpu", 1, 0, -1, JobId("j"), 0, 3, cells, stage, 7)


def cell(index: int, accumulated: bool = True) -> ReportedCell:
    return ReportedCell(Microbatch(0, 3, index), 2, accumulated, True, 0.5)


def test_a_link_is_avoided_in_both_directions_for_a_while_and_then_tried_again() -> None:
    links = Links()
    assert not links.any(0.0)
    links.accuse(B, A, 1.0)
    assert links.any(1.0)
    assert links.fails(A, B)
    assert links.fails(B, A)
    assert links.cost_s(A, B) > 0 == links.cost_s(A, C)
    assert links.touches(A)
    assert not links.touches(C)
    assert not links.any(1.0 + LINK_AVOIDED_S)
    assert not links.fails(A, B)


def test_the_links_of_a_peer_that_is_gone_are_forgotten() -> None:
    links = Links()
    links.accuse(A, B, 0.0)
    links.forget(B)
    assert not links.any(0.0)


def test_the_census_waits_for_all_that_were_known_but_those_that_are_gone_again() -> None:
    census = RestartCensus({A: 0, B: 0, C: 0}, 10.0)
    census.report(hello(A))
    assert census.missing() == [B, C]
    census.forget(B)
    assert census.missing() == [C]


def test_what_a_peer_says_anew_replaces_what_it_said_and_what_it_did_since_is_added() -> None:
    census = RestartCensus({A: 0, B: 0}, 10.0)
    census.report(hello(B, cell(4), stage=1))
    census.report(hello(A, cell(0), cell(1)))
    census.report(hello(A, cell(1, accumulated=False)))
    assert not census.accumulated(A, Accumulated(Microbatch(0, 3, 0), 0, 2, True, 0.5, 0.1, 0.1, 0.0)), "not reported"
    assert not census.accumulated(A, Accumulated(Microbatch(0, 3, 1), 0, 3, True, 0.5, 0.1, 0.1, 0.0)), "never given"
    assert census.accumulated(A, Accumulated(Microbatch(0, 3, 1), 0, 2, True, 0.5, 0.1, 0.1, 0.0))
    assert census.cells(3) == [(A, 0, cell(1)), (B, 1, cell(4))]
    assert census.last_step() == 3
    assert census.cells(2) == []


def test_of_a_pair_the_one_leaves_that_failed_with_more_others_then_the_one_that_did_less() -> None:
    troubles = Troubles()
    troubles.failed(A, B, 0.0)
    assert troubles.leaver((A, B), {A, B}, {A: 1, B: 5}) == A
    troubles.failed(C, B, 0.0)
    assert troubles.leaver((A, B), {A, B}, {A: 1, B: 5}) == B
    assert troubles.leaver((A, B), {A}, {}) == A, "the last replica of a stage cannot be spared"
    assert troubles.leaver((A, B), set(), {}) is None


def test_a_round_is_repeated_at_once_and_then_with_growing_pauses() -> None:
    troubles, pauses_s = Troubles(), []
    for number in range(8):
        troubles.failed(A, None, 10.0 * number)
        pauses_s.append(troubles.retry_s - 10.0 * number)
    assert pauses_s[0] == 0.0
    assert pauses_s == sorted(pauses_s)
    assert pauses_s[-1] == 5.0
