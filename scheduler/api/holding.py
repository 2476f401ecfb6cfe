"""Places of calls: one is held while a call lasts, and ends its call when it is needed for somebody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from scheduler.brain.members.persons import Person
from scheduler.brain.members.places import CallSlot, CallSlots
from swarm.errors import Crowded
from swarm.limits import PLACE_WAIT_S, READS_AT_ONCE, READS_MAX, READS_OF_ONE_MAX, READS_PER_S
from swarm.pki.names import Role


class Holding:
    """The calls that hold `places`."""

    def __init__(self, places: CallSlots) -> None:
        self._places = places
        self._calls: dict[CallSlot, asyncio.Timeout] = {}

    @asynccontextmanager
    async def held(self, person: Person) -> AsyncIterator[CallSlot]:
        """A place while the block runs; Crowded if there is none, or as soon as it is ended for others."""
        clock = asyncio.get_running_loop()
        try:
            place = self._places.take(person, clock.time())
        except Crowded:
            ended = self._places.end_one(clock.time())
            if ended is not None and not ended.is_sending:
                self._calls[ended].reschedule(clock.time())
            raise
        try:
            async with asyncio.timeout(None) as call:
                self._calls[place] = call
                yield place
        except TimeoutError:
            if not call.expired():
                raise
            _check(place)
        finally:
            self._calls.pop(place, None)
            self._places.leave(place)


@contextmanager
def sending(place: CallSlot) -> Iterator[None]:
    """Hand a message to gRPC within the block; Crowded, before it or after it, if the place is ended.

    gRPC tells a caller nothing if the call is cancelled while a message leaves. So a call whose caller does not read
    stays until it does, without its place.
    """
    _check(place)
    place.is_sending = True
    try:
        yield
    finally:
        place.is_sending = False
    _check(place)


def _check(place: CallSlot) -> None:
    if place.is_ended:
        raise Crowded(
            f"others, who had fewer, waited {PLACE_WAIT_S:g} s for this place",
            hint="call again: it goes on from where it was",
        )


class Reads:
    """Turns of readers: each call takes from the time in which the scheduler hears stage servers.

    A caller that reads oftener than a person does waits for the next turn, in its place. Admins do not wait, nor do
    callers over plaintext, who have no names.
    """

    def __init__(self) -> None:
        self._places = Holding(CallSlots(READS_MAX, READS_OF_ONE_MAX, "calls read"))
        self._booked_s: dict[Person, float] = {}  # until when turns are booked, if each took its share of time

    @asynccontextmanager
    async def turn(self, person: Person) -> AsyncIterator[CallSlot]:
        """A place while the block runs, which begins when it is the caller's turn; Crowded if there is no place,
        or once others need it."""
        async with self._places.held(person) as place:
            if person.name and person.role is not Role.ADMIN:
                now_s = asyncio.get_running_loop().time()
                booked_s = self._booked_s[person] = max(now_s, self._booked_s.get(person, now_s)) + 1.0 / READS_PER_S
                await asyncio.sleep(max(0.0, booked_s - now_s - READS_AT_ONCE / READS_PER_S))
            yield place
