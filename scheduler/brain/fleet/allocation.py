"""Allocates idle peers to jobs.

    idle peers ──▶ 1. a replica on its way to another stage of its job: reserved for that job
                   2. waiting jobs, one after the other: the peers that each can start with
                   3. running jobs that NEED one: a stage has fewer than `min_replicas` replicas that stay
                   4. running jobs that have fewer replicas than they started with
                   5. running jobs that would be faster with one more

Within a step the jobs of the highest priority come first, of equal ones the oldest. A waiting job also keeps the peers
that it would start with from waiting jobs of lower priority, which might otherwise take each peer as it comes. Nothing
is taken from a job at work.

A waiting job that could not start even with every idle peer does not reserve any against steps 3 and 4. Otherwise a
replica that wants to leave, or a stage that is down to its last replica, would wait for as long as the job does. But a
waiting job must not starve either, so the peers that it would start with are reserved for it

    against step 5, at once: a job that waits comes before a job that would only be faster;
    against step 4, once it has waited for PATIENCE_S: if peers come and go all the time, a large running job always has
        fewer than it started with, and takes every peer that the waiting job would have to collect.

Nothing is reserved for a job that all present peers, busy ones included, could not serve: it waits for machines that
are not running, maybe forever. Those that leave or are quarantined do not count as present. Never are more peers
reserved than the job needs to start. Price: a peer may be idle while an old job waits for peers that others have now.
A job that may begin with fewer islands (`Fewer`) keeps what it needs for as many as all present peers could serve. One
that could begin with another cut keeps nothing for that while it waits for its own.

A peer that the scheduler cannot dial gets no stage beside others, as it would hold up every step that they average
with it; `together` in placement.py has the exceptions. Not chosen: to ask stage servers whether they reach each other,
because they have no connections before they have a job.

A stalled job that is still looking for its checkpoint is about to start: the peers that it can start with are reserved
for it against everybody, for LOOKS_S_MAX.

Not chosen: preemption, because it costs the work since a checkpoint to save a wait; `max_replicas` as a bound on each
stage, because it would forbid the moves that let an unequal pool flow.

Decision: docs/decisions/090.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from scheduler.brain.settings import ON_ITS_WAY_S_MAX
from swarm.job.memory_split import ModelCosts, fit, needs
from swarm.job.placement import Candidate, at_home, homes_of, least, place, together
from swarm.limits import STAGES_MAX
from swarm.text import counted
from swarm.types import Decision, JobId, Memory, PeerId

PATIENCE_S = 600.0
LOOKS_S_MAX = 60.0
_FULL = "it has as many stage servers as its limits.max_replicas allows"
_UNREACHED = "the scheduler cannot dial it, so others may not reach it: swarm explain PEER"
_APART = "the scheduler cannot dial the stage server that serves it, so others may not reach that"
KEEPERS_SHOWN = 3
MORE_STAGES_MAX = 16  # that are tried beyond a job's present ones
UNFIT_MAX = 256  # peers that one job has expelled; of more, the oldest are forgotten


@dataclass(frozen=True, slots=True)
class Reservation:
    """A replica that was released for another stage of its job and has not arrived there."""

    job: JobId
    stage: int
    until_s: float


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that waits for peers to start with; `needs` is what a replica of each stage takes.

    Its stages are the stages of all its `islands`, one island after the other.
    """

    job: JobId
    needs: tuple[Memory, ...]
    min_replicas: int
    waited_s: float
    looks: bool = False  # it is stalled, and still looking for its checkpoint
    peers_max: int | None = None  # that the job takes; None: any number
    unfit: frozenset[PeerId] = frozenset()  # it has expelled them, or has no stage for them
    islands: int = 1
    fewer: tuple[PendingJob, ...] = ()  # the job with fewer islands, if it may begin so (`Fewer`); the most come first
    is_part: bool = False  # it is one of those

    def plan(self, peers: Sequence[Candidate]) -> Decision[dict[PeerId, int]]:
        """The stage of each peer, if the job started with these."""
        first, *others = self._groups(peers)
        decision = self._plan(first)
        if decision.plan is None:
            decision = next((other for other in map(self._plan, others) if other.plan is not None), decision)
        aside = sorted({candidate.peer for candidate in peers if candidate.unreached} - self.unfit)
        if decision.plan is not None or not aside:
            return decision
        get, them = ("gets", "it") if len(aside) == 1 else ("get", "them")
        told = f"{', '.join(aside)} {get} no stage beside others, as the scheduler cannot dial {them}"
        return Decision(None, f"{decision.reason}; {told}: swarm explain {aside[0]}")

    def with_cut(self, model: ModelCosts, split: tuple[int, ...], peers: int) -> PendingJob:
        """The job, which has no islands, with another cut for a number of peers."""
        most = None if self.peers_max is None else self.peers_max // len(self.needs) * len(split)
        return replace(self, needs=needs(model, split, max(peers, len(split))), peers_max=most)

    def _groups(self, peers: Sequence[Candidate]) -> list[Sequence[Candidate]]:
        """The peers that may serve it together, in turn; islands exchange, so theirs are one group."""
        return list(together(peers, len(self.needs) if self.min_replicas == 1 else 2))[: 1 if self._has_homes else None]

    def _plan(self, peers: Sequence[Candidate]) -> Decision[dict[PeerId, int]]:
        peers, homes = self._at_home(peers)
        if self.peers_max is not None and self.peers_max < len(peers):
            peers = self._within(peers, homes, self.peers_max)
        return place(peers, len(self.needs), self.min_replicas, self.needs, homes)

    def able(self, peers: Sequence[Candidate]) -> PendingJob | None:
        """The job with as many of its islands as these peers can serve; None if they can serve too few."""
        return next((job for job in (self, *self.fewer) if job.plan(peers).plan is not None), None)

    def least(self, peers: Sequence[Candidate]) -> frozenset[PeerId]:
        """The fewest peers that bring the job nearest to a start."""
        groups = self._groups(peers)
        peers = next((group for group in groups if self._plan(group).plan is not None), groups[0])
        peers, homes = self._at_home(peers)
        return least(peers, len(self.needs), self.min_replicas, self.needs, homes)

    @property
    def _has_homes(self) -> bool:
        """Whether each island is of one site; so is one that begins alone."""
        return self.islands > 1 or self.is_part

    def _at_home(self, peers: Sequence[Candidate]) -> tuple[list[Candidate], tuple[str, ...]]:
        """The peers that the job can use, and the sites of its stages."""
        able = [candidate for candidate in peers if candidate.peer not in self.unfit]
        stages = len(self.needs) // self.islands
        homes = homes_of(able, self.islands, self.min_replicas, self.needs[:stages]) if self._has_homes else ()
        return [at_home(candidate, homes, stages) for candidate in able], homes

    def _within(self, peers: Sequence[Candidate], homes: Sequence[str], room: int) -> list[Candidate]:
        """As many peers as there is room for, including the peers that the job needs to start."""
        needed = least(peers, len(self.needs), self.min_replicas, self.needs, homes)
        ordered = sorted(peers, key=lambda candidate: (candidate.peer not in needed, -candidate.speed, candidate.peer))
        return ordered[:room]


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A running job; `replicas` counts per stage the replicas that stay or are on their way, without leavers.

    `where_to_join(peer, stages, coming)` asks its brain for the best of the stages that fit a peer. The brain has not
    yet heard of the peers in `coming`, which were just sent to stages.
    """

    job: JobId
    needs: tuple[Memory, ...]
    min_replicas: int
    replicas: tuple[int, ...]
    at_start: int
    where_to_join: Callable[[Candidate, Collection[int], Mapping[PeerId, int]], Decision[int]]
    room: int | None = None  # peers that it may take beside those that it has and awaits; None: any number
    site: str = ""  # where all of its peers are, if they are at one site
    apart: bool = False  # the only peer that it has cannot be dialled


@dataclass(frozen=True, slots=True)
class JoinStage:
    """The idle peer is to become a replica of the stage."""

    peer: PeerId
    job: JobId
    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """The joins, and why no running job takes the other peers."""

    joins: tuple[JoinStage, ...]
    unused: Mapping[PeerId, Mapping[JobId, str]]


class Urgency(IntEnum):
    """How urgently a running job wants a peer, the most urgent first."""

    NEEDED = 3
    MISSED = 4
    HELPFUL = 5


class Reservations:
    """Replicas on their way from one stage of their job to another."""

    def __init__(self) -> None:
        self._reserved: dict[PeerId, Reservation] = {}

    def reserve(self, peer: PeerId, job: JobId, stage: int, now_s: float) -> None:
        """Reserve the peer for the stage that it was released for, as long as its job waits for it."""
        self._reserved[peer] = Reservation(job, stage, now_s + ON_ITS_WAY_S_MAX)

    def end(self, peer: PeerId) -> None:
        """The peer joins, or is gone."""
        self._reserved.pop(peer, None)

    def end_of(self, job: JobId) -> None:
        """The job no longer runs."""
        self._reserved = {peer: one for peer, one in self._reserved.items() if one.job != job}

    def now(self, now_s: float) -> Mapping[PeerId, Reservation]:
        """The reservations that have not expired."""
        self._reserved = {peer: one for peer, one in self._reserved.items() if now_s < one.until_s}
        return dict(self._reserved)


class UnfitPeers:
    """The peers that one job has expelled for false reports or failures: they are not given to it again.

    A peer that is started anew (another incarnation) gets another chance, and other jobs may use it meanwhile.
    """

    def __init__(self) -> None:
        self._reasons: dict[tuple[PeerId, int], str] = {}  # by peer and incarnation, oldest first

    def add(self, peer: PeerId, incarnation: int, reason: str) -> None:
        """The job has expelled this incarnation of the peer."""
        self._reasons[peer, incarnation] = reason
        while len(self._reasons) > UNFIT_MAX:
            del self._reasons[next(iter(self._reasons))]

    def why(self, peer: PeerId, incarnation: int) -> str:
        """Why the peer is not given to the job; empty if it may be."""
        reason = self._reasons.get((peer, incarnation))
        return f"the job expelled it ({reason}); start it anew" if reason is not None else ""

    def among(self, incarnations: Callable[[PeerId], int | None]) -> frozenset[PeerId]:
        """Those that are not given to the job, of the peers as they are now."""
        return frozenset(peer for peer, incarnation in self._reasons if incarnations(peer) == incarnation)


class StartTurn:
    """One turn of the waiting jobs, in their order: which can start, and which peers are reserved against which jobs.

        priority 5    offer, offer, ...    whoever starts takes its peers
                      descend              those that still wait keep theirs from all below
        priority 0    offer, offer, ...

    What is free is carried along, so a job is placed a few times, however many wait. Peers that become idle meanwhile
    are for the next turn, because earlier jobs of this turn were not offered them.

    `idle` and `present` as in `allocate`.
    """

    def __init__(
        self, idle: Sequence[Candidate], reserved: Mapping[PeerId, Reservation], present: Sequence[Candidate]
    ) -> None:
        self._present = present
        self._left = [candidate for candidate in idle if candidate.peer not in reserved]  # by jobs of higher priority
        self._above: list[JobId] = []  # the jobs of higher priority that keep some
        self._free = self._left  # of these, what no job that is about to start keeps
        self._keepers: list[JobId] = []

    def only(self, idle: Collection[Candidate]) -> None:
        """Keep only these peers as idle: the others were given away, or are gone."""
        self._left = [candidate for candidate in self._left if candidate in idle]
        self._free = [candidate for candidate in self._free if candidate in idle]

    def offer(self, job: PendingJob) -> Decision[dict[PeerId, int]]:
        """The stage of each peer, if the job can start now. One that looks for its checkpoint keeps what it can."""
        if job.looks:
            self._keep(job.job, _about_to_start(job, self._free))
            return Decision(None, "it looks for its checkpoint")
        decision = job.plan(self._free)
        if decision.plan is None and self._keepers:
            kept_for = ", ".join(self._keepers[:KEEPERS_SHOWN])
            return Decision(None, f"{decision.reason}; others are kept for {kept_for}")
        return decision

    def offer_fewer(self, job: PendingJob) -> tuple[int, Decision[dict[PeerId, int]]]:
        """With how many of its islands a job could start now that cannot with all, and each peer's stage then; or 0."""
        decided = ((part.islands, part.plan(self._free)) for part in job.fewer)
        return next(((many, one) for many, one in decided if one.plan is not None), (0, Decision(None, "")))

    @property
    def free(self) -> Sequence[Candidate]:
        """The peers that no job before keeps."""
        return self._free

    def may_serve(self, job: PendingJob) -> bool:
        """Whether all present peers, busy ones included, could serve the job: it waits for these, not for others."""
        return job.able(self._present) is not None

    def descend(self, waiting: Iterable[PendingJob]) -> Iterator[None]:
        """Go on to jobs of lower priority; `waiting` are the jobs of this one that still wait. Rests after each."""
        self._free, self._keepers = self._left, list(self._above)
        for job in waiting:
            if not self._free:
                break
            kept = _about_to_start(job, self._free)
            if not kept and (able := job.able(self._present)) is not None:
                kept = able.least(self._free)
            self._keep(job.job, kept)
            yield
        self._left, self._above = self._free, list(self._keepers)

    def _keep(self, job: JobId, kept: Collection[PeerId]) -> None:
        if kept:
            self._keepers.append(job)
            self._free = [candidate for candidate in self._free if candidate.peer not in kept]


def allocate(
    idle: Sequence[Candidate],
    present: Sequence[Candidate],
    waiting: Sequence[PendingJob],
    running: Sequence[ActiveJob],
    reserved: Mapping[PeerId, Reservation],
) -> Allocation:
    """The idle peers that join running jobs, after the waiting jobs have started as far as they could.

    `present` are all peers that are here, stay and may serve, idle or busy. Jobs are in their order: the
    highest priority first, among equals the oldest.
    """
    deciding = _Deciding(running, reserved)
    moving = [candidate for candidate in idle if candidate.peer in reserved]
    free = [candidate for candidate in idle if candidate.peer not in reserved]
    for candidate in moving:
        deciding.move(candidate, reserved[candidate.peer].job)
    kept = _kept(free, present, waiting)
    for urgency in Urgency:
        for candidate in free:
            deciding.offer(candidate, urgency, kept.get(candidate.peer))
    return Allocation(tuple(deciding.joins.values()), deciding.why_not)


@dataclass(frozen=True, slots=True)
class _PeerReservation:
    """The job that a peer is reserved for, and the urgency from which on no other job gets it."""

    job: JobId
    since: Urgency


class _Deciding:
    """The joins that are decided so far."""

    def __init__(self, running: Sequence[ActiveJob], reserved: Mapping[PeerId, Reservation]) -> None:
        self._left = {job.job: job.room for job in running if job.room is not None}
        self._running = running
        self._counts = {job.job: list(job.replicas) for job in running}
        for coming in reserved.values():
            if coming.job in self._counts:
                self._counts[coming.job][coming.stage] += 1
        self.joins: dict[PeerId, JoinStage] = {}
        self.why_not: dict[PeerId, dict[JobId, str]] = {}

    def move(self, one: Candidate, to: JobId) -> None:
        """A replica on its way joins its job, or waits."""
        for job in self._running:
            if job.job != to:
                self._refuse(one, job, f"it moves to another stage of {to}")
            elif self._joins(one, job, range(len(job.needs))):
                return

    def offer(self, one: Candidate, urgency: Urgency, kept: _PeerReservation | None) -> None:
        """The peer joins the first job of this urgency that takes it, unless it is reserved for another."""
        if one.peer in self.joins:
            return
        for job in self._running:
            counts = self._counts[job.job]
            stages = _stages_at(urgency, job, counts)
            if not stages:
                continue
            if kept is not None and kept.since <= urgency:
                self._refuse(one, job, f"it is kept for {kept.job}, which waits for peers")
            elif (one.unreached or job.apart) and not (one.site and one.site == job.site):
                self._refuse(one, job, _UNREACHED if one.unreached else _APART)
            elif urgency is not Urgency.NEEDED and self._left.get(job.job, 1) <= 0:
                self._refuse(one, job, _FULL)
            elif self._joins(one, job, stages):
                counts[self.joins[one.peer].stage] += 1
                if job.job in self._left:
                    self._left[job.job] -= 1
                return

    def _joins(self, one: Candidate, job: ActiveJob, stages: Collection[int]) -> bool:
        fitting = [stage for stage in stages if one.holds(job.needs[stage])]
        coming = {join.peer: join.stage for join in self.joins.values() if join.job == job.job}
        decision = job.where_to_join(one, fitting, coming)
        if decision.plan is None:
            self._refuse(one, job, decision.reason)
            return False
        self.joins[one.peer] = JoinStage(one.peer, job.job, decision.plan, decision.reason)
        self.why_not.pop(one.peer, None)
        return True

    def _refuse(self, one: Candidate, job: ActiveJob, reason: str) -> None:
        self.why_not.setdefault(one.peer, {})[job.job] = reason


def _stages_at(urgency: Urgency, job: ActiveJob, counts: Sequence[int]) -> Collection[int]:
    """The stages for which the job wants a peer with this urgency."""
    match urgency:
        case Urgency.NEEDED:
            return [stage for stage, count in enumerate(counts) if count < job.min_replicas]
        case Urgency.MISSED:
            return range(len(counts)) if sum(counts) < job.at_start else ()
        case Urgency.HELPFUL:
            return range(len(counts))


def _about_to_start(job: PendingJob, free: Sequence[Candidate]) -> frozenset[PeerId]:
    """The peers of a job that is not ready to start, but will be in a moment."""
    if not job.looks or job.waited_s >= LOOKS_S_MAX or job.plan(free).plan is None:
        return frozenset()
    return job.least(free)


def _kept(
    free: Sequence[Candidate], present: Sequence[Candidate], waiting: Sequence[PendingJob]
) -> Mapping[PeerId, _PeerReservation]:
    """The idle peers that are reserved for waiting jobs."""
    kept: dict[PeerId, _PeerReservation] = {}
    for job in waiting:
        left = [candidate for candidate in free if candidate.peer not in kept]
        if not left:
            break
        if about := _about_to_start(job, left):
            kept |= dict.fromkeys(about, _PeerReservation(job.job, Urgency.NEEDED))
        elif (able := job.able(present)) is not None:
            since = Urgency.MISSED if job.waited_s >= PATIENCE_S else Urgency.HELPFUL
            kept |= dict.fromkeys(able.least(left), _PeerReservation(job.job, since))
    return kept


@dataclass(frozen=True, slots=True)
class Fewer:
    """When a job begins with fewer islands than its file asks for, or cut into other stages.

        goes on, stage servers for all islands ──▶ begins with all
           │ for fewer, but islands.min; or for another cut (pipeline.recut)
           ▼
        waits for the others ──limits.no_progress_s──▶ begins with as many as it can; the others are lost at first

    That is as long as islands at work wait for another one. The wait begins when some could begin, not when the job
    stalled: machines that fail together come back one after the other. The first start of a job is for a person to see,
    and waits for all islands.

    A job that waits for all its islands could begin with `count` of them, and does so at `at_s`. One without islands
    (`of` is None) could begin with `count` stages, and waits so only if all present peers, busy ones included, are too
    few for its own: it does not change its cut to pass a job at work.
    """

    count: int
    of: int | None
    at_s: float

    def told(self, now_s: float) -> str:
        """What it waits for, for a person."""
        left_s = max(0, math.ceil(self.at_s - now_s))
        if self.of is None:
            return f"goes on with {counted(self.count, 'stage')} in {left_s} s if no more come"
        return f"goes on with {self.count} of {counted(self.of, 'island')} in {left_s} s if no more can begin"


def waits_on(before: Fewer | None, count: int, of: int | None, wait_s: float, now_s: float) -> Fewer | None:
    """How a job waits on that could begin with `count` now, after it waited as `before`; None: it has to."""
    if not count:
        return None
    return Fewer(count, of, before.at_s if before is not None else now_s + wait_s)


def cut_here(
    job: PendingJob, model: ModelCosts, here: Sequence[Candidate], is_allowed: Callable[[tuple[int, ...]], bool]
) -> tuple[tuple[int, ...], Decision[dict[PeerId, int]]]:
    """The cut with which a job without islands could begin with the peers that are here, and each peer's stage then.

    Fewer stages than now come first, the most of them, then more. () if the estimate of memory says that none that
    `is_allowed` would hold it, or only as many stages as now.
    """
    able = [candidate for candidate in here if candidate.peer not in job.unfit]
    now, most = len(job.needs), min(len(able) // job.min_replicas, model.layers, STAGES_MAX)
    for stages in (*range(min(most, now - 1), 0, -1), *range(now + 1, min(most, now + MORE_STAGES_MAX) + 1)):
        split = fit(model, [candidate.offer for candidate in able], stages, job.min_replicas)
        if split is None or not is_allowed(split):
            continue
        if (decision := job.with_cut(model, split, len(able)).plan(able)).plan is not None:
            return split, decision
    return (), Decision(None, "")
