"""A replica that goes over to another island: it serves its stage on a new timeline, with the outer weights.

An island begins like that as a copy of the one to which the replica belonged, with the optimizer's state of that one.
What the replica has trained and not merged stays behind, as it counts in the other island.

Decision: docs/decisions/091.
"""

from __future__ import annotations

from dataclasses import replace

from stage_server.ports import Assignment, ReplicaPorts
from stage_server.replica.replica import Replica
from swarm.errors import StaleMessage
from swarm.wire.messages import LoadStage


def can_cross(replica: Replica | None, command: LoadStage) -> bool:
    """Whether the replica holds what the island that `command` names begins with."""
    if replica is None or not command.held:
        return False
    held = (replica.job, replica.me.stage, replica.cells.stages, replica.cells.version)
    return held == (command.job, command.stage, len(command.split), command.held)


def to_load(command: LoadStage) -> LoadStage:
    """The command of one that cannot cross; StaleMessage if it may not load the stage instead."""
    if command.held:
        raise StaleMessage(f"version {command.held} of stage {command.stage} is not held here")
    return command


async def crossed(before: Replica, command: LoadStage, ports: ReplicaPorts) -> Replica:
    """The replica of the other island; it has told of itself. The work of the one before is ended."""
    digest = await ports.device.run(before.stage.begin_anew)  # behind whatever was queued
    loaded = replace(before.loaded, timeline=command.timeline, version=command.held, digest=digest, join=0)
    after = Replica(Assignment.of(command, before.me), before.stage, loaded, ports)
    ports.emit(loaded)
    ports.log.info("goes over to another island", timeline=command.timeline, version=command.held)
    return after
