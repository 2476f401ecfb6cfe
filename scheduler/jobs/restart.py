"""Restart of the scheduler: reads every job back, and continues the jobs that were at work."""

from __future__ import annotations

import asyncio

from scheduler.brain.explain.facts import LOADED
from scheduler.jobs.islands import timelines
from scheduler.jobs.job import Job, again
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.runner import JobRunner
from scheduler.jobs.series import is_over
from scheduler.jobs.starts import Rollback, Timelines
from scheduler.storage.job_record import JobRecord
from swarm.errors import InvalidConfig, SwarmError
from swarm.job.spec import JobSpec, spec_from_json
from swarm.types import JobState


class Restart:
    """Reads the stores at the start. Jobs that were running continue once their peers are back."""

    def __init__(
        self,
        ports: SchedulerPorts,
        registry: JobRegistry,
        peers: Peers,
        timelines: Timelines,
        rollback: Rollback,
        runner: JobRunner,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._stores, self._metrics, self._wall_s = ports.stores, ports.metrics, ports.wall_s
        self._registry = registry
        self._peers = peers
        self._timelines = timelines
        self._rollback = rollback
        self._runner = runner
        self._tasks = tasks

    async def load(self) -> None:
        """Read all jobs and continue the open ones."""
        await self._stores.files.load()
        for record in await self._stores.database.jobs():
            job = await self._read(record)
            await self._continue(job)

    async def _read(self, record: JobRecord) -> Job:
        job = Job(record, spec_of(record))
        self._registry.add(job)
        job.progress = await self._timelines.progress_of(record, job.spec)
        if not (record.state.is_final and job.spec.checkpoint.dir):  # a bucket per old job would take long
            job.newest = await self._stores.checkpoints.newest(record, job.spec)
        if not record.state.is_final:
            await self._stores.logs.reopen(record.id)
        if is_over(record, self._wall_s()):
            return job
        self._metrics.job_opened(record.id, job.spec.model.family, job.progress.steps_done)
        self._metrics.job_state(record.id, record.state)
        if job.progress.evaluation_step:
            self._metrics.evaluated(record.id, step=job.progress.evaluation_step, loss=job.progress.evaluation_loss)
        return job

    async def _continue(self, job: Job) -> None:
        record, database = job.record, self._stores.database
        match record.state:
            case JobState.QUEUED | JobState.PLACING:
                await self._find_start(job)
            case JobState.LOADING if not any([await database.last_rows(record.id, at, 1) for at in timelines(job)]):
                reason = "the scheduler was restarted before the job ran"
                await self._registry.enter(job, JobState.PLACING, reason, peers={})
                await self._find_start(job)
            case JobState.LOADING:  # it ran, but the database never heard of that
                await self._registry.enter(job, JobState.RUNNING, LOADED)
                await self._reattach(job)
            case JobState.STALLED:
                self._tasks.create_task(self._rollback.go_back(job))
            case JobState.RUNNING | JobState.PAUSING | JobState.CANCELLING:
                await self._reattach(job)
            case _:
                pass  # paused or ended: a person decides

    async def _find_start(self, job: Job) -> None:
        """Look up the checkpoint that the job starts from, if any; without it the job fails."""
        try:
            job.start = await self._stores.checkpoints.start_of(job.record)
            await self._stores.files.reopened(job.record, job.spec)
        except SwarmError as error:
            await self._fail(job, error)
        else:
            self._peers.wake.set()

    async def _reattach(self, job: Job) -> None:
        """Continue a job that was at work, once its peers are back."""
        try:
            job.start = await self._stores.checkpoints.start_of(job.record)
            batches = await self._stores.files.reopened(job.record, job.spec)
        except SwarmError as error:
            await self._fail(job, error)
        else:
            await self._runner.reattach(job, batches)
            self._peers.wake.set()

    async def _fail(self, job: Job, error: SwarmError) -> None:
        hint = again(job) or error.hint
        await self._registry.enter(job, JobState.FAILED, error.message, error_code=error.code, hint=hint)


def spec_of(record: JobRecord) -> JobSpec:
    """The spec of a stored job; InvalidConfig if it says what this version does not know."""
    try:
        return spec_from_json(record.spec_json)
    except InvalidConfig as error:
        raise InvalidConfig(
            f"job {record.id} is from an earlier version: {error.message}",
            hint="end or pull its jobs with that version, then start this one with an empty --data-dir",
        ) from None
