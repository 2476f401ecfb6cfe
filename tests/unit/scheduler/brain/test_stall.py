"""What becomes of a job that lost a stage: every case by hand."""

from __future__ import annotations

import math

import pytest

from scheduler.brain.outputs import Fail, Stopped
from scheduler.brain.stall import (
    PAUSE_AGAIN_S,
    Over,
    Recovery,
    Stalls,
    Watchdog,
    going_on,
    is_loss,
    lost_in,
    nobody_back,
    pause_s,
    pausing,
    recovery_for,
    resume_hint,
    seeking,
    stalled_hint,
    steps_lost,
    stopped_by_loss,
    stuck,
    waiting,
)
from swarm.errors import GradientRange, NoProgress, OutOfMemory, PeerUnavailable
from swarm.types import JobId, JobState, OnStall, PeerId

JOB = JobId("demo-1")
LOST = "stage server c (stage 1) is gone: killed; the stage has no other replica"


@pytest.mark.parametrize(
    ("on_stall", "state"), [("wait", JobState.STALLED), ("pause", JobState.PAUSED), ("fail", None)]
)
def test_a_lost_stage_does_what_on_stall_says(on_stall: OnStall, state: JobState | None) -> None:
    stopped = stopped_by_loss(LOST, on_stall, None)
    assert (stopped.state if stopped else None) is state
    if stopped is not None:
        assert stopped.reason.startswith(LOST)
        assert "start a stage server" in stopped.hint


@pytest.mark.parametrize("on_stall", ["wait", "pause", "fail"])
@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.CANCELLED])
def test_a_job_that_was_told_to_stop_stops(on_stall: OnStall, state: JobState) -> None:
    stopped = stopped_by_loss(LOST, on_stall, Stopped(state, "enough"))
    assert stopped is not None
    assert stopped.state is state
    assert stopped.reason == f"enough; {LOST}"


@pytest.mark.parametrize(
    ("found_of", "skipped", "way"),
    [
        (JOB, False, Recovery.FROM_CHECKPOINT),
        (JOB, True, Recovery.FROM_CHECKPOINT),
        ("other-1", False, Recovery.FROM_CHECKPOINT),  # nothing of its own was written: back to what it started from
        (None, False, Recovery.ANEW),
        ("other-1", True, Recovery.BY_HAND),
        (None, True, Recovery.BY_HAND),
    ],
)
def test_only_a_job_that_wrote_no_checkpoint_goes_back_to_its_start(
    found_of: str | None, skipped: bool, way: Recovery
) -> None:
    assert recovery_for(JOB, found_of, skipped=skipped) is way


@pytest.mark.parametrize(
    ("reached", "step", "saved", "told"),
    [
        (60, 0, False, "60 steps are lost: no checkpoint"),
        (537, 500, True, "from step 500: 37 steps are lost"),
        (501, 500, True, "from step 500: 1 step is lost"),
        (1, 0, False, "1 step is lost: no checkpoint"),
        (500, 500, True, "no step is lost"),
        (0, 0, False, "no step is lost"),
    ],
)
def test_what_a_lost_stage_costs_is_said_in_steps(reached: int, step: int, saved: bool, told: str) -> None:
    """A job lost 60 steps with its stage, and all that people saw was "step 0 of 300"."""
    cost = steps_lost(reached, step, saved=saved)
    assert cost == told
    back = going_on(LOST, cost, step, "from the beginning", "")
    assert back.startswith(f"{LOST}; {told}; goes on at step {step} ")
    assert lost_in(back) == lost_in(pausing(back, Stalls(count=4))) == LOST, "each stall tells of one loss"


def test_reasons_keep_what_was_lost() -> None:
    start, skipped = "from checkpoint step-00000004", "step-00000006 was skipped: it ends early"
    back = going_on(LOST, "from step 4: 3 steps are lost", 4, start, skipped)
    assert back == f"{LOST}; from step 4: 3 steps are lost; goes on at step 4 {start} ({skipped})"
    waits = waiting(back, "stage 1 needs 1 replica more")
    assert waits == f"{back} once it has peers: stage 1 needs 1 replica more"
    assert seeking(LOST) == f"{LOST}; looks for the newest checkpoint that verifies"
    assert seeking(LOST, "no answer").endswith("that verifies: no answer")
    pauses = pausing(back, Stalls(count=4))
    assert pauses == f"{back}; tries again in 8 s, failure 4"
    assert pausing(back, Stalls()) == back
    for reason in (LOST, seeking(LOST), seeking(LOST, "no answer"), back, waits, pauses):
        assert lost_in(reason) == LOST


def test_stages_of_which_nobody_came_back_are_named_with_those_who_served_them() -> None:
    known = {PeerId("a"): 0, PeerId("d"): 1, PeerId("c"): 1}
    assert nobody_back([1, 2], known) == (
        "after the restart of the scheduler stage 1 has no replica: c, d did not come back; "
        "stage 2 has no replica: it had none"
    )


def test_the_pause_doubles_with_every_failure_up_to_a_minute() -> None:
    pauses_s = [pause_s(Stalls(count=count)) for count in range(9)]
    assert pauses_s == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert pause_s(Stalls(count=100_000)) == 60.0


def test_a_job_that_got_further_than_ever_begins_to_count_anew() -> None:
    stalls = Stalls().after(10, 0, stood_still=False)
    assert stalls == Stalls(10, 0)
    stalls = stalls.after(9, 5, stood_still=False)
    assert stalls == Stalls(10, 1)
    stalls = stalls.after(10, 8, stood_still=False)
    assert stalls == Stalls(10, 2)
    assert stalls.after(11, 8, stood_still=False) == Stalls(11, 0)
    assert Stalls().after(500, 500, stood_still=False) == Stalls(500, 1), "it began there"


def test_only_standing_still_three_times_in_a_row_is_too_often() -> None:
    stalls = Stalls(10)
    for stood_still in (False, False, True, True, False, True, True):
        stalls = stalls.after(9, 5, stood_still=stood_still)
        assert not stalls.are_too_many
    assert stalls.after(9, 5, stood_still=True).are_too_many
    assert not stalls.after(11, 5, stood_still=True).are_too_many


@pytest.mark.parametrize(
    ("on_stall", "state"), [("wait", JobState.STALLED), ("pause", JobState.PAUSED), ("fail", None)]
)
def test_a_job_at_which_nothing_moves_ends_as_on_stall_says(on_stall: OnStall, state: JobState | None) -> None:
    end = stuck(JOB, 300.0, "waits for a to commit", on_stall, None)
    assert (end.state if isinstance(end, Stopped) else None) is state
    told = end.reason if isinstance(end, Stopped) else end.message
    assert told.startswith("no step was committed for 300 s: waits for a to commit")
    assert "raise limits.no_progress_s" in end.hint
    asked = Stopped(JobState.CANCELLED, "cancelled by its user")
    cancelled = stuck(JOB, 300.0, "waits for a to commit", on_stall, asked)
    assert isinstance(cancelled, Stopped)
    assert cancelled.state is JobState.CANCELLED


def test_hints_are_commands() -> None:
    assert "swarm cancel demo-1" in stalled_hint(JOB)
    assert "what is here" not in stalled_hint(JOB)
    here = "or go on with what is here: swarm pause demo-1, swarm resume demo-1 --set pipeline.stages=1"
    assert here in stalled_hint(JOB, Stalls(), 1)
    assert "swarm cancel demo-1" in stalled_hint(JOB, Stalls(count=2))
    assert "too little memory" in stalled_hint(JOB, Stalls(count=2))
    assert "swarm logs demo-1" in stalled_hint(JOB, Stalls(count=2, standstills=1))
    assert resume_hint(JOB, 4) == "go on from step 4 with: swarm resume demo-1"
    assert resume_hint(JOB, None).endswith("swarm resume demo-1 --from 0")


def test_a_loss_is_told_from_other_ends_by_codes() -> None:
    assert all(is_loss(one) for one in (stopped_by_loss("x", how, None) for how in ("wait", "pause")) if one)
    assert is_loss(Fail(PeerUnavailable.code, "x is gone", "start another"))
    assert is_loss(Fail(OutOfMemory.code, "x cannot go on", "use more stages"))
    assert not is_loss(Fail(GradientRange.code, "not finite", ""))
    assert not is_loss(stuck(JOB, 300.0, "x", "wait", None)), "nothing moved"
    assert not is_loss(Fail(NoProgress.code, "nothing moved", ""))
    assert not is_loss(Stopped(JobState.PAUSED, "enough"))


def test_a_job_that_moves_may_run_for_ever() -> None:
    patience = Watchdog(300.0, 0.0)
    assert patience.due_s() == math.inf
    patience.begin(10.0)
    assert patience.due_s() == 310.0
    patience.moved(200.0)
    assert patience.over(310.0) is None
    assert patience.due_s() == 500.0


def test_that_a_job_stands_still_is_said_again_when_as_long_has_passed() -> None:
    patience = Watchdog(300.0, 0.0)
    patience.begin(0.0)
    assert patience.over(300.0) is Over.STILL
    assert patience.over(300.0) is None
    assert patience.over(599.0) is None
    assert patience.over(600.0) is Over.STILL


def test_nothing_can_move_while_the_job_rests() -> None:
    patience = Watchdog(10.0, 0.0)
    patience.begin(0.0)
    assert patience.due_s(60.0) == 70.0
    assert patience.over(69.0, 60.0) is None
    assert patience.over(70.0, 60.0) is Over.STILL


def test_a_job_whose_time_is_over_is_told_once_and_again_if_it_could_not_be_paused() -> None:
    patience = Watchdog(1e6, 100.0)
    patience.begin(5.0)
    assert patience.over(104.0) is None
    assert patience.over(105.0) is Over.RAN_OUT
    assert patience.over(1000.0) is None
    patience.goes_on(1000.0)
    assert patience.due_s() == 1000.0 + PAUSE_AGAIN_S
    assert patience.over(1000.0 + PAUSE_AGAIN_S) is Over.RAN_OUT


def test_a_pause_that_a_person_asked_for_and_that_failed_takes_nothing_from_the_time() -> None:
    patience = Watchdog(1e6, 100.0)
    patience.begin(0.0)
    patience.goes_on(10.0)
    assert patience.over(70.0) is None
    assert patience.over(100.0) is Over.RAN_OUT


def test_a_short_time_is_waited_for_as_long_as_it_is() -> None:
    patience = Watchdog(1e6, 5.0)
    patience.begin(0.0)
    assert patience.over(5.0) is Over.RAN_OUT
    patience.goes_on(6.0)
    assert patience.due_s() == 11.0


def test_a_watchdog_that_asks_far_too_late_stood_still_itself() -> None:
    patience = Watchdog(300.0, 0.0)
    patience.begin(0.0)
    assert patience.over(5000.0) is None, "the scheduler was stopped"
    assert patience.over(5300.0) is Over.STILL
