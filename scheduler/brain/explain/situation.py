"""What a job at work stands on, put together out of what its parts know; explaining.py makes sentences of it."""

from __future__ import annotations

from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.explain.facts import JoinerStanding, MoveMade, ReplicaStanding, Situation
from scheduler.brain.replicas.moves import Moves
from scheduler.brain.routing.loads import Loads
from scheduler.brain.state.brain_state import BrainState
from swarm.types import PeerId


class SituationView:
    """What is told of one job; changes nothing."""

    def __init__(self, state: BrainState, loads: Loads, saving: CheckpointSchedule, moves: Moves) -> None:
        self._state = state
        self._loads = loads
        self._saving = saving
        self._moves = moves

    def situation(self, waiting_for: str, now_s: float, *, is_running: bool) -> Situation:
        """What the job stands on, to be explained."""
        done, leaves = self._state.ledger.contributions(), self._state.pool.leaves
        newest = leaves.newest_move
        joiners = [
            JoinerStanding(one.replica.peer, one.replica.stage, one.since_s, one.report is not None)
            for one in self._state.joiners
        ]
        return Situation(
            is_running,
            len(self._state.pool.by_stage),
            self._state.progress.agreed,
            waiting_for,
            self._moves.decision.reason,
            tuple(self._replica(peer, done[peer]) for peer in self._state.pool),
            tuple(joiners),
            leaves.moves,
            newest and MoveMade(newest[0], newest[1].target or 0, newest[1].reason, newest[2]),
            self._state.links.failing(now_s),
            self._saving.open,
        )

    def _replica(self, peer: PeerId, contributions: int) -> ReplicaStanding:
        standing = self._state.pool[peer]
        return ReplicaStanding(
            peer,
            standing.replica.stage,
            self._loads.measured_s(peer),
            self._state.ledger.outstanding(peer),
            contributions,
            standing.is_suspect,
            self._state.pool.leaves.wants(peer),
            standing.asked_s,
            standing.needs_donors,
        )
