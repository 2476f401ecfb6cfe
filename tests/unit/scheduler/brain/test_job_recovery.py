"""Who may go on with a job after a broken session or a restart, who may join it, and what becomes of what it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from scheduler.brain.inputs import Happened, Input, Join, PeerGone, ReplicaRecord, Resumed, RowDurable, Start, Tick
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import CommitRow, Fail, Output, Send, WriteCommit
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.brain_state import Mode
from swarm.types import JobId, Microbatch, PeerId, Round, UnitName
from swarm.wire.messages import (
    Accumulated,
    Admit,
    Average,
    Averaged,
    Command,
    Commit,
    Committed,
    Follow,
    Hello,
    Loaded,
    LoadStage,
    ParameterNorm,
    Release,
    ReportedCell,
    Route,
    UnitSize,
    Void,
)

JOB = JobId("job")
A, B, C, D = (PeerId(name) for name in "abcd")  # a and b serve stage 0, c and d stage 1
STAGE_OF = {A: 0, B: 0, C: 1, D: 1}
UNITS = {UnitName("stage-0"): (0,), UnitName("stage-1"): (1,)}
GRACE_S = 5.0


class Restarted:
    """A brain of the fourth scheduler start: `committed` steps were committed by the third."""

    def __init__(self, committed: int = 1, **changes: Any) -> None:
        settings: dict[str, Any] = {
            "job": JOB,
            "epoch": 4,
            "timeline": 0,
            "steps": 9,
            "microbatches": 2,
            "split": (1, 1),
            "spec_json": "{}",
            "overlap": 0,
            "max_in_flight": None,
            "units": UNITS,
            "grad_clip_norm": 1.0,
            "averaging_timeout_s": 5.0,
            "fail_on_nonfinite": False,
            "learning_rate": lambda step: 0.1,
            "tokens_of": lambda step: 8,
            "recover": True,
        }
        self.brain = JobBrain(BrainSettings(**(settings | changes)), Random(0))
        self.sent: list[tuple[PeerId, Command]] = []
        self.rows: list[CommitRow] = []
        made = {unit: Round(3, 1) for unit in UNITS}
        rows = tuple(CommitRow(0, step, made, 1.0, 1.0, 1.0, 0.1, False, 8) for step in range(committed))
        self.tell(Resumed(STAGE_OF, committed, rows, (), GRACE_S), 0.0)

    def take(self, outputs: list[Output]) -> list[tuple[PeerId, Command]]:
        sent = [(one.peer, one.command) for one in outputs if isinstance(one, Send)]
        self.sent += sent
        self.rows += [one.row for one in outputs if isinstance(one, WriteCommit)]
        self.brain.validate()
        return sent

    def hello(self, peer: PeerId, version: int = 1, **more: Any) -> list[tuple[PeerId, Command]]:
        """The peer dials: what it holds, then what the scheduler may have missed."""
        stage = STAGE_OF[peer]
        hello = Hello(
            peer, 1, 1, "0", f"at {peer}", "", "cpu", 1, 0, -1, JOB, 0, version,
            more.get("cells", ()), stage, more.get("attempt", 0),
        )  # fmt: skip
        sent = self.tell(Happened(peer, hello))
        sizes = tuple(UnitSize(unit, 1000) for unit, stages in UNITS.items() if stage in stages)
        sent += self.tell(Happened(peer, Loaded(JOB, 0, stage, 0, "start", sizes)))
        return sent + self.tell(Happened(peer, Committed(0, version - 1, version, stage, "after")))

    def tell(self, happened: Input, now_s: float = 1.0) -> list[Output]:
        return self.take(self.brain.step(happened, now_s))

    def join(self, peer: PeerId) -> int:
        """An idle peer is sent to its stage; the number of its attempt."""
        sent = self.tell(Join(ReplicaRecord(peer, 1, f"at {peer}", STAGE_OF[peer])), 7.0)
        (load,) = [command for to, command in sent if isinstance(command, LoadStage) and to == peer]
        return load.join

    def loaded(self, peer: PeerId, version: int, digest: str, join: int) -> list[Command]:
        """A joiner has the state; what it is told."""
        stage = STAGE_OF[peer]
        sizes = tuple(UnitSize(unit, 1000) for unit, stages in UNITS.items() if stage in stages)
        event = Loaded(JOB, 0, stage, version, digest, sizes, join=join)
        return [command for to, command in self.tell(Happened(peer, event), 8.0) if to == peer]

    def admits(self, peer: PeerId, version: int, stage: int | None = None) -> bool:
        stage = STAGE_OF[peer] if stage is None else stage
        hello = Hello(peer, 1, 1, "0", "", "", "cpu", 1, 0, -1, JOB, 0, version, (), stage, 0)
        return self.brain.admits(hello)

    def answer(self, *kinds: type[Command]) -> None:
        """Let all that have not done so carry out what they were told."""
        for peer, command in [one for one in self.sent if isinstance(one[1], kinds)]:
            self.sent.remove((peer, command))
            stage = STAGE_OF[peer]
            match command:
                case Route(microbatch=microbatch, hops=hops) if hops[stage].peer == peer:
                    self.hear(peer, Accumulated(microbatch, stage, hops[stage].attempt, True, 0.0, 0.1, 0.1, 0.0))
                case Average():
                    norms = (ParameterNorm(f"w of {command.unit}", 4.0),)
                    self.hear(peer, Averaged(0, command.step, command.unit, command.round, "mean", norms, 0.1))
                case Commit():
                    self.hear(peer, Committed(0, command.step, command.version, stage, "after"))

    def hear(self, peer: PeerId, event: Any) -> None:
        self.tell(Happened(peer, event))

    def until_decided(self) -> None:
        """The row of the open step is on its way to the database."""
        rows = len(self.rows)
        while len(self.rows) == rows:
            self.answer(Route, Average)

    def commit(self) -> None:
        self.until_decided()
        self.tell(RowDurable(self.rows[-1].step))
        self.answer(Commit)


@contextmanager
def running(*peers: PeerId) -> Iterator[Restarted]:
    """These came back; the grace of the others is over."""
    made = Restarted()
    for peer in peers:
        made.hello(peer)
    made.tell(Tick(), GRACE_S + 1.0)
    assert made.brain.mode is Mode.RUNNING
    yield made


def attempts(sent: list[tuple[PeerId, Command]], step: int) -> set[int]:
    routes = [command for _, command in sent if isinstance(command, Route) and command.microbatch.step == step]
    return {hop.attempt for route in routes for hop in route.hops}


def test_new_hops_carry_more_than_any_attempt_that_a_replica_knows_in_later_steps_too() -> None:
    made = Restarted()
    held = (ReportedCell(Microbatch(0, 1, 0), 7, True, True, 0.0),)
    sent = [command for peer in (A, B, C) for command in made.hello(peer)]
    sent += made.hello(D, cells=held, attempt=7)
    assert attempts(sent, 1)
    assert min(attempts(sent, 1)) > 7
    made.commit()
    assert min(attempts(made.sent, 2)) > 7


def test_a_cell_that_no_attempt_can_have_led_to_is_not_adopted() -> None:
    made = Restarted()
    for peer in (A, B, C):
        made.hello(peer)
    made.hello(D, cells=(ReportedCell(Microbatch(0, 1, 0), 99, True, True, 0.0),), attempt=7)
    assert made.brain.counts().violations == 1
    assert made.brain.counts().replayed == 0


def test_what_was_done_on_a_session_that_broke_is_void() -> None:
    with running(A, B, C, D) as made:
        made.answer(Route)
        sent = made.hello(A)
        assert [(peer, command.step) for peer, command in sent if isinstance(command, Void)] == [(A, 1)]


def test_commits_that_a_peer_missed_are_sent_again() -> None:
    made = Restarted()
    for peer in (A, B, C):
        made.hello(peer)
    hello = Hello(D, 1, 1, "0", "", "", "cpu", 1, 0, -1, JOB, 0, 0, (), 1, 0)
    made.tell(Happened(D, hello))
    sizes = (UnitSize(UnitName("stage-1"), 1000),)
    sent = made.tell(Happened(D, Loaded(JOB, 0, 1, 0, "start", sizes)))
    assert [(peer, command.step) for peer, command in sent if isinstance(command, Commit)] == [(D, 0)]
    with running(A, B, C, D) as made:
        made.until_decided()
        made.tell(RowDurable(1))
        sent = made.hello(D, version=1)
        assert [(peer, command.step) for peer, command in sent if isinstance(command, Commit)] == [(D, 1)]


def test_a_peer_that_was_gone_is_released() -> None:
    with running(A, B, C, D) as made:
        made.tell(PeerGone(B, "silent"), 7.0)
        assert not made.admits(B, 1)
        assert [(peer, type(command)) for peer, command in made.hello(B)] == [(B, Release)]


def test_a_job_that_fails_while_it_gathers_does_not_go_on() -> None:
    """The last replica to come back held other bytes: the job failed, and was then begun again by the same event."""
    made = Restarted()
    for peer in (A, B, C):
        made.hello(peer)
    hello = Hello(D, 1, 1, "0", "at d", "", "cpu", 1, 0, -1, JOB, 0, 1, (), STAGE_OF[D], 0)
    made.tell(Happened(D, hello))
    sizes = tuple(UnitSize(unit, 1000) for unit, stages in UNITS.items() if STAGE_OF[D] in stages)
    outputs = made.brain.step(Happened(D, Loaded(JOB, 0, STAGE_OF[D], 0, "other bytes", sizes)), 1.0)
    assert isinstance(outputs[-1], Fail), "nothing comes after it"
    assert made.brain.is_over
    assert made.brain.due_s == math.inf


def test_a_late_peer_comes_in_until_a_step_is_decided_without_it() -> None:
    with running(A, C, D) as made:
        assert made.admits(B, 1)
        assert not made.admits(B, 2), "what nobody has committed"
        made.until_decided()
        assert not made.admits(B, 1), "the row of a round that it was no member of is being written"
        made.tell(RowDurable(1))
        assert not made.admits(B, 1), "it does not hold the mean of a round that it was no member of"
    made = Restarted(2, overlap=2)
    for peer in (A, C, D):
        made.hello(peer, version=2)
    made.tell(Tick(), GRACE_S + 1.0)
    assert made.admits(B, 2)
    while any(isinstance(command, Route | Average) for _, command in made.sent):
        made.answer(Route, Average)
    assert made.rows == [], "step 2 is averaged, but nobody has said yet that it committed step 0"
    assert not made.admits(B, 2)
    with running(A, C, D) as made:
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
    with running(A, C, D) as made:
        assert not made.admits(stranger, 1, stage=0)
        assert not made.admits(B, 1, stage=1)
        assert made.admits(B, 1)


def test_nobody_comes_back_to_a_job_that_this_start_of_the_scheduler_began() -> None:
    settings = Restarted().brain.settings
    brain = JobBrain(settings, Random(0))
    replicas = tuple(ReplicaRecord(peer, 1, f"at {peer}", stage) for peer, stage in STAGE_OF.items())
    brain.step(Start(replicas), 0.0)
    for peer, stage in STAGE_OF.items():
        sizes = tuple(UnitSize(unit, 1000) for unit, stages in UNITS.items() if stage in stages)
        brain.step(Happened(peer, Loaded(JOB, 0, stage, 0, "start", sizes)), 1.0)
    assert brain.mode is Mode.RUNNING
    hello = Hello(PeerId("e"), 1, 1, "0", "", "", "cpu", 1, 0, -1, JOB, 0, 0, (), 0, 0)
    assert not brain.admits(hello)


def test_nobody_holds_a_version_that_was_committed_while_it_was_away() -> None:
    """At the newest version there was no row to look at, so whoever claimed it was let in."""
    with running(A, C, D) as made:
        made.commit()
        assert made.brain.counts().committed_steps == 2
        assert not made.admits(B, 2)


def test_what_a_peer_adds_while_the_others_are_awaited_counts_if_it_had_reported_the_cell() -> None:
    made = Restarted()
    open_cell = ReportedCell(Microbatch(0, 1, 0), 7, False, True, 0.0)
    for peer in (A, B, C):
        made.hello(peer)
        made.hear(peer, Accumulated(Microbatch(0, 1, 0), STAGE_OF[peer], 3, True, 0.0, 0.1, 0.1, 0.0))
    assert made.brain.counts().violations == 3, "nobody gave it to them"
    hello = Hello(D, 1, 1, "0", "at d", "", "cpu", 1, 0, -1, JOB, 0, 1, (open_cell,), 1, 7)
    made.tell(Happened(D, hello))
    made.hear(D, Accumulated(Microbatch(0, 1, 0), 1, 7, True, 0.0, 0.1, 0.1, 0.0))
    made.hear(D, Loaded(JOB, 0, 1, 0, "start", (UnitSize(UnitName("stage-1"), 1000),)))
    made.hear(D, Committed(0, 0, 1, 1, "after"))
    story = "\n".join(made.brain.story(1, 0))
    assert "d reports that it has accumulated" in story
    assert not any(f"{peer} reports" in story for peer in (A, B, C))
    made.commit()
    assert made.brain.counts().replayed == 0


@pytest.mark.parametrize("overlap", [0, 2])
def test_whoever_reports_work_that_it_was_not_given_begins_the_open_steps_anew(overlap: int) -> None:
    """Its sums may hold what the ledger does not count."""
    made = Restarted(overlap=overlap)
    for peer in (A, B, C):
        made.hello(peer)
    held = (ReportedCell(Microbatch(0, 1, 0), 7, True, True, 0.0),)
    hello = Hello(D, 1, 1, "0", "at d", "", "cpu", 1, 0, -1, JOB, 0, 1, held, 1, 7)
    sent = made.tell(Happened(D, hello, doubted=True))
    sent += made.tell(Happened(D, Loaded(JOB, 0, 1, 0, "start", (UnitSize(UnitName("stage-1"), 1000),))))
    voids = [(peer, one.step, one.attempt >= 7) for peer, one in sent if isinstance(one, Void)]
    assert voids == [(D, step, True) for step in range(1, 2 + made.brain.settings.staleness)]
    assert min(attempts(sent, 1)) > 7
    made.hear(D, Committed(0, 0, 1, 1, "after"))
    made.commit()
    assert made.brain.counts().committed_steps == 2


# Joining ----------------------------------------------------------------------------------------------------------


def told(sent: list[Command]) -> set[type[Command]]:
    return {type(command) for command in sent} & {Admit, Release, Follow, Commit}


def test_a_joiner_whose_state_is_that_of_the_replicas_is_one() -> None:
    with running(A, C, D) as made:
        number = made.join(B)
        assert told(made.loaded(B, 1, "after", number + 1)) == set(), "the report of another attempt"
        assert told(made.loaded(B, 1, "after", number)) == {Admit}
        made.commit()
        assert made.brain.counts().committed_steps == 2


def test_a_joiner_leans_on_the_others_for_a_commit_of_before_the_restart_too() -> None:
    made = Restarted(2)
    for peer in (A, C, D):
        made.hello(peer)
    made.tell(Tick(), GRACE_S + 1.0)
    assert told(made.loaded(B, 1, "after", made.join(B))) == {Admit, Commit}
    for peer in (A, C, D):
        made.hear(peer, Committed(0, 1, 2, STAGE_OF[peer], "after"))
    assert made.brain.is_joining(B), "only a has the mean of step 1"
    made.hear(B, Committed(0, 1, 2, 0, "after"))
    assert not made.brain.is_joining(B)


def test_a_joiner_whose_state_is_another_is_turned_away() -> None:
    with running(A, C, D) as made:
        assert told(made.loaded(B, 1, "another", made.join(B))) == {Release}
        assert told(made.loaded(B, 1, "after", 1)) == set()


def test_a_joiner_that_is_too_late_is_told_to_follow() -> None:
    with running(A, C, D) as made:
        number = made.join(B)
        made.commit()
        assert told(made.loaded(B, 1, "after", number)) == {Follow}
        assert told(made.loaded(B, 2, "after", number)) == {Admit}


def test_a_joiner_that_says_what_nobody_has_committed_is_turned_away() -> None:
    with running(A, C, D) as made:
        assert told(made.loaded(B, 2, "after", made.join(B))) == {Release}
        assert made.brain.counts().violations == 1
