"""When a checkpoint is due, who hands over what, and what a failure means for the job."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.brain.checkpoint.schedule import FIRST_S_MAX, SAVING_S_MAX, UNHEALING_MAX, CheckpointSchedule
from scheduler.brain.inputs import CheckpointKept, CheckpointNotKept, PeerGone, RowDurable, Stop, Tick
from scheduler.brain.outputs import (
    BeginCheckpoint,
    DropCheckpoint,
    EnterState,
    Fail,
    Finish,
    Note,
    PublishCheckpoint,
    Stopped,
)
from scheduler.brain.settings import SavingRules
from scheduler.brain.state.brain_state import Mode
from swarm.errors import CheckpointFailed
from swarm.types import JobId, JobState
from swarm.wire.messages import Commit, LoadStage, Release, Route, Saved, SaveStage
from tests.support.brain import A, B, C, D, Swarm, sends

RULES = SavingRules(every_steps=2, optimizer=True)


def train_a_step(swarm: Swarm, *, commit: bool = True) -> list[Any]:
    swarm.until_written()
    outputs = swarm.write()
    if commit:
        swarm.answer(Commit)
    return outputs


def started(**changes: Any) -> Swarm:
    return Swarm.loaded(**{"steps": 6, "saving": RULES, **changes})


def of(outputs: list[Any], kind: type) -> list[Any]:
    return [one for one in outputs if isinstance(one, kind)]


def test_a_checkpoint_is_asked_for_right_after_the_commit_and_written_once_all_agree() -> None:
    swarm = started()
    train_a_step(swarm)
    assert swarm.pop(SaveStage) == []
    outputs = train_a_step(swarm, commit=False)
    commits = [number for number, one in enumerate(outputs) if one in sends(outputs, Commit)]
    (begin,) = [number for number, one in enumerate(outputs) if one == BeginCheckpoint(2)]
    saves = [number for number, one in enumerate(outputs) if one in sends(outputs, SaveStage)]
    assert max(commits) < begin < min(saves)
    asked = swarm.pop(SaveStage)
    assert [swarm.stage_of[peer] for peer, _ in asked] == [0, 1]
    assert asked[0][1] == SaveStage(JobId("job"), 0, 2, True)
    for peer, command in asked:
        assert of(swarm.obey(peer, command), PublishCheckpoint) == []
    commits_left = swarm.pop(Commit)
    for peer, command in commits_left:
        outputs = swarm.obey(peer, command)
    assert [one.version for one in of(outputs, PublishCheckpoint)] == [2], "not before all replicas agree on it"
    assert of(swarm.tell(CheckpointKept(2)), Finish) == []


def test_the_steps_never_wait_for_a_checkpoint_and_a_second_one_is_skipped_with_a_note() -> None:
    swarm = started()
    for _ in range(4):
        train_a_step(swarm)
    assert len(swarm.pop(SaveStage)) == 2
    assert swarm.brain.counts().committed_steps == 4
    notes = [one.message for one in of(swarm.outputs, Note)]
    assert "no checkpoint at step 4: the one at step 2 is still being written" in notes
    for _ in range(2):
        train_a_step(swarm)
    assert swarm.brain.mode is Mode.SAVING
    assert swarm.pop(SaveStage) == [], "the last one waits for the one before"
    swarm.tell(CheckpointNotKept(2, "disk_full", "full"))
    assert [command.version for _, command in swarm.pop(SaveStage)] == [6, 6]


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
    copy = CheckpointSchedule(one.of_copy, stages=1, first_step=3, steps=10_000)
    for version in range(4, 60):
        assert one.due(version, 90.0 * version) == copy.due(version, 90.0 * version)


def test_a_checkpoint_that_takes_too_long_is_given_up_for_the_next() -> None:
    swarm = started()
    for _ in range(2):
        train_a_step(swarm)
    swarm.pop(SaveStage)
    train_a_step(swarm)
    swarm.until_written()
    outputs = swarm.tell(RowDurable(swarm.rows[-1].step), 2.0 + SAVING_S_MAX)
    assert [(one.version, one.reason) for one in of(outputs, DropCheckpoint)] == [(2, "timeout")]
    assert of(outputs, BeginCheckpoint) == [BeginCheckpoint(4)]
    before = swarm.brain.counts().duplicates
    swarm.hear(A, Saved(JobId("job"), 0, 2, 0, ()))
    assert swarm.brain.counts().duplicates == before + 1


def test_a_peer_that_cannot_hand_over_costs_the_checkpoint_and_not_the_job() -> None:
    swarm = started()
    for _ in range(2):
        train_a_step(swarm)
    peer, command = swarm.pop(SaveStage)[0]
    outputs = swarm.hear(peer, Saved(JobId("job"), 0, command.version, 0, (), "no memory"))
    (drop,) = of(outputs, DropCheckpoint)
    assert (drop.version, drop.reason) == (2, "peer")
    assert "no memory" in drop.fault
    assert swarm.brain.mode is Mode.RUNNING


def test_final_weights_are_saved_again_until_they_are_kept_at_growing_intervals() -> None:
    swarm = started(steps=1, saving=SavingRules())
    train_a_step(swarm)
    now_s, pauses_s = 1.0, []
    for _ in range(8):
        swarm.answer(SaveStage)
        outputs = swarm.tell(CheckpointNotKept(1, "disk_full", "the disk is full"), now_s)
        (turned,) = of(outputs, EnterState)
        assert turned.state is JobState.RUNNING
        assert "the final weights (step 1) could not be saved: the disk is full; tries again in" in turned.reason
        assert not of(outputs, Fail)
        assert not swarm.tell(Tick(), now_s)
        pauses_s.append(swarm.brain.due_s - now_s)
        now_s = swarm.brain.due_s
        assert of(swarm.tell(Tick(), now_s), BeginCheckpoint)
    assert pauses_s == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    swarm.answer(SaveStage)
    assert of(swarm.tell(CheckpointKept(1), now_s), Finish)


def test_final_weights_that_no_stage_server_hands_over_fail_the_job_and_say_what_to_do() -> None:
    for kept in (False, True):
        swarm = started(steps=3)
        for step in range(3):
            train_a_step(swarm)
            if step == 1:
                swarm.answer(SaveStage)
                if kept:
                    swarm.tell(CheckpointKept(2))
                else:
                    swarm.tell(CheckpointNotKept(2, "disk_full", "the disk is full"))
        now_s, outputs = 1.0, []
        for _ in range(UNHEALING_MAX):
            assert not of(outputs, Fail)
            swarm.answer(SaveStage)
            outputs = swarm.tell(CheckpointNotKept(3, "peer", "hashes contradict each other"), now_s)
            now_s = swarm.brain.due_s
            outputs += swarm.tell(Tick(), now_s)
        (fail,) = of(outputs, Fail)
        assert fail.code == CheckpointFailed.code
        assert "the final weights (step 3) could not be saved: hashes contradict each other" in fail.message
        assert ("checkpoint is that of step 2" if kept else "no earlier checkpoint") in fail.message
        assert ("swarm resume job" if kept else "submit the job again") in fail.hint


def test_a_job_whose_final_weights_cannot_be_saved_can_be_cancelled() -> None:
    swarm = started(steps=1, saving=SavingRules())
    train_a_step(swarm)
    swarm.answer(SaveStage)
    swarm.tell(CheckpointNotKept(1, "disk_full", "the disk is full"))
    assert of(swarm.tell(Stop(JobState.CANCELLED, "enough"), 1.5), BeginCheckpoint)  # once more, at once
    swarm.answer(SaveStage)
    (stopped,) = of(swarm.tell(CheckpointNotKept(1, "disk_full", "the disk is full"), 1.6), Stopped)
    assert stopped.state is JobState.CANCELLED
    assert "no earlier checkpoint" in stopped.reason


def test_a_lost_saver_is_replaced_while_others_hold_the_version() -> None:
    swarm = started(recover=True, overlap=4, steps=2, saving=SavingRules())
    for _ in range(2):
        train_a_step(swarm)
    assert swarm.brain.mode is Mode.SAVING
    (saver, _), *_ = swarm.pop(SaveStage)
    outputs = swarm.tell(PeerGone(saver, "kill -9"))
    (again,) = sends(outputs, SaveStage)
    assert swarm.stage_of[again.peer] == swarm.stage_of[saver]


def test_a_lost_saver_of_an_older_version_ends_the_checkpoint_only() -> None:
    swarm = started(recover=True)
    for _ in range(3):
        train_a_step(swarm)
    (saver, _), *_ = swarm.pop(SaveStage)
    outputs = swarm.tell(PeerGone(saver, "kill -9"))
    assert [one.reason for one in of(outputs, DropCheckpoint)] == ["peer"]
    assert of(outputs, Fail) == []


def stop(swarm: Swarm, state: JobState) -> list[Any]:
    return swarm.tell(Stop(state, "because"))


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.CANCELLED])
def test_a_job_that_shall_stop_commits_what_runs_saves_it_and_lets_the_peers_go(state: JobState) -> None:
    swarm = started(overlap=4, saving=SavingRules())
    train_a_step(swarm)
    assert stop(swarm, state) == []
    open_steps = {route.microbatch.step for _, route in swarm.inbox if isinstance(route, Route)}
    while swarm.brain.counts().committed_steps <= max(open_steps, default=0):
        train_a_step(swarm)
    newest = swarm.brain.counts().committed_steps
    assert [command.version for _, command in swarm.inbox if isinstance(command, SaveStage)] == [newest] * 2
    assert [one for one in swarm.inbox if isinstance(one[1], Route)] == []
    swarm.answer(SaveStage)
    outputs = swarm.tell(CheckpointKept(newest))
    assert of(outputs, Stopped) == [Stopped(state, "because")]
    assert [one.peer for one in sends(outputs, Release)] == [A, B, C, D]
    assert swarm.brain.mode is Mode.ENDED


def test_a_job_that_has_not_trained_just_stops() -> None:
    loading = Swarm(saving=RULES)
    assert of(stop(loading, JobState.PAUSED), Stopped) != []
    swarm = started()
    assert of(stop(swarm, JobState.CANCELLED), Stopped) != []
    assert swarm.pop(SaveStage) == []


def test_a_pause_that_cannot_be_saved_is_given_up_and_a_cancel_says_what_is_lost() -> None:
    swarm = started(saving=SavingRules())
    train_a_step(swarm)
    stop(swarm, JobState.PAUSED)
    train_a_step(swarm)
    outputs = swarm.tell(CheckpointNotKept(2, "disk_full", "full"))
    (turned,) = of(outputs, EnterState)
    assert turned.state is JobState.RUNNING
    assert sends(outputs, Route) != []
    stop(swarm, JobState.CANCELLED)
    train_a_step(swarm)
    outputs = swarm.tell(CheckpointNotKept(3, "disk_full", "full"))
    (stopped,) = of(outputs, Stopped)
    assert "the checkpoint at step 3 could not be written: full; there is no earlier checkpoint" in stopped.reason


def test_a_checkpoint_on_the_way_that_fails_costs_neither_the_pause_nor_what_a_cancel_saves() -> None:
    for state in (JobState.PAUSED, JobState.CANCELLED):
        swarm = started(overlap=4)
        for _ in range(3):
            train_a_step(swarm)
        stop(swarm, state)
        outputs = swarm.tell(CheckpointNotKept(2, "disk_full", "full"))
        assert of(outputs, Stopped) == of(outputs, EnterState) == []
        swarm.pop(SaveStage)
        while swarm.brain.counts().in_flight or swarm.brain.counts().committed_steps < 5:
            train_a_step(swarm)
        asked = {command.version for _, command in swarm.inbox if isinstance(command, SaveStage)}
        assert asked == {swarm.brain.counts().committed_steps}, "all that was trained is saved"
        swarm.answer(SaveStage)
        outputs = swarm.tell(CheckpointKept(swarm.brain.counts().committed_steps))
        assert of(outputs, Stopped) == [Stopped(state, "because")]


def test_a_resumed_job_begins_at_its_step_and_needs_no_checkpoint_of_it() -> None:
    swarm = Swarm(first_step=4, steps=6, saving=SavingRules())
    assert {command.version for _, command in swarm.inbox if isinstance(command, LoadStage)} == {4}
    for peer, command in swarm.pop(LoadStage):
        swarm.obey(peer, command)
    routes = [route for _, route in swarm.inbox if isinstance(route, Route)]
    assert {(route.microbatch.step, route.version) for route in routes} == {(4, 4)}
    for _ in range(2):
        train_a_step(swarm)
    assert [row.step for row in swarm.rows] == [4, 5]


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
