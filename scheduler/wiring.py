"""Which replica takes each hop of a microbatch.

 stage 0        stage 1        stage 2
cost(a) ──────▶ cost(c) ──────▶ cost(e)      cost of a replica: (outstanding + 1) * pace_s
     ╲        ╱        ╲        ╱             cost of a link: its transfer seconds
cost(b) ──────▶ cost(d) ──────▶ cost(f)      the cheapest path is the route
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from swarm.types import Decision, PeerId

Links: TypeAlias = Callable[[PeerId, PeerId], float]
"""Seconds to carry one boundary tensor between two peers."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has to do; without credit it takes no new work."""

    peer: PeerId
    outstanding: int
    pace_s: float
    has_credit: bool = True

    @property
    def completion_s(self) -> float:
        """Expected seconds until one more microbatch is done here."""
        return (self.outstanding + 1) * self.pace_s


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The replicas that may take the hop at one stage."""

    stage: int
    replicas: tuple[ReplicaLoad, ...]


def choose_route(
    loads: Sequence[StageLoad], now_s: float, rng: Random, links: Links | None = None
) -> Decision[tuple[PeerId, ...]]:
    """Pick one replica per stage so that the microbatch is expected to finish first.

    Cost of a replica is (outstanding + 1) * pace_s, of a link its transfer seconds; the cheapest path over all stages
    is found in O(stages * replicas^2), without link costs in O(stages * replicas). Ties are broken by `rng`. No plan if
    some stage has no replica with credit.

    Source: stochastic wiring, SWARM (arXiv 2301.11913) section 3.2; shared load instead of private heaps is ours.
    """
    pools: list[list[ReplicaLoad]] = []
    for load in loads:
        pool = [replica for replica in load.replicas if replica.has_credit]
        if not pool:
            full = "no replica" if not load.replicas else f"none of {len(load.replicas)} replicas has credit"
            return Decision(None, f"stage {load.stage}: {full}")
        pools.append(pool)
    path, cost_s = _nearest(pools, rng) if links is None else _cheapest_path(pools, links, rng)
    return Decision(path, f"expected to finish in {cost_s:.3g} s at {now_s:.3f}: {' > '.join(path)}")


def _nearest(pools: Sequence[list[ReplicaLoad]], rng: Random) -> tuple[tuple[PeerId, ...], float]:
    """Without link costs the stages do not influence each other."""
    path: list[PeerId] = []
    total_s = 0.0
    for pool in pools:
        best_s = min(replica.completion_s for replica in pool)
        path.append(_one_of([replica.peer for replica in pool if replica.completion_s == best_s], rng))
        total_s += best_s
    return tuple(path), total_s


def _cheapest_path(pools: Sequence[list[ReplicaLoad]], links: Links, rng: Random) -> tuple[tuple[PeerId, ...], float]:
    """Dynamic programme from the first stage to the last: the best way to reach each replica."""
    reach: dict[PeerId, tuple[float, tuple[PeerId, ...]]] = {
        replica.peer: (replica.completion_s, (replica.peer,)) for replica in pools[0]
    }
    for pool in pools[1:]:
        following: dict[PeerId, tuple[float, tuple[PeerId, ...]]] = {}
        for replica in pool:
            arrivals = {peer: cost_s + links(peer, replica.peer) for peer, (cost_s, _) in reach.items()}
            nearest_s = min(arrivals.values())
            via = _one_of([peer for peer, cost_s in arrivals.items() if cost_s == nearest_s], rng)
            following[replica.peer] = (nearest_s + replica.completion_s, (*reach[via][1], replica.peer))
        reach = following
    best_s = min(cost_s for cost_s, _ in reach.values())
    end = _one_of([peer for peer, (cost_s, _) in reach.items() if cost_s == best_s], rng)
    return reach[end][1], best_s


def _one_of(peers: Sequence[PeerId], rng: Random) -> PeerId:
    return peers[0] if len(peers) == 1 else rng.choice(peers)
