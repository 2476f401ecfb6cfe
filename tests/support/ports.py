"""The ports of a replica that is neither given state by a scheduler nor saved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from stage_server.device import Device
from stage_server.metrics import StageServerMetrics
from stage_server.ports import JobTasks, ReplicaPorts
from swarm.process.logs import get_logger
from swarm.rpc.links.peers import PeerLinks
from swarm.types import PROTOCOL_VERSION, Pieces
from swarm.wire.messages import Event, FetchRequest, StoreHeader


async def _store(header: StoreHeader, payload: Pieces) -> str:
    raise AssertionError("nothing is stored here")


def _fetch(request: FetchRequest) -> AsyncGenerator[bytes, None]:
    raise AssertionError("nothing is fetched here")


def ports_of(
    device: Device, links: PeerLinks, emit: Callable[[Event], None], tasks: asyncio.TaskGroup, **others: Any
) -> ReplicaPorts:
    """Ports whose tasks run in the group; `others` are fields of ReplicaPorts."""
    metrics = StageServerMetrics("0", PROTOCOL_VERSION)
    return ReplicaPorts(device, links, emit, _store, _fetch, JobTasks(tasks), metrics, get_logger("test"), **others)
