"""Replicas leave once nothing depends on them (state/pool.py), or are lost with their contributions.

Decision: docs/decisions/032.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.brain.checkpoint.collection import CheckpointCollector
from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.commit.commits import Commits
from scheduler.brain.commit.digests import Expel, Remedy, StartOver
from scheduler.brain.commit.rounds import Rounds
from scheduler.brain.outputs import Fail, Left, Unfit
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.routing.evaluation import Evaluations
from scheduler.brain.stall import FAILED_HINT, stopped_by_loss
from scheduler.brain.state.brain_state import BrainState, Mode
from scheduler.brain.state.pool import Leave
from scheduler.brain.state.step import Phase
from swarm.errors import PeerUnavailable
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class Departures:
    """The departures of one job."""

    _state: BrainState
    _saving: CheckpointSchedule
    _evaluations: Evaluations
    _dispatch: Dispatch
    _rounds: Rounds
    _commits: Commits
    _collector: CheckpointCollector

    def ask(self, peer: PeerId, leave: Leave, now_s: float) -> None:
        """Ask a replica to leave: at once if the job is at work and the stage can spare it."""
        if not self._state.pool.leaves.ask(peer, leave):
            return
        self._state.pool[peer].asked_s = now_s
        if self._state.mode.is_at_work:
            self._begin(self._state.pool.stage_of(peer))
        if peer not in self._state.pool.leaves:
            told = f"{self._state.pool.name(peer)} is to leave ({leave.reason}), and stays until another one has joined"
            self._state.outbox.note("warning", told)

    def begin(self) -> None:
        """Let replicas that wait to leave begin, where their stage can spare them now."""
        for stage in range(len(self._state.pool.by_stage)) if self._state.pool.leaves else ():
            self._begin(stage)

    def release(self, now_s: float) -> None:
        """Release the leaving replicas on which nothing depends any more."""
        pool = self._state.pool
        for peer in pool.leaves.due(self._state.progress.agreed):
            if self._saving.stage_of(peer) is not None:
                continue  # it still hands over a checkpoint
            if peer not in pool.spare():
                continue  # whether a suspect comes back, or this one has to stay, is not known yet
            name, asked_s = pool.name(peer), pool[peer].asked_s
            leave = pool.leaves.done(peer, now_s)
            self._state.outbox.release(peer, leave.reason)
            stage = self._remove(peer)
            where = f"moves to stage {leave.target}" if leave.target is not None else "has handed over its work"
            self._state.outbox.note("info", f"{name} {where}: {leave.reason}")
            self._state.outbox.put(Left(peer, stage, leave.target, now_s - asked_s))

    # Lost ----------------------------------------------------------------------------------------------------------

    def expel(self, peer: PeerId, cause: str, reason: str, now_s: float, *, unfit: bool = False) -> None:
        """The peer is alive but cannot go on: the job goes on without it. `unfit`: it is not to come back."""
        if unfit:
            self._state.outbox.put(Unfit(peer, self._state.pool[peer].replica.incarnation, cause))
        self._state.outbox.release(peer, cause)
        self.lose(peer, cause, reason, now_s)

    def remedy(self, found: Sequence[Remedy], now_s: float) -> None:
        """Replicas differ: go on without the outvoted ones, or end the job.

        What passed through them may be wrong at other stages too, so all that has no row yet is computed again.
        """
        for remedy in found:
            if self._state.mode is Mode.ENDED:
                return
            match remedy:
                case Fail():
                    self._state.conclude(remedy)
                case StartOver(cause=cause):
                    self._state.outbox.note("error", f"{cause}; what has no row is computed again")
                case Expel(peer=peer) if peer not in self._state.pool:
                    pass  # it was outvoted twice, in two units of one step
                case Expel(peer=peer, cause=cause):
                    for run in self._state.progress.runs.values():
                        run.commits.pop(peer, None)
                    self.expel(peer, cause, "refused", now_s, unfit=True)
        if not found or not self._state.mode.is_at_work:
            return
        for run in self._state.progress.undecided():
            self._rounds.start_over(run, "whoever computed a part of it held other bytes than most", now_s)
        self._evaluations.start_over()
        self._state.conclude(self._collector.start_over(now_s))

    def lose(self, peer: PeerId, cause: str, reason: str, now_s: float) -> None:
        """The peer is out of the job: its contributions to undecided steps are done again."""
        state, leaves = self._state, self._state.pool.leaves
        name, stage = state.pool.name(peer), state.pool.stage_of(peer)
        self._remove(peer)
        leaves.forget(peer)
        others = state.pool.by_stage[stage]
        if state.census is not None:
            state.census.forget(peer)
            state.outbox.note("warning", f"{name} is gone: {cause}")
            return
        if not others:
            self.stage_lost(f"{name} is gone: {cause}; the stage has no other replica")
            return
        if not state.settings.recover:
            state.conclude(Fail(PeerUnavailable.code, f"{name} is gone: {cause}", FAILED_HINT))
            return
        staying = leaves.stay(others, state.progress.agreed)
        if all(other in leaves for other in others):
            self.stage_lost(f"{name} is gone: {cause}; who still leaves the stage has older weights")
            return
        state.outbox.note("warning", f"{name} is gone: {cause}; its uncommitted work is done again")
        for run in state.progress.redoable():
            self._rounds.reopen(run, f"{peer} is gone")
        steps = [run.step for run in state.progress.redoable()]
        state.ledger.peer_gone(peer, steps, f"gone, {cause}", now_s, reason)
        self._rounds.undecide_unheld(now_s)
        for other, until in staying.items():
            self._stay(other, until)
        state.conclude(self._collector.saver_gone(peer, stage, now_s))

    def stage_lost(self, lost: str) -> None:
        """No replica of a stage is left: everything since the newest checkpoint is lost in the other stages too."""
        settings = self._state.settings
        stopped = stopped_by_loss(lost, settings.on_stall, self._saving.stop) if settings.recover else None
        self._state.conclude(stopped or Fail(PeerUnavailable.code, lost, FAILED_HINT))

    def _remove(self, peer: PeerId) -> int:
        """Forget what the replica held and was to do; gives the stage that it served."""
        self._rounds.lost(peer)
        stage = self._state.pool.remove(peer).stage
        self._dispatch.remove(peer, stage)
        return stage

    def _stay(self, peer: PeerId, until: int) -> None:
        """The last replica of its stage cannot leave. From step `until` on it was not a member."""
        self._state.outbox.note("warning", f"{self._state.pool.name(peer)} stays: it is the last of its stage")
        self._dispatch.go_on(peer)
        for run in self._state.progress.runs.values():
            if run.phase is Phase.COMMITTING and run.step >= until and run.row is not None:
                self._commits.send(peer, run.row)  # it is waited for from now on

    def _begin(self, stage: int) -> None:
        pool = self._state.pool
        for peer in pool.leaves.begin(pool.by_stage[stage], pool.suspects(), self._state.progress.next):
            leave = pool.leaves.wants(peer)
            assert leave is not None
            self._dispatch.pause(peer)
            self._state.outbox.note("info", f"{pool.name(peer)} takes no new work: {leave.reason}")
