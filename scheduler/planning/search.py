"""The search: which number of stages, and which peer where, by the bound.

    for each number of stages   the scheduler's own rules cut the model (resolve.choose)
        starts                  as the scheduler would place; in the order of the file; fastest to the neediest, and
                                without slow lines; sites together, near ones side by side; sites spread; at random
        climb                   a peer to another stage, two peers swapped, one out or in: taken if the cost falls;
                                every second time to the slowest stage
    the best numbers of stages  climb on, from their best and from random starts

Effort is counted in evaluations of the bound and chance is seeded, so equal facts give the same answer however fast
the machine is. Differences of less than TIE are none; then fewer stages win.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from random import Random
from statistics import median

import numpy as np

from scheduler.brain.fleet.allocation import PendingJob
from scheduler.planning.bound import Array, Bound, CutBound
from scheduler.planning.pool import PeerPool, candidates
from swarm.errors import InvalidConfig, OutOfMemory, SwarmError
from swarm.job.overlap import FleetSpeed
from swarm.job.resolve import END_OF_TEXT, Basis, choose
from swarm.job.spec import JobSpec
from swarm.limits import HOPS_MAX
from swarm.text import counted
from swarm.types import JobId, PeerId

EFFORT = 20_000  # evaluations
STAGES_TRIED_MAX = 64
TIE = 1e-3
FREE = 1e-9  # added to the price of an hour: of placements that cost nothing the fastest is best
FALLS = 1e-6  # the least part of its cost by which a change is better
RANDOM_STARTS = 7
GAPS, GAP = 4, 8.0  # between speeds of lines: so many of the widest, so many times, have a start above them
REST = 256  # evaluations between two rests
STALE = 3  # times the number of changes that there are: so many in a row that are no better end a climb
AGAIN = 12  # climbs from random starts that find nothing better end the search of a cut
BEGINNING = 0.3  # of the effort at most: for starts
ROUNDS = ((0.5, 12), (0.8, 6), (1.0, 3))  # the effort until the end of each, and how many of the best cuts climb in it
BYTE_TOKENS = 257


@dataclass(frozen=True, slots=True)
class Placement:
    """A cut of the job, the names of each stage's peers, and their bound; `cost` is what the search makes small."""

    spec: JobSpec
    places: tuple[tuple[str, ...], ...]
    bound: Bound
    cost: float


@dataclass(slots=True)
class _Climber:
    """One cut, its best placement so far, where it climbs now, and the evaluations that were spent on it."""

    facts: CutBound
    prices: Array | None
    min_replicas: int
    peers_max: int
    rng: Random
    best: list[list[int]] = field(default_factory=list)
    cost: float = math.inf
    spent: int = 0
    state: _State | None = None
    stale: int = 0  # changes in a row that were no better
    failed: int = 0  # climbs in a row that ended no lower
    is_done: bool = False
    able: list[list[int]] = field(init=False)  # the stages that each peer holds
    share: float = field(init=False)  # of what all peers compute, each stage's if all were used to the full

    def __post_init__(self) -> None:
        self.able = [holds.nonzero()[0].tolist() for holds in self.facts.holds]
        self.share = sum(1.0 / sum(1.0 / each for each in rates) for rates in self.facts.rate.tolist())
        self.share *= min(1.0, self.peers_max / len(self.able))

    def take(self, state: _State) -> bool:
        """Keep the placement if it is the best so far and memory holds it; gives whether it is kept."""
        if state.cost >= self.cost * (1.0 - FALLS) or not self.facts.is_held(state.places):
            return False
        self.best, self.cost = [sorted(members) for members in state.places], state.cost
        return True


def basis_of(pool: PeerPool, spec: JobSpec) -> Basis:
    """What a scheduler of this pool would resolve the job with; InvalidConfig if the job's vocabulary is not known."""
    offers = [peer.offer for peer in pool.peers]
    vocabulary, end_of_text = spec.model.config.get("vocab_size"), -1
    if not isinstance(vocabulary, int):
        if spec.model.id or spec.model.tokenizer not in ("", "byte"):
            raise InvalidConfig(
                f"the vocabulary of {spec.model.tokenizer or spec.model.id} is not known without its files",
                hint="add --set model.config.vocab_size=N",
            )
        vocabulary, end_of_text = BYTE_TOKENS, END_OF_TEXT
    ends = {pool.end_of(peer): peer for peer in pool.peers}.values()
    links = [pool.link(a, b) for a in ends for b in ends]
    lines = median(min(peer.up_bits_per_s, peer.down_bits_per_s) for peer in pool.peers)
    carried = min(lines, median(link.bits_per_s for link in links))
    receipt_s = 2.0 * median(link.delay_s for link in links)
    between = [pool.link(a, b).bits_per_s for a in ends for b in ends if a.site != b.site]
    apart = min(lines, median(between)) if between else 0.0
    # Medians, as of a fleet.
    speed = FleetSpeed(median(peer.speed for peer in pool.peers), carried / 8.0, receipt_s, apart / 8.0)
    lasting = candidates(pool.peers)
    return Basis(vocabulary, end_of_text, idle=offers, present=offers, lasting=lasting, speed=speed)


class Search:
    """Finds placements of one job in one pool.

    `by_price`: what is made small is the price of a token, not its time. `refused` says why a number of stages cannot
    be; 0 stands for the job's own cut. `spent` of `effort` evaluations are done. `is_done`: it came to its end.
    """

    def __init__(
        self, pool: PeerPool, spec: JobSpec, *, seed: int = 0, effort: int = EFFORT, by_price: bool = False
    ) -> None:
        self.pool, self.spec, self.seed, self.effort = pool, spec, seed, effort
        self.refused: dict[int, SwarmError] = {}
        self.is_done, self.by_price = False, by_price
        self._basis = basis_of(pool, spec)
        self._prices: Array | None = None
        if by_price:
            unpriced = [peer.name for peer in pool.peers if peer.price_per_hour is None]
            if unpriced:
                raise InvalidConfig(f"peer {unpriced[0]} has no price", hint="write its price_per_hour in the pool")
            self._prices = np.array([peer.price_per_hour or 0.0 for peer in pool.peers])
        # By stages, sequences of a microbatch, and whether forward is computed again for backward.
        self._climbers: dict[tuple[int, int, bool], _Climber] = {}

    @property
    def spent(self) -> int:
        return sum(climber.spent for climber in self._climbers.values())

    @property
    def found(self) -> list[Placement]:
        """The best placement of each number of stages, the best first; of equal ones that with fewer stages."""
        left: dict[int, _Climber] = {}
        for (stages, *_), climber in sorted(self._climbers.items()):
            if stages not in left or climber.cost < left[stages].cost * (1.0 - TIE):
                left[stages] = climber
        ordered = []
        while left:
            least = min(climber.cost for climber in left.values())
            first = next(stages for stages, climber in left.items() if climber.cost <= least * (1.0 + TIE))
            climber = left.pop(first)
            names = tuple(tuple(sorted(self.pool.peers[peer].name for peer in stage)) for stage in climber.best)
            ordered.append(Placement(climber.facts.spec, names, climber.facts.of(climber.best), climber.cost))
        return ordered

    def run(self) -> Iterator[None]:
        """Search; rests now and then. It may be left at any rest, or by an exception between two."""
        pipeline, least = self.spec.pipeline, self.spec.limits.min_replicas
        most = min(self.spec.stages_max, len(self.pool.peers) // least, STAGES_TRIED_MAX)
        is_open = pipeline.split == pipeline.stages == "auto"
        for stages in range(1, most + 1) if is_open else [0]:
            self._begin(stages, self.spec)
            yield
        if not self._climbers:
            choose(self.spec, self._basis)  # raises what the scheduler would refuse the job with
            raise self.refused[max(self.refused)] if self.refused else _too_few(len(self.pool.peers), 1, least)
        for climber in self._best(len(self._climbers)):
            if self.spent > BEGINNING * self.effort:
                break
            for other in lighter_ways(self.spec, climber.facts.spec):
                self._begin(len(climber.best) if is_open else 0, other)
                yield
        for share, count in ROUNDS:
            chosen = self._best(count)
            for number, climber in enumerate(chosen):
                until = climber.spent + int(max(0.0, share * self.effort - self.spent) / (len(chosen) - number))
                while climber.spent < until and not climber.is_done:
                    _climb_on(self.pool, climber, min(until, climber.spent + REST))
                    yield
        self.is_done = True

    def _best(self, count: int) -> list[_Climber]:
        keys = sorted(self._climbers, key=lambda key: (self._climbers[key].cost, key))
        return [self._climbers[key] for key in keys[:count]]

    def _begin(self, stages: int, spec: JobSpec) -> None:
        """Cut the job into so many stages (0: as it says) by the scheduler's rules, and evaluate the starts."""
        try:
            resolved, _ = choose(spec.having("pipeline", stages=stages) if stages else spec, self._basis)
        except OutOfMemory as error:
            self.refused[stages] = error
            return
        if (hops := resolved.training.microbatches * len(resolved.split)) > HOPS_MAX:
            hint = "raise training.microbatch_sequences, or lower pipeline.stages"
            self.refused[stages] = InvalidConfig(f"a step has {hops} hops, of {HOPS_MAX} at most", hint=hint)
            return
        facts = CutBound(self.pool, resolved)
        if self._prices is None and facts.least_step_s() > min(
            (climber.cost for climber in self._climbers.values()), default=math.inf
        ):
            return
        size = resolved.training.global_batch_sequences // resolved.training.microbatches
        limits, rng = spec.limits, Random(f"{self.seed}.{len(resolved.split)}.{size}")
        peers_max = limits.max_replicas * len(resolved.split) or len(self.pool.peers)
        climber = _Climber(facts, self._prices, limits.min_replicas, peers_max, rng)
        for start in _starts(self.pool, climber):
            climber.take(_State(climber, start))
        if climber.best:
            self._climbers[len(resolved.split), size, bool(resolved.model.recompute)] = climber
        elif not any(stages == key for key, *_ in self._climbers):
            self.refused[stages] = _too_large(self.pool, facts, climber.min_replicas)


def lighter_ways(spec: JobSpec, resolved: JobSpec) -> Iterator[JobSpec]:
    """The job with smaller microbatches, and with recomputing, where it leaves these open: more peers may hold it."""
    batch = spec.training.global_batch_sequences
    sizes = [batch // resolved.training.microbatches]
    while spec.training.microbatch_sequences == "auto" and sizes[-1] > 1:
        sizes.append(max(less for less in range(1, sizes[-1] // 2 + 1) if batch % less == 0))
    for recompute, size in product((False, True), sizes):
        if recompute == resolved.model.recompute and size == sizes[0]:
            continue
        if spec.model.recompute in ("auto", recompute):
            yield spec.having("training", microbatch_sequences=size).having("model", recompute=recompute)


def placed_as_it_starts(pool: PeerPool, facts: CutBound) -> list[list[int]] | None:
    """The peers of each stage as a scheduler places them when the job starts with this cut; None if it cannot."""
    limits, stages = facts.spec.limits, len(facts.split)
    most = limits.max_replicas * stages or None
    job = PendingJob(JobId("plan"), facts.needs, limits.min_replicas, 0.0, peers_max=most)
    if (found := job.plan(candidates(pool.peers)).plan) is None:
        return None
    stage_of = [found.get(PeerId(peer.name)) for peer in pool.peers]
    return [[peer for peer, at in enumerate(stage_of) if at == stage] for stage in range(stages)]


def _too_few(peers: int, stages: int, min_replicas: int) -> InvalidConfig:
    return InvalidConfig(
        f"{counted(stages, 'stage')} of {counted(min_replicas, 'replica')} {'needs' if stages == 1 else 'need'} "
        f"{counted(stages * min_replicas, 'peer')}, there are {peers}",
        hint="lower pipeline.stages or limits.min_replicas, or add peers to the pool",
    )


def _too_large(pool: PeerPool, facts: CutBound, min_replicas: int) -> SwarmError:
    """Why a cut has no placement at all."""
    able = facts.holds.sum(axis=0)
    stage = min(range(len(able)), key=lambda number: (int(able[number]), -facts.needs[number].total_bytes))
    if able[stage] >= min_replicas:
        return _too_few(len(pool.peers), len(able), min_replicas)
    largest = max(peer.offer for peer in pool.peers)
    return OutOfMemory(
        f"stage {stage} of {len(able)} needs {facts.needs[stage].beside(largest)}, the largest peer offers {largest}",
        hint="allow more stages, or add peers with more memory",
    )


# Starts ---------------------------------------------------------------------------------------------------------------


def _starts(pool: PeerPool, climber: _Climber) -> Iterator[list[list[int]]]:
    """Placements to begin with, each with enough replicas of every stage."""
    peers = pool.peers
    if (today := placed_as_it_starts(pool, climber.facts)) is None:
        return
    yield today
    file_order = list(range(len(peers)))
    fastest = sorted(file_order, key=lambda peer: (-peers[peer].speed, peer))
    chain = {site: number for number, site in enumerate(_chain(pool))}
    near = sorted(file_order, key=lambda peer: (chain[peers[peer].site], peer))
    lines = [min(peer.up_bits_per_s, peer.down_bits_per_s) for peer in peers]
    quick = [[peer for peer in fastest if lines[peer] >= least] for least in _least_lines(lines)]
    orders = [(file_order, True), (fastest, False), *((some, False) for some in quick), (near, True), (near, False)]
    for number in range(RANDOM_STARTS):
        orders.append((_shuffled(pool, climber.rng, by_site=number % 2 == 0), number % 2 == 0))
    for order, in_rows in orders:
        if (dealt := _dealt(climber, order, in_rows=in_rows)) is not None:
            yield dealt


def _least_lines(lines: Sequence[float]) -> list[float]:
    """The slowest line of each start without slow lines: the median, and the line above each of the widest gaps.

    No climb leads there: while others are as slow, to leave a slow machine out gains nothing.
    """
    gaps = sorted((low / high, high) for low, high in pairwise(sorted(set(lines))) if high >= GAP * low)
    return list(dict.fromkeys((median(lines), *(line for _, line in gaps[:GAPS]))))


def _shuffled(pool: PeerPool, rng: Random, *, by_site: bool) -> list[int]:
    """All peers in a random order, or with the peers of each site together."""
    order = list(range(len(pool.peers)))
    rng.shuffle(order)
    if by_site:
        sites = sorted({peer.site for peer in pool.peers})
        rng.shuffle(sites)
        order.sort(key=lambda peer: sites.index(pool.peers[peer].site))
    return order


def _chain(pool: PeerPool) -> list[str]:
    """The sites, each behind the nearest one before it, from the first of the file on."""
    some = {peer.site: peer for peer in reversed(pool.peers)}
    left = sorted(some)
    chain = [pool.peers[0].site]
    left.remove(chain[0])
    while left:
        here = some[chain[-1]]
        chain.append(max(left, key=lambda site: (pool.link(here, some[site]).bits_per_s,
                                                 -pool.link(here, some[site]).delay_s)))  # fmt: skip
        left.remove(chain[-1])
    return chain


def _dealt(climber: _Climber, order: Sequence[int], *, in_rows: bool) -> list[list[int]] | None:
    """The peers dealt in this order: in rows, one stage after the other, each to its share of what all compute; else
    each to the stage that computes least so far. None if a stage gets too few. Nobody is dealt beyond `peers_max`."""
    stages = len(climber.facts.split)
    places: list[list[int]] = [[] for _ in range(stages)]
    have, at = [0.0] * stages, 0
    for peer in [peer for peer in order if climber.able[peer]][: climber.peers_max]:
        while in_rows and at < stages - 1 and have[at] >= climber.share and len(places[at]) >= climber.min_replicas:
            at += 1
        able = climber.able[peer]
        stage = at if in_rows and at in able else min(able, key=have.__getitem__)
        places[stage].append(peer)
        have[stage] += float(climber.facts.rate[peer, stage])
    return places if all(len(members) >= climber.min_replicas for members in places) else None


# Climbing -------------------------------------------------------------------------------------------------------------


class _State:
    """A placement with what its stages and boundaries add, so that a change sums only what it touches anew."""

    def __init__(self, climber: _Climber, places: Sequence[Sequence[int]]) -> None:
        facts = climber.facts
        self._climber = climber
        self.places = [list(members) for members in places]
        used = {peer for members in places for peer in members}
        self.out = [peer for peer in range(len(facts.rate)) if peer not in used and climber.able[peer]]
        self._stages = [facts.figures(number, members) for number, members in enumerate(places)]
        self._boundaries = [facts.boundary(left, right) for left, right in pairwise(self._stages)]
        self._tied_s = facts.tied_s(places)
        self.cost = self._cost(self.places, facts.joined(self._stages, self._boundaries, self._tied_s).step_s)
        climber.spent += 1

    def _cost(self, places: Sequence[Sequence[int]], step_s: float) -> float:
        prices = self._climber.prices
        if prices is None:
            return step_s
        return step_s * (FREE + sum(float(prices[peer]) for members in places for peer in members))

    def tried(self, changed: dict[int, list[int]], out: list[int]) -> bool:
        """Change the members of some stages if that lowers the cost; gives whether it did."""
        facts = self._climber.facts
        places = [changed.get(number, members) for number, members in enumerate(self.places)]
        self._climber.spent += 1
        if self._cost(places, facts.least_with_s(self._stages, changed)) >= self.cost * (1.0 - FALLS):
            return False
        stages, boundaries, tied_s = list(self._stages), list(self._boundaries), self._tied_s
        for number, members in changed.items():
            stages[number] = facts.figures(number, members)
        for left in {
            boundary for number in changed for boundary in (number - 1, number) if 0 <= boundary < len(boundaries)
        }:
            boundaries[left] = facts.boundary(stages[left], stages[left + 1])
        if 0 in changed or len(stages) - 1 in changed:
            tied_s = facts.tied_s(places)
        cost = self._cost(places, facts.joined(stages, boundaries, tied_s).step_s)
        if cost >= self.cost * (1.0 - FALLS):
            return False
        self.places, self.out, self.cost = places, out, cost
        self._stages, self._boundaries, self._tied_s = stages, boundaries, tied_s
        return True

    def changed(self, rng: Random) -> tuple[dict[int, list[int]], list[int]] | None:
        """A random change, as `tried` takes it; None if what was drawn cannot be."""
        holds, least, stages = self._climber.facts.holds, self._climber.min_replicas, len(self.places)
        a, b, kind = rng.randrange(stages), rng.randrange(stages), rng.random()
        if rng.random() < 0.5:
            b = min(range(stages), key=lambda stage: self._stages[stage].rate)
        peer = rng.choice(self.places[a])
        rest = [other for other in self.places[a] if other != peer]
        if kind < 0.1 and self.out:
            into = rng.choice(self.out)
            left = [other for other in self.out if other != into]
            has_room = sum(map(len, self.places)) < self._climber.peers_max
            if kind < 0.05 and has_room and holds[into, b]:
                return {b: [*self.places[b], into]}, left
            if holds[into, a]:
                return {a: [*rest, into]}, [*left, peer]
        elif kind < 0.2:
            if len(rest) >= least:
                return {a: rest}, [*self.out, peer]
        elif a == b:
            return None
        elif kind < 0.6:
            if len(rest) >= least and holds[peer, b]:
                return {a: rest, b: [*self.places[b], peer]}, self.out
        else:
            two = rng.choice(self.places[b])
            if holds[peer, b] and holds[two, a]:
                others = [other for other in self.places[b] if other != two]
                return {a: [*rest, two], b: [*others, peer]}, self.out
        return None


def _climb_on(pool: PeerPool, climber: _Climber, until: int) -> None:
    """Climb from where the last climb stopped; from the top of a hill go on with a random start."""
    rng = climber.rng
    state = climber.state = climber.state or _State(climber, climber.best)
    peers, stages = len(pool.peers), len(state.places)
    patience = STALE * (peers * stages + peers * peers // 2)
    while climber.spent < until and not climber.is_done:
        drawn = state.changed(rng)
        climber.stale = 0 if drawn is not None and state.tried(*drawn) else climber.stale + 1
        if climber.stale < patience:
            continue
        climber.stale = 0
        climber.failed = 0 if climber.take(state) else climber.failed + 1
        in_rows = climber.failed % 2 == 0
        order = _shuffled(pool, rng, by_site=in_rows)[: rng.randint(climber.min_replicas * stages, peers)]
        start = _dealt(climber, order, in_rows=in_rows)
        state = climber.state = _State(climber, start or climber.best)
        climber.is_done = climber.failed >= AGAIN
    climber.take(state)
