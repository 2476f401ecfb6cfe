"""Feeds the page: makes each visitor's look on the scheduler's loop when the visitor's stream asks for it.

     stream ──look──▶ Feed ──▶ visitor ────▶ Overview, as `swarm ls`, `explain` and `peers` ──▶ snapshot.py
     stream ◀──────── the newest Look, which those who see the same share

Nothing is queued: a slow stream asks less often, and a stream that does not ask costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import isfinite, nan
from typing import TypeAlias

from scheduler.api.views import Overview
from scheduler.brain.fleet.membership import Peer
from scheduler.brain.members.persons import Person
from scheduler.jobs.history import StepMade, evaluations, thinned
from scheduler.jobs.job import SPEED_STEPS, Job
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.job_log import LogLine
from scheduler.storage.job_record import JobRecord
from scheduler.web.snapshot import (
    JOBS_MAX,
    PEERS_MAX,
    Json,
    job_values,
    jobs_values,
    news_values,
    peers_values,
    reroutes_values,
)
from swarm.errors import DatabaseUnavailable, NotFound
from swarm.pki.names import Role
from swarm.types import NO_JOB, JobState, PeerId
from swarm.wire import jobs_pb2 as pb

LOOK_S_MIN = 0.45  # a look is shared for so long by visitors that see the same
LOOKS_MAX = 32  # that are kept: of one person at one job
JOBS_READ_MAX = 32  # whose curves are kept
READ_S_MAX = 2.0
AGAIN_S = 5.0  # a curve that nobody looked at for so long has a gap

# Who shows this certificate (DER), or None; NotAdmitted, RoleForbids and the like.
Entrance: TypeAlias = Callable[[bytes | None], Person]


@dataclass(frozen=True, slots=True)
class Look:
    """The content of the page for a visitor at a moment; `clock_s`: that moment on the job's timeline."""

    at_s: float
    now_unix_s: float
    clock_s: float
    state: Json


POINTS_MAX = 240

Curve = dict[int, float]  # by steps committed, in order


def every(steps_done: int) -> int:
    """One of how many steps to read for a curve of at most POINTS_MAX points."""
    return max(1, -(-steps_done // POINTS_MAX))


@dataclass(slots=True)
class Curves:
    """Losses in nats and speeds in tokens per second."""

    loss: Curve = field(default_factory=dict)
    validation: Curve = field(default_factory=dict)
    speed: Curve = field(default_factory=dict)

    @classmethod
    def read(cls, steps: Sequence[StepMade], validation: Curve) -> Curves:
        """The curves of the past, from rows that the database picked; speeds are smoothed as for a job at work."""
        found = cls()
        for made in steps:
            _add(found.loss, made.step, made.loss)
        smooth = nan
        for before, made in pairwise(steps):
            took_s = made.committed_unix_s - before.committed_unix_s if before.committed_unix_s else 0.0
            if took_s > 0.0:
                speed = made.tokens * (made.step - before.step) / took_s
                smooth = smooth + (speed - smooth) / SPEED_STEPS if isfinite(smooth) else speed
                _add(found.speed, made.step, smooth)
        for step in sorted(validation):
            _add(found.validation, step, validation[step])
        return found

    def add(self, step: int, loss: float, tokens_per_s: float) -> None:
        """The job has come to `step`; the same one again changes nothing."""
        _add(self.loss, step, loss)
        _add(self.speed, step, tokens_per_s)

    def evaluated(self, step: int, loss: float) -> None:
        _add(self.validation, step, loss)

    def values(self) -> dict[str, dict[str, float]]:
        """As JSON has them; steps are names, so that a new point is a small change."""
        of = {"loss": self.loss, "validation": self.validation, "speed": self.speed}
        return {name: {str(step): value for step, value in curve.items()} for name, curve in of.items()}


def _add(curve: Curve, step: int, value: float) -> None:
    """A point behind the others; every second one goes when there are too many."""
    if not isfinite(value) or step <= 0 or (curve and step <= next(reversed(curve))):
        return
    curve[step] = float(f"{value:.5g}")
    if len(curve) > POINTS_MAX:
        for old in list(curve)[1:-1:2]:
            del curve[old]


@dataclass(slots=True)
class _Read:
    """The data read of a job: its curves, and the news of one that has ended."""

    curves: Curves
    news: list[tuple[int, LogLine]]
    timeline: int
    since_unix_s: float
    again_s: float  # when to read the past again: it could not be read, or nobody has looked for that long
    is_whole: bool  # the past could be read
    before: Curves = field(default_factory=Curves)  # the job had gone further until it lost a stage


@dataclass(eq=False)
class Feed:
    """Gives looks at everything that a visitor may see."""

    _overview: Overview  # as everybody may see it
    _entrance: Entrance
    _product: str
    _troubles: Callable[[], list[str]] = list  # faults of the scheduler
    _owner: Callable[[PeerId], str] = lambda peer: ""  # who invited a stage server
    _looks: OrderedDict[tuple[Person, str], Look] = field(default_factory=OrderedDict)
    _read: OrderedDict[str, _Read] = field(default_factory=OrderedDict)

    async def enter(self, certificate: bytes | None) -> Person:
        """The visitor with this certificate (DER), or without one; the error of `entrance` if it may not look."""
        return self._entrance(certificate)

    async def look(self, certificate: bytes | None, reference: str) -> Look:
        """All that the visitor may see, with the named job in full, or else the newest one that runs.

        A visitor without access gets the error of `entrance`, also if access was lost since the last look.
        """
        person = self._entrance(certificate)
        now_s = asyncio.get_running_loop().time()
        key = (person, reference)
        known = self._looks.get(key)
        if known is None or now_s - known.at_s >= LOOK_S_MIN:
            known = self._looks[key] = await self._new(person, reference, now_s)
            if len(self._looks) > LOOKS_MAX:
                self._looks.popitem(last=False)
        self._looks.move_to_end(key)
        return known

    async def _new(self, person: Person, reference: str, now_s: float) -> Look:
        registry = self._overview.jobs.registry
        overview = replace(self._overview, asks=lambda: person)
        job = _chosen(registry, reference)
        read = None if job is None else await self._about(job)  # the only wait: all that follows is of one moment
        queue, all_jobs, pool = overview.queue(), registry.all(), overview.membership.peers()
        jobs = [overview.job(listed, spec=False, queue=queue) for listed in _newest(all_jobs, job)]
        peers = [overview.peer(peer) for peer in _first(pool, job)]
        is_admin = person.role is Role.ADMIN
        who = {"role": person.role.value, "name": person.name}
        state: Json = {
            "scheduler": {"product": self._product, "troubles": self._troubles(), "visitor": who},
            "jobs": jobs_values(jobs, queue.waiting),
            "jobs_in_all": len(all_jobs),
            "peers": peers_values(
                [*overview.relay_views(), *peers], lambda peer: self._owner(PeerId(peer)) if is_admin else ""
            ),
            "peers_in_all": len(pool),
        }
        if job is not None and read is not None:
            state["job"] = self._in_full(overview, job, read, {view.id: view for view in peers})
        clock_s = now_s if job is None else job.clock_s()
        return Look(now_s, self._overview.wall_s(), clock_s, state)

    def _in_full(self, overview: Overview, job: Job, read: _Read, peers: dict[str, pb.PeerView]) -> Json:
        view = overview.job(job, spec=False)
        facts = [fact for fact in overview.job_facts(job) if fact.topic not in ("state", "hint", "progress")]
        values = job_values(view, job.situation(), facts, peers)
        values["curves"] = read.curves.values() | ({"before": read.before.values()["loss"]} if job.lost else {})
        values["trained"] = _trained(job.record)
        if job.lost:
            values["reached"] = job.record.repeats.reached
        values["news"] = news_values(read.news)
        values["reroutes"] = {} if job.brain is None else reroutes_values(job.brain.counts().reroutes)
        return values

    async def _about(self, job: Job) -> _Read:
        """The curves and the news of a job; the past is read once."""
        record, progress, now_s = job.record, job.progress, asyncio.get_running_loop().time()
        read = self._read.get(record.id)
        if read is None or now_s >= read.again_s or _is_stale(read, record):
            before = read.before if read is not None else Curves()
            if read is not None and read.timeline != record.timeline and read.curves.loss:
                before = read.curves
            read = self._read[record.id] = replace(await self._read_past(job, now_s), before=before)
            if len(self._read) > JOBS_READ_MAX:
                self._read.popitem(last=False)
        self._read.move_to_end(record.id)
        if read.is_whole:
            read.again_s = now_s + AGAIN_S
        read.curves.add(progress.steps_done, progress.loss, progress.tokens_per_s)
        read.curves.evaluated(progress.evaluation_step, progress.evaluation_loss)
        if not job.record.state.is_final:
            read.news = self._overview.jobs.stores.logs.of(record.id).news()
        return read

    async def _read_past(self, job: Job, now_s: float) -> _Read:
        """Without a past, to be read again soon, while the database does not answer."""
        record, stores, curves = job.record, self._overview.jobs.stores, None
        try:
            async with asyncio.timeout(READ_S_MAX):
                steps = await thinned(stores.database, record, job.spec, every(job.progress.steps_done))
                curves = Curves.read(steps, await evaluations(stores.database, record))
        except (DatabaseUnavailable, TimeoutError):
            pass
        news = (await stores.logs.read(record.id)).news()
        past = curves or Curves()
        return _Read(past, news, record.timeline, record.since_unix_s, now_s + AGAIN_S, curves is not None)


def _trained(record: JobRecord) -> Json:
    """How long the job has run, seconds, until a moment; while it runs the page adds what has passed since."""
    until_unix_s = record.counted_unix_s or record.since_unix_s
    return {"for_s": round(record.times.get(JobState.RUNNING.value, 0.0)), "until_unix_s": round(until_unix_s)}


def _is_stale(read: _Read, record: JobRecord) -> bool:
    """Whether the job went back, or has ended since."""
    return read.timeline != record.timeline or (record.state.is_final and read.since_unix_s != record.since_unix_s)


def _chosen(registry: JobRegistry, reference: str) -> Job | None:
    """The job that is meant; else the newest that runs, that is open, that there is."""
    if reference:
        try:
            return registry.find(reference)
        except NotFound:
            pass
    jobs = registry.all()
    running = (job for job in jobs if job.record.state is JobState.RUNNING)
    still_open = (job for job in jobs if not job.record.state.is_final)
    return next(running, None) or next(still_open, None) or next(iter(jobs), None)


def _newest(jobs: Sequence[Job], chosen: Job | None) -> list[Job]:
    """As many as the page has room for: the one in full, the open ones, the newest first."""
    order = sorted(jobs, key=lambda job: (job.record.state.is_final, -job.record.created_unix_s))
    return sorted(order, key=lambda job: job is not chosen)[:JOBS_MAX]


def _first(pool: Sequence[Peer], job: Job | None) -> list[Peer]:
    """All stage servers of the job, and of the others as many as the page has room for, busy ones first."""
    of_job = [peer for peer in pool if job is not None and peer.job == job.record.id]
    others = [peer for peer in pool if job is None or peer.job != job.record.id]
    others.sort(key=lambda peer: (peer.job == NO_JOB, peer.hello.peer))
    return of_job + others[: max(0, PEERS_MAX - len(of_job))]
