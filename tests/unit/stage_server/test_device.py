from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field

import pytest
import torch

from stage_server import app
from stage_server.device import PATIENCE_S, WATCH_S, DeviceDrain, ThreadDevice, watch_memory, with_room
from stage_server.metrics import StageServerMetrics
from stage_server.options import MemoryShare
from swarm.errors import OutOfMemory
from swarm.model.runtime import CONTEXT_BYTES, GPUS
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, Memory
from tests.support.devices import InlineDevice, SimDevice
from tests.support.sim import loop as sim


class Gpu:
    """torch's module for a GPU that is not there; notes which threads use it."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.emptied = 0

    def set_device(self, device: torch.device) -> None:
        self.threads.add(threading.current_thread().name.partition("_")[0])

    def empty_cache(self) -> None:
        self.emptied += 1


def starve(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("name", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("error", "on_host"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
    ],
)
async def test_every_way_of_running_out_of_memory_names_the_memory_and_a_way_out(
    name: str, error: Exception, on_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GPUS, "cuda", Gpu())
    device = ThreadDevice(torch.device(name), 1)
    short = "the host of cuda" if on_host and name == "cuda" else name
    with pytest.raises(OutOfMemory, match=f"^{short} has no memory left") as caught:
        await device.run(lambda: starve(error))
    assert "microbatch_sequences" in caught.value.hint
    assert ("optimizer_on" in caught.value.hint) == (short != name)
    device.close()


async def test_all_threads_use_the_gpu_on_which_the_stage_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the second GPU of a machine the other threads made contexts on the first."""
    monkeypatch.setitem(GPUS, "cuda", gpu := Gpu())
    device = ThreadDevice(torch.device("cuda", 1), 1)
    await device.run(lambda: None)
    await device.aside(lambda: None)
    assert gpu.threads == {"compute", "aside"}
    device.close()


@pytest.mark.parametrize(("name", "tries"), [("cpu", 1), ("cuda", 2)])
def test_a_gpu_without_memory_gets_one_more_try(name: str, tries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time ended the job, though a neighbour may have had the memory for a moment."""
    monkeypatch.setitem(GPUS, "cuda", gpu := Gpu())
    tried: list[bool] = []

    def work() -> None:
        tried.append(True)
        starve(torch.OutOfMemoryError("CUDA out of memory"))

    with pytest.raises(torch.OutOfMemoryError):
        with_room(work, torch.device(name))
    assert (len(tried), gpu.emptied) == (tries, tries - 1)


def test_a_fault_of_a_gpu_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GPUS, "cuda", gpu := Gpu())
    with pytest.raises(RuntimeError, match="illegal"):
        with_room(lambda: starve(RuntimeError("CUDA error: an illegal memory access")), torch.device("cuda"))
    assert gpu.emptied == 0


def test_a_gpu_is_offered_without_what_each_process_takes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on tensors alone let each process take half a GiB more than it offered."""
    monkeypatch.setattr(app, "free_bytes", lambda device: 10 << 30)
    monkeypatch.setattr(app, "total_bytes", lambda device: 16 << 30)
    share = MemoryShare.parse("8GiB")

    assert app._offered(share, torch.device("cpu")) == Memory(8 << 30, 0)
    assert app._offered(share, torch.device("cuda", 0)).device_bytes == (8 << 30) - CONTEXT_BYTES


async def test_another_error_stays_what_it_is() -> None:
    device = ThreadDevice(torch.device("cpu"), 1)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        await device.run(lambda: starve(RuntimeError("shapes do not fit")))
    device.close()


@pytest.mark.parametrize("device", [ThreadDevice(torch.device("cpu"), 1), InlineDevice(lambda: 0.001)])
async def test_work_is_done_in_the_order_of_the_calls(device: ThreadDevice | InlineDevice) -> None:
    done: list[int] = []
    for number in range(50):
        device.run(lambda number=number: done.append(number))  # type: ignore[misc]
    timed = await device.timed(lambda: "last")
    assert done == list(range(50))
    assert timed.result == "last"
    assert timed.seconds >= 0
    await asyncio.sleep(0.01)


async def test_the_compute_thread_has_its_own_number_of_threads() -> None:
    device = ThreadDevice(torch.device("cpu"), 3)
    assert await device.run(torch.get_num_threads) == 3
    device.close()


def test_it_is_over_when_what_was_handed_over_before_is_done_and_long_after_a_while() -> None:
    async def main() -> None:
        device = SimDevice(lambda: 3 * PATIENCE_S)
        working = asyncio.ensure_future(device.work_forever())
        aftermath = DeviceDrain(device)
        assert aftermath.is_over
        await aftermath.over()

        device.timed(lambda: None)
        aftermath.begin()
        await asyncio.sleep(PATIENCE_S - 1.0)
        assert not aftermath.is_over
        assert not aftermath.is_long
        aftermath.begin()  # a second job was released: the first one is still in its way
        await asyncio.sleep(1.0)
        assert aftermath.is_long
        began_s = asyncio.get_running_loop().time()
        await aftermath.over()
        assert asyncio.get_running_loop().time() - began_s == 2 * PATIENCE_S
        assert aftermath.is_over
        assert not aftermath.is_long

        aftermath.begin()
        await asyncio.sleep(0.1)
        assert aftermath.is_over, "an idle device is free at once"
        working.cancel()

    sim.run(main(), seed=1, limit_s=3600.0)


def test_it_waits_for_a_computation_that_has_begun_on_the_compute_thread() -> None:
    async def main() -> None:
        device, begun, free = ThreadDevice(torch.device("cpu"), 1), threading.Event(), threading.Event()
        try:
            aftermath = DeviceDrain(device)
            computing = device.run(lambda: (begun.set(), free.wait()))
            await asyncio.to_thread(begun.wait)
            computing.cancel()  # type: ignore[attr-defined]  # as the tasks of a released job are
            aftermath.begin()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(aftermath.over(), 0.05)
            free.set()
            await aftermath.over()
            assert aftermath.is_over
        finally:
            free.set()
            device.close()

    asyncio.run(main())


OFFERED = 100
EXCEEDED = "swarm_device_memory_exceeded_total"


@dataclass
class Process:
    """Holds memory, some of which nothing uses."""

    held: int = 0
    unused: int = 0
    released: int = 0
    metrics: StageServerMetrics = field(default_factory=lambda: StageServerMetrics("0", PROTOCOL_VERSION))

    def device(self) -> InlineDevice:
        process = self

        class Releasing(InlineDevice):
            def release(self) -> None:
                process.released += 1
                process.held -= process.unused
                process.unused = 0

        return Releasing(lambda: 0.0)

    @property
    def warnings(self) -> float:
        return self.metrics.registry.get_sample_value(EXCEEDED) or 0.0


def watched(*held: tuple[int, int]) -> Process:
    """A process after it has held and used these amounts, each for a minute."""
    process = Process()

    async def main() -> None:
        watching = asyncio.ensure_future(
            watch_memory(lambda: process.held, OFFERED, process.device(), process.metrics, get_logger("test"))
        )
        for amount, unused in held:
            process.held, process.unused = amount, unused
            await asyncio.sleep(12 * WATCH_S)
        watching.cancel()

    sim.run(main(), seed=1, limit_s=3600.0)
    return process


def test_what_is_within_the_offer_is_left_alone() -> None:
    process = watched((OFFERED, 50))
    assert (process.released, process.warnings) == (0, 0)


def test_memory_that_nothing_uses_is_given_back_without_a_warning() -> None:
    process = watched((OFFERED + 1, 50))
    assert (process.released, process.warnings, process.held) == (1, 0, OFFERED - 49)


def test_an_excess_is_told_once_until_it_is_over() -> None:
    assert watched((OFFERED + 1, 0)).warnings == 1
    assert watched((OFFERED + 1, 0), (OFFERED, 0), (OFFERED + 1, 0)).warnings == 2
