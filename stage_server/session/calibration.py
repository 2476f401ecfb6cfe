"""What an idle stage server measures of itself: its device with a layer and a head, and its line to the scheduler.

    a layer of width 1024, a head of 4096 tokens    microbatches of 128 tokens and more, while a pass is short
    its line                                        files of 256 KiB and more, while one is short

Passes and files are short, so that a job which wants this stage server waits for one at most. The best of each counts.
Not chosen: the model of a job, because speeds are wanted before a job is there; and the links to other stage servers,
because each pair would need passes: a job measures the links that it uses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import torch

from stage_server.device import Device
from stage_server.ports import BuildStage, FetchCall, StoreCall
from swarm.errors import OutOfMemory, SwarmError
from swarm.job.footprint import stage_footprint
from swarm.job.partition import stage_flops
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, parse_job
from swarm.limits import LINE_BYTES_MAX
from swarm.model.runtime import configure
from swarm.model.stage import Stage
from swarm.text import first_line
from swarm.types import NO_JOB, Memory, Microbatch, PeerId, Pieces
from swarm.wire.messages import Calibrate, Calibrated, FetchRequest, StoreHeader

WIDTH, VOCABULARY = 1024, 4096
SEQUENCES_MAX, SEQUENCES_MAX_OF_CPU = 256, 16  # of a microbatch
PASS_S, FILE_S = 0.1, 0.2  # a larger one is tried behind a shorter one than this
COMPUTING = 0.5  # of the time that there is
PING_BYTES = 1
FIGURES = ("multiply_adds_per_s", "up_bytes_per_s", "down_bytes_per_s", "receipt_s")


def standard(device: torch.device) -> JobSpec:
    """The job of one stage whose passes are timed."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 11 * WIDTH // 4, "num_attention_heads": 16}
    config = shape | {"num_hidden_layers": 1, "vocab_size": VOCABULARY}
    is_cpu = device.type == "cpu"
    most = SEQUENCES_MAX_OF_CPU if is_cpu else SEQUENCES_MAX
    values = {
        "name": "calibration",
        "model": {"config": config} | ({"dtype": "float32"} if is_cpu else {}),
        "data": {"source": "-", "sequence_length": 128},
        "training": {"optimizer": "sgd", "global_batch_sequences": most, "microbatch_sequences": most},
    }
    return resolve(parse_job(values), Basis(VOCABULARY, stages=1))


async def calibrate(
    command: Calibrate,
    device: Device,
    offered: Memory,
    build: BuildStage,
    fetch: FetchCall,
    store: StoreCall,
    me: tuple[PeerId, int],
) -> Calibrated:
    """Measure all that there is time for, once the layer is built. `me`: the peer and its incarnation."""
    found, faults, left_s = dict[str, float](), list[str](), command.seconds_max
    try:
        stage = await _built(device, offered, build)
        await _compute(device, stage, 1, found)  # however long: it also prepares
        left_s -= await _took_s(_within(COMPUTING * left_s, _enlarge(device, stage, found), faults))
        del stage
    except (SwarmError, RuntimeError) as error:  # as torch raises, too: a job tells whether it matters
        faults.append(first_line(error))
    finally:
        device.release()
    await device.run(lambda: None)  # a pass that was broken off goes on in its thread, and would slow the line
    try:
        await _within(left_s, _move(fetch, store, me, found), faults)
    except SwarmError as error:
        faults.append(error.message)
    return Calibrated(**{name: found.get(name, 0.0) for name in FIGURES}, fault="; ".join(faults))


async def _within(seconds: float, work: Awaitable[None], faults: list[str]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        faults.append(f"not done within {seconds:.3g} s")


async def _built(device: Device, offered: Memory, build: BuildStage) -> Stage:
    spec = standard(device.name)
    need = stage_footprint(spec, spec.layers, 0, 1).memory
    if not offered.holds(need):
        raise OutOfMemory(f"it takes {need.beside(offered)}, this stage server offers {offered}")

    def begin() -> Stage:
        configure(device.name, threads=None, reproducible=False)
        return build(spec, 0, device.name)

    return await device.run(begin)


async def _enlarge(device: Device, stage: Stage, found: dict[str, float]) -> None:
    """Compute larger and larger microbatches while that is short."""
    sequences, took_s = 1, 0.0
    while sequences <= standard(device.name).training.global_batch_sequences and took_s < PASS_S:
        for _ in range(2):  # the first one of a size also prepares
            took_s = await _compute(device, stage, sequences, found)
        sequences *= 2


async def _compute(device: Device, stage: Stage, sequences: int, found: dict[str, float]) -> float:
    """Seconds of a pass: multiply-adds of a forward count, over the time of forward and backward."""
    spec = standard(device.name)
    ids = torch.randint(0, VOCABULARY, (sequences, spec.data.sequence_length))
    took_s = (await device.timed(_pass(stage, ids))).seconds
    _raise(found, "multiply_adds_per_s", ids.numel() * sum(stage_flops(spec, spec.split)) / took_s)
    return took_s


def _raise(found: dict[str, float], name: str, figure: float) -> None:
    found[name] = max(figure, found.get(name, 0.0))


def _pass(stage: Stage, ids: torch.Tensor) -> Callable[[], bool]:
    """Forward and backward of a microbatch, as a job computes it."""

    def work() -> bool:
        where = Microbatch(0, 0, 0)
        stage.forward(where, 0, portion=0, tokens=ids, targets=ids)
        return stage.backward(where, accumulate=False)[1]

    return work


async def _move(fetch: FetchCall, store: StoreCall, me: tuple[PeerId, int], found: dict[str, float]) -> None:
    """Find out bytes per second to the scheduler and from it, and seconds of a message there and back."""

    async def up(size: int) -> None:
        await store(StoreHeader(NO_JOB, *me, 0, 0, 0, size), Pieces(bytes(size)))

    async def down(size: int) -> None:
        async with aclosing(fetch(FetchRequest(NO_JOB, 0, "", 0, size))) as chunks:
            async for _ in chunks:
                pass

    found["receipt_s"] = min([await _took_s(up(PING_BYTES)) for _ in range(3)])  # the first one dials
    for name, move in (("up_bytes_per_s", up), ("down_bytes_per_s", down)):
        size, took_s = LINE_BYTES_MAX // 16, 0.0
        while size <= LINE_BYTES_MAX and took_s < FILE_S:
            took_s = await _took_s(move(size))
            _raise(found, name, size / took_s)
            size *= 4


async def _took_s(work: Awaitable[None]) -> float:
    now_s = asyncio.get_running_loop().time
    began_s = now_s()
    await work
    return max(1e-6, now_s() - began_s)
