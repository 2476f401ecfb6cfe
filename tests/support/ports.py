"""A replica's assignment, and its ports if it is neither given state by a scheduler nor saved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

from stage_server.device import Device
from stage_server.metrics import StageServerMetrics
from stage_server.ports import Assignment, JobTasks, ReplicaId, ReplicaPorts
from swarm.job.spec import JobSpec
from swarm.process.logs import get_logger
from swarm.rpc.links.peers import PeerLinks
from swarm.types import PROTOCOL_VERSION, JobId, PeerId, Pieces
from swarm.wire.messages import Event, FetchRequest, LoadStage, StoreHeader

JOB = JobId("job")


async def _store(header: StoreHeader, payload: Pieces) -> str:
    raise AssertionError("nothing is stored here")


def _fetch(request: FetchRequest) -> AsyncGenerator[bytes, None]:
    raise AssertionError("nothing is fetched here")


def assignment_of(spec: JobSpec, stage: int = 0, peer: str = "me", **fields: Any) -> Assignment:
    """A stage of a resolved job, as a stage server is told to load it; `fields` of LoadStage."""
    command = replace(LoadStage(JOB, 0, stage, spec.split, 0, spec.model_dump_json()), **fields)
    return Assignment(command, spec, ReplicaId(JOB, PeerId(peer), 1, stage))


def ports_of(
    device: Device, links: PeerLinks, emit: Callable[[Event], None], tasks: asyncio.TaskGroup, **others: Any
) -> ReplicaPorts:
    """Ports whose tasks run in the group; `others` are fields of ReplicaPorts."""
    metrics = StageServerMetrics("0", PROTOCOL_VERSION)
    return ReplicaPorts(device, links, emit, _store, _fetch, JobTasks(tasks), metrics, get_logger("test"), **others)
