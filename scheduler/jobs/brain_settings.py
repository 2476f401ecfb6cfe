"""The settings of a job's brain, from the job's record and job file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.brain.settings import DEADLINES, REBALANCING, BrainSettings, SavingRules
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.reader import files_for
from swarm.data.batches import Batches
from swarm.job.footprint import stage_footprint
from swarm.job.partition import stage_flops, unit_names
from swarm.job.schedule import learning_rate
from swarm.job.spec import JobSpec
from swarm.text import without_passwords
from swarm.wire.messages import StateFile


def brain_settings(
    record: JobRecord, spec: JobSpec, epoch: int, batches: Batches, files: Sequence[StateFile], skipped_in_a_row: int
) -> BrainSettings:
    """The settings of a job on its present timeline; `skipped_in_a_row` newest commits changed no weight."""
    training, pipeline, split = spec.training, spec.pipeline, spec.split
    footprints = [stage_footprint(spec, layers, stage, len(split)) for stage, layers in enumerate(split)]
    return BrainSettings(
        job=record.id,
        epoch=epoch,
        timeline=record.timeline,
        steps=training.steps,
        microbatches=training.microbatches,
        split=split,
        spec_json=without_passwords(record.spec_json),
        overlap=spec.overlap,
        sync_steps=spec.sync_steps,
        max_in_flight=None if pipeline.max_in_flight == "auto" else pipeline.max_in_flight,
        units=unit_names(len(split), spec.tied),
        grad_clip_norm=training.grad_clip_norm,
        averaging_timeout_s=spec.averaging.timeout_s,
        fail_on_nonfinite=spec.limits.on_nonfinite == "fail",
        learning_rate=lambda rate_step: learning_rate(training, rate_step),
        tokens_of=batches.tokens_of,
        routing=pipeline.routing,
        eval_every_steps=training.eval_every_steps,
        evaluation_microbatches=batches.evaluation_microbatches,
        evaluation_tokens=batches.evaluation_tokens,
        pause_on_nonfinite=spec.limits.on_nonfinite == "pause",
        nonfinite_steps_max=spec.limits.nonfinite_steps_max,
        skipped_in_a_row=skipped_in_a_row,
        first_step=record.first_steps[-1],
        files=files_for(files, 0),
        saving=SavingRules(spec.checkpoint.every_steps, spec.checkpoint.every_s, spec.checkpoint.optimizer),
        recover=True,
        work=tuple(max(1.0, float(flops)) for flops in stage_flops(spec, split)),
        compiles=spec.model.compile,
        steps_on_host=training.step_on == "cpu",
        state_bytes=tuple(footprint.weights + footprint.optimizer for footprint in footprints),
        on_stall=spec.limits.on_stall,
        spot_check=spec.trust.spot_check,
        recount=spec.trust.recount,
        second_owner=spec.trust.second_owner,
        clips=spec.averaging.aggregate == "centered_clip",
        second_hash=spec.trust.second_hash,
        deadlines=DEADLINES,
        rebalance=replace(REBALANCING, rebalance=pipeline.rebalance, min_replicas=spec.limits.min_replicas),
    )
