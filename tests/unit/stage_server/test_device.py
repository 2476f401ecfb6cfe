from __future__ import annotations

import asyncio

import pytest
import torch

from stage_server.device import ThreadDevice
from swarm.errors import OutOfMemory
from tests.support.devices import InlineDevice


def starve(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
async def test_every_way_of_running_out_of_memory_is_one_error_with_a_hint(error: Exception) -> None:
    device = ThreadDevice(torch.device("cpu"), 1)
    with pytest.raises(OutOfMemory, match="cpu has no memory left") as caught:
        await device.run(lambda: starve(error))
    assert "microbatch_sequences" in caught.value.hint
    device.close()


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
