"""What one replica knows of each microbatch: rules R1 to R7, one test per claim."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from stage_server.brain.cell import (
    EARLY_CELLS_MAX,
    Action,
    Ask,
    CellTable,
    Compute,
    DropOutput,
    Emit,
    Forget,
    ForgetSums,
    Report,
    Sealed,
)
from swarm.types import Direction, Hop, Microbatch, PeerId, set_digest
from swarm.wire.messages import Accumulated, Forwarded, ReportedCell, Route

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


def accumulate(table: CellTable, index: int = 0) -> tuple[Action, ...]:
    """Bring a middle cell to the end of its backward."""
    forward(table, index)
    work = start(table, table.arrived(mb(index), B, 1).actions)
    return table.computed_backward(work, True, 0.5, wait_s=1.0)


@pytest.fixture
def table() -> CellTable:
    return middle()


def test_a_microbatch_flows_forward_and_backward_through_a_middle_stage(table: CellTable) -> None:
    assert table.route(route()) == ()
    arrival = table.arrived(mb(), F, 1)
    assert arrival.accepted
    (work,) = arrival.actions
    assert work == Compute(mb(), F, 0, False, 1)
    assert table.begin(work) == work
    told = Report(Forwarded(mb(), 1, 1))
    assert table.computed_forward(work, 0.0, 0.25) == (told, Emit(mb(), F, hop("n"), 1))
    (backward,) = table.arrived(mb(), B, 1).actions
    assert backward == Compute(mb(), B, 0, True, 2)
    table.begin(backward)
    report, emit = table.computed_backward(backward, True, 0.5, wait_s=1.0)
    assert report == Report(Accumulated(mb(), 1, 1, True, 0.0, 0.25, 0.5, 1.0))
    assert emit == Emit(mb(), B, hop("p"), 1)
    assert table.accumulated(0) == {0}
    assert table.set_digest(0) == set_digest([0])
    table.validate()


def test_the_only_stage_starts_with_its_route_and_reports_the_loss() -> None:
    table = alone()
    work = start(table, table.route(alone_route()))
    work = start(table, table.computed_forward(work, 2.5, 0.1))
    assert (work.direction, work.accumulate) == (B, True)
    (report,) = table.computed_backward(work, True, 0.1)
    assert report.event.loss == 2.5  # type: ignore[union-attr]  # the one action is a Report
    table.validate()


# R1 ---------------------------------------------------------------------------------------------------------------


def test_r1_an_input_is_accepted_once_and_a_duplicate_is_acknowledged(table: CellTable) -> None:
    table.route(route())
    work = start(table, table.arrived(mb(), F, 1).actions)
    for _ in range(2):
        repeated = table.arrived(mb(), F, 1)
        assert (repeated.accepted, repeated.duplicate, repeated.actions) == (False, True, ())
    table.computed_forward(work, 0.0, 0.1)
    assert table.arrived(mb(), F, 1).duplicate
    work = start(table, table.arrived(mb(), B, 1).actions)
    assert table.arrived(mb(), B, 1).duplicate
    table.computed_backward(work, True, 0.1)
    assert table.arrived(mb(), B, 1).duplicate
    assert table.duplicates == 5


def test_r1_an_input_from_an_older_attempt_than_the_routes_is_refused(table: CellTable) -> None:
    table.route(route(before=3))
    arrival = table.arrived(mb(), F, 1)
    assert (arrival.accepted, arrival.duplicate) == (False, False)
    assert arrival.reason == "attempt 1 is older than the route's (3)"
    assert table.arrived(mb(), F, 3).accepted


def test_r1_an_input_that_comes_before_its_route_waits_for_it(table: CellTable) -> None:
    assert table.arrived(mb(), F, 1).actions == ()
    assert table.arrived(mb(), F, 1).duplicate
    assert start(table, table.route(route())).direction is F


@pytest.mark.parametrize("microbatch", [mb(timeline=1), mb(step=5)])
def test_r1_what_is_not_open_here_is_refused_and_kept_nowhere(table: CellTable, microbatch: Microbatch) -> None:
    arrival = table.arrived(microbatch, F, 1)
    assert (arrival.accepted, arrival.duplicate) == (False, False)
    assert "not open here" in arrival.reason
    assert table.need(microbatch, F, hop("n")) == ()
    assert table.open_cells() == ()


def test_r1_a_stage_at_an_end_takes_no_tensor_from_beyond_it() -> None:
    table = alone()
    table.route(alone_route())
    for direction in Direction:
        assert not table.arrived(mb(), direction, 1).accepted
        assert table.need(mb(), direction, hop("x")) == ()


def test_inputs_without_a_route_are_bounded(table: CellTable) -> None:
    for index in range(EARLY_CELLS_MAX):
        assert table.arrived(mb(index), F, 1).accepted
    refused = table.arrived(mb(EARLY_CELLS_MAX), F, 1)
    assert not refused.accepted
    assert "wait for their route" in refused.reason
    table.route(route(index=0))
    assert table.arrived(mb(EARLY_CELLS_MAX), F, 1).accepted


# R2, R3 -----------------------------------------------------------------------------------------------------------


def test_r2_forward_waits_for_the_weights_that_its_step_needs(table: CellTable) -> None:
    table.route(route(step=1))
    assert table.arrived(mb(step=1), F, 1).actions == ()
    (work,) = table.commit(0, 1)
    assert work == Compute(mb(step=1), F, 1, False, 1)


def test_r2_with_staleness_one_the_version_before_is_held_as_well() -> None:
    table = middle(version=1, staleness=1)
    table.route(Route(mb(step=1), 0, route().hops))
    assert start(table, table.arrived(mb(step=1), F, 1).actions).version == 0


def test_r3_a_gradient_that_is_not_finite_is_reported_not_counted_and_passed_on(table: CellTable) -> None:
    forward(table)
    work = start(table, table.arrived(mb(), B, 1).actions)
    report, emit = table.computed_backward(work, False, 0.1)
    assert not report.event.finite  # type: ignore[union-attr]  # the first action is a Report
    assert isinstance(emit, Emit)
    assert table.accumulated(0) == frozenset()
    assert table.open_cells() == (ReportedCell(mb(), 1, True, False, 0.0),)


def test_r3_an_early_gradient_waits_for_the_forward(table: CellTable) -> None:
    table.route(route(mine=2))
    assert table.arrived(mb(), B, 1).accepted
    work = start(table, table.arrived(mb(), F, 1).actions)
    after = table.computed_forward(work, 0.0, 0.1)
    assert [type(action) for action in after] == [Report, Emit, Compute]


# R4, R5 -----------------------------------------------------------------------------------------------------------


def test_r5_a_replacement_asks_both_neighbours_and_they_answer_from_what_they_hold() -> None:
    replacement = middle()
    asks = replacement.route(route(mine=2))
    assert asks == (Ask(mb(), F, hop("p"), 2), Ask(mb(), B, hop("n"), 2))
    assert replacement.route(route(mine=2)) == (), "once"
    neighbour = middle()
    accumulate(neighbour)
    assert neighbour.need(mb(), F, hop("n2", 2)) == (Emit(mb(), F, hop("n2", 2), 1),)
    assert neighbour.need(mb(), B, hop("p2", 2)) == (Emit(mb(), B, hop("p2", 2), 1),)


def test_r5_in_a_first_run_nobody_asks_because_everybody_sends(table: CellTable) -> None:
    assert table.route(route()) == ()
    assert table.lacking() == (Ask(mb(), F, hop("p"), 1), Ask(mb(), B, hop("n"), 1)), "but it can, for repair"


def test_r5_an_asker_is_remembered_until_the_output_is_there_and_is_sent_it_once(table: CellTable) -> None:
    assert table.need(mb(), F, hop("n", 1)) == (), "not even the route is here"
    table.route(route())
    work = start(table, table.arrived(mb(), F, 1).actions)
    assert table.need(mb(), F, hop("n", 1)) == ()
    assert only(table.computed_forward(work, 0.0, 0.1), Emit) == [Emit(mb(), F, hop("n"), 1)]
    table.validate()


def test_r5_an_asker_that_is_no_longer_on_the_route_gets_nothing(table: CellTable) -> None:
    accumulate(table)
    table.route(route(behind=4))
    assert table.need(mb(), F, hop("n", 1)) == ()


def test_r4_an_evicted_output_is_computed_again_without_accumulating_again(table: CellTable) -> None:
    accumulate(table)
    assert table.evicted(mb(), B) == ()
    # Its inputs are used up, so the question walks on to those who hold them.
    asks = table.need(mb(), B, hop("p", 3))
    assert asks == (Ask(mb(), F, hop("p"), 1), Ask(mb(), B, hop("n"), 1))
    work = start(table, table.arrived(mb(), F, 1).actions)
    table.computed_forward(work, 0.0, 0.1)
    work = start(table, table.arrived(mb(), B, 1).actions)
    assert not work.accumulate
    assert table.computed_backward(work, True, 0.1) == (Emit(mb(), B, hop("p", 3), 1),)
    assert table.accumulated(0) == {0}
    table.validate()


def test_r4_an_output_that_is_evicted_before_its_backward_is_computed_again_from_x_that_is_asked_for() -> None:
    """The forward had used up x, but was ordered again as if it were held: the stage server ended with an error."""
    table = middle()
    forward(table)
    assert table.evicted(mb(), F) == ()
    (ask,) = table.need(mb(), F, hop("n2", 3))
    assert ask == Ask(mb(), F, hop("p"), 1)
    again = start(table, table.arrived(mb(), F, 1).actions)
    assert Emit(mb(), F, hop("n2", 3), 1) in table.computed_forward(again, 0.0, 0.25)
    work = start(table, table.arrived(mb(), B, 1).actions)
    assert work.accumulate
    table.validate()


def test_r4_the_first_stage_computes_an_evicted_output_again_from_its_tokens() -> None:
    table = CellTable(0, 2, 0, 0, 0, peer=ME, incarnation=1)
    first = Route(mb(), 0, (hop("me"), hop("n")))
    work = start(table, table.route(first))
    table.computed_forward(work, 0.0, 0.1)
    work = start(table, table.arrived(mb(), B, 1).actions)
    table.computed_backward(work, True, 0.1)
    table.evicted(mb(), F)
    work = start(table, table.need(mb(), F, hop("n", 2)))
    assert table.computed_forward(work, 0.0, 0.1) == (Emit(mb(), F, hop("n", 2), 1),)


# R6 ---------------------------------------------------------------------------------------------------------------


def test_r6_void_forgets_cells_and_sums_and_old_routes_stay_dead(table: CellTable) -> None:
    accumulate(table, 0)
    forward(table, 1)
    assert table.void(0, 1) == (Forget(mb(0)), Forget(mb(1)), ForgetSums(0))
    assert table.accumulated(0) == frozenset()
    assert table.route(route()) == (), "a repeated route of a void attempt"
    assert table.open_cells() == ()
    assert only(table.route(route(mine=2)), Ask), "the new one is taken"
    table.validate()


def test_r6_a_repeated_or_older_void_changes_nothing() -> None:
    table = alone()
    table.void(0, 2)
    work = start(table, table.route(alone_route(attempt=3)))
    work = start(table, table.computed_forward(work, 1.0, 0.1))
    table.computed_backward(work, True, 0.1)
    assert table.void(0, 2) == table.void(0, 1) == ()
    assert table.accumulated(0) == {0}


def test_r6_void_spares_newer_cells_but_not_their_part_in_the_sum() -> None:
    """Should a Void ever be overtaken by a newer route, the sum that it abolishes holds both: it is done again."""
    table = alone()
    work = start(table, table.route(alone_route(attempt=3)))
    work = start(table, table.computed_forward(work, 1.0, 0.1))
    table.computed_backward(work, True, 0.1)
    actions = table.void(0, 2)
    assert actions[:2] == (Forget(mb()), ForgetSums(0))
    assert table.accumulated(0) == frozenset()
    work = start(table, actions[2:])
    work = start(table, table.computed_forward(work, 1.0, 0.1))
    (report,) = table.computed_backward(work, True, 0.1)
    assert report.event.attempt == 3  # type: ignore[union-attr]  # the one action is a Report


def test_r6_a_void_that_meets_a_running_backward_leaves_nothing_in_the_sums() -> None:
    """ForgetSums is carried out on the compute thread, so after the backward; its result is known by its ticket."""
    table = alone()
    work = start(table, table.route(alone_route()))
    running = start(table, table.computed_forward(work, 1.0, 0.1))
    assert table.void(0, 1) == (Forget(mb()), ForgetSums(0))
    again = start(table, table.route(alone_route(attempt=2)))
    assert table.computed_backward(running, True, 0.1) == (DropOutput(mb(), B),)
    assert table.accumulated(0) == frozenset()
    work = start(table, table.computed_forward(again, 1.0, 0.1))
    table.computed_backward(work, True, 0.1)
    assert table.accumulated(0) == {0}


def test_r6_an_order_that_was_not_begun_can_always_be_withdrawn() -> None:
    table = alone()
    (work,) = only(table.route(alone_route()), Compute)
    table.void(0, 1)
    assert table.begin(work) is None


def test_r6_a_displaced_replica_drops_its_cell_unless_it_has_accumulated(table: CellTable) -> None:
    forward(table)
    assert table.route(route(mine=2, at="other")) == (Forget(mb()),)
    assert table.route(route()) == (), "the older route does not bring it back"
    assert table.open_cells() == ()
    accumulate(table, 1)
    assert table.route(route(mine=2, at="other", index=1)) == ()
    assert table.accumulated(0) == {1}


def test_r6_a_displaced_replica_whose_backward_runs_finishes_and_reports(table: CellTable) -> None:
    """It cannot be taken out of the sum any more; the ledger settles the two holders."""
    forward(table)
    running = start(table, table.arrived(mb(), B, 1).actions)
    assert table.route(route(mine=2, at="other")) == ()
    (report,) = table.computed_backward(running, True, 0.1)
    assert isinstance(report, Report), "and it pushes nothing: the other does"
    assert table.accumulated(0) == {0}


def test_r6_another_incarnation_of_the_same_peer_is_another_replica(table: CellTable) -> None:
    forward(table)
    reborn = Route(mb(), 0, (hop("p"), hop("me", 2, incarnation=2), hop("n")))
    assert table.route(reborn) == (Forget(mb()),)


def test_a_holder_that_gets_the_hop_again_reports_again_and_adds_nothing(table: CellTable) -> None:
    accumulate(table)
    report, *emits = table.route(route(mine=5))
    assert report.event.attempt == 5  # type: ignore[union-attr]  # the first action is a Report
    assert [emit.direction for emit in only(emits, Emit)] == [F, B], "its neighbours may be new"
    assert only(emits, Compute) == []


def test_a_result_that_was_withdrawn_does_not_keep_its_output(table: CellTable) -> None:
    table.route(route())
    work = start(table, table.arrived(mb(), F, 1).actions)
    table.route(route(mine=2, at="other"))
    assert table.computed_forward(work, 0.0, 0.1) == (DropOutput(mb(), F),)


# Sealing, committing, R7 --------------------------------------------------------------------------------------------


def test_a_sealed_step_sends_outputs_but_adds_nothing_until_it_is_unsealed(table: CellTable) -> None:
    forward(table)
    (ordered,) = only(table.arrived(mb(), B, 1).actions, Compute)
    assert ordered.accumulate
    assert table.seal(0) == (Sealed(0),)
    begun = table.begin(ordered)
    assert begun is not None
    assert not begun.accumulate
    assert table.computed_backward(begun, True, 0.1) == (Emit(mb(), B, hop("p"), 1),)
    assert table.accumulated(0) == frozenset()
    assert table.is_sealed(0)
    asks = table.unseal(0)
    assert asks == (Ask(mb(), F, hop("p"), 1), Ask(mb(), B, hop("n"), 1)), "now it is wanted, and its inputs are used"


def test_a_seal_waits_for_the_backward_that_is_on_the_device(table: CellTable) -> None:
    forward(table, 0)
    forward(table, 1)
    running = start(table, table.arrived(mb(0), B, 1).actions)
    (queued,) = only(table.arrived(mb(1), B, 1).actions, Compute)
    assert table.seal(0) == ()
    assert not table.is_sealed(0)
    actions = table.computed_backward(running, True, 0.1)
    assert [type(action) for action in actions] == [Report, Sealed, Emit]
    assert table.set_digest(0) == set_digest([0])
    late = table.begin(queued)
    assert late is not None
    assert not late.accumulate
    assert table.seal(0) == (Sealed(0),), "a second unit of the same step"


def test_a_seal_that_waits_for_a_void_backward_waits_no_longer(table: CellTable) -> None:
    forward(table)
    start(table, table.arrived(mb(), B, 1).actions)
    assert table.seal(0) == ()
    assert table.void(0, 1) == (Forget(mb()), ForgetSums(0), Sealed(0))


def test_a_step_seals_itself_with_the_set_that_was_told_ahead(table: CellTable) -> None:
    forward(table, 0)
    forward(table, 1)
    assert table.seal_when(0, set_digest([0, 1])) == ()
    first = start(table, table.arrived(mb(0), B, 1).actions)
    assert [type(action) for action in table.computed_backward(first, True, 0.1)] == [Report, Emit]
    assert not table.is_sealed(0)
    second = start(table, table.arrived(mb(1), B, 1).actions)
    assert [type(action) for action in table.computed_backward(second, True, 0.1)] == [Report, Sealed, Emit]
    assert table.is_sealed(0)
    assert table.seal_when(0, set_digest([0, 1])) == (Sealed(0),), "a second unit of the same step"


def test_who_holds_his_set_already_or_has_none_seals_at_once() -> None:
    assert middle().seal_when(0, set_digest([])) == (Sealed(0),)
    table = middle()
    accumulate(table, 0)
    assert table.seal_when(0, set_digest([0])) == (Sealed(0),)


def test_what_was_told_ahead_and_given_up_seals_nothing() -> None:
    for give_up in (lambda table: table.unseal(0), lambda table: table.unseal_all()):
        table = middle()
        forward(table)
        assert table.seal_when(0, set_digest([0])) == ()
        assert give_up(table) == ()
        work = start(table, table.arrived(mb(), B, 1).actions)
        assert [type(action) for action in table.computed_backward(work, True, 0.1)] == [Report, Emit]
        assert not table.is_sealed(0)


def test_a_full_step_is_sealed_whatever_was_told_ahead(table: CellTable) -> None:
    """The set is another than the scheduler believes: the member says so, instead of waiting."""
    accumulate(table, 0)
    assert table.seal_when(0, set_digest([0, 1])) == ()
    assert table.seal(0) == (Sealed(0),)
    assert table.set_digest(0) == set_digest([0])


def test_commit_closes_the_step_and_everything_about_it_is_a_repeat_afterwards(table: CellTable) -> None:
    accumulate(table, 0)
    forward(table, 1)
    table.arrived(mb(step=1), F, 1)
    assert table.commit(0, 1) == (Forget(mb(0)), Forget(mb(1)))
    assert table.commit(0, 1) == ()
    assert table.arrived(mb(2), F, 1).duplicate
    assert table.route(route(index=2)) == table.void(0, 9) == table.seal(0) == ()
    assert table.need(mb(), F, hop("n")) == ()
    assert table.accumulated(0) == frozenset()
    assert start(table, table.route(route(step=1))).microbatch == mb(step=1), "the early input was kept"
    table.validate()
