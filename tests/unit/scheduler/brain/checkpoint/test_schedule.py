"""When a checkpoint is due, who hands over what, and what a failure means for the job."""

from __future__ import annotations

import pytest

from scheduler.brain.checkpoint.schedule import FIRST_S_MAX, CheckpointSchedule
from scheduler.brain.outputs import Exchanged, PublishCheckpoint
from scheduler.brain.settings import SavingRules
from swarm.job.course import IslandCourse, OuterCourse
from swarm.types import JobId
from swarm.wire.messages import Saved
from tests.support.brain import A, B, C, Player
from tests.support.situations import Situation, beside

RULES = SavingRules(every_steps=2, optimizer=True)


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_the_brain_decides_what_the_text_says(situation: Situation) -> None:
    situation.check(Player().play)


@pytest.mark.parametrize(
    ("version", "now_s", "due"), [(1, 5.0, False), (1, 10.0, True), (3, 0.0, True), (4, 9.0, False), (12, 99.0, False)]
)
def test_whichever_comes_first(version: int, now_s: float, due: bool) -> None:
    saving = CheckpointSchedule(SavingRules(every_steps=3, every_s=10.0), stages=1, first_step=0, steps=12)
    assert saving.due(0, 0.0).plan == 0  # a multiple; sets the clock
    assert (saving.due(version, now_s).plan == version) is due


def test_the_first_checkpoint_by_time_comes_after_minutes_and_the_next_ones_as_the_job_says() -> None:
    """A job with the defaults (500 steps, 30 min) lost a stage after some minutes, and with it all its steps."""

    def due(saving: CheckpointSchedule, times_s: list[float]) -> list[float]:
        return [now_s for version, now_s in enumerate(times_s, start=1) if saving.due(version, now_s).plan is not None]

    def saving_by(rules: SavingRules) -> CheckpointSchedule:
        return CheckpointSchedule(rules, stages=1, first_step=0, steps=10_000)

    minutes = [60.0 * minute for minute in range(60)]
    first = saving_by(SavingRules(every_steps=500, every_s=1800.0))
    assert due(first, minutes) == [FIRST_S_MAX, FIRST_S_MAX + 1800.0]
    assert due(saving_by(SavingRules(every_s=60.0)), minutes) == minutes[1:], "it is never later than the job says"
    assert due(saving_by(SavingRules(every_steps=500)), minutes) == [], "a job that does not save by time"


def test_an_island_that_begins_as_a_copy_saves_when_the_others_do() -> None:
    rules = SavingRules(every_s=1800.0)
    one = CheckpointSchedule(rules, stages=1, first_step=0, steps=10_000)
    assert [one.due(version, 90.0 * version).plan for version in range(1, 4)] == [None, None, 3]
    one.at_once = True
    copy = CheckpointSchedule(one.of_copy, stages=1, first_step=3, steps=10_000)
    for version in range(4, 60):
        assert one.due(version, 90.0 * version) == copy.due(version, 90.0 * version)


def test_islands_are_saved_where_all_hold_the_same_and_there_alone_does_their_clock_begin() -> None:
    course = OuterCourse(IslandCourse(12, 4, 2, 0), fragments=2)
    level = [version for version in range(1, course.steps) if course.level_from(version) == version]
    between = [version for version in range(1, course.steps) if version not in level]
    saving = CheckpointSchedule(SavingRules(every_s=10.0), 1, 0, course.steps, course)
    assert saving.due(between[0], 0.0).plan is None
    assert [saving.wants(level[0], 20.0, clock=clock) for clock in (True, False)] == [True, False]
    assert saving.due(level[0], 20.0).plan is None, "the clock begins here, as at all islands"
    assert all(saving.due(version, 99.0).plan is None for version in between)
    assert saving.due(level[1], 30.0).plan == level[1]


def test_nothing_is_saved_behind_an_exchange_that_islands_merge_at_several_moments() -> None:
    course = OuterCourse(IslandCourse(12, 4, 2, 0))
    first, second, third = (outer.step + 1 for outer in course.outer)
    saving = CheckpointSchedule(SavingRules(every_steps=2, every_s=10.0), 1, 0, course.steps, course)
    assert saving.wants(first, 0.0, clock=False)
    saving.merges(Exchanged(first - 1, (), False, 1.0))
    assert saving.due(first, 0.0).plan is None
    saving.merges(Exchanged(second - 1, (), False, 1.0, whole=True))
    assert saving.wants(second, 5.0, clock=False)
    assert saving.due(second, 5.0).plan == second
    assert saving.wants(third, 6.0, clock=False), "the last one"


def test_a_stage_is_taken_from_the_one_who_was_asked_for_it_and_once() -> None:
    saving = CheckpointSchedule(RULES, 2, 0, 6)
    saving.begin(2, [A, C], 0.0)

    def saved(stage: int, version: int = 2) -> Saved:
        return Saved(JobId("job"), 0, version, stage, ())

    for peer, event in ((B, saved(0)), (A, saved(1)), (C, saved(0)), (A, saved(0, version=1))):
        assert not saving.saved(peer, event)
    assert saving.saved(A, saved(0))
    assert not saving.saved(A, saved(0))
    assert saving.next(2, 0.0, idle=False) is None
    assert saving.saved(C, saved(1))
    assert saving.next(2, 0.0, idle=False) == PublishCheckpoint(2, {0: (), 1: ()})
