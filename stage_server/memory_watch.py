"""Watches how much memory this process holds beyond the memory that it offers (`--max-memory`).

Decision: docs/decisions/017.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from stage_server.device import Device
from stage_server.metrics import StageServerMetrics
from swarm.process.logs import Logger
from swarm.text import size

WATCH_S = 5.0


async def watch_memory(
    used_bytes: Callable[[], int], offered_bytes: int, device: Device, metrics: StageServerMetrics, log: Logger
) -> None:
    """Over the offer: give back what nothing uses. If that is not enough, warn and count, once until it is."""
    is_over = False
    while True:
        await asyncio.sleep(WATCH_S)
        if used_bytes() <= offered_bytes:
            is_over = False
        elif not is_over:
            device.release()
            await asyncio.sleep(WATCH_S)
            held = used_bytes()
            is_over = held > offered_bytes
            if is_over:
                metrics.memory_exceeded()
                log.warning(
                    f"this process holds {size(held)}, more than the {size(offered_bytes)} that it "
                    "offers: use more stages, or a smaller model",
                )
