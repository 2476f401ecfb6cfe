"""Which job gets which idle peer.

    idle peers ──▶ 1. a replica on its way to another stage of its job: to that job, nobody else
                   2. jobs that wait, the oldest first: whatever each can start with
                   3. jobs at work that NEED one: a stage with fewer than `min_replicas` that stay
                   4. jobs at work that have fewer replicas than they started with
                   5. jobs at work that would be faster with one more

A job that waits and cannot start with all that is idle keeps no peer from steps 3 and 4: a replica that wants to leave,
or a stage that is down to its last, would wait for as long as somebody asks for what is not there. But it must not
starve either, so peers that it would start with are kept for it

    from step 5, at once: who waits to begin comes before who would only be faster;
    from step 4, when it has waited for PATIENCE_S: where peers come and go all the time a large job at work always has
        fewer than it started with, and takes one after the other of those that a waiting job would have to collect.

Nothing is kept for a job that all peers that are here, the busy ones included, could not serve: it waits for machines
that nobody has started, maybe for ever. Nor is more kept than the least with which it would start. Price: a peer may be
idle, for as long as an old job waits for what others have now.

A stalled job that still looks for its checkpoint is about to start: what it can start with is kept for it from
everybody, for LOOKS_S_MAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from scheduler.brain.fleet.placement import Candidate, least, place
from scheduler.brain.settings import ON_ITS_WAY_S_MAX
from swarm.types import Decision, JobId, PeerId

PATIENCE_S = 600.0
LOOKS_S_MAX = 60.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A replica that was released for another stage of its job, and is not there yet."""

    job: JobId
    stage: int
    until_s: float


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job that wants peers to start with; `needs` are the bytes that a replica of each stage takes."""

    job: JobId
    needs: tuple[int, ...]
    min_replicas: int
    waited_s: float
    looks: bool = False  # it is stalled, and it is not known yet where it goes on

    def plan(self, peers: Sequence[Candidate]) -> Decision[dict[PeerId, int]]:
        """Who would serve which stage, if it began with these."""
        return place(peers, len(self.needs), self.min_replicas, self.needs)

    def least(self, peers: Sequence[Candidate]) -> frozenset[PeerId]:
        """Those of them with whom it would get nearest to a start, and no more than it needs for one."""
        return least(peers, len(self.needs), self.min_replicas, self.needs)


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """A job at work; `replicas` are those of each stage that stay or are on their way, without those that leave.

    `where_to_join(peer, stages, coming)` is what its brain says of a peer for which these stages would do, when those
    of `coming` were sent to stages since it last heard.
    """

    job: JobId
    needs: tuple[int, ...]
    min_replicas: int
    replicas: tuple[int, ...]
    at_start: int
    where_to_join: Callable[[Candidate, Collection[int], Mapping[PeerId, int]], Decision[int]]


@dataclass(frozen=True, slots=True)
class Join:
    """The idle peer is to become a replica of the stage."""

    peer: PeerId
    job: JobId
    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """Who joins, and why no job at work takes the others."""

    joins: tuple[Join, ...]
    unused: Mapping[PeerId, Mapping[JobId, str]]


class Urgency(IntEnum):
    """How badly a job at work wants a peer, the worst first."""

    NEEDED = 3
    MISSED = 4
    HELPFUL = 5


class Reservations:
    """Replicas on their way from one stage of their job to another."""

    def __init__(self) -> None:
        self._reserved: dict[PeerId, Reservation] = {}

    def reserve(self, peer: PeerId, job: JobId, stage: int, now_s: float) -> None:
        """The peer was released for that stage; it is waited for as long as its job does."""
        self._reserved[peer] = Reservation(job, stage, now_s + ON_ITS_WAY_S_MAX)

    def end(self, peer: PeerId) -> None:
        """The peer joins, or is gone."""
        self._reserved.pop(peer, None)

    def end_of(self, job: JobId) -> None:
        """The job is at work no longer."""
        self._reserved = {peer: one for peer, one in self._reserved.items() if one.job != job}

    def now(self, now_s: float) -> Mapping[PeerId, Reservation]:
        """Those that are not over."""
        self._reserved = {peer: one for peer, one in self._reserved.items() if now_s < one.until_s}
        return dict(self._reserved)


def start_with(
    job: PendingJob, older: Iterable[PendingJob], idle: Sequence[Candidate], reserved: Mapping[PeerId, Reservation]
) -> Decision[dict[PeerId, int]]:
    """Who serves which stage of the job, if it can start now; `older` are the jobs that wait before it."""
    free = [one for one in idle if one.peer not in reserved]
    for other in older:
        taken = _about_to_start(other, free)
        free = [one for one in free if one.peer not in taken]
    return job.plan(free)


def allocate(
    idle: Sequence[Candidate],
    present: Sequence[Candidate],
    waiting: Sequence[PendingJob],
    running: Sequence[ActiveJob],
    reserved: Mapping[PeerId, Reservation],
) -> Allocation:
    """Which idle peers join which jobs at work, once those that wait have started with what they could.

    `present` are all peers that are here and stay, idle and busy. Jobs are in order of age, the oldest first.
    """
    deciding = _Deciding(running, reserved)
    moving = [one for one in idle if one.peer in reserved]
    free = [one for one in idle if one.peer not in reserved]
    for one in moving:
        deciding.move(one, reserved[one.peer].job)
    kept = _kept(free, present, waiting)
    for urgency in Urgency:
        for one in free:
            deciding.offer(one, urgency, kept.get(one.peer))
    return Allocation(tuple(deciding.joins.values()), deciding.why_not)


# Below ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """For whom a peer is kept, and from what urgency on nobody else gets it."""

    job: JobId
    since: Urgency


class _Deciding:
    """Who joins, as far as that is decided."""

    def __init__(self, running: Sequence[ActiveJob], reserved: Mapping[PeerId, Reservation]) -> None:
        self._running = running
        self._counts = {job.job: list(job.replicas) for job in running}
        for coming in reserved.values():
            if coming.job in self._counts:
                self._counts[coming.job][coming.stage] += 1
        self.joins: dict[PeerId, Join] = {}
        self.why_not: dict[PeerId, dict[JobId, str]] = {}

    def move(self, one: Candidate, to: JobId) -> None:
        """A replica on its way joins its job, or waits."""
        for job in self._running:
            if job.job != to:
                self._refuse(one, job, f"it moves to another stage of {to}")
            elif self._joins(one, job, range(len(job.needs))):
                return

    def offer(self, one: Candidate, urgency: Urgency, kept: _Kept | None) -> None:
        """The peer joins the oldest job that wants one so badly and takes it, if it is not kept for another."""
        if one.peer in self.joins:
            return
        for job in self._running:
            counts = self._counts[job.job]
            stages = _stages_at(urgency, job, counts)
            if not stages:
                continue
            if kept is not None and kept.since <= urgency:
                self._refuse(one, job, f"it is kept for {kept.job}, which waits for peers")
            elif self._joins(one, job, stages):
                counts[self.joins[one.peer].stage] += 1
                return

    def _joins(self, one: Candidate, job: ActiveJob, stages: Collection[int]) -> bool:
        fitting = [stage for stage in stages if one.holds(job.needs[stage])]
        coming = {join.peer: join.stage for join in self.joins.values() if join.job == job.job}
        decision = job.where_to_join(one, fitting, coming)
        if decision.plan is None:
            self._refuse(one, job, decision.reason)
            return False
        self.joins[one.peer] = Join(one.peer, job.job, decision.plan, decision.reason)
        self.why_not.pop(one.peer, None)
        return True

    def _refuse(self, one: Candidate, job: ActiveJob, reason: str) -> None:
        self.why_not.setdefault(one.peer, {})[job.job] = reason


def _stages_at(urgency: Urgency, job: ActiveJob, counts: Sequence[int]) -> Collection[int]:
    """The stages for which the job wants a peer so badly."""
    match urgency:
        case Urgency.NEEDED:
            return [stage for stage, count in enumerate(counts) if count < job.min_replicas]
        case Urgency.MISSED:
            return range(len(counts)) if sum(counts) < job.at_start else ()
        case Urgency.HELPFUL:
            return range(len(counts))


def _about_to_start(job: PendingJob, free: Sequence[Candidate]) -> frozenset[PeerId]:
    """Whom a job takes that is not ready, and will be in a moment."""
    if not job.looks or job.waited_s >= LOOKS_S_MAX or job.plan(free).plan is None:
        return frozenset()
    return job.least(free)


def _kept(
    free: Sequence[Candidate], present: Sequence[Candidate], waiting: Sequence[PendingJob]
) -> Mapping[PeerId, _Kept]:
    """The idle peers that are kept for jobs that wait."""
    kept: dict[PeerId, _Kept] = {}
    for job in waiting:
        left = [one for one in free if one.peer not in kept]
        if about := _about_to_start(job, left):
            kept |= dict.fromkeys(about, _Kept(job.job, Urgency.NEEDED))
        elif job.plan(present).plan is not None:
            since = Urgency.MISSED if job.waited_s >= PATIENCE_S else Urgency.HELPFUL
            kept |= dict.fromkeys(job.least(left), _Kept(job.job, since))
    return kept
