"""What a stage starts from, fetched: from the scheduler by Session.Fetch, or from the hub.

`swarm.model.state` says which bytes; here they come from somewhere. Tensors are decoded on the device's thread, so that
the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Protocol, TypeVar

from stage_server.device import Device
from swarm.hf.pretrained import hub_files
from swarm.job.spec import JobSpec
from swarm.messages import FetchRequest, LoadStage
from swarm.model.state import InitialState, StateReading, read_files, wanted_names
from swarm.process.logs import Logger

T = TypeVar("T")

# A download that takes long is announced this often, as a share of the job's patience: it is progress.
SIGN_OF_LIFE = 1 / 3


class FetchCall(Protocol):
    """Bytes of a file that the scheduler has for this job; gives exactly those that were asked for, or raises."""

    def __call__(self, request: FetchRequest) -> AsyncGenerator[bytes, None]: ...


async def load_initial(
    command: LoadStage, spec: JobSpec, device: Device, fetch: FetchCall, log: Logger
) -> InitialState | None:
    """The state that `command` asks to start from; None: weights are drawn from the seed.

    InvalidModel names file and tensor; SchedulerUnreachable if the session breaks meanwhile.
    """
    if command.files:
        return await _from_scheduler(command, spec, device, fetch, log)
    if spec.model.id and spec.model.init == "pretrained":
        return await _from_hub(command, spec, device, log)
    return None


async def _from_scheduler(
    command: LoadStage, spec: JobSpec, device: Device, fetch: FetchCall, log: Logger
) -> InitialState:
    reading = await device.run(lambda: StateReading(spec, command.stage, command.files, command.version))
    for span in reading.spans():
        request = FetchRequest(command.job, command.timeline, span.path, span.start, span.stop)
        async with aclosing(fetch(request)) as chunks:
            async for chunk in chunks:
                await device.run(lambda chunk=chunk: reading.feed(chunk))  # type: ignore[misc]
    log.info("weights read", read_bytes=reading.read_bytes, total_bytes=reading.total_bytes, files=len(command.files))
    return reading.state()


async def _from_hub(command: LoadStage, spec: JobSpec, device: Device, log: Logger) -> InitialState:
    model = spec.model
    log.info("reading the hub", model=model.id, revision=model.revision)
    wanted = await device.run(lambda: wanted_names(spec, command.stage))
    every_s = spec.limits.no_progress_s * SIGN_OF_LIFE
    files = await _announced(device.run(lambda: hub_files(spec, wanted)), every_s, log)
    state = await device.run(lambda: read_files(spec, command.stage, files, command.version))
    log.info("weights read", files=len(files), total_bytes=sum(file.size_bytes for file in files))
    return state


async def _announced(work: Awaitable[T], every_s: float, log: Logger) -> T:
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait({task}, timeout=every_s))[0]:
        log.info("still downloading weights")
    return task.result()
