"""Turns of readers: each call takes from the time in which the scheduler hears stage servers.

A caller that reads oftener than a person does waits for the next turn. A place is for a call from its beginning to its
end, also while it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from scheduler.api.holding import Holding
from scheduler.brain.members.persons import Person
from scheduler.brain.members.places import Place, Places
from swarm.limits import READS_AT_ONCE, READS_MAX, READS_OF_ONE_MAX, READS_PER_S
from swarm.pki.names import Role


class Reads:
    """Gives each caller turns. Admins do not wait, nor do callers over plaintext, who have no names."""

    def __init__(self) -> None:
        self._places = Holding(Places(READS_MAX, READS_OF_ONE_MAX, "calls read"))
        self._booked_s: dict[Person, float] = {}  # until when turns are booked, if each took its share of time

    @asynccontextmanager
    async def turn(self, person: Person) -> AsyncIterator[Place]:
        """A place while the block runs, which begins when it is the caller's turn; Crowded if there is no place,
        or once others need it."""
        async with self._places.held(person) as place:
            if person.name and person.role is not Role.ADMIN:
                now_s = asyncio.get_running_loop().time()
                booked_s = self._booked_s[person] = max(now_s, self._booked_s.get(person, now_s)) + 1.0 / READS_PER_S
                await asyncio.sleep(max(0.0, booked_s - now_s - READS_AT_ONCE / READS_PER_S))
            yield place
