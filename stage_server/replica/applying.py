"""Applies a commit to a stage, an optimizer step or an outer step of an island, with the averages that it needs."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from stage_server.ports import Assignment, ReplicaPorts
from stage_server.replica.averaging.one_round import Mean
from stage_server.state.donor import CommitRecord, Donor
from stage_server.state.joiner import missed_record
from swarm.errors import StaleMessage, SwarmError
from swarm.model.islands.exchange import merge_of
from swarm.model.stage import Stage
from swarm.types import UnitName
from swarm.wire.messages import Commit


async def averages(
    command: Commit, means: Mapping[UnitName, Mean] | None, assignment: Assignment, stage: Stage, ports: ReplicaPorts
) -> dict[UnitName, Tensor]:
    """The averaged gradients that a commit makes effective: the `means` held here, or from the log of a member.

    StaleMessage if no member has them.
    """
    if means is not None:
        return {unit: mean.gradient for unit, mean in means.items() if unit in stage.units}
    try:
        record = await missed_record(command.step, assignment, command.donors, stage, ports.links)
    except SwarmError as error:
        raise StaleMessage(f"step {command.step} was averaged without this replica: {error.message}") from error
    places = stage.places_at(command.step)
    return await ports.device.aside(lambda: places.means_of(record.gradients))


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
