"""Plans moves of replicas between stages, and chooses the stage that a new peer joins.

      stage 0   stage 1   stage 2        capacity of a stage: sum over its replicas of 1 / seconds per microbatch
        |█|       |█|       | |          rate of the pipeline: the least capacity
        |█|       |█|       |█|
        |█|──────────────▶  |█|          a move takes from a stage what it can spare and raises the one that limits

Water is filled into the lowest vessel: each move of a plan goes to the stage with the least capacity, and is the move
that gives the best sorted capacities, worst stage first. So no move of a plan lowers the rate. (A swap of a fast peer
for a slow one would lower it on the way, and is not tried.) If several stages limit together, only all their moves
raise the rate, so gain and cost are those of the whole plan. Its first move is made.

    gain = (rate after / rate now - 1) * (1 - seconds of the transfers / horizon)
    worth it if gain >= min(min_gain, 0.5 / replicas of the limiting stage)

The stage that gives a peer away still reaches at least the pipeline's rate without it, so nothing is lost while the
mover is absent, whether it fetches its new stage before or after it leaves the old one. A move costs only the time
until its gain begins. One move is worth about 1 / replicas, hence the second bound: with many replicas a fixed share
would forbid every move.

Against thrashing: a stage must need a peer in `windows` consecutive windows, a peer that has arrived rests for
`cooldown_s`, only one peer moves at a time, and a joiner under way counts as if it had arrived.

Source: the published rule (SWARM, arXiv 2301.11913, appendix D: one peer per period from the stage with the shortest
queues to the one with the longest) and Petals' max-min rule; speeds, costs, plans of several moves and confirmation
are ours. benchmarks/models/rebalancing.py compares them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, inf
from statistics import median
from types import MappingProxyType

from scheduler.brain.routing.loads import Loads
from scheduler.brain.settings import RebalanceSettings
from scheduler.brain.state.brain_state import BrainState
from swarm.job.placement import Candidate
from swarm.text import counted
from swarm.types import Decision, PeerId

ROUNDED_DIGITS = 9  # of a capacity, as a share of the greatest: adding and subtracting again may change the last bits
SAME_RATE = 10.0**-ROUNDED_DIGITS


@dataclass(frozen=True, slots=True)
class StageReplica:
    """A peer in its stage; `seconds` are device seconds per microbatch here, forward and backward together."""

    peer: PeerId
    seconds: float
    since_s: float = -inf  # when it joined or moved here
    pinned: bool = False
    arriving: bool = False  # it still fetches the stage: it counts as capacity, but is neither moved nor relied upon

    def __post_init__(self) -> None:
        assert 0.0 < self.seconds < inf, "a pace is a positive, finite number of seconds"

    @property
    def speed(self) -> float:
        """Microbatches per second."""
        return 1.0 / self.seconds


@dataclass(frozen=True, slots=True)
class StagePool:
    """A stage, the replicas that serve it, and the cost of bringing one more there."""

    stage: int
    replicas: tuple[StageReplica, ...]
    state_bytes: int
    bytes_per_s: float  # that a joiner of this stage is expected to receive
    work: float = 1.0  # per microbatch, relative to the other stages: turns seconds here into seconds there

    @property
    def capacity(self) -> float:
        """Microbatches per second, arriving replicas included."""
        return fsum(replica.speed for replica in self.replicas)

    @property
    def transfer_s(self) -> float:
        """Seconds to fetch the state."""
        return self.state_bytes / self.bytes_per_s if self.bytes_per_s > 0.0 else inf


@dataclass(frozen=True, slots=True)
class Move:
    """Take `peer` out of stage `source` and make it a replica of `target`.

    Rates are the pipeline's, in microbatches per second: now, and once all `moves` of the plan are made. This is the
    first move."""

    peer: PeerId
    source: int
    target: int
    rate_now: float
    rate_after: float
    gain: float  # net, as a share of the microbatches of the horizon; infinite if the rate is 0 now
    cost_s: float  # of transfers
    moves: int


class Rebalancer:
    """Confirms plans over time; the caller describes the stages."""

    def __init__(self, settings: RebalanceSettings) -> None:
        self._settings = settings
        self._window_end_s = -inf
        self._wanting: dict[int, int] = {}  # stage -> consecutive windows in which a plan wanted a peer there

    def consider(self, pools: Sequence[StagePool], now_s: float, moving: PeerId | None = None) -> Decision[Move]:
        """The move to make now, or none and why.

        It must be called at least every `interval_s`, which makes a window, and as soon as a mover serves: the rest of
        a confirmed plan need not wait again. `moving` is the peer under way, if there is one; `pools` lists it as
        arriving at its new stage, even while it still serves the old one. The caller must make the returned move.
        """
        settings = self._settings
        plan = plan_moves(pools, settings, now_s)
        if now_s >= self._window_end_s:
            self._window_end_s = now_s + settings.interval_s
            self._wanting = {stage: self._wanting.get(stage, 0) + 1 for stage in plan.targets}
        else:
            self._wanting = {stage: count for stage, count in self._wanting.items() if stage in plan.targets}
        if moving is not None:
            return Decision(None, f"{moving} is on its way; one move at a time")
        if plan.first is None:
            return Decision(None, plan.reason)
        seen = self._wanting.get(plan.first.target, 0)
        reason = f"{plan.reason}, confirmed {min(seen, settings.windows)} of {settings.windows}"
        return Decision(plan.first if seen >= settings.windows else None, reason)


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The first move of a worthwhile plan, if there is one, and all stages that the plan brings peers to."""

    first: Move | None
    targets: frozenset[int]
    reason: str


def plan_moves(pools: Sequence[StagePool], settings: RebalanceSettings, now_s: float) -> MovePlan:
    """The plan with the greatest net gain, and whether it is worth it; earlier decisions play no part.

    O(peers log peers + stages^3 log peers): at most twice as many moves as stages. Ties go to the lowest peer id.
    """
    state = _Fill(pools, settings, now_s)
    rate_now = state.rate
    low = state.lowest
    fastest = max(state.capacities.values())
    limits = f"stage {low} sets the pace: {rate_now:.3g} microbatches/s, the fastest stage could do {fastest:.3g}"
    best: Move | None = None
    targets: list[int] = []
    first: tuple[PeerId, int, int] | None = None
    best_targets: frozenset[int] = frozenset()
    transfer_s = 0.0
    for moves in range(1, max(4, 2 * len(pools)) + 1):
        step = state.best_step()
        if step is None:
            break
        transfer_s += state.pools[step.target].transfer_s
        state.make(step)
        targets.append(step.target)
        first = first or (step.replica.peer, step.source, step.target)
        share = _net_share(rate_now, state.rate, transfer_s, settings)
        if best is None or share > best.gain or (share == best.gain == inf and state.rate > best.rate_after):
            best = Move(*first, rate_now, state.rate, share, transfer_s, moves)
            best_targets = frozenset(targets)
    if best is None or (best.gain <= 0.0 and best.rate_after <= rate_now * (1.0 + SAME_RATE)):
        return MovePlan(None, frozenset(), f"{limits}; to move a stage server would not help{state.obstacles()}")

    crowd = sum(not replica.arriving for replica in state.pools[low].replicas)
    needed = min(settings.min_gain, 0.5 / max(1, crowd))
    rise = (
        f"gives {best.rate_after / rate_now - 1.0:+.1%}"
        if rate_now > 0.0
        else f"gives {best.rate_after:.3g} microbatches/s"
    )
    others = f" and {best.moves - 1} more" if best.moves > 1 else ""
    text = (
        f"{limits}; moving {best.peer} from stage {best.source} to {best.target}{others} {rise}, "
        f"cost {best.cost_s:.3g} s of transfer, net {best.gain:+.1%}"
    )
    if best.gain <= 0.0 or best.gain < needed:
        return MovePlan(None, frozenset(), f"{text}, below the {needed:.1%} that a move must gain")
    return MovePlan(best, best_targets, text)


def where_to_join(pools: Sequence[StagePool], *, min_replicas: int = 1) -> Decision[int]:
    """The stage where one more peer helps most: first a stage short of replicas, then the best sorted capacities.

    The peer is assumed to be as fast as the median of the present replicas. Ties go to the stage with the fewest
    replicas, then to the lowest number. A peer that was sent to a stage and still fetches it must be in `pools` as
    arriving.
    """
    assert pools
    assert min_replicas >= 1
    short = [pool for pool in pools if len(pool.replicas) < min_replicas]
    if short:
        pool = min(short, key=lambda pool: (len(pool.replicas), pool.stage))
        return Decision(
            pool.stage, f"stage {pool.stage} has {len(pool.replicas)} of {counted(min_replicas, 'replica')}"
        )
    speed = median(pool.work * replica.speed for pool in pools for replica in pool.replicas)
    capacities = {pool.stage: pool.capacity for pool in pools}
    unit = max(capacities.values())

    def rank(pool: StagePool) -> tuple[list[float], int, int]:
        after = {**capacities, pool.stage: capacities[pool.stage] + speed / pool.work}
        return _worst_first(after, unit), -len(pool.replicas), -pool.stage

    pool = max(pools, key=rank)
    rate = min(capacities.values())
    after = min(capacities[stage] + (speed / pool.work if stage == pool.stage else 0.0) for stage in capacities)
    return Decision(
        pool.stage,
        f"stage {pool.stage} does {capacities[pool.stage]:.3g} microbatches/s "
        f"with {counted(len(pool.replicas), 'replica')}, "
        f"{max(capacities.values()):.3g} at best elsewhere; the pipeline goes from {rate:.3g} to {after:.3g}",
    )


# Water filling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PlanStep:
    replica: StageReplica
    source: int
    target: int
    adds: float  # capacity at the target


class _Fill:
    """Capacities while a plan is made."""

    def __init__(self, pools: Sequence[StagePool], settings: RebalanceSettings, now_s: float) -> None:
        self.settings = settings
        self.pools = {pool.stage: pool for pool in pools}
        assert len(self.pools) == len(pools), "a stage is listed once"
        self.capacities = {pool.stage: pool.capacity for pool in pools}
        self.unit = max(self.capacities.values()) or 1.0
        self.serving = {pool.stage: sum(not replica.arriving for replica in pool.replicas) for pool in pools}
        free = [replica for pool in pools for replica in pool.replicas if not replica.pinned and not replica.arriving]
        self.resting = sum(now_s - replica.since_s < settings.cooldown_s for replica in free)
        rested = {replica for replica in free if now_s - replica.since_s >= settings.cooldown_s}
        self.movable = {  # slowest first, then by peer id
            pool.stage: sorted(rested.intersection(pool.replicas), key=lambda replica: (replica.speed, replica.peer))
            for pool in pools
        }
        self.pinned = sum(replica.pinned for pool in pools for replica in pool.replicas)

    @property
    def rate(self) -> float:
        return min(self.capacities.values())

    @property
    def lowest(self) -> int:
        return min(self.capacities, key=lambda stage: (self.capacities[stage], stage))

    def best_step(self) -> _PlanStep | None:
        """The move to the lowest stage that gives the best sorted capacities; none if all give worse ones."""
        best: _PlanStep | None = None
        best_rank = _worst_first(self.capacities, self.unit)
        for step in self._steps():
            after = dict(self.capacities)
            after[step.source] -= step.replica.speed
            after[step.target] += step.adds
            rank = _worst_first(after, self.unit)
            tied = best is not None and rank == best_rank and step.replica.peer < best.replica.peer
            if rank > best_rank or tied:
                best, best_rank = step, rank
        return best

    def _steps(self) -> Iterator[_PlanStep]:
        """The best moves from each stage: those with the greatest smaller capacity after the move.

        That capacity rises with the mover's speed until both are equal, and then falls.
        """
        target = self.lowest
        for source, movable in self.movable.items():
            if source == target or not movable or self.serving[source] <= self.settings.min_replicas:
                continue
            ratio = self.pools[source].work / self.pools[target].work
            level = (self.capacities[source] - self.capacities[target]) / (1.0 + ratio)
            above = _first_as_fast(movable, level)
            if above < len(movable):
                yield _PlanStep(movable[above], source, target, ratio * movable[above].speed)
            if above > 0:
                below = movable[_first_as_fast(movable, movable[above - 1].speed)]
                yield _PlanStep(below, source, target, ratio * below.speed)

    def make(self, step: _PlanStep) -> None:
        self.capacities[step.source] -= step.replica.speed
        self.capacities[step.target] += step.adds
        self.serving[step.source] -= 1
        self.movable[step.source].remove(step.replica)

    def obstacles(self) -> str:
        """The replicas that may not be moved and why, in words."""
        least = self.settings.min_replicas
        at_least = sorted(stage for stage, count in self.serving.items() if 0 < count <= least and stage != self.lowest)
        facts = [
            f"{self.pinned} pinned" if self.pinned else "",
            f"{self.resting} moved or joined less than {self.settings.cooldown_s:g} s ago" if self.resting else "",
            f"stage {', '.join(map(str, at_least))} cannot spare its last {least}" if at_least else "",
        ]
        told = "; ".join(fact for fact in facts if fact)
        return f" ({told})" if told else ""


def _first_as_fast(replicas: Sequence[StageReplica], speed: float) -> int:
    """The index of the first replica, sorted by speed, that is at least this fast; their number if there is none."""
    return bisect_left(replicas, speed, key=lambda replica: replica.speed)


def _net_share(rate_now: float, rate_after: float, transfer_s: float, settings: RebalanceSettings) -> float:
    """By what share a plan increases the microbatches of the horizon."""
    left = max(0.0, 1.0 - transfer_s / settings.horizon_s)
    if rate_now > 0.0:
        return (rate_after / rate_now - 1.0) * left
    return inf if rate_after * left > 0.0 else 0.0


def _worst_first(capacities: Mapping[int, float], unit: float) -> list[float]:
    """Sorted, and rounded to a share of `unit` so that equal sums compare equal."""
    return sorted(round(capacity / unit, ROUNDED_DIGITS) for capacity in capacities.values())


JOINER_BYTES_PER_S = 25e6  # a home link of 200 Mb/s, until transfers are measured


class Moves:
    """Asks the planners which replica moves to another stage, and which stage a new peer joins.

    They are shown each stage with its replicas and their speeds. Peers that join or move count as arriving; replicas
    that leave do not count.

    The planned moves of one job; `decision` is the newest about them.
    """

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
