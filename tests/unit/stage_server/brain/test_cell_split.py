"""Split backwards: dx first, and the gradient of the weights once nothing else waits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from stage_server.brain.cell import (
    Action,
    Ask,
    CellTable,
    Compute,
    Emit,
    Forget,
    Gradients,
    Report,
    Sealed,
)
from swarm.types import Direction, Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated, ReportedCell, Route

F, B = Direction.FORWARD, Direction.BACKWARD
ME = PeerId("me")


def mb(index: int = 0, step: int = 0, timeline: int = 0) -> Microbatch:
    return Microbatch(timeline, step, index)


def hop(peer: str, attempt: int = 1, incarnation: int = 1) -> Hop:
    return Hop(PeerId(peer), incarnation, attempt, f"at {peer}")


def route(before: int = 1, mine: int = 1, behind: int = 1, *, index: int = 0, step: int = 0, at: str = "me") -> Route:
    """A route through three stages; the numbers are the hops' attempts."""
    return Route(mb(index, step), step, (hop("p", before), hop(at, mine), hop("n", behind)))


def middle(**more: int) -> CellTable:
    """A replica of the middle one of three stages."""
    return CellTable(1, 3, 0, more.get("version", 0), more.get("staleness", 0), peer=ME, incarnation=1)


def alone() -> CellTable:
    return CellTable(0, 1, 0, 0, 0, peer=ME, incarnation=1)


def alone_route(attempt: int = 1, index: int = 0, step: int = 0) -> Route:
    return Route(mb(index, step), step, (hop("me", attempt),))


def only(actions: Iterable[Action], kind: type) -> list:  # type: ignore[type-arg]  # the kind is the caller's
    return [action for action in actions if isinstance(action, kind)]


def start(table: CellTable, actions: Iterable[Action]) -> Compute:
    """Begin the one order among the actions."""
    (work,) = only(actions, Compute)
    begun = table.begin(work)
    assert begun is not None
    return begun


def forward(table: CellTable, index: int = 0, **attempts: int) -> tuple[Action, ...]:
    """Bring a middle cell to the end of its forward."""
    table.route(route(index=index, **attempts))
    work = start(table, table.arrived(mb(index), F, 1).actions)
    return table.computed_forward(work, 0.0, 0.25)


@pytest.fixture
def table() -> CellTable:
    return middle()


def split(table: CellTable, index: int = 0) -> tuple[Compute, tuple[Action, ...]]:
    """Bring a middle cell to where dx is done: the order of its weights, and the other actions."""
    forward(table, index)
    (ordered,) = only(table.arrived(mb(index), B, 1).actions, Compute)
    inputs = table.begin(ordered, split=True)
    assert inputs is not None
    assert (inputs.part, inputs.accumulate) == (Gradients.INPUTS, False)
    actions = table.computed_backward(inputs, True, 0.5, wait_s=1.0)
    table.validate()
    (weights,) = only(actions, Compute)
    return weights, tuple(action for action in actions if action is not weights)


def weigh(table: CellTable, weights: Compute, *, finite: bool = True) -> tuple[Action, ...]:
    begun = table.begin(weights, split=True)
    assert begun == weights
    return table.computed_backward(begun, finite, 0.25, wait_s=9.0)


def test_a_split_backward_sends_dx_first_and_reports_once_the_weights_are_added(table: CellTable) -> None:
    weights, rest = split(table)
    assert rest == (Emit(mb(), B, hop("p"), 1),)
    assert (weights.part, weights.accumulate, table.owed()) == (Gradients.WEIGHTS, True, 1)
    assert table.accumulated(0) == frozenset()
    assert table.open_cells() == (ReportedCell(mb(), 1, False, True, 0.0),)
    assert weigh(table, weights, finite=False) == (Report(Accumulated(mb(), 1, 1, False, 0.0, 0.25, 0.75, 1.0)),)
    assert table.owed() == 0
    assert table.begin(weights) is None, "once"
    table.validate()


def test_a_backward_is_split_only_for_a_neighbour_that_waits_and_if_it_is_to_be_added(table: CellTable) -> None:
    alone_table = alone()
    work = start(alone_table, alone_table.route(alone_route()))
    (ordered,) = alone_table.computed_forward(work, 1.0, 0.1)
    assert isinstance(ordered, Compute)
    assert alone_table.begin(ordered, split=True) == ordered
    forward(table)
    (ordered,) = only(table.arrived(mb(), B, 1).actions, Compute)
    table.seal(0)
    begun = table.begin(ordered, split=True)
    assert begun is not None
    assert (begun.part, begun.accumulate) == (Gradients.ALL, False)


def test_a_seal_waits_for_weights_on_the_device_and_leaves_all_others_owed_until_it_is_broken(table: CellTable) -> None:
    running, _ = split(table, 0)
    queued, _ = split(table, 1)
    begun = table.begin(running)
    assert begun is not None
    forward(table, 2)
    (ordered,) = only(table.arrived(mb(2), B, 1).actions, Compute)
    assert table.seal(0) == ()
    assert [type(action) for action in table.computed_backward(begun, True, 0.1)] == [Report, Sealed]
    assert table.begin(queued) is None
    assert (table.owed(), table.accumulated(0)) == (1, {0})
    again, *_ = only(table.unseal(0), Compute)
    assert (again.microbatch, again.part) == (mb(1), Gradients.WEIGHTS)
    inputs = table.begin(ordered, split=True)
    assert inputs is not None
    assert table.owed() == 2
    assert table.seal(0) == (Sealed(0),), "what gives dx adds nothing, so nobody waits for it"
    assert only(table.computed_backward(inputs, True, 0.1), Compute) == []
    assert table.begin(again) is None
    assert [work.microbatch for work in only(table.unseal(0), Compute)] == [mb(1), mb(2)]
    table.validate()


def test_what_is_owed_is_forgotten_with_its_cell(table: CellTable) -> None:
    voided = middle()
    weights, _ = split(voided)
    assert Forget(mb()) in voided.void(0, 1)
    assert (voided.owed(), voided.begin(weights)) == (0, None)
    weights, _ = split(table, 1)
    assert table.route(route(mine=2, at="other", index=1)) == (Forget(mb(1)),)
    assert table.begin(weights) is None
    weights, _ = split(table, 2)
    assert table.commit(0, 1) == (*map(Forget, [mb(1), mb(2)]),)
    assert (table.owed(), table.begin(weights)) == (0, None)


def test_weights_that_were_begun_report_even_if_the_hop_has_gone_to_another(table: CellTable) -> None:
    weights, _ = split(table)
    begun = table.begin(weights)
    assert begun is not None
    assert table.route(route(mine=2, at="other")) == ()
    (report,) = table.computed_backward(begun, True, 0.1)
    assert isinstance(report, Report)
    weights, _ = split(table, 1)
    begun = table.begin(weights)
    assert begun is not None
    table.void(0, 2)
    assert table.computed_backward(begun, True, 0.1) == ()
    assert table.accumulated(0) == frozenset()


def test_weights_that_wait_make_way_for_dx_that_is_asked_for_again(table: CellTable) -> None:
    weights, _ = split(table)
    table.evicted(mb(), B)
    asks = table.need(mb(), B, hop("p", 3))
    assert only(asks, Ask) == [Ask(mb(), F, hop("p"), 1), Ask(mb(), B, hop("n"), 1)]
    newest = [work for work in only(asks, Compute) if work.part is Gradients.WEIGHTS]
    again = start(table, table.arrived(mb(), F, 1).actions)
    for stale in (weights, *newest):
        assert table.begin(stale) is None
    table.computed_forward(again, 0.0, 0.1)
    work = start(table, table.arrived(mb(), B, 1).actions)
    assert (work.part, work.accumulate) == (Gradients.ALL, False)
    actions = table.computed_backward(work, True, 0.1)
    assert only(actions, Emit) == [Emit(mb(), B, hop("p", 3), 1)]
    (weights,) = only(actions, Compute)
    assert isinstance(only(weigh(table, weights), Report)[0], Report)
    assert table.accumulated(0) == {0}
    table.validate()
