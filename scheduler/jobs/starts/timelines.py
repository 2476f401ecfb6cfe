"""Timelines: the checkpoint from which a job begins or resumes, its new timeline, and the rows that count."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from scheduler.brain.lineage import checkpoint_counts, resumed, row_counts
from scheduler.jobs.islands import rows_made
from scheduler.jobs.job import Job, JobProgress, job_rows
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.checkpoints.catalog import Beginning, job_and_step, same_model
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.reader import Checkpoint, Found
from swarm.checkpoint.storage import MANIFEST
from swarm.errors import NotFound
from swarm.job.changes import check_state, check_steps
from swarm.job.spec import JobSpec


class Timelines:
    """Begins the timelines of all jobs."""

    def __init__(self, ports: SchedulerPorts, registry: JobRegistry) -> None:
        self._database = ports.stores.database
        self._catalog = ports.stores.checkpoints
        self._metrics = ports.metrics
        self._registry = registry

    async def progress_of(self, record: JobRecord, spec: JobSpec) -> JobProgress:
        """How far the job is, by its rows without abandoned parts of its timelines."""
        progress = JobProgress.at_start(spec, record.timeline, record.first_steps[-1])
        for timeline in range(record.timeline + 1) if progress.islands is not None else ():
            newest = [  # of the timeline before; `logged` has what counts of those before that
                one
                for one in progress.outer_log()[len(progress.logged) :]
                if checkpoint_counts(timeline - 1, one.after_step, record.first_steps)
            ]
            before = [  # a timeline begins with equal shares
                replace(one, shares=()) if one.after_step == record.first_steps[timeline] else one
                for one in (*progress.logged, *newest)
            ]
            progress.logged, progress.islands = tuple(before), job_rows(spec, timeline)
            for made in await rows_made(self._database, record, spec, progress.islands):
                progress.take(asdict(made))
        for row in await self._database.commits(record.id) if progress.islands is None else ():
            if row_counts(row["timeline"], row["step"], record.first_steps):
                progress.take(row)
        for evaluation in await self._database.evaluations(record.id):
            if checkpoint_counts(evaluation.timeline, evaluation.version, record.first_steps):
                progress.evaluation_loss, progress.evaluation_step = evaluation.loss, evaluation.version
        return progress

    def source(self, spec: JobSpec) -> Job:
        """The job that `checkpoint.resume_from` names; InvalidConfig, NotFound."""
        name, _ = job_and_step(spec.checkpoint.resume_from)
        return self._registry.find(name)

    async def start_from(self, spec: JobSpec, at: int | None = None) -> Found:
        """The checkpoint of another job that a new one starts from.

        InvalidConfig, NotFound, CheckpointDamaged.

        `at`: the step of the checkpoint, if it was chosen before.
        """
        step = job_and_step(spec.checkpoint.resume_from)[1] if at is None else f"{at}"
        other = self.source(spec)
        same_model(other.spec, spec, f"job {other.record.id}")
        found = await self._catalog.choose(other.record, other.spec, step)
        if found.checkpoint is None:
            raise NotFound(f"job {other.record.id} has no checkpoint to start from", hint=found.skipped_text())
        check_state(await self._catalog.trainer_state(found.checkpoint), spec)
        check_steps(spec, found.checkpoint.step)
        return found

    async def pinned(self, spec: JobSpec) -> tuple[JobSpec, Found]:
        """The checkpoint of `start_from`, and the spec with it by job id and step: a name may mean another job later,
        and "latest" another step."""
        source, found = self.source(spec).record.id, await self.start_from(spec)
        assert found.checkpoint is not None, "start_from raises NotFound"
        pin = {"resume_from": f"{source}:{found.checkpoint.step}"}
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=pin)}), found

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
        """Begin a new timeline; nothing after `beginning` counts any more. The caller enters a state next.

        NotAllowed if the job is no longer as in `record`.
        """
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
        newest = await self._catalog.newest(turned, spec)
        self._registry.begin_timeline(job, record, turned)
        job.spec, job.start, job.progress, job.newest = spec, start, progress, newest
        self._metrics.job_opened(record.id, spec.model.family, step)
        self._metrics.job_went_back(
            record.id,
            max(0, before - step),
            progress.loss,
            progress.learning_rate,
            progress.norm,
            progress.evaluation_step,
        )
        if progress.evaluation_step:
            self._metrics.evaluated(record.id, step=progress.evaluation_step, loss=progress.evaluation_loss)


def starting_at(start: Checkpoint | None) -> dict[str, Any]:
    """The fields of a record that say what its present timeline starts from."""
    if start is None:
        return {"start_where": "", "start_name": ""}
    return {"first_steps": (start.step,), "start_where": start.storage.where, "start_name": start.name}
