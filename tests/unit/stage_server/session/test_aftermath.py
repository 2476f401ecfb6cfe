"""When the device is free of what released jobs left there."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from stage_server.device import ThreadDevice
from stage_server.session.aftermath import PATIENCE_S, Aftermath
from tests.support.devices import SimDevice
from tests.support.sim import loop as sim


def test_it_is_over_when_what_was_handed_over_before_is_done_and_long_after_a_while() -> None:
    async def main() -> None:
        device = SimDevice(lambda: 3 * PATIENCE_S)
        working = asyncio.ensure_future(device.work_forever())
        aftermath = Aftermath(device)
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
            aftermath = Aftermath(device)
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
