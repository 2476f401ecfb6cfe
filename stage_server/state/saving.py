"""Handing a stage's state to the scheduler while training goes on.

    SaveStage ─▶ copy on the compute thread ─▶ one file after the other is built and sent beside it ─▶ Saved

Training waits for the copy only. Memory: the copy (see Stage.capture) and the bytes of one file at a time, the largest
of which is the stage's weights.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator

from stage_server.device import Device
from stage_server.ports import ReplicaId, StoreCall
from swarm.errors import CorruptFrame, StaleMessage, SwarmError
from swarm.events import ParameterHash, Saved
from swarm.job.spec import JobSpec
from swarm.messages import SaveStage, StoreHeader
from swarm.model.stage import Stage
from swarm.model.state import InitialState, files_of, parameter_hashes
from swarm.process.logs import Logger

ATTEMPTS = 2  # of a file that did not arrive as it was sent


def capture(command: SaveStage, stage: Stage, device: Device) -> Awaitable[InitialState]:
    """Queue the copy on the compute thread, now: after the commit that made the version and before any other."""

    def copy() -> InitialState:
        if stage.version != command.version:
            raise StaleMessage(f"asked for version {command.version}, this replica holds {stage.version}")
        return stage.capture(optimizer=command.optimizer)

    return device.run(copy)


async def hand_over(
    command: SaveStage,
    captured: Awaitable[InitialState],
    spec: JobSpec,
    me: ReplicaId,
    device: Device,
    store: StoreCall,
    log: Logger,
) -> Saved:
    """Send every file of the stage; gives what to tell the scheduler: the weights' hashes, or why it went wrong."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    parameters: tuple[ParameterHash, ...] = ()
    fault = ""
    sent_bytes = 0
    try:
        state = await captured
        parameters = await device.aside(lambda: parameter_hashes(state))
        files = files_of(spec, me.stage, state, optimizer=command.optimizer)
        while (made := await device.aside(_next(files))) is not None:
            path, payload = made
            await _send(command, me, path, payload, device, store)
            sent_bytes += len(payload)
            del made, payload
        log.info(
            "stage saved", stage=me.stage, step=command.version, size_bytes=sent_bytes, seconds=loop.time() - started_s
        )
    except SwarmError as error:
        log.warning("stage not saved", stage=me.stage, step=command.version, reason=str(error))
        parameters, fault = (), str(error)
    return Saved(command.job, command.timeline, command.version, me.stage, parameters, fault)


async def _send(command: SaveStage, me: ReplicaId, path: str, payload: bytes, device: Device, store: StoreCall) -> None:
    sha256 = await device.aside(lambda: hashlib.sha256(payload).hexdigest())
    header = StoreHeader(
        job=command.job,
        peer=me.peer,
        incarnation=me.incarnation,
        timeline=command.timeline,
        version=command.version,
        stage=me.stage,
        total_bytes=len(payload),
        path=path,
    )
    for _ in range(ATTEMPTS):
        if await store(header, payload) == sha256:
            return
    raise CorruptFrame(f"{path} arrived {ATTEMPTS} times with another sha256 than it was sent with")


def _next(files: Iterator[tuple[str, bytes]]) -> Callable[[], tuple[str, bytes] | None]:
    return lambda: next(files, None)
