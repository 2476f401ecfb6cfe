"""A timeline of steps: when each was full, averaged and agreed, also when it is done again or overlaps the next."""

from __future__ import annotations

from math import isnan

from scheduler.brain.explain.step_times import KEPT, StepClock, StepTimes
from scheduler.brain.state.step import Phase, StepEvent, StepRun


def test_a_step_is_fed_averaged_and_committed_while_the_next_is_fed() -> None:
    clock, runs = StepClock(), {7: StepRun(7)}
    clock.look(runs, 1.0)
    runs[7].turn(StepEvent.FULL)
    runs[8] = StepRun(8)
    clock.look(runs, 2.0)
    clock.look(runs, 2.5)
    runs[7].turn(StepEvent.AVERAGED)
    runs[7].turn(StepEvent.WRITTEN)
    clock.look(runs, 3.0)
    runs[7].turn(StepEvent.DURABLE)
    clock.look(runs, 4.0)
    del runs[7]
    clock.look(runs, 5.0)
    over, at_work = clock.steps()
    assert over == StepTimes(7, 1.0, 2.0, 3.0, 5.0)
    assert (at_work.step, at_work.began_s) == (8, 2.0)
    assert all(map(isnan, (at_work.full_s, at_work.averaged_s, at_work.agreed_s)))


def test_a_step_that_is_reopened_is_fed_on_and_says_how_often() -> None:
    clock, runs = StepClock(), {0: StepRun(0)}
    clock.look(runs, 1.0)
    runs[0].turn(StepEvent.FULL)
    clock.look(runs, 2.0)
    runs[0].turn(StepEvent.REOPENED, "a replica is gone")
    clock.look(runs, 3.0)
    assert isnan(clock.steps()[0].full_s)
    runs[0].turn(StepEvent.FULL)
    clock.look(runs, 4.0)
    (times,) = clock.steps()
    assert (times.began_s, times.full_s, times.repeats) == (1.0, 4.0, 1)


def test_a_step_that_is_not_finite_is_not_averaged() -> None:
    clock, runs = StepClock(), {0: StepRun(0)}
    clock.look(runs, 1.0)
    runs[0].turn(StepEvent.NOT_FINITE)
    clock.look(runs, 2.0)
    assert (clock.steps()[0].full_s, clock.steps()[0].averaged_s) == (2.0, 2.0)


def test_the_newest_steps_are_kept_and_no_more() -> None:
    clock = StepClock()
    for step in range(3 * KEPT):
        clock.look({step: StepRun(step, Phase.COMMITTING)}, float(step))
    assert [step.step for step in clock.steps()] == list(range(2 * KEPT - 1, 3 * KEPT))
