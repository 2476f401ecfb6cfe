"""Takes a stalled job back to its newest valid checkpoint; brain/stall.py decides how it goes on.

Decision: docs/decisions/027.
"""

from __future__ import annotations

import asyncio

from scheduler.brain import stall
from scheduler.jobs.job import Job, now_s, success_text
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.starts.timelines import Timelines
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.storage import LATEST
from swarm.errors import DatabaseUnavailable, Fenced, StorageError, SwarmError
from swarm.types import JobState

# How often a stalled job looks for checkpoints whose storage does not answer.
CHECKPOINTS_RETRY_S = 10.0


class Rollback:
    """Takes stalled jobs to a new timeline."""

    def __init__(self, ports: SchedulerPorts, registry: JobRegistry, peers: Peers, timelines: Timelines) -> None:
        self._catalog = ports.stores.checkpoints
        self._log = ports.log
        self._registry = registry
        self._peers = peers
        self._timelines = timelines

    async def go_back(self, job: Job) -> None:
        """Take a stalled job to a new timeline that begins at its newest valid checkpoint; then it waits for peers.

        A cancel, pause or resume in the meantime wins.
        """
        lost, timeline = stall.lost_in(job.record.reason), job.record.timeline
        while (record := job.record).state is JobState.STALLED and record.timeline == timeline:
            try:
                await self._try_to_go_back(job, record, lost)
            except (StorageError, DatabaseUnavailable) as error:
                reason = stall.seeking(lost, str(error))
                if job.record is record and reason != record.reason:
                    await self._registry.enter(job, JobState.STALLED, reason)
                await asyncio.sleep(CHECKPOINTS_RETRY_S)
            except Fenced:
                raise
            except Exception as error:  # such as a missing start, or our own fault: it must not end other jobs
                if job.record is not record:
                    continue
                self._log.error("stalled job cannot go back", job_id=record.id, exc_info=error)
                told = error if isinstance(error, SwarmError) else SwarmError(f"internal error: {error!r}")
                reason, hint = f"{lost}; it cannot go back: {told.message}", told.hint or stall.stalled_hint(record.id)
                await self._registry.enter(job, JobState.PAUSED, reason, error_code=told.code, hint=hint)

    async def _try_to_go_back(self, job: Job, record: JobRecord, lost: str) -> None:
        """NotAllowed if the job is no longer as in `record`; StorageError, DatabaseUnavailable: try again."""
        found = await self._catalog.choose(record, job.spec, LATEST)
        found_of = found.checkpoint.job if found.checkpoint is not None else None
        way = stall.recovery_for(record.id, found_of, skipped=bool(found.skipped))
        if way is stall.Recovery.BY_HAND:
            if job.record is record:
                reason = f"{lost}; no checkpoint of the job verifies: {found.skipped_text()}"
                await self._registry.enter(job, JobState.PAUSED, reason, hint=stall.resume_hint(record.id, None))
            return
        beginning = await self._timelines.beginning(job, found, anew=way is stall.Recovery.ANEW)
        if beginning.start is not None and beginning.step >= job.spec.training.steps:
            if job.record is record:
                sha256 = beginning.start.weights_sha256
                await self._registry.enter(job, JobState.SUCCEEDED, success_text(job), hint="", weights_sha256=sha256)
            return
        reached = job.progress.steps_done
        await self._timelines.switch_to(job, record, beginning, job.spec)
        cost = stall.steps_lost(reached, beginning.step, saved=beginning.start is not None)
        if beginning.skipped:
            self._registry.say(job, "warning", beginning.skipped)
        if reached <= beginning.step and job.lost:  # it went back before, and trained nothing since
            cost = job.lost
        assert job.waiting is not None, "a stalled job waits for peers"
        goes_on = stall.going_on(lost, cost, beginning.step, beginning.source, beginning.skipped)
        job.waiting.goes_on, job.waiting.tries_again_s = goes_on, now_s() + stall.pause_s(job.stalls)
        hint = stall.stalled_hint(record.id, job.stalls)
        repeats = job.record.repeats.lost(reached, beginning.step, cost)
        told = stall.pausing(goes_on, job.stalls)
        await self._registry.enter(job, JobState.STALLED, told, hint=hint, repeats=repeats)
        self._peers.wake.set()
