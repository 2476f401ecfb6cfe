"""Places that callers take for a while: some for all together, fewer for one, so that nobody takes all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.brain.members.persons import Person
from swarm.errors import Crowded


class Places:
    """At most `most` places, `most_of_one` of them for one person; `what` says what they are, such as "files wait".

    Over plaintext nobody is known, so only `most` counts.
    """

    def __init__(self, most: int, most_of_one: int, what: str) -> None:
        self._most, self._most_of_one, self._what = most, most_of_one, what
        self._taken: Counter[Person] = Counter()

    @contextmanager
    def taken(self, person: Person) -> Iterator[None]:
        """A place while the block runs; Crowded if there is none."""
        self.take(person)
        try:
            yield
        finally:
            self.leave(person)

    def take(self, person: Person) -> None:
        """Take a place; Crowded if there is none."""
        if person.name and self._taken[person] >= self._most_of_one:
            raise Crowded(f"{self._most_of_one} of your {self._what} already", hint="end some of them")
        if self._taken.total() >= self._most:
            raise Crowded(f"{self._most} {self._what} already", hint="try again in a moment")
        self._taken[person] += 1

    def leave(self, person: Person) -> None:
        """Give back a place that was taken."""
        self._taken[person] -= 1
        if not self._taken[person]:
            del self._taken[person]
