"""Applies a commit to a stage: an optimizer step, or an outer step of an island."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stage_server.ports import Assignment
from stage_server.state.donor import CommitRecord, Donor
from swarm.messages import Commit
from swarm.model.islands.exchange import merge_of
from swarm.model.stage import Stage
from swarm.types import UnitName


def commit(
    assignment: Assignment, stage: Stage, donor: Donor, command: Commit, means: Mapping[UnitName, Tensor]
) -> CommitRecord:
    """`apply`; gives what the donor is to remember of it."""
    apply(assignment, stage, command, means)
    return donor.record(command, means)


def apply(assignment: Assignment, stage: Stage, command: Commit, means: Mapping[UnitName, Tensor]) -> None:
    """Commit the step with the averages of its units, none if it is skipped."""
    if assignment.course.is_outer(command.step):
        means_made = None if command.skip else means
        stage.merge(command.step, merge_of(stage, assignment.spec, command.step, means_made))
        return
    rate, scale = command.learning_rate, command.scale
    stage.apply(command.step, means, learning_rate=rate, scale=scale, skip=command.skip)
