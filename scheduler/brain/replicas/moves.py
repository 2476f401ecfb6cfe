"""Asks the planners (rebalancing.py) which replica moves to another stage, and which stage a new peer joins.

They are shown each stage with its replicas and their speeds. Peers that join or move count as arriving;
replicas that leave do not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from scheduler.brain.fleet.placement import Candidate
from scheduler.brain.replicas.rebalancing import Move, Rebalancer, StagePool, StageReplica, where_to_join
from scheduler.brain.routing.loads import Loads
from scheduler.brain.state.brain_state import BrainState
from swarm.types import Decision, PeerId

JOINER_BYTES_PER_S = 25e6  # a home link of 200 Mb/s, until transfers are measured


class Moves:
    """The planned moves of one job; `decision` is the newest about them."""

    def __init__(self, state: BrainState, loads: Loads) -> None:
        self.decision: Decision[Move] = Decision(None, "the job has not run long enough")
        self.decided_s = math.nan  # when it was taken
        self.look_s = math.inf  # when to look again
        self._state = state
        self._loads = loads
        self._rebalancer = Rebalancer(state.settings.rebalance)
        self._bytes_per_s = JOINER_BYTES_PER_S

    def consider(self, now_s: float) -> Decision[Move] | None:
        """Look at the stages from time to time, and name the replica whose move is worth it; None: not now."""
        settings, pool = self._state.settings, self._state.pool
        if not settings.recover or not settings.rebalance.rebalance or len(pool.by_stage) < 2:
            return None
        if self.look_s == math.inf:
            self.look_s = now_s + settings.rebalance.interval_s
        if now_s < self.look_s:
            return None
        self.look_s = now_s + settings.rebalance.interval_s
        if not all(any(map(self._loads.is_measured, peers)) for peers in pool.by_stage):
            return None
        on_the_way = [*pool.leaves.moving(now_s), *(joiner.replica.peer for joiner in self._state.joiners)]
        moving = on_the_way[0] if on_the_way else None
        decision = self._rebalancer.consider(self._stages(now_s), now_s, moving)
        if decision.plan is not None:
            others = sorted(set(pool.by_stage[decision.plan.source]).intersection(pool.suspects()))
            if others:  # the move would take the last replica of its stage, which would wait for another to join there
                decision = Decision(None, f"{decision.reason}, but {', '.join(others)} may be gone")
        if decision.reason != self.decision.reason:
            self._state.outbox.note("debug", f"rebalancing: {decision.reason}")
        self.decision, self.decided_s = decision, now_s
        return decision

    def where_to_join(
        self, idle: Candidate, fitting: Iterable[int], now_s: float, coming: Mapping[PeerId, int]
    ) -> Decision[int]:
        """The stage that an idle peer should join, among the stages that fit into its memory; or why none."""
        fits = set(fitting)
        if idle.pinned_stage >= 0:
            fits &= {idle.pinned_stage}
        destination = self._state.pool.leaves.destination(idle.peer, now_s)
        if destination is not None and destination.target in fits:
            return Decision(destination.target, destination.reason)
        pools = [pool for pool in self._stages(now_s, idle.peer, coming) if pool.stage in fits]
        if not pools:
            pinned = f"stage {idle.pinned_stage} does not"
            return Decision(None, "no stage fits its memory" if idle.pinned_stage < 0 else pinned)
        return where_to_join(pools, min_replicas=self._state.settings.rebalance.min_replicas)

    def fetched(self, stage: int, took_s: float) -> None:
        """Learn from a joiner that fetched the stage how fast others will be."""
        sizes = self._state.settings.state_bytes
        if sizes and took_s > 0.0:
            self._bytes_per_s += 0.3 * (sizes[stage] / took_s - self._bytes_per_s)

    def _stages(
        self, now_s: float, without: PeerId | None = None, coming: Mapping[PeerId, int] = MappingProxyType({})
    ) -> list[StagePool]:
        """The stages as the planners see them."""
        settings, pool = self._state.settings, self._state.pool
        arriving = {peer: stage for peer, stage in coming.items() if peer not in pool}
        arriving |= {joiner.replica.peer: joiner.replica.stage for joiner in self._state.joiners}
        arriving |= pool.leaves.moving(now_s)
        if without is not None:
            arriving.pop(without, None)
        pools = []
        for stage, peers in enumerate(pool.by_stage):
            here = [self._staying(peer) for peer in peers if peer not in pool.leaves]
            coming_here = [peer for peer, at in arriving.items() if at == stage]
            here += [StageReplica(peer, self._loads.pace_s(peer, stage), arriving=True) for peer in coming_here]
            state_bytes = settings.state_bytes[stage] if settings.state_bytes else 0
            work = settings.work[stage] if settings.work else 1.0
            pools.append(StagePool(stage, tuple(here), state_bytes, self._bytes_per_s, work))
        return pools

    def _staying(self, peer: PeerId) -> StageReplica:
        standing = self._state.pool[peer]
        replica = standing.replica
        return StageReplica(peer, self._loads.pace_s(peer, replica.stage), standing.joined_s, pinned=replica.pinned)
