"""Restart of the scheduler: reads every job back, and continues the jobs that were at work."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from scheduler.brain.explain.facts import LOADED
from scheduler.jobs.islands import timelines
from scheduler.jobs.job import Job, again
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.runner import JobRunner
from scheduler.jobs.series import is_over
from scheduler.jobs.starts import Timelines
from scheduler.storage.job_record import JobRecord
from swarm.errors import InvalidConfig, SwarmError
from swarm.job.spec import JobSpec, spec_from_json
from swarm.types import JobState

AT_WORK = (JobState.LOADING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING)


@dataclass(eq=False)
class Restart:
    """Reads the stores at the start. Jobs that were running continue once their peers are back."""

    _ports: SchedulerPorts
    _registry: JobRegistry
    _peers: Peers
    _timelines: Timelines
    _runner: JobRunner
    _tasks: asyncio.TaskGroup

    async def load(self) -> None:
        """Read all jobs and continue the open ones."""
        stores = self._ports.stores
        await stores.files.load()
        jobs = [await self._read(record) for record in await stores.database.jobs()]
        for job in sorted(jobs, key=lambda job: job.record.state in AT_WORK):  # last: the grace of their peers begins
            await self._continue(job)

    async def _read(self, record: JobRecord) -> Job:
        stores, metrics = self._ports.stores, self._ports.metrics
        job = Job(record, spec_of(record))
        self._registry.add(job)
        job.progress = await self._timelines.progress_of(record, job.spec)
        if not (record.state.is_final and job.spec.checkpoint.dir):  # a bucket per old job would take long
            job.newest = await stores.checkpoints.newest(record, job.spec)
        if not record.state.is_final:
            await stores.logs.reopen(record.id)
        if is_over(record, self._ports.wall_s()):
            return job
        metrics.job_opened(record.id, job.spec.model.family, job.progress.steps_done)
        metrics.job_state(record.id, record.state)
        if job.progress.evaluation_step:
            metrics.evaluated(record.id, step=job.progress.evaluation_step, loss=job.progress.evaluation_loss)
        return job

    async def _continue(self, job: Job) -> None:
        record, database = job.record, self._ports.stores.database
        match record.state:
            case JobState.QUEUED | JobState.PLACING:
                await self._find_start(job)
            case JobState.LOADING if not any([await database.last_rows(record.id, at, 1) for at in timelines(job)]):
                reason = "the scheduler was restarted before the job ran"
                await self._registry.enter(job, JobState.PLACING, reason, peers={})
                await self._find_start(job)
            case JobState.LOADING:  # it ran, but the database never heard of that
                await self._registry.enter(job, JobState.RUNNING, LOADED)
                await self._find_start(job, at_work=True)
            case JobState.STALLED:
                self._tasks.create_task(self._timelines.go_back(job))
            case state if state in AT_WORK:
                await self._find_start(job, at_work=True)
            case _:
                pass  # paused or ended: a person decides

    async def _find_start(self, job: Job, *, at_work: bool = False) -> None:
        """Find the data and the checkpoint that the job starts from, if any; without them the job fails."""
        stores = self._ports.stores
        try:
            job.start = await stores.checkpoints.start_of(job.record)
            batches = await stores.files.reopened(job.record, job.spec)
        except SwarmError as error:
            hint = again(job) or error.hint
            await self._registry.enter(job, JobState.FAILED, error.message, error_code=error.code, hint=hint)
            return
        if at_work:
            await self._runner.reattach(job, batches)
        self._peers.wake.set()


def spec_of(record: JobRecord) -> JobSpec:
    """The spec of a stored job; InvalidConfig if it says what this version does not know."""
    try:
        return spec_from_json(record.spec_json)
    except InvalidConfig as error:
        raise InvalidConfig(
            f"job {record.id} is from an earlier version: {error.message}",
            hint="end or pull its jobs with that version, then start this one with an empty --data-dir",
        ) from None
