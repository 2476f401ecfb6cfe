"""Where is the scheduler? A joiner needs only the broker's address: the scheduler announces itself there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from swarm.errors import IncompatibleVersion, SchedulerUnreachable
from swarm.limits import Bucket
from swarm.mqtt import topics
from swarm.mqtt.bus import Bus
from swarm.process.logs import get_logger
from swarm.text import is_address
from swarm.types import PROTOCOL_VERSION

ADDRESS_CHARACTERS_MAX = 255
# A broker sends what it retains once per subscription; one that stays silent is made again.
ASK_AGAIN_S = 2.0
COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE = 1 / 600, 3  # of announcements that are none, in one search
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A scheduler's announcement of itself: dial `address` (host:port); `epoch` counts its starts."""

    address: str
    epoch: int
    product: str = ""
    protocol: int = PROTOCOL_VERSION
    database: str = ""  # tells another start of the same scheduler from another scheduler

    def payload(self) -> dict[str, Any]:
        return asdict(self)


def parse_announcement(payload: Mapping[str, Any]) -> Announcement | None:
    """The announcement in a stranger's message; None if it is not one."""
    address, epoch = payload.get("address"), payload.get("epoch")
    product, protocol, database = payload.get("product", ""), payload.get("protocol"), payload.get("database", "")
    if not (isinstance(address, str) and len(address) <= ADDRESS_CHARACTERS_MAX and is_address(address)):
        return None
    if not (type(epoch) is int and type(protocol) is int and epoch >= 0):
        return None
    if not (isinstance(product, str) and isinstance(database, str)):
        return None
    return Announcement(address, epoch, product[:64], protocol, database[:64])


async def find_scheduler(
    url: str, *, swarm: str = topics.DEFAULT_SWARM, timeout_s: float | None = None
) -> Announcement:
    """The scheduler that is announced at the broker `url` under this name; waits until there is one.

    Raises SchedulerUnreachable after `timeout_s` (None: never), IncompatibleVersion if it speaks another protocol,
    InvalidConfig if the URL is not valid.
    """
    bus = Bus(url, "find-scheduler")
    link, complaints = asyncio.create_task(bus.run()), Bucket(COMPLAINTS_PER_S, COMPLAINTS_AT_ONCE)
    _log.info("waiting for the scheduler's announcement", broker=bus.endpoint.shown, topic=topics.scheduler(swarm))
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ASK_AGAIN_S):
                        return await _announced(bus, topics.scheduler(swarm), complaints)
    except TimeoutError:
        raise SchedulerUnreachable(
            f'no scheduler announced itself at {bus.endpoint.shown} as swarm "{swarm}" within {timeout_s:g} s'
            if bus.connected
            else f"the broker {bus.endpoint.shown} does not answer",
            hint="check that the broker and the scheduler run, or give --scheduler HOST:PORT",
        ) from None
    finally:
        while not link.done():  # more than once: a library below may swallow a cancellation
            link.cancel()
            await asyncio.wait({link}, timeout=0.2)


async def _announced(bus: Bus, topic: str, complaints: Bucket) -> Announcement:
    """The first announcement of a new subscription; IncompatibleVersion if the scheduler speaks another protocol."""
    messages = bus.subscribe(topic)
    try:
        async for _, payload in messages:
            if not payload:
                continue  # cleared: the scheduler has ended
            found = parse_announcement(payload)
            if found is None:
                if complaints.take(asyncio.get_running_loop().time()):
                    _log.warning("announcement is not one", topic=topic)
                continue
            if found.protocol != PROTOCOL_VERSION:
                raise IncompatibleVersion(
                    f"the scheduler at {found.address} speaks protocol {found.protocol}, this process "
                    f"{PROTOCOL_VERSION}",
                    hint="install the same version of swarm on both sides",
                )
            return found
        raise AssertionError("the subscription ended")
    finally:
        messages.close()
