"""The brain and evaluation: what waits for it, what does not, and what happens when a replica is lost."""

from __future__ import annotations

from typing import Any

from scheduler.brain.inputs import CheckpointKept, PeerGone
from scheduler.brain.outputs import EvaluationRow, Fail, Finish, WriteCommit, WriteEvaluation
from scheduler.brain.state.brain_state import Mode
from swarm.types import PeerId
from swarm.wire.messages import Average, Commit, Evaluate, Evaluated, LoadStage, Route, SaveStage
from tests.support.brain import A, B, C, D, Swarm

EVALUATING: dict[str, Any] = {"eval_every_steps": 1, "evaluation_microbatches": 3, "evaluation_tokens": 6}


def train_to_row(swarm: Swarm) -> None:
    """Answer everything but evaluations until the next row is to be written, or nothing more is asked."""
    rows = len(swarm.rows)
    while swarm.pending() and len(swarm.rows) == rows:
        swarm.answer(LoadStage, Route, Average, Commit)


def answer_evaluations(swarm: Swarm, count: int | None = None) -> None:
    given = [(peer, command) for peer, command in swarm.pop(Evaluate) if command.hops[-1].peer == peer]
    for peer, command in given[:count]:
        swarm.hear(peer, Evaluated(command.batch, command.hops[-1].attempt, 2.0))
    swarm.inbox += given[count:] if count is not None else []


class Evaluating(Swarm):
    def pending(self) -> bool:
        return any(isinstance(command, LoadStage | Route | Average | Commit) for _, command in self.inbox)


def evaluations_of(swarm: Swarm) -> list[EvaluationRow]:
    return [one.row for one in swarm.outputs if isinstance(one, WriteEvaluation)]


def test_a_version_is_evaluated_once_its_commit_was_sent_and_the_row_that_overwrites_it_waits() -> None:
    for staleness in (0, 1):
        swarm = Evaluating(steps=4, overlap=4 * staleness, **EVALUATING)
        train_to_row(swarm)
        assert not any(isinstance(command, Evaluate) for _, command in swarm.inbox)
        for step in range(1 + staleness):
            swarm.write()
            train_to_row(swarm)
            assert len(swarm.rows) == min(step + 2, 1 + staleness), "version 1 is overwritten by this step"
        assert swarm.brain.waiting_for() == (
            f"step {1 + staleness}: waits for the evaluation of the weights after 1 step: 0 of 3"
        )
        order = [type(command) for _, command in swarm.inbox]
        assert set(order) == {Evaluate}
        answer_evaluations(swarm)
        assert evaluations_of(swarm)[0] == EvaluationRow(0, 1, 1.0, 6)
        assert swarm.rows[-1].step == 1 + staleness


def test_the_last_version_is_evaluated_before_the_peers_are_released() -> None:
    swarm = Evaluating(steps=1, **EVALUATING)
    train_to_row(swarm)
    swarm.write()
    train_to_row(swarm)
    assert swarm.brain.mode is Mode.RUNNING
    assert "waits for the evaluation" in swarm.brain.waiting_for()
    answer_evaluations(swarm)
    assert swarm.brain.mode is Mode.SAVING
    swarm.answer(SaveStage)
    swarm.tell(CheckpointKept(1))
    assert isinstance(swarm.outputs[-1], Finish)


def test_a_command_reaches_every_hop_once_and_after_the_commit_that_makes_the_version() -> None:
    swarm = Evaluating(steps=2, **EVALUATING)
    train_to_row(swarm)
    swarm.outputs.clear()
    swarm.inbox.clear()
    swarm.write()
    sent = [(peer, command) for peer, command in swarm.inbox if isinstance(command, Commit | Evaluate)]
    for peer in (A, B, C, D):
        commands = [command for to, command in sent if to == peer]
        assert isinstance(commands[0], Commit)
    microbatches = [command.batch.index for _, command in sent if isinstance(command, Evaluate)]
    assert sorted(microbatches) == [0, 0, 1, 1, 2, 2]


def test_evaluation_goes_on_without_a_lost_replica() -> None:
    swarm = Evaluating(steps=2, recover=True, **EVALUATING)
    train_to_row(swarm)
    swarm.write()
    answer_evaluations(swarm, 1)
    swarm.tell(PeerGone(C, "killed"))
    swarm.inbox = [(peer, command) for peer, command in swarm.inbox if peer != C]
    again = [command for peer, command in swarm.inbox if isinstance(command, Evaluate) and peer == D]
    assert {command.batch.index for command in again} >= {1}
    assert all(command.hops[1].peer == D for command in again)
    train_to_row(swarm)
    answer_evaluations(swarm)
    assert evaluations_of(swarm) == [EvaluationRow(0, 1, 1.0, 6)]
    assert not any(isinstance(one, Fail) for one in swarm.outputs)


def test_without_recovery_a_lost_replica_ends_the_job_during_an_evaluation_too() -> None:
    swarm = Evaluating(steps=2, **EVALUATING)
    train_to_row(swarm)
    swarm.write()
    swarm.tell(PeerGone(PeerId("c"), "killed"))
    assert isinstance(swarm.outputs[-1], Fail)
    assert sum(isinstance(one, WriteCommit) for one in swarm.outputs) == 1
