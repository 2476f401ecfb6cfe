"""The jobs of one scheduler, and the only place that changes a job's record.

A change of state counts at once. Then it is written to the database, and shown to watchers, metrics and the broker.

    queued ─▶ placing ─▶ loading ─▶ running ─▶ succeeded | failed | cancelled | paused
      ▲          ▲          ▲          │ ╲
      │          │          └ stalled ◀┘  ╲▶ pausing, cancelling ─▶ the asked state, or the one that came first
      └ resume ─ paused | failed | cancelled

A stalled job lost a stage, or stood still: it goes back to a checkpoint and loads again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Set
from dataclasses import replace
from typing import Any

from scheduler.brain.explain.facts import WAITING_STATES, Holder, JobQueue
from scheduler.brain.fleet.membership import check_reference
from scheduler.jobs.job import Job, Waiting, now_s
from scheduler.jobs.ports import SchedulerPorts
from scheduler.storage.job_log import LogLine
from scheduler.storage.job_record import HOLDING, JobRecord
from scheduler.storage.patience import patiently
from swarm.errors import DatabaseRejected, DatabaseUnavailable, NotAllowed, NotFound
from swarm.job.partition import shape_text
from swarm.job.spec import JobSpec
from swarm.types import JobId, JobState, PeerId

REASON_CHARACTERS_MAX = 4000
# How long a change of state waits for a database that takes no writes.
STATE_PATIENCE_S = 10.0

_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.PAUSED, JobState.STALLED})
_STOPS = frozenset({JobState.PAUSING, JobState.CANCELLING})
_WAITING_ENDS = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.PAUSED})

# A job may also enter the state that it is in, with another reason, unless it has ended.
TRANSITIONS: Mapping[JobState, Set[JobState]] = {
    JobState.QUEUED: {JobState.PLACING, JobState.LOADING} | _WAITING_ENDS,
    JobState.PLACING: {JobState.LOADING} | _WAITING_ENDS,
    # A restarted scheduler places a job anew that had not run yet. One that is loaded may have no step left to train.
    JobState.LOADING: {JobState.PLACING, JobState.RUNNING} | _STOPS | _ENDS,
    JobState.RUNNING: _STOPS | _ENDS,
    JobState.PAUSING: {JobState.RUNNING, JobState.CANCELLING} | _ENDS,  # a pause that cannot be saved is given up
    JobState.CANCELLING: _ENDS,  # training may end before it hears of the order
    JobState.STALLED: {JobState.LOADING, JobState.SUCCEEDED} | _WAITING_ENDS,
    JobState.PAUSED: {JobState.QUEUED, JobState.CANCELLED},
    JobState.FAILED: {JobState.QUEUED},
    JobState.CANCELLED: {JobState.QUEUED},
    JobState.SUCCEEDED: frozenset(),
}


class JobRegistry:
    """All jobs that are known."""

    def __init__(self, ports: SchedulerPorts) -> None:
        self._database, self._announcer, self._metrics = ports.stores.database, ports.announcer, ports.metrics
        self._wall_s, self._log = ports.wall_s, ports.log
        self._jobs: dict[JobId, Job] = {}
        self._unstored: set[JobId] = set()  # whose newest record is not stored, as the database was away
        self.relays_here = True  # any relay of the swarm, as far as jobs know
        self.unreached: tuple[PeerId, ...] = ()  # by the scheduler
        self.logs = ports.stores.logs
        self.on_ended: Callable[[Job], Awaitable[None]] = _nothing  # while its log is still open

    def add(self, job: Job) -> None:
        """A job that was submitted, or read from the database."""
        self._jobs[job.record.id] = job
        job.done_again_before = job.record.repeats.microbatches
        job.waiting = (job.waiting or Waiting(now_s())) if job.record.state in WAITING_STATES else None

    def remove(self, job: Job) -> None:
        """The job is removed, and not found any more."""
        del self._jobs[job.record.id]

    def get(self, job: JobId) -> Job | None:
        return self._jobs.get(job)

    def all(self) -> list[Job]:
        """All jobs, newest first."""
        return sorted(self._jobs.values(), key=lambda job: job.record.created_unix_s, reverse=True)

    def find(self, reference: str) -> Job:
        """The job that a reference means; NotFound if there is none, or more than one.

        The job with this id, else the open one with this name, else the newest ended one with this name, else the only
        one whose id begins with it.
        """
        check_reference(reference)
        jobs = self.all()
        exact = self._jobs.get(JobId(reference))
        if exact is not None:
            return exact
        named = [job for job in jobs if job.record.name == reference]
        still_open = [job for job in named if not job.record.state.is_final]
        if len(still_open) > 1:
            ids = ", ".join(job.record.id for job in still_open[:5])
            raise NotFound(f'{len(still_open)} open jobs are named "{reference}": {ids}', hint="give the id of one")
        if named:
            return (still_open or named)[0]
        begins = [job for job in jobs if job.record.id.startswith(reference)] if reference else []
        if len(begins) == 1:
            return begins[0]
        if begins:
            ids = ", ".join(job.record.id for job in begins[:5])
            raise NotFound(f'"{reference}" fits several jobs: {ids}', hint="give more of the id")
        raise NotFound(f'there is no job "{reference}"', hint="list them with: swarm ls -a")

    def awaits_database(self) -> bool:
        """Whether a row of a job waits for a database that takes no writes."""
        return any(job.awaits_database for job in self._jobs.values())

    def waiting(self) -> list[Job]:
        """Jobs that wait for peers, in the order in which they get some."""
        return _in_turn(job for job in reversed(self.all()) if job.waiting is not None)

    def at_work(self) -> list[Job]:
        """Running jobs, in the order in which they get peers."""
        return _in_turn(job for job in reversed(self.all()) if job.record.state is JobState.RUNNING)

    def queue(self) -> JobQueue:
        """Jobs that wait for stage servers, and jobs that have some."""

        def holder(job: Job) -> Holder:
            steps = job.progress.steps_done, job.spec.training.steps
            return Holder(job.record.id, len(job.record.peers), *steps, job.left_s)

        held = [job for job in self.all() if job.record.state in HOLDING and job.record.peers]
        holders = map(holder, sorted(held, key=lambda job: -len(job.record.peers)))
        waiting = self.waiting()
        priorities = {job.record.id: job.spec.limits.priority for job in waiting}
        return JobQueue(tuple(priorities), tuple(holders), priorities)

    async def enter(self, job: Job, state: JobState, reason: str, **changes: Any) -> None:
        before = job.record.state
        assert may_enter(before, state), f"{job.record.id}: {before.value} does not lead to {state.value}"
        # Shown at once: nobody may act on the old state while the row is being written.
        job.record = job.record.entered(state, reason[:REASON_CHARACTERS_MAX], self._wall_s(), **changes)
        self._count_repeats(job)
        job.waiting = (job.waiting or Waiting(now_s())) if job.record.state in WAITING_STATES else None
        if state is JobState.RUNNING:
            self._metrics.job_runs(job.record.id, job.record.since_unix_s)
        await self.put(job)
        self.say(job, "error" if state is JobState.FAILED else "info", f"job {state.phrase}: {reason}")
        self.changed(job)
        if state.is_final:
            try:
                await self.on_ended(job)
            finally:
                if job.record.state.is_final:  # else it was resumed meanwhile
                    self.logs.close(job.record.id)

    def cut_anew(self, job: Job, spec: JobSpec, said: str) -> None:
        """Cut a waiting job otherwise: on its timeline nothing was trained yet. The next change of state stores it."""
        job.spec, job.record = spec, replace(job.record, spec_json=spec.model_dump_json())
        self._metrics.recut(job.record.id)
        self.say(job, "info", f"cut anew for the stage servers that are here: {shape_text(spec)}{said}")

    def begin_timeline(self, job: Job, before: JobRecord, after: JobRecord) -> None:
        """Turn the job to its next timeline; NotAllowed, and nothing changes, if it is no longer as in `before`."""
        if job.record is not before:
            raise NotAllowed(f"job {before.id} changed meanwhile: it {job.record.state.phrase}")
        assert (after.state, after.timeline) == (before.state, before.timeline + 1)
        job.record = after

    def place(self, job: Job, peer: PeerId, place: int | None) -> bool:
        """The peer has a place in the job, or (None) no longer; whether that is new, and the record to be put."""
        peers = {one: at for one, at in job.record.peers.items() if one != peer}
        peers |= {peer: place} if place is not None else {}
        if is_new := peers != job.record.peers:
            job.record = replace(job.record.counted(self._wall_s()), peers=peers)
            self._count_repeats(job)
        return is_new

    def end_run(self, job: Job) -> None:
        """The job has no brain any more: what that counted stays with the job."""
        job.done_again_before, job.run = job.done_again, None

    def _count_repeats(self, job: Job) -> None:
        job.record = replace(job.record, repeats=replace(job.record.repeats, microbatches=job.done_again))

    async def put(self, job: Job) -> None:
        """Write the job's record, if the database accepts it."""

        async def put() -> None:
            await self._database.put_job(job.record)  # the newest record, since writes may be late

        try:
            with job.used():
                await patiently(put, patience_s=STATE_PATIENCE_S)
            self._unstored.discard(job.record.id)
        except (DatabaseUnavailable, DatabaseRejected) as error:
            # Only commits must be durable; a state that is only in memory is better than a scheduler that ends.
            record = job.record
            if isinstance(error, DatabaseUnavailable):
                self._unstored.add(record.id)
            self._log.error("state of job not stored", job_id=record.id, state=record.state.value, reason=error.message)

    async def put_again(self) -> None:
        """Write the records that an earlier attempt could not, until the first that still cannot be written."""
        for name in [*self._unstored]:
            self._unstored.discard(name)
            if (job := self.get(name)) is not None:
                await self.put(job)
            if name in self._unstored:
                return

    def changed(self, job: Job) -> None:
        """Show the job as it is now."""
        job.changed.set()
        job.changed = asyncio.Event()
        self._metrics.job_state(job.record.id, job.record.state)
        if job.brain is not None:
            counts = job.brain.counts()
            self._metrics.in_flight(job.record.id, counts.in_flight)
            self._metrics.ledger_violations(job.record.id, counts.violations)
            self._metrics.recovery(job.record.id, counts.replayed_by_stage, counts.reroutes, counts.duplicates)
        self._announcer.job_changed(replace(job.record, reason=job.reason), job.progress)

    def say(self, job: Job, level: str, text: str, **facts: object) -> None:
        """Write a line to the job's log and to the scheduler's; the latter has `facts` as fields."""
        getattr(self._log, level)(text, job_id=job.record.id, **facts)
        self.logs.append(job.record.id, LogLine(self._wall_s(), level, "", -1, text))


async def _nothing(job: Job) -> None:
    pass


def may_enter(before: JobState, after: JobState) -> bool:
    """Whether a job in one state may enter the other."""
    return after in TRANSITIONS[before] or (after is before and not before.is_final)


def _in_turn(oldest_first: Iterable[Job]) -> list[Job]:
    """The highest priority first; of equal ones the oldest."""
    return sorted(oldest_first, key=lambda job: -job.spec.limits.priority)
