"""Building a stage: from the job's seed, or from files of the scheduler (Session.Fetch) or the hub.

`swarm.model.state` says which bytes are needed. Headers are parsed and tensors decoded on the device's thread, so the
event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from typing import TypeVar

from stage_server.device import Device
from stage_server.ports import Assignment, FetchCall, ReplicaPorts
from stage_server.state.donor import chunks_of
from swarm.hf.pretrained import hub_files
from swarm.job.spec import JobSpec
from swarm.model.compiled import compile_layers
from swarm.model.probe import probe_digest
from swarm.model.runtime import configure, is_slow_at_bfloat16, step_device
from swarm.model.stage import Stage
from swarm.model.state import InitialState, StateReading, read_files, wanted_names
from swarm.process.logs import Logger
from swarm.wire.messages import FetchRequest, Loaded, LoadStage, UnitSize

T = TypeVar("T")

# What takes long is logged this often, as a share of limits.no_progress_s: it counts as progress.
SIGN_OF_LIFE = 1 / 3


async def build_stage(assignment: Assignment, ports: ReplicaPorts) -> tuple[Stage, Loaded]:
    """Build the stage on the device; gives it and its report. Raises OutOfMemory, InvalidModel."""
    command, spec, device, log = assignment.command, assignment.spec, ports.device, ports.log
    initial = await load_initial(command, spec, ports)
    stage, probe = await build_and_probe(assignment, ports, initial)
    digest = await device.run(stage.digest)
    if spec.model.dtype != "float32" and is_slow_at_bfloat16(device.name):
        told = 'its CPU has no bfloat16 instructions, and float32 is many times as fast: set model.dtype = "float32"'
        log.warning(f"{assignment.me.peer}: {told}")
    log.info("stage loaded", stage=command.stage, layers=command.split[command.stage], device=str(device.name))
    return stage, Loaded(
        command.job, command.timeline, command.stage, stage.version, digest, unit_sizes(stage), probe, command.join
    )


async def build_and_probe(
    assignment: Assignment, ports: ReplicaPorts, initial: InitialState | None
) -> tuple[Stage, str]:
    """Build the stage on the compute thread; gives it, and the digest of the optimizer's step on a fixed input."""
    command, spec, device, log = assignment.command, assignment.spec, ports.device.name, ports.log

    def build() -> tuple[Stage, str]:
        configure(device, threads=None, reproducible=spec.training.reproducible)
        stage = ports.build(spec, command.stage, device, initial, step_on=command.step_on)
        chunks_of(stage)  # here, and not on the event loop
        return stage, probe_digest(spec.training, step_device(device, command.step_on))

    stage, probe = await ports.device.run(build)
    if spec.model.compile:
        every_s = spec.limits.no_progress_s * SIGN_OF_LIFE
        compiling = ports.device.run(lambda: compile_layers([stage], spec))
        if fault := await _announced(compiling, "still compiling the layers", every_s, log):
            log.warning(f"{assignment.me.peer} cannot compile layers and computes them as they are: {fault}")
    return stage, probe


def unit_sizes(stage: Stage) -> tuple[UnitSize, ...]:
    return tuple(UnitSize(name, layout.elements) for name, layout in stage.units.items())


async def load_initial(command: LoadStage, spec: JobSpec, ports: ReplicaPorts) -> InitialState | None:
    """The state that `command` asks to start from; None: weights are drawn from the seed.

    InvalidModel names file and tensor; NotAllowed if this stage server does not load that model from the hub;
    SchedulerUnreachable if the session breaks meanwhile.
    """
    if command.files:
        return await _from_scheduler(command, spec, ports.device, ports.fetch, ports.log)
    if spec.model.id and spec.model.init == "pretrained":
        ports.hub.check(spec.model.id)
        return await _from_hub(command, spec, ports)
    return None


async def _from_scheduler(
    command: LoadStage, spec: JobSpec, device: Device, fetch: FetchCall, log: Logger
) -> InitialState:
    reading = await device.run(lambda: StateReading(spec, command.stage, command.files, command.version))
    spans = reading.spans()
    while (span := await device.run(lambda: next(spans, None))) is not None:  # it parses headers in between
        request = FetchRequest(command.job, command.timeline, span.path, span.start, span.stop)
        async with aclosing(fetch(request)) as chunks:
            async for chunk in chunks:
                await device.run(lambda chunk=chunk: reading.feed(chunk))  # type: ignore[misc]
    log.info("weights read", read_bytes=reading.read_bytes, total_bytes=reading.total_bytes, files=len(command.files))
    return await device.run(reading.state)


async def _from_hub(command: LoadStage, spec: JobSpec, ports: ReplicaPorts) -> InitialState:
    model, device, log, token = spec.model, ports.device, ports.log, ports.hub.with_token
    log.info("reading the hub", model=model.id, revision=model.revision)
    wanted = await device.run(lambda: wanted_names(spec, command.stage))
    every_s = spec.limits.no_progress_s * SIGN_OF_LIFE
    downloading = device.run(lambda: hub_files(spec, wanted, with_token=token))
    files = await _announced(downloading, "still downloading weights", every_s, log)
    state = await device.run(lambda: read_files(spec, command.stage, files, command.version))
    log.info("weights read", files=len(files), total_bytes=sum(file.size_bytes for file in files))
    return state


async def _announced(work: Awaitable[T], sign_of_life: str, every_s: float, log: Logger) -> T:
    """The result of `work`, which is dropped on cancellation; a log line every `every_s` meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=every_s))[0]:
            log.info(sign_of_life)
        return task.result()
    finally:
        task.cancel()  # work that has begun goes on, and a fault of it would be an exception that nobody retrieves
