"""The rules that benchmarks.models.rebalancing compares: nobody moves, SWARM's, Petals', and the scheduler's own.

A rule sees the fleet (who serves or fetches which stage, how fast) and says who moves where. `costed` is the production
code of scheduler/brain/replicas/rebalancing.py; the others are written here after their publications and used nowhere
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from scheduler.brain.replicas.rebalancing import Rebalancer, StagePool, StageReplica, where_to_join
from scheduler.brain.settings import RebalanceSettings
from swarm.types import PeerId

PETALS_KEEP = 0.75 - 1e-3  # move only if the weakest stage now has less than this share of what it would have
PETALS_PERIOD_S = 120.0  # each peer asks itself every U(0, 240 s); the mean of that
PETALS_SHARE = 0.1  # of the peers ask themselves together, every tenth of that: ten times fewer events
PETALS_ROUNDS_MAX = 10
TAKES_PART_MIN = 2  # SWARM's rule moves only if stages differ by this many peers; without that it moves for ever


@dataclass(slots=True)
class Peer:
    """A peer that is up: it serves `stage`, or fetches it (`arriving`)."""

    name: PeerId
    speed: float  # microbatches per second
    stage: int = -1
    since_s: float = 0.0
    arriving: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """What a rule may look at; `speeds` are as measured."""

    stages: int
    peers: Mapping[PeerId, Peer]
    speeds: Mapping[PeerId, float]
    moving: PeerId | None
    state_bytes: int
    bytes_per_s: float

    def by_stage(self) -> list[list[Peer]]:
        """Peers of each stage, those on their way to it included."""
        pools: list[list[Peer]] = [[] for _ in range(self.stages)]
        for peer in self.peers.values():
            if peer.stage >= 0:
                pools[peer.stage].append(peer)
        return pools

    def capacities(self) -> list[float]:
        """Sum of speeds of each stage."""
        return [sum(self.speeds[peer.name] for peer in pool) for pool in self.by_stage()]


class Rule(Protocol):
    """A way to balance. `prewarm`: movers serve their old stage until they hold the new one."""

    name: str
    period_s: float
    prewarm: bool

    def join(self, view: View, rng: Random) -> int:
        """The stage of a peer that just came."""
        ...

    def consider(self, view: View, now_s: float, rng: Random) -> Iterable[tuple[PeerId, int]]:
        """Who moves now, and to which stage; asked every `period_s`."""
        ...


class Nobody:
    """No rebalancing; joiners go anywhere."""

    name, period_s, prewarm = "none", float("inf"), False

    def join(self, view: View, rng: Random) -> int:
        return rng.randrange(view.stages)

    def consider(self, view: View, now_s: float, rng: Random) -> Iterable[tuple[PeerId, int]]:
        return ()


class Swarm:
    """Every T seconds one peer goes from the stage with the shortest queues to the one with the longest.

    In a fluid there are no queues; the load of a stage is its share of the work over its capacity, the queue of a peer
    its share of that. Source: SWARM (arXiv 2301.11913) section 3.2, appendix D.
    """

    prewarm = False

    def __init__(self, period_s: float) -> None:
        self.name, self.period_s = f"SWARM's rule, T = {period_s:g} s", period_s

    def join(self, view: View, rng: Random) -> int:
        capacities = view.capacities()
        return capacities.index(min(capacities))

    def consider(self, view: View, now_s: float, rng: Random) -> Iterable[tuple[PeerId, int]]:
        pools, capacities = view.by_stage(), view.capacities()
        low, high = (capacities.index(extreme) for extreme in (min(capacities), max(capacities)))
        candidates = [peer for peer in pools[high] if not peer.arriving]
        if len(candidates) < 2 or capacities[high] - capacities[low] < TAKES_PART_MIN * _mean(view.speeds):
            return ()
        # Wirings keep the queues of a stage's peers equally long in seconds: the shortest queue is the slowest peer's.
        mover = min(candidates, key=lambda peer: (view.speeds[peer.name], peer.name))
        return ((mover.name, low),)


class Petals:
    """Each peer asks itself now and then whether the weakest stage would gain enough if it went where it is needed,
    the others having reacted. Source: petals, block_selection.py; a span is one stage here."""

    name, prewarm = "Petals' rule", False

    def __init__(self) -> None:
        self.period_s = PETALS_PERIOD_S * PETALS_SHARE

    def join(self, view: View, rng: Random) -> int:
        capacities = view.capacities()
        return capacities.index(min(capacities))

    def consider(self, view: View, now_s: float, rng: Random) -> Iterable[tuple[PeerId, int]]:
        capacities = view.capacities()
        if min(capacities) / (sum(capacities) / len(capacities)) >= PETALS_KEEP:
            return ()  # no reaction of the others could bring more than the mean
        names = sorted(name for name, peer in view.peers.items() if peer.stage >= 0 and not peer.arriving)
        for asking in rng.sample(names, round(len(names) * PETALS_SHARE)):
            if (chosen := self._wishes(asking, names, view, rng)) is not None:
                return ((asking, chosen),)
        return ()

    def _wishes(self, asking: PeerId, names: list[PeerId], view: View, rng: Random) -> int | None:
        """Where the peer wants to go, if it wants to go at all."""
        capacities = view.capacities()
        now = min(capacities)
        places = {peer.name: peer.stage for peer in view.peers.values() if peer.stage >= 0}
        if not self._choose(asking, places, capacities, view.speeds):
            return None
        chosen = places[asking]
        others = [name for name in names if name != asking]
        for _ in range(PETALS_ROUNDS_MAX):
            rng.shuffle(others)
            if not sum(self._choose(name, places, capacities, view.speeds) for name in others):
                break
        after = min(capacities)
        return chosen if after > 0.0 and now / after < PETALS_KEEP else None

    def _choose(
        self, name: PeerId, places: dict[PeerId, int], capacities: list[float], speeds: Mapping[PeerId, float]
    ) -> bool:
        """Put the peer where throughput is least without it; whether that is elsewhere."""
        old, speed = places[name], speeds[name]
        without = list(capacities)
        without[old] -= speed * (1 + 1e-3)
        if without[old] <= 0.0:
            return False
        new = without.index(min(without))
        if new == old:
            return False
        capacities[old] -= speed
        capacities[new] += speed
        places[name] = new
        return True


class Costed:
    """scheduler/brain/replicas/rebalancing.py, as the scheduler runs it."""

    def __init__(self, settings: RebalanceSettings, *, prewarm: bool = True, name: str = "costed (ours)") -> None:
        self.name, self.prewarm, self.period_s = name, prewarm, settings.interval_s
        self._settings = settings
        self._rebalancer = Rebalancer(settings)

    def join(self, view: View, rng: Random) -> int:
        chosen = where_to_join(self._pools(view)).plan
        assert chosen is not None
        return chosen

    def consider(self, view: View, now_s: float, rng: Random) -> Iterable[tuple[PeerId, int]]:
        move = self._rebalancer.consider(self._pools(view), now_s, view.moving).plan
        return () if move is None else ((move.peer, move.target),)

    def _pools(self, view: View) -> list[StagePool]:
        return [
            StagePool(
                stage,
                tuple(
                    StageReplica(peer.name, 1.0 / view.speeds[peer.name], peer.since_s, arriving=peer.arriving)
                    for peer in pool
                ),
                view.state_bytes,
                view.bytes_per_s,
            )
            for stage, pool in enumerate(view.by_stage())
        ]


def _mean(speeds: Mapping[PeerId, float]) -> float:
    return sum(speeds.values()) / len(speeds)
