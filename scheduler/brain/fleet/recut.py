"""Whether a job that waits for stage servers could go on with the present ones, cut into fewer stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.brain.fleet.allocation import PendingJob
from scheduler.brain.fleet.memory_split import ModelCosts, fit, needs
from scheduler.brain.fleet.placement import Candidate


def stages_here(job: PendingJob, model: ModelCosts, here: Sequence[Candidate]) -> int | None:
    """Into how many stages, the most first, a job without islands could be cut to begin with the peers that are here.

    None if the estimate of memory says that none would hold it, or if only as many stages as now would do.
    """
    able = [one for one in here if one.peer not in job.unfit]
    most = min(len(able) // job.min_replicas, len(job.needs) - 1, model.layers)
    for stages in range(most, 0, -1):
        cut = fit(model, [one.offer for one in able], [stages], job.min_replicas)
        if cut.plan is None:
            continue
        if replace(job, needs=needs(model, cut.plan, len(able))).plan(able).plan is not None:
            return stages
    return None
