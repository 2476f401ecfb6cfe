"""Sends a stage's state to the scheduler while training goes on, or hashes the state that another replica sends.

    SaveStage ─▶ copy on the compute thread ─▶ one file after the other is built and sent beside it ─▶ Saved
    HashStage ─▶ the same copy              ─▶ one file after the other is built and hashed         ─▶ Hashed

Training waits for the copy only, which is all the memory that it takes: files are made of it in pieces.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from stage_server.device import Device
from stage_server.ports import Assignment, ReplicaId, ReplicaPorts, StoreCall
from swarm.errors import CorruptFrame, SchedulerUnreachable, StaleMessage, SwarmError
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.model.state import InitialState, files_of, parameter_hashes
from swarm.process.logs import Logger
from swarm.types import Pieces
from swarm.wire.messages import Hashed, HashStage, ParameterHash, Saved, SaveStage, StateFile, StoreHeader

ATTEMPTS = 2  # of a file that did not arrive as it was sent
STORE_AGAIN_S = 1.0


def capture(command: SaveStage | HashStage, stage: Stage, device: Device) -> Awaitable[InitialState]:
    """Queue the copy on the compute thread, now: after the commit that made the version and before any other."""

    def copy() -> InitialState:
        if stage.version != command.version:
            raise StaleMessage(f"asked for version {command.version}, this replica holds {stage.version}")
        return stage.capture(optimizer=command.optimizer)

    return device.run(copy)


class Saving:
    """The hand-over of one replica's state: one at a time, the newest."""

    def __init__(self, assignment: Assignment, stage: Stage, ports: ReplicaPorts) -> None:
        self._assignment, self._stage, self._ports = assignment, stage, ports
        self._task: asyncio.Task[None] | None = None

    def take(self, command: SaveStage | HashStage) -> None:
        """Begin. The copy is queued now: after the commit that made the version, before any other."""
        self.stop()
        captured = capture(command, self._stage, self._ports.device)
        self._task = self._ports.work.start(self._answer(command, captured))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _answer(self, command: SaveStage | HashStage, captured: Awaitable[InitialState]) -> None:
        spec, me, ports = self._assignment.spec, self._assignment.me, self._ports
        answer: Saved | Hashed
        if isinstance(command, SaveStage):
            answer = await hand_over(command, captured, spec, me, ports.device, self._store, ports.log)
        else:
            answer = await hashed(command, captured, spec, me, ports.device)
        ports.emit(answer)

    async def _store(self, header: StoreHeader, payload: Pieces) -> str:
        """Store, however long it takes until the scheduler can be reached."""
        while True:
            try:
                return await self._ports.store(header, payload)
            except (SchedulerUnreachable, StaleMessage) as error:  # the latter: it sees sooner that the session broke
                stage = self._assignment.me.stage
                self._ports.log.warning("stage not stored yet", stage=stage, reason=error.message)
                await asyncio.sleep(STORE_AGAIN_S)


async def hand_over(
    command: SaveStage,
    captured: Awaitable[InitialState],
    spec: JobSpec,
    me: ReplicaId,
    device: Device,
    store: StoreCall,
    log: Logger,
) -> Saved:
    """Send every file of the stage; gives the report: the weights' hashes, or the reason of the failure."""
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    parameters: tuple[ParameterHash, ...] = ()
    fault = ""
    sent_bytes = 0
    try:
        state = await captured
        parameters = await device.aside(lambda: parameter_hashes(state))
        files = files_of(spec, me.stage, state, optimizer=command.optimizer, island=command.island)
        while (made := await device.aside(lambda: next(files, None))) is not None:
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
    return Saved(command.job, command.timeline, command.version, me.stage, parameters, fault, command.again)


async def hashed(
    command: HashStage, captured: Awaitable[InitialState], spec: JobSpec, me: ReplicaId, device: Device
) -> Hashed:
    """Hashes of each file that `hand_over` would send, and of each weight; or the reason of the failure."""
    parameters: tuple[ParameterHash, ...] = ()
    found: list[StateFile] = []
    fault = ""
    try:
        state = await captured
        parameters = await device.aside(lambda: parameter_hashes(state))
        files = files_of(spec, me.stage, state, optimizer=command.optimizer)
        while (made := await device.aside(lambda: next(files, None))) is not None:
            path, payload = made
            found.append(StateFile(path, len(payload), await device.aside(payload.sha256)))
            del made, payload
    except SwarmError as error:
        parameters, found, fault = (), [], str(error)
    return Hashed(command.job, command.timeline, command.version, me.stage, tuple(found), parameters, fault)


async def _send(
    command: SaveStage, me: ReplicaId, path: str, payload: Pieces, device: Device, store: StoreCall
) -> None:
    sha256 = await device.aside(payload.sha256)
    header = StoreHeader(
        job=command.job,
        peer=me.peer,
        incarnation=me.incarnation,
        timeline=command.timeline,
        version=command.version,
        stage=me.stage,
        total_bytes=len(payload),
        path=path,
        sha256=sha256,
    )
    for _ in range(ATTEMPTS):
        if await store(header, payload) == sha256:
            return
    raise CorruptFrame(f"{path} arrived {ATTEMPTS} times with another sha256 than it was sent with")
