"""The bound: about the least that a step takes, by a closed form that is cheap enough for thousands of placements.

    λ   microbatches/s: the least of what any stage computes, what links carry over any boundary, and what the
        scheduler routes
    F   fill and drain: a microbatch's way through all stages but the slowest, and there and back between them
    X   the longest round of averaging        K   the commit: two round trips to the scheduler
    L   late microbatches of a step: F + X + K hide behind what they take

    step  = M / λ + optimizer + F + X + K       where steps overlap, half of F + X + K is assumed hidden, L / λ at most
    least = M / λ + optimizer + max(0, F + X + K - L / λ)

A replica takes μ microbatches/s: what it computes, or what its line carries. Any replica sends to any of the next
stage, in proportion to what these take, as routes do that know no links. Where the peers of both stages are unequal,
routes lead from like to like (`Lanes`), so peers of one speed send to peers that stand as they do among theirs. All
peers of two sites share the link between them, over all boundaries and both ways of a tensor and its gradient. Within
a site no link is shared. F, X and K are counted as if nothing collided.

So a play is slower. Where many microbatches are late it may be faster than the step, since more than half hides, but
hardly faster than the least (tests/property/test_planning.py): where a slow stage has work while others fill, where
routes avoid a slow link, or by chance. Not chosen: a search for the least, because it ends where all hides behind the
slowest of many slow peers.

    stage 0  oregon 3, paris 1     stage 1  oregon 1, paris 1     over oregon → paris: 3/4 · 1/2 of all activations,
                                                                  and 1/2 · 1/4 of all gradients

Sources: `docs/benchmarks.md` P6 for the scheduler's hops/s, `scheduler/brain/commit/slices.py` for a round's seconds.
Not chosen: the best flow over all links, because no route follows it: plays of plans by it had a third of their bound.
The price: where links limit, a faster peer behind a slow link draws more over that, and lowers the bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.brain.routing.policies import UNEQUAL
from scheduler.planning.pool import PeerPool
from swarm.job.footprint import HOST_STEP_S, StageSizes, model_costs
from swarm.job.memory_split import needs
from swarm.job.partition import BOUNDARY_BYTES, microbatch_tokens, stage_flops
from swarm.job.spec import JobSpec
from swarm.types import Memory

HOPS_PER_S = 1700.0  # of the whole scheduler with 1,000 peers
GAP_S = 0.001  # between two computations of a stage server (docs/benchmarks.md, "Unequal replicas")
COMMIT_S = 0.001
RECOMPUTING = 4.0 / 3.0  # of the time of forward and backward, if forward is computed again for backward
HIDDEN = 0.5  # of F + X + K where steps overlap
SLICE_BYTES = {"none": 4.0, "bfloat16": 2.0, "int8": 1.02}  # of an element on its way between replicas

Array = npt.NDArray[np.float64]
Places = Sequence[Sequence[int]]  # the numbers of the peers of each stage


@dataclass(frozen=True, slots=True)
class Bound:
    """What a placement does at best. `limits` names what λ follows from; seconds are of one step.

    A search minimizes `step_s`; no play is far below `least_s`.
    """

    step_s: float
    microbatches_per_s: float
    fill_s: float
    round_s: float
    limits: str
    least_s: float


@dataclass(frozen=True, slots=True)
class _StageFigures:
    """What one stage adds to the bound."""

    count: int
    rate: float  # microbatches/s of all its replicas
    mean_s: float  # of a microbatch at a replica
    shares: Array  # of the rate, by end
    counts: Array  # by end
    unit_s: float  # of its round of averaging
    lanes: tuple[Array, Array, Array] | None  # where each speed begins and ends, slowest first; its shares by end


@dataclass(frozen=True, slots=True)
class _Boundary:
    """What the boundary between two stages adds to the bound."""

    travel_s: float  # of a tensor, mean over pairs of replicas
    sent: Array  # the part of all tensors that goes from end to end


class CutBound:
    """The bound of one cut of a resolved job for one pool. Peers and ends go by their numbers.

    `spec` is of one island. `rate[peer, stage]` and `holds[peer, stage]` are what a search may look at, `unit_bits` and
    `tied_bits` what a replica sends of its stage's own parameters, and of a tied embedding, to average them;
    `unit_parameters` counts both. `adds_up`: rounds may go by site.
    """

    def __init__(self, pool: PeerPool, spec: JobSpec) -> None:
        self.spec, self.split = spec, spec.split
        stages, peers = len(self.split), pool.peers
        tokens, again = microbatch_tokens(spec), RECOMPUTING if spec.model.recompute else 1.0
        flops = [again * flops for flops in stage_flops(spec, self.split)]
        self.flops = flops  # multiply-adds per token of each stage
        self.boundary_bits = 8.0 * tokens * spec.boundary_width * BOUNDARY_BYTES[spec.pipeline.compression]
        neighbours = np.array([(stage > 0) + (stage < stages - 1) for stage in range(stages)], dtype=float)
        speed = np.array([peer.speed for peer in peers])
        self._speed, (kinds, self._kind) = speed, np.unique(speed, return_inverse=True)
        self._kinds = len(kinds)
        self._line = np.array([min(peer.up_bits_per_s, peer.down_bits_per_s) for peer in peers])
        self.compute_s: Array = np.array(flops) * tokens / speed[:, None] + 2 * GAP_S
        self.rate: Array = 1.0 / np.maximum(self.compute_s, self.boundary_bits * neighbours / self._line[:, None])
        is_checked = spec.trust.recount or spec.trust.second_owner or spec.averaging.aggregate != "mean"
        self.adds_up = not (is_checked or pool.by_peer or any(not peer.site for peer in peers))
        self._offers, self._costs = [peer.offer for peer in peers], model_costs(spec)
        self.needs: tuple[Memory, ...] = ()
        count = len(peers)
        while True:  # with fewer replicas each needs more, and fewer peers hold it
            self.needs = needs(self._costs, self.split, count)
            held = {offer: [offer.holds(need) for need in self.needs] for offer in set(self._offers)}
            self.holds = np.array([held[offer] for offer in self._offers])
            if (able := int(self.holds.any(axis=1).sum())) in (0, count):
                break
            count = able
        self._set_links(pool)
        sizes = StageSizes(spec)
        parameters = sizes.parameters_of(self.split)
        on_host = spec.training.optimizer_on == "host" or any(peer.device == "cpu" for peer in peers)
        self.optimizer_s = HOST_STEP_S * max(parameters) if on_host else 0.0
        tied = 0
        if spec.tied and stages > 1:
            tied = sizes.parameters(0, first=True, last=False)
            parameters[0] -= tied
            parameters[-1] -= tied
        width = 8.0 * SLICE_BYTES[spec.averaging.compression] * (1.5 if spec.training.reproducible else 1.0)
        self.unit_parameters = (*parameters, tied)
        self.unit_bits = [width * count for count in parameters]
        self.tied_bits = width * tied

    def _set_links(self, pool: PeerPool) -> None:
        """Delays and rates between ends; within a site no link is shared."""
        first = {pool.end_of(peer): peer for peer in reversed(pool.peers)}
        number = {end: at for at, end in enumerate(first)}
        self.end = np.array([number[pool.end_of(peer)] for peer in pool.peers])
        links = [[pool.link(a, b) for b in first.values()] for a in first.values()]
        self._delay_s: Array = np.array([[link.delay_s for link in row] for row in links])
        self._bits: Array = np.array([[link.bits_per_s for link in row] for row in links])
        self._ends = list(first)
        self._shared_bits: Array = self._bits.copy()
        np.fill_diagonal(self._shared_bits, np.inf)
        self._travel_s: Array = self._delay_s + self.boundary_bits / self._bits
        weights = np.bincount(self.end, minlength=len(first)).astype(float)
        there_and_back = (self._delay_s + self._delay_s.T) / 2.0 * 2.0
        # The scheduler is taken to be where it is nearest to all.
        self.commit_s = 2.0 * float(((there_and_back * weights).sum(axis=1) / weights.sum()).min()) + COMMIT_S

    def is_held(self, places: Places) -> bool:
        """Whether each peer's memory holds its stage, with as many replicas as this placement has."""
        takes = needs(self._costs, self.split, sum(map(len, places)))
        kinds = {(self._offers[peer], stage) for stage, members in enumerate(places) for peer in members}
        return all(offer.holds(takes[stage]) for offer, stage in kinds)

    def figures(self, stage: int, members: Sequence[int]) -> _StageFigures:
        """What a stage with these members, at least one, adds."""
        peers = np.array(members)
        rates, ends = self.rate[peers, stage], self.end[peers]
        kinds = len(self._delay_s)
        by_end: Array = np.bincount(ends, rates, kinds).astype(np.float64)
        counts: Array = np.bincount(ends, minlength=kinds).astype(np.float64)
        rate = float(rates.sum())
        unit_s = self._round_s(self.unit_bits[stage], peers, counts)
        lanes, speeds = None, self._speed[peers]
        if float(speeds.max()) > UNEQUAL * float(speeds.min()):
            by_kind = np.bincount(self._kind[peers] * kinds + ends, rates, self._kinds * kinds).reshape(-1, kinds)
            widths = by_kind.sum(axis=1)
            by_kind, widths = by_kind[widths > 0] / rate, widths[widths > 0] / rate
            stops = widths.cumsum()
            lanes = stops - widths, stops, by_kind / widths[:, None]
        return _StageFigures(len(peers), rate, len(peers) / rate, by_end / rate, counts, unit_s, lanes)

    def least_with_s(self, stages: Sequence[_StageFigures], changed: Mapping[int, Sequence[int]]) -> float:
        """No step takes less where some of the stages get other members: what is cheap to say of a change."""
        rate = min(float(self.rate[members, stage].sum()) for stage, members in changed.items())
        round_s = max((stage.unit_s for number, stage in enumerate(stages) if number not in changed), default=0.0)
        return self._step_s(rate, round_s)

    def _step_s(self, rate: float, round_s: float, fill_s: float = 0.0) -> float:
        between_s = fill_s + round_s + self.commit_s
        hidden_s = min(HIDDEN * between_s, self.spec.overlap / rate)
        return self.spec.training.microbatches / rate + self.optimizer_s + between_s - hidden_s

    def _round_s(self, bits: float, peers: npt.NDArray[np.int64], counts: Array) -> float:
        """Seconds of a round of averaging: lines with the best shares, or links; and a round trip.

        A round ends when the slowest member has sent its parts, or when all bytes went through all lines. It goes by
        site where that is shorter: members of a site add up their parts, and one sum of each site goes to all others.
        """
        count = len(peers)
        if count == 1 or not bits:
            return 0.0
        line = self._line[peers]
        seconds = max(1.0 / float(line.min()), (2.0 * count - 2.0) / float(line.sum()))
        used = counts.nonzero()[0]
        pairs, here = (used[:, None], used), counts[used]
        trip_s = 2.0 * float(self._delay_s[pairs].max())
        if len(used) == 1:
            return bits * seconds + trip_s
        amount = 2.0 * (here[:, None] * here) / count / self._shared_bits[pairs]
        flat_s = bits * max(seconds, float(amount.max())) + trip_s
        if not self.adds_up or count == len(used):
            return flat_s
        seconds = max(
            float(((2.0 - 1.0 / counts[self.end[peers]]) / line).max()),
            2.0 / len(used) / float(self._shared_bits[pairs].min()),
            float(((here > 1) * 2.0 / here / self._bits[used, used]).max()),
        )
        return min(flat_s, bits * seconds + trip_s + 2.0 * float(((here > 1) * self._delay_s[used, used]).max()))

    def boundary(self, left: _StageFigures, right: _StageFigures) -> _Boundary:
        """What the boundary between two stages adds."""
        travel_s = float(left.counts @ self._travel_s @ right.counts) / (left.count * right.count)
        if left.lanes is None or right.lanes is None:
            return _Boundary(travel_s, left.shares[:, None] * right.shares)
        (starts, stops, here), (begins, ends, there) = left.lanes, right.lanes
        shared = np.minimum(stops[:, None], ends) - np.maximum(starts[:, None], begins)
        return _Boundary(travel_s, here.T @ np.maximum(0.0, shared) @ there)

    def _carried(self, boundaries: Sequence[_Boundary]) -> tuple[float, str]:
        """The microbatches/s that the busiest link carries, and its name."""
        there: Array = sum((boundary.sent for boundary in boundaries[1:]), boundaries[0].sent)
        with np.errstate(divide="ignore"):
            rates = self._shared_bits / self.boundary_bits / (there + there.T)
        a, b = divmod(int(rates.argmin()), len(self._ends))
        return float(rates[a, b]), f"the link from {self._ends[a]} to {self._ends[b]}"

    def tied_s(self, places: Places) -> float:
        """Seconds of the round of the tied embedding, which first and last stage share; 0 if there is none."""
        if not self.tied_bits:
            return 0.0
        peers = np.array([*places[0], *places[-1]])
        counts = np.bincount(self.end[peers], minlength=len(self._delay_s)).astype(float)
        return self._round_s(self.tied_bits, peers, counts)

    def joined(self, stages: Sequence[_StageFigures], boundaries: Sequence[_Boundary], tied_s: float) -> Bound:
        """The bound of a step from what its stages and boundaries add."""
        slowest = min(range(len(stages)), key=lambda number: stages[number].rate)
        rate, limits = stages[slowest].rate, f"stage {slowest}"
        if len(stages) > 1 and len(self._ends) > 1 and (carried := self._carried(boundaries))[0] < rate:
            rate, limits = carried
        if HOPS_PER_S / len(stages) < rate:
            rate, limits = HOPS_PER_S / len(stages), "the scheduler"
        means = [stage.mean_s for stage in stages]
        fill_s = sum(means) - max(means) + 2.0 * sum(boundary.travel_s for boundary in boundaries)
        round_s = max(tied_s, max(stage.unit_s for stage in stages))
        step_s = self._step_s(rate, round_s, fill_s)
        between_s = max(0.0, fill_s + round_s + self.commit_s - self.spec.overlap / rate)
        least_s = self.spec.training.microbatches / rate + self.optimizer_s + between_s
        return Bound(step_s, rate, fill_s, round_s, limits, least_s)

    def of(self, places: Places) -> Bound:
        """The bound of a placement: the members of each stage, at least one each."""
        stages = [self.figures(number, members) for number, members in enumerate(places)]
        boundaries = [self.boundary(left, right) for left, right in pairwise(stages)]
        return self.joined(stages, boundaries, self.tied_s(places))

    def sent_bytes(self, stage: int, replicas: int) -> float:
        """What a replica of a stage sends in a step: boundary tensors, and parts and means of its round."""
        neighbours = (stage > 0) + (stage < len(self.split) - 1)
        tensors = neighbours * self.spec.training.microbatches / replicas * self.boundary_bits
        return float(tensors + 2.0 * (replicas - 1) / replicas * self.unit_bits[stage]) / 8.0

    def least_step_s(self) -> float:
        """No placement has a smaller `step_s`: all peers compute all the time, and the fastest fill the pipeline."""
        fastest = self.compute_s.min(axis=0)
        weights = fastest / fastest.sum()  # whatever they are, no placement has a higher rate than this gives
        rate = min(float((weights / self.compute_s).max(axis=1).sum()), HOPS_PER_S / len(self.split))
        share = HIDDEN if self.spec.overlap else 1.0
        fill_s = share * float(fastest.sum() - fastest.max())
        return self.spec.training.microbatches / rate + fill_s
