"""A scheduler's hold on its swarm's name at the broker.

    claim ─▶ no scheduler is announced, or it does not answer ─▶ hold: announce, again whenever it is lost
         └─▶ a living scheduler answers: NotAllowed

An announcement is retained, so it may be of a scheduler that is dead. Clearing it asks: a living scheduler notices, and
announces itself again.

The first answer comes after a second. While the announcement is lost again and again, each pause is twice the last one,
up to a minute, and a scheduler that asks waits for longer than that. Not chosen: an answer to each message, because any
writer at the broker could make the scheduler write for ever.
"""

from __future__ import annotations

import asyncio
import math

from swarm.errors import NotAllowed
from swarm.limits import Bucket
from swarm.mqtt import topics
from swarm.mqtt.bus import Bus, Subscription
from swarm.mqtt.discovery import Announcement, parse_announcement
from swarm.process.logs import get_logger

LINK_S_MAX = 5.0  # a scheduler does not wait longer for a broker that is away
RETAINED_S = 0.5  # after a subscription was acknowledged
AGAIN_S, AGAIN_S_MAX = 1.0, 60.0  # before announcing again: two schedulers that fell out must not flood the broker
LEFT_ALONE_S = 60.0  # then the next answer is a first one
ANSWER_S = 64.0  # more than AGAIN_S_MAX and a slow broker
WARNINGS_PER_S, WARNINGS_AT_ONCE = 1 / 600, 3

_log = get_logger(__name__)


class Answers:
    """Decides when an announcement that was lost is made again. Times are of one clock, in seconds."""

    def __init__(self) -> None:
        self.due_s: float | None = None  # when to announce; None: nothing is lost
        self._pause_s = AGAIN_S  # before the next answer
        self._answered_s = -math.inf

    def lost(self, now_s: float) -> None:
        """Somebody cleared or overwrote the announcement; if it is lost already, its answer comes as planned."""
        if self.due_s is not None:
            return
        if now_s - self._answered_s >= LEFT_ALONE_S:
            self._pause_s = AGAIN_S
        self.due_s = now_s + self._pause_s

    def found(self) -> None:
        """The announcement is there: nothing is to be answered."""
        self.due_s = None

    def answered(self, now_s: float) -> None:
        """It was made again."""
        self.due_s, self._answered_s, self._pause_s = None, now_s, min(2 * self._pause_s, AGAIN_S_MAX)


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
            if (told := await self._other(messages, RETAINED_S)) is None:
                return
            _log.info("another scheduler is announced: asks if it lives", address=told.address, wait_s_max=ANSWER_S)
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
        loop, answers, warnings = asyncio.get_running_loop(), Answers(), Bucket(WARNINGS_PER_S, WARNINGS_AT_ONCE)
        instead, times = "", 0
        self._bus.announce(self._topic, ours.payload())
        while True:
            if answers.due_s is not None and loop.time() >= answers.due_s:
                if warnings.take(loop.time()):
                    _log.warning(
                        "announcement was lost: announces again", swarm=self._swarm, instead=instead, times=times
                    )
                    times = 0
                self._bus.announce(self._topic, ours.payload())
                answers.answered(loop.time())
            try:
                async with asyncio.timeout_at(answers.due_s):
                    _, payload = await anext(messages)
            except TimeoutError:
                continue
            found = parse_announcement(payload)
            if found == ours:
                answers.found()
                continue
            instead, times = found.address if found is not None else "", times + 1
            answers.lost(loop.time())

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
