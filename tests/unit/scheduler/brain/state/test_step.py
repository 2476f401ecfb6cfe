"""The life of one optimizer step, and what may overlap."""

from __future__ import annotations

import pytest

from scheduler.brain.state.links import Troubles
from scheduler.brain.state.step import TRANSITIONS, Phase, StepEvent, StepRun, UnitAveraging, may_write
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Averaged, Member

UNIT = UnitName("stage-0")


def averaging(*peers: str) -> UnitAveraging:
    return UnitAveraging(Round(1, 1), tuple(Member(PeerId(peer), 1, "", 0, 0, "") for peer in peers))


def report(unit: str = "stage-0") -> Averaged:
    return Averaged(0, 0, UnitName(unit), Round(1, 1), "d", (), 0.1)


def test_a_step_goes_from_feeding_to_done() -> None:
    run = StepRun(0)
    for turn in (StepEvent.FULL, StepEvent.AVERAGED, StepEvent.WRITTEN, StepEvent.DURABLE, StepEvent.AGREED):
        run.turn(turn)
    assert run.phase is Phase.DONE
    assert run.history[0] == "full: averaging"


def test_a_step_that_is_not_finite_is_decided_without_a_round() -> None:
    run = StepRun(0)
    run.turn(StepEvent.NOT_FINITE)
    assert (run.phase, run.skip, run.is_averaged) == (Phase.DECIDED, True, False)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("turn", list(StepEvent))
def test_an_illegal_turn_raises_and_changes_nothing(phase: Phase, turn: StepEvent) -> None:
    run = StepRun(3, phase)
    if (phase, turn) in TRANSITIONS:
        run.turn(turn)
        assert run.phase is TRANSITIONS[phase, turn]
        return
    with pytest.raises(AssertionError, match="step 3"):
        run.turn(turn)
    assert (run.phase, run.history) == (phase, [])


def test_every_phase_leads_to_done_and_none_after_the_row_leads_back() -> None:
    after = [Phase.WRITING, Phase.COMMITTING, Phase.DONE]
    for (before, _), to in TRANSITIONS.items():
        assert before not in after or to in after
    reached, frontier = {Phase.DONE}, {Phase.DONE}
    while frontier:
        frontier = {before for (before, _), to in TRANSITIONS.items() if to in frontier} - reached
        reached |= frontier
    assert reached == set(Phase)


def test_reopening_forgets_rounds_and_their_failures() -> None:
    run = StepRun(0)
    run.turn(StepEvent.FULL)
    run.rounds[UNIT] = averaging("a")
    run.troubles[UNIT] = Troubles(failures=3)
    run.turn(StepEvent.REOPENED, "a is void")
    assert (run.phase, run.rounds, run.troubles) == (Phase.FEEDING, {}, {})
    assert run.can_be_redone


def test_a_step_is_averaged_when_every_member_of_every_unit_reported() -> None:
    run = StepRun(0)
    run.turn(StepEvent.FULL)
    run.rounds = {UNIT: averaging("a", "b"), UnitName("tied"): averaging("a")}
    run.rounds[UNIT].reports[PeerId("a")] = report()
    run.rounds[UnitName("tied")].reports[PeerId("a")] = report("tied")
    assert not run.is_averaged
    assert run.rounds[UNIT].missing() == ["b"]
    run.rounds[UNIT].reports[PeerId("b")] = report()
    assert run.is_averaged


def test_rows_are_written_in_order_and_at_most_one_commit_ahead_of_agreement() -> None:
    assert may_write(0, commits_sent=0, agreed=0)
    assert may_write(1, commits_sent=1, agreed=0)
    assert not may_write(2, commits_sent=2, agreed=0)
    assert may_write(2, commits_sent=2, agreed=1)
    assert not may_write(1, commits_sent=0, agreed=0), "the row before it is not durable"
