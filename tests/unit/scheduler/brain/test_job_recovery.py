"""Who may go on with a job after a broken session or a restart, who may join it, and what becomes of what it holds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from scheduler.brain.inputs import Happened, Join, PeerGone, ReplicaRecord, Resumed, Tick
from scheduler.brain.outputs import CommitRow, Fail
from scheduler.brain.state.brain_state import Mode
from swarm.types import Microbatch, PeerId, Round
from swarm.wire.messages import (
    Accumulated,
    Admit,
    Average,
    Command,
    Commit,
    Committed,
    Follow,
    Hello,
    LoadStage,
    Release,
    ReportedCell,
    Route,
    Void,
)
from tests.support.brain import JOB, S0, S1, A, B, C, D, Swarm, sends

Told = list[tuple[PeerId, Command]]

STAGE_OF = {A: 0, B: 0, C: 1, D: 1}
GRACE_S = 5.0


def greeting(peer: PeerId, version: int = 1, stage: int | None = None, *cells: ReportedCell, attempt: int = 0) -> Hello:
    stage = STAGE_OF[peer] if stage is None else stage
    return Hello(peer, 1, 1, "0", f"at {peer}", "", "cpu", 1, 0, -1, JOB, 0, version, cells, stage, attempt)


class Restarted(Swarm):
    """A brain of the fourth scheduler start: `committed` steps were committed by the third. These came back."""

    def __init__(self, committed: int = 1, *back: PeerId, **changes: Any) -> None:
        rows = [
            CommitRow(0, step, {S0: Round(3, 1), S1: Round(3, 1)}, 1.0, 1.0, 1.0, 0.1, False, 8)
            for step in range(committed)
        ]
        begin = Resumed(STAGE_OF, committed, tuple(rows), (), GRACE_S)
        super().__init__(begin=begin, epoch=4, steps=9, microbatches=2, recover=True, **changes)
        for peer in back:
            self.hello(peer, committed)

    def hello(
        self, peer: PeerId, version: int = 1, *cells: ReportedCell, attempt: int = 0, doubted: bool = False
    ) -> Told:
        """The peer dials: what it holds, then what the scheduler may have missed. What anybody is told."""
        before = len(self.outputs)
        self.tell(Happened(peer, greeting(peer, version, None, *cells, attempt=attempt), doubted=doubted))
        self.hear(peer, self.holding(peer))
        if version:
            self.hear(peer, Committed(0, version - 1, version, STAGE_OF[peer], "after"))
        return [(one.peer, one.command) for one in sends(self.outputs[before:], Command)]

    def after_grace(self) -> Restarted:
        self.tell(Tick(), GRACE_S + 1.0)
        assert self.brain.mode is Mode.RUNNING
        return self

    def join(self, peer: PeerId) -> int:
        """An idle peer is sent to its stage; the number of its attempt."""
        outputs = self.tell(Join(ReplicaRecord(peer, 1, f"at {peer}", STAGE_OF[peer])), 7.0)
        (load,) = [one.command for one in sends(outputs, LoadStage) if one.peer == peer]
        return load.join

    def joins(self, peer: PeerId, version: int, digest: str, join: int) -> set[type[Command]]:
        """A joiner has the state; what it is told."""
        outputs = self.tell(Happened(peer, self.holding(peer, version, digest, join)), 8.0)
        return {type(one.command) for one in sends(outputs, Admit, Release, Follow, Commit) if one.peer == peer}

    def admits(self, peer: PeerId, version: int, stage: int | None = None) -> bool:
        return self.brain.admits(greeting(peer, version, stage))

    def until_decided(self) -> None:
        """The row of the open step is on its way to the database."""
        rows = len(self.rows)
        while len(self.rows) == rows:
            self.answer(Route, Average)

    def commit(self) -> None:
        self.until_decided()
        super().commit()


def running(*peers: PeerId) -> Restarted:
    """These came back; the grace of the others is over."""
    return Restarted(1, *peers).after_grace()


def attempts(sent: Told, step: int) -> set[int]:
    routes = [command for _, command in sent if isinstance(command, Route) and command.microbatch.step == step]
    return {hop.attempt for route in routes for hop in route.hops}


def steps(sent: Told, kind: type[Commit | Void]) -> list[tuple[PeerId, int]]:
    return [(peer, command.step) for peer, command in sent if isinstance(command, kind)]


def test_new_hops_carry_more_than_any_attempt_that_a_replica_knows_in_later_steps_too() -> None:
    made = Restarted(1, A, B, C)
    made.hello(D, 1, ReportedCell(Microbatch(0, 1, 0), 7, True, True, 0.0), attempt=7)
    assert min(attempts(made.inbox, 1)) > 7
    made.commit()
    assert min(attempts(made.inbox, 2)) > 7


def test_a_cell_that_no_attempt_can_have_led_to_is_not_adopted() -> None:
    made = Restarted(1, A, B, C)
    made.hello(D, 1, ReportedCell(Microbatch(0, 1, 0), 99, True, True, 0.0), attempt=7)
    assert made.brain.counts().violations == 1
    assert made.brain.counts().replayed == 0


def test_what_was_done_on_a_session_that_broke_is_void() -> None:
    made = running(A, B, C, D)
    made.answer(Route)
    assert steps(made.hello(A), Void) == [(A, 1)]


def test_commits_that_a_peer_missed_are_sent_again() -> None:
    assert steps(Restarted(1, A, B, C).hello(D, 0), Commit) == [(D, 0)]
    made = running(A, B, C, D)
    made.until_decided()
    made.write()
    assert steps(made.hello(D), Commit) == [(D, 1)]


def test_a_peer_that_was_gone_is_released() -> None:
    made = running(A, B, C, D)
    made.tell(PeerGone(B, "silent"), 7.0)
    assert not made.admits(B, 1)
    assert [(peer, type(command)) for peer, command in made.hello(B)] == [(B, Release)]


def test_a_job_that_fails_while_it_gathers_does_not_go_on() -> None:
    """The last replica to come back held other bytes: the job failed, and was then begun again by the same event."""
    made = Restarted(1, A, B, C)
    made.tell(Happened(D, greeting(D)))
    outputs = made.hear(D, made.holding(D, 0, "other bytes"))
    assert isinstance(outputs[-1], Fail), "nothing comes after it"
    assert made.brain.is_over
    assert made.brain.due_s == math.inf


def test_a_late_peer_comes_in_until_a_step_is_decided_without_it() -> None:
    made = running(A, C, D)
    assert made.admits(B, 1)
    assert not made.admits(B, 2), "what nobody has committed"
    made.until_decided()
    assert not made.admits(B, 1), "the row of a round that it was no member of is being written"
    made.write()
    assert not made.admits(B, 1), "it does not hold the mean of a round that it was no member of"
    made = Restarted(2, A, C, D, overlap=2).after_grace()
    assert made.admits(B, 2)
    while any(isinstance(command, Route | Average) for _, command in made.inbox):
        made.answer(Route, Average)
    assert made.rows == [], "step 2 is averaged, but nobody has said yet that it committed step 0"
    assert not made.admits(B, 2)
    made = running(A, C, D)
    made.hello(B)
    made.commit()
    assert made.brain.counts().committed_steps == 2


def test_only_those_whom_the_record_named_in_that_stage_go_on_with_it() -> None:
    """An idle stage server that named a job and a stage of it became a replica, whoever it was: no digest was asked."""
    stranger = PeerId("e")
    for made in (Restarted(), Restarted(2)):
        assert not made.admits(stranger, 1, stage=0), "while the others are awaited"
        assert not made.admits(A, 1, stage=1), "in a stage that it never served"
        assert made.admits(A, 1)
    made = running(A, C, D)
    assert not made.admits(stranger, 1, stage=0)
    assert not made.admits(B, 1, stage=1)
    assert made.admits(B, 1)


def test_nobody_comes_back_to_a_job_that_this_start_of_the_scheduler_began() -> None:
    made = Swarm.loaded(recover=True)
    assert made.brain.mode is Mode.RUNNING
    assert not made.brain.admits(greeting(PeerId("e"), 0, 0))


def test_nobody_holds_a_version_that_was_committed_while_it_was_away() -> None:
    """At the newest version there was no row to look at, so whoever claimed it was let in."""
    made = running(A, C, D)
    made.commit()
    assert made.brain.counts().committed_steps == 2
    assert not made.admits(B, 2)


def test_what_a_peer_adds_while_the_others_are_awaited_counts_if_it_had_reported_the_cell() -> None:
    made = Restarted()
    cell = Microbatch(0, 1, 0)
    for peer in (A, B, C):
        made.hello(peer)
        made.hear(peer, Accumulated(cell, STAGE_OF[peer], 3, True, 0.0, 0.1, 0.1, 0.0))
    assert made.brain.counts().violations == 3, "nobody gave it to them"
    made.tell(Happened(D, greeting(D, 1, 1, ReportedCell(cell, 7, False, True, 0.0), attempt=7)))
    made.hear(D, Accumulated(cell, 1, 7, True, 0.0, 0.1, 0.1, 0.0))
    made.hear(D, made.holding(D))
    made.hear(D, Committed(0, 0, 1, 1, "after"))
    story = "\n".join(made.brain.story(1, 0))
    assert "d reports that it has accumulated" in story
    assert not any(f"{peer} reports" in story for peer in (A, B, C))
    made.commit()
    assert made.brain.counts().replayed == 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_whoever_reports_work_that_it_was_not_given_begins_the_open_steps_anew(overlap: int) -> None:
    """Its sums may hold what the ledger does not count."""
    made = Restarted(1, A, B, C, overlap=overlap)
    held = ReportedCell(Microbatch(0, 1, 0), 7, True, True, 0.0)
    sent = made.hello(D, 1, held, attempt=7, doubted=True)
    voids = [(peer, one.step, one.attempt >= 7) for peer, one in sent if isinstance(one, Void)]
    assert voids == [(D, step, True) for step in range(1, 2 + made.brain.settings.staleness)]
    assert min(attempts(sent, 1)) > 7
    made.commit()
    assert made.brain.counts().committed_steps == 2


# Joining ----------------------------------------------------------------------------------------------------------


def test_a_joiner_whose_state_is_that_of_the_replicas_is_one() -> None:
    made = running(A, C, D)
    number = made.join(B)
    assert made.joins(B, 1, "after", number + 1) == set(), "the report of another attempt"
    assert made.joins(B, 1, "after", number) == {Admit}
    made.commit()
    assert made.brain.counts().committed_steps == 2


def test_a_joiner_leans_on_the_others_for_a_commit_of_before_the_restart_too() -> None:
    made = Restarted(2)
    for peer in (A, C, D):
        made.hello(peer)
    made.after_grace()
    assert made.joins(B, 1, "after", made.join(B)) == {Admit, Commit}
    for peer in (A, C, D):
        made.hear(peer, Committed(0, 1, 2, STAGE_OF[peer], "after"))
    assert made.brain.is_joining(B), "only a has the mean of step 1"
    made.hear(B, Committed(0, 1, 2, 0, "after"))
    assert not made.brain.is_joining(B)


def test_a_joiner_whose_state_is_another_is_turned_away() -> None:
    made = running(A, C, D)
    assert made.joins(B, 1, "another", made.join(B)) == {Release}
    assert made.joins(B, 1, "after", 1) == set()


def test_a_joiner_that_is_too_late_is_told_to_follow() -> None:
    made = running(A, C, D)
    number = made.join(B)
    made.commit()
    assert made.joins(B, 1, "after", number) == {Follow}
    assert made.joins(B, 2, "after", number) == {Admit}


def test_a_joiner_that_says_what_nobody_has_committed_is_turned_away() -> None:
    made = running(A, C, D)
    assert made.joins(B, 2, "after", made.join(B)) == {Release}
    assert made.brain.counts().violations == 1
