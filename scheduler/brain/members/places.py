"""Places that callers take for a while: some for all together, fewer for one caller.

Each free place is for the waiting caller with the fewest places. After too long a wait, a place of the person with the
most is ended; it counts for its holder until the holder leaves it. A caller that asks again within a few seconds is
waiting; others have given up.

Not chosen: an end for each place after a while, because it would break off long uploads for no waiting caller.

Decision: docs/decisions/113.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from scheduler.brain.members.persons import Person
from swarm.errors import Crowded
from swarm.limits import PLACE_ASKED_S, PLACE_WAIT_S


@dataclass(eq=False, slots=True)
class CallSlot:
    """A place that somebody has."""

    person: Person
    since_s: float
    moved_bytes: int = 0  # of files; a call that follows a job moves none
    is_sending: bool = False  # a message of its call is on its way
    is_ended: bool = False  # others have it: its holder is to leave

    def bytes_per_s(self, now_s: float) -> float:
        """The speed from its beginning on."""
        return self.moved_bytes / max(1.0, now_s - self.since_s)


@dataclass(slots=True)
class _Wait:
    """Somebody who was refused, as all places were taken."""

    since_s: float
    asked_s: float  # the last time


class CallSlots:
    """At most `most` places, `most_of_one` of them for one person; `what` says what they are, such as "files wait".

    Over plaintext callers have no names, so only `most` counts. Times are by one monotonic clock, in seconds.
    """

    def __init__(self, most: int, most_of_one: int, what: str) -> None:
        self._most, self._most_of_one, self._what = most, most_of_one, what
        self._taken: list[CallSlot] = []
        self._waits: dict[Person, _Wait] = {}

    @contextmanager
    def taken(self, person: Person, now_s: float) -> Iterator[None]:
        """A place while the block runs, which is never ended from outside; Crowded if there is none."""
        place = self.take(person, now_s)
        try:
            yield
        finally:
            self.leave(place)

    def take(self, person: Person, now_s: float) -> CallSlot:
        """Take a place; Crowded if there is none, or if callers with fewer places wait for the free ones."""
        counts = Counter(place.person for place in self._taken)
        if person.name and counts[person] >= self._most_of_one:
            raise Crowded(f"{self._most_of_one} of your {self._what} already", hint="end some of them")
        taken, waits = sum(not place.is_ended for place in self._taken), self._waiting(now_s)
        mine = waits.get(person) or _Wait(now_s, now_s)
        before = sum((counts[one], wait.since_s) < (counts[person], mine.since_s) for one, wait in waits.items())
        if taken + before >= self._most:
            mine.asked_s, waits[person] = now_s, mine
            many = f"{taken} {self._what} already"
            told = many if taken >= self._most else f"{many}, and others wait for the next place"
            raise Crowded(told, hint="try again in a moment")
        waits.pop(person, None)
        self._taken.append(place := CallSlot(person, now_s))
        return place

    def leave(self, place: CallSlot) -> None:
        """Give back a place that was taken."""
        self._taken.remove(place)

    def end_one(self, now_s: float) -> CallSlot | None:
        """The place to end now for a caller that has waited for PLACE_WAIT_S, if there is one.

        It is the slowest place of the person with the most places, if that is at least two more than the waiting person
        has; among equally slow places the oldest. Its holder is to leave.
        """
        counts = Counter(place.person for place in self._taken if not place.is_ended)
        due = sorted(
            (counts[person], wait.since_s)
            for person, wait in self._waiting(now_s).items()
            if now_s - wait.since_s >= PLACE_WAIT_S
        )
        free, most = self._most - counts.total(), max(counts.values(), default=0)
        if free >= len(due) or most < due[free][0] + 2:
            return None
        held = (place for place in self._taken if not place.is_ended and counts[place.person] == most)
        found = min(held, key=lambda place: (place.bytes_per_s(now_s), place.since_s))
        found.is_ended = True
        return found

    def _waiting(self, now_s: float) -> dict[Person, _Wait]:
        """Those who wait still."""
        self._waits = {person: wait for person, wait in self._waits.items() if now_s - wait.asked_s <= PLACE_ASKED_S}
        return self._waits
