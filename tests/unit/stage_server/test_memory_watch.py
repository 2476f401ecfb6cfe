"""A process that holds more than it offers gives back what nothing uses, then says so once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from stage_server.memory_watch import WATCH_S, watch_memory
from stage_server.metrics import StageServerMetrics
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION
from tests.support.devices import InlineDevice
from tests.support.sim import loop as sim

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
