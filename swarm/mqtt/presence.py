"""A scheduler's hold on its swarm's name at the broker.

    claim ─▶ no scheduler is announced, or it does not answer ─▶ hold: announce, again whenever it is lost
         └─▶ a living scheduler answers: NotAllowed

An announcement is retained, so it may be of a scheduler that is dead. Clearing it asks: a living scheduler notices, and
announces itself again.
"""

from __future__ import annotations

import asyncio

from swarm.errors import NotAllowed
from swarm.mqtt import topics
from swarm.mqtt.bus import Bus, Subscription
from swarm.mqtt.discovery import Announcement, parse_announcement
from swarm.process.logs import get_logger

LINK_S_MAX = 5.0  # a scheduler does not wait longer for a broker that is away
RETAINED_S = 0.5  # after a subscription was acknowledged
AGAIN_S = 1.0  # before announcing again: two schedulers that fell out must not flood the broker
ANSWER_S = 4.0  # more than AGAIN_S and a slow broker

_log = get_logger(__name__)


class Presence:
    """Keeps `announcement` the one that stage servers find under the swarm's name."""

    def __init__(self, bus: Bus, swarm: str, announcement: Announcement) -> None:
        self._bus = bus
        self._swarm = swarm
        self._topic = topics.scheduler(swarm)
        self._announcement = announcement

    async def claim(self) -> None:
        """NotAllowed if another living scheduler is announced; the bus must be running."""
        messages = self._bus.subscribe(self._topic)
        try:
            async with asyncio.timeout(LINK_S_MAX):
                await self._bus.settled()
            if await self._other(messages, RETAINED_S) is None:
                return
            self._bus.announce(self._topic, {})
            if (other := await self._other(messages, ANSWER_S)) is not None:
                raise NotAllowed(
                    f'the scheduler at {other.address} is announced as swarm "{self._swarm}" at '
                    f"{self._bus.endpoint.shown}",
                    hint="stop it, or choose another --swarm for this one and its stage servers",
                )
        except TimeoutError:
            _log.warning("broker does not answer: others on it are not known", broker=self._bus.endpoint.shown)
        finally:
            messages.close()

    async def hold(self) -> None:
        """Announce, and announce again whenever somebody cleared or overwrote it; for ever."""
        messages, ours = self._bus.subscribe(self._topic), self._announcement
        self._bus.announce(self._topic, ours.payload())
        async for _, payload in messages:
            found = parse_announcement(payload)
            if found == ours or (found is not None and self._is_ours(found) and found.epoch > ours.epoch):
                continue  # a later start on our database has fenced us off
            _log.warning(
                "announcement was lost: announces again",
                swarm=self._swarm,
                instead=found.address if found is not None else "",
            )
            await asyncio.sleep(AGAIN_S)
            self._bus.announce(self._topic, ours.payload())

    async def _other(self, messages: Subscription, wait_s: float) -> Announcement | None:
        """Another scheduler's announcement, if one comes within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                async for _, payload in messages:
                    found = parse_announcement(payload)
                    if found is not None and not self._is_ours(found):
                        return found
        except TimeoutError:
            pass
        return None

    def _is_ours(self, found: Announcement) -> bool:
        """Whether it is of this scheduler, or of an earlier or later start on the same database."""
        return bool(found.database) and found.database == self._announcement.database
