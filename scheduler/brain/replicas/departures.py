"""Replicas that go: those that leave once nothing depends on them (leaving.py), and what goes with any of them."""

from __future__ import annotations

from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.commit.commits import Commits
from scheduler.brain.commit.rounds import Rounds
from scheduler.brain.outputs import Left
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.leaves import Leave
from scheduler.brain.state.step import Phase
from swarm.messages import Release
from swarm.types import PeerId


class Departures:
    """The departures of one job."""

    def __init__(
        self, state: BrainState, saving: CheckpointSchedule, dispatch: Dispatch, rounds: Rounds, commits: Commits
    ) -> None:
        self._state = state
        self._saving = saving
        self._dispatch = dispatch
        self._rounds = rounds
        self._commits = commits

    def ask(self, peer: PeerId, leave: Leave, now_s: float, *, at_work: bool) -> None:
        """A replica is to leave: at once if the job is at work and the stage can spare it."""
        if not self._state.pool.leaves.ask(peer, leave):
            return
        self._state.pool[peer].asked_s = now_s
        if at_work:
            self._begin(self._state.pool.stage_of(peer))
        if peer not in self._state.pool.leaves:
            told = f"{self._state.pool.name(peer)} is to leave ({leave.reason}), and stays until another one has joined"
            self._state.outbox.note("warning", told)

    def begin(self) -> None:
        """Let those begin to leave whose stage can spare them now."""
        for stage in range(len(self._state.pool.by_stage)) if self._state.pool.leaves else ():
            self._begin(stage)

    def stay(self, peer: PeerId, until: int) -> None:
        """The last replica of its stage cannot leave; from step `until` on it was no member."""
        self._state.outbox.note("warning", f"{self._state.pool.name(peer)} stays: it is the last of its stage")
        self._dispatch.go_on(peer)
        for run in self._state.progress.runs.values():
            if run.phase is Phase.COMMITTING and run.step >= until and run.row is not None:
                self._commits.send(peer, run.row)  # it is waited for from now on

    def release(self, now_s: float) -> None:
        """Let go of those on whom nothing depends any more."""
        pool = self._state.pool
        for peer in pool.leaves.due(self._state.progress.agreed):
            if self._saving.stage_of(peer) is not None:
                continue  # it still hands over a checkpoint
            if peer not in pool.spare():
                continue  # whether a suspect comes back, or this one has to stay, is not known yet
            name, asked_s = pool.name(peer), pool[peer].asked_s
            leave = pool.leaves.done(peer, now_s)
            self._state.outbox.send(peer, Release(self._state.settings.job, leave.reason))
            stage = self.remove(peer)
            where = f"moves to stage {leave.target}" if leave.target is not None else "has handed over its work"
            self._state.outbox.note("info", f"{name} {where}: {leave.reason}")
            self._state.outbox.put(Left(peer, stage, leave.target, now_s - asked_s))

    def remove(self, peer: PeerId) -> int:
        """The peer is no replica any more, of the stage that is given: forget what it held and was to do."""
        self._rounds.lost(peer)
        stage = self._state.pool.remove(peer).stage
        self._dispatch.remove(peer, stage)
        return stage

    def _begin(self, stage: int) -> None:
        pool = self._state.pool
        for peer in pool.leaves.begin(pool.by_stage[stage], pool.suspects(), self._state.progress.next):
            leave = pool.leaves.wants(peer)
            assert leave is not None
            self._dispatch.pause(peer)
            self._state.outbox.note("info", f"{pool.name(peer)} takes no new work: {leave.reason}")
