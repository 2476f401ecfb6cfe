"""Where a job begins, and where it begins again after a stall; brain/stall.py decides how a stalled job goes on.

Decision: docs/decisions/027.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scheduler.brain import stall
from scheduler.brain.lineage import checkpoint_counts, resumed, row_counts
from scheduler.jobs.islands import rows_made
from scheduler.jobs.job import Job, JobProgress, job_rows, now_s, success_text
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.checkpoints.catalog import Beginning, job_and_step, same_model
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.reader import Checkpoint, Found
from swarm.checkpoint.storage import LATEST, MANIFEST
from swarm.errors import DatabaseUnavailable, Fenced, NotFound, StorageError, SwarmError
from swarm.job.changes import check_state, check_steps
from swarm.job.leases import Cut
from swarm.job.outer_log import Entry
from swarm.job.spec import JobSpec
from swarm.types import JobState

# How often a stalled job looks for checkpoints whose storage does not answer.
CHECKPOINTS_RETRY_S = 10.0


@dataclass(eq=False)
class Timelines:
    """The checkpoint from which a job begins or resumes, its new timeline, and the rows that count."""

    _ports: SchedulerPorts
    _registry: JobRegistry
    _wake: asyncio.Event  # set once a stalled job can be placed again

    async def progress_of(self, record: JobRecord, spec: JobSpec) -> JobProgress:
        """How far the job is, by its rows without abandoned parts of its timelines."""
        database = self._ports.stores.database
        progress = JobProgress.at_start(spec, record.timeline, record.first_steps[-1])
        for timeline in range(record.timeline + 1) if progress.islands is not None else ():
            newest = (  # of the timeline before; `logged` has what counts of those before that
                entry
                for entry in progress.outer_log()[len(progress.logged) :]
                if _entry_counts(timeline - 1, entry, record.first_steps)
            )
            progress.logged, progress.islands = (*progress.logged, *newest), job_rows(spec, timeline)
            for made in await rows_made(database, record, spec, progress.islands):
                progress.take(asdict(made))
        for row in await database.commits(record.id) if progress.islands is None else ():
            if row_counts(row["timeline"], row["step"], record.first_steps):
                progress.take(row)
        for evaluation in await database.evaluations(record.id):
            if checkpoint_counts(evaluation.timeline, evaluation.version, record.first_steps):
                progress.evaluation_loss, progress.evaluation_step = evaluation.loss, evaluation.version
        return progress

    def source(self, spec: JobSpec) -> Job:
        """The job that `checkpoint.resume_from` names; InvalidConfig, NotFound."""
        name, _ = job_and_step(spec.checkpoint.resume_from)
        return self._registry.find(name)

    async def start_from(self, spec: JobSpec, at: int | None = None) -> Found:
        """The checkpoint of another job that a new job starts from; `at` is its step, if it was chosen before.

        InvalidConfig, NotFound, CheckpointDamaged.
        """
        step = job_and_step(spec.checkpoint.resume_from)[1] if at is None else f"{at}"
        other = self.source(spec)
        same_model(other.spec, spec, f"job {other.record.id}")
        catalog = self._ports.stores.checkpoints
        found = await catalog.choose(other.record, other.spec, step)
        if found.checkpoint is None:
            raise NotFound(f"job {other.record.id} has no checkpoint to start from", hint=found.skipped_text())
        check_state(await catalog.trainer_state(found.checkpoint), spec)
        check_steps(spec, found.checkpoint.step)
        return found

    async def pinned(self, spec: JobSpec) -> tuple[JobSpec, Found]:
        """The checkpoint of `start_from`, and the spec with it by job id and step: a name may mean another job later,
        and "latest" another step."""
        source, found = self.source(spec).record.id, await self.start_from(spec)
        assert found.checkpoint is not None, "start_from raises NotFound"
        pin = {"resume_from": f"{source}:{found.checkpoint.step}"}
        return spec.having("checkpoint", **pin), found

    async def beginning(self, job: Job, found: Found, *, anew: bool) -> Beginning:
        """Where the job resumes: at the checkpoint `found`, or (`anew`) at its start; NotFound, CheckpointDamaged."""
        record = job.record
        start, skipped = (None, "") if anew else (found.checkpoint, found.skipped_text())
        if start is None and not anew:
            raise NotFound(
                f"job {record.id} has no checkpoint that can be used{': ' if skipped else ''}{skipped}",
                hint=f"begin again at step 0 with: swarm resume {record.id} --from 0",
            )
        was_sent = any(file.path == MANIFEST for file in record.files)
        if start is None and job.spec.checkpoint.resume_from and not was_sent:
            start = (await self.start_from(job.spec, record.first_steps[0])).checkpoint
        return Beginning(start.step if start is not None else record.first_steps[0], start, skipped)

    async def switch_to(self, job: Job, record: JobRecord, beginning: Beginning, spec: JobSpec) -> None:
        """Begin a new timeline, before the caller enters a state; NotAllowed if the job is no longer as in `record`."""
        start, step = beginning.start, beginning.step
        ours = start is not None and start.job == record.id
        first_steps = resumed(record.first_steps, start.timeline if start and ours else record.timeline, step)
        turned = replace(
            record,
            timeline=record.timeline + 1,
            spec_json=spec.model_dump_json(),
            weights_sha256="",
            peers={},
            **(starting_at(start) | {"first_steps": first_steps}),
        )
        progress, before = await self.progress_of(turned, spec), job.progress.steps_done
        newest = await self._ports.stores.checkpoints.newest(turned, spec)
        self._registry.begin_timeline(job, record, turned)
        job.asked = job.asked if spec is job.spec else None
        job.spec, job.start, job.progress, job.newest = spec, start, progress, newest
        metrics = self._ports.metrics
        metrics.job_opened(record.id, spec.model.family, step)
        metrics.job_went_back(
            record.id,
            max(0, before - step),
            progress.loss,
            progress.learning_rate,
            progress.norm,
            progress.evaluation_step,
        )
        if progress.evaluation_step:
            metrics.evaluated(record.id, step=progress.evaluation_step, loss=progress.evaluation_loss)

    async def go_back(self, job: Job) -> None:
        """Take a stalled job to a new timeline at its newest valid checkpoint, unless a person's order comes first."""
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
                self._ports.log.error("stalled job cannot go back", job_id=record.id, exc_info=error)
                told = error if isinstance(error, SwarmError) else SwarmError(f"internal error: {error!r}")
                reason, hint = f"{lost}; it cannot go back: {told.message}", told.hint or stall.stalled_hint(record.id)
                await self._registry.enter(job, JobState.PAUSED, reason, error_code=told.code, hint=hint)

    async def _try_to_go_back(self, job: Job, record: JobRecord, lost: str) -> None:
        """NotAllowed if the job is no longer as in `record`; StorageError, DatabaseUnavailable: try again."""
        found = await self._ports.stores.checkpoints.choose(record, job.spec, LATEST)
        found_of = found.checkpoint.job if found.checkpoint is not None else None
        if found_of != record.id and not found.skipped:
            await self._ports.stores.checkpoints.check_there(record, job.spec, job.newest)
        way = stall.recovery_for(record.id, found_of, skipped=bool(found.skipped))
        if way is stall.Recovery.BY_HAND:
            if job.record is record:
                reason = f"{lost}; no checkpoint of the job verifies: {found.skipped_text()}"
                await self._registry.enter(job, JobState.PAUSED, reason, hint=stall.resume_hint(record.id, None))
            return
        beginning = await self.beginning(job, found, anew=way is stall.Recovery.ANEW)
        if beginning.start is not None and beginning.step >= job.spec.training.steps:
            if job.record is record:
                sha256 = beginning.start.weights_sha256
                await self._registry.enter(job, JobState.SUCCEEDED, success_text(job), hint="", weights_sha256=sha256)
            return
        reached = job.progress.steps_done
        await self.switch_to(job, record, beginning, job.spec)
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
        self._wake.set()


def _entry_counts(timeline: int, entry: Entry, first_steps: Sequence[int]) -> bool:
    """Whether an entry of the outer log leads to the present: a period that begins anew has equal leases again."""
    if isinstance(entry, Cut):
        return row_counts(timeline, entry.first_step, first_steps)
    return checkpoint_counts(timeline, entry.after_step, first_steps)


def starting_at(start: Checkpoint | None) -> dict[str, Any]:
    """The fields of a record that say what its present timeline starts from."""
    if start is None:
        return {"start_where": "", "start_name": ""}
    return {"first_steps": (start.step,), "start_where": start.storage.where, "start_name": start.name}
