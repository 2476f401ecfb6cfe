"""Places for callers: some for all, fewer for one, and the next free one for the person who has fewest."""

from __future__ import annotations

import pytest

from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.brain.members.places import CallSlot, CallSlots
from swarm.errors import Crowded
from swarm.limits import PLACE_WAIT_S
from swarm.pki.names import Role
from tests.support.situations import Calls, Situation, beside

EVE, ANN, BOB = (Person(Role.VIEWER, name) for name in ("eve", "ann", "bob"))
PEOPLE = {person.name: person for person in (EVE, ANN, BOB)}


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_places_are_taken_and_left_as_the_text_says(situation: Situation) -> None:
    people = {"eve": EVE, "ann": ANN, "bob": BOB, "anybody": ANYBODY}
    situation.check(Calls(None, CallSlots=CallSlots, refused=refused_for, **people).play)


def test_a_place_is_left_with_the_block_also_by_an_error() -> None:
    places = CallSlots(5, 1, "files wait")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), places.taken(EVE, 0.0):
            _ = 1 // 0
    with places.taken(EVE, 0.0), pytest.raises(Crowded):
        places.take(EVE, 0.0)
    places.take(EVE, 0.0)


def refused_for(places: CallSlots, person: Person, begin_s: float, end_s: float) -> None:
    """The person asks each second, and is refused."""
    for after_s in range(int(end_s - begin_s) + 1):
        with pytest.raises(Crowded):
            places.take(person, begin_s + after_s)


def held(places: CallSlots, *taken: tuple[str, float, int]) -> list[CallSlot]:
    """Places of persons by name, each with when it began and the bytes that moved."""
    found = []
    for name, since_s, moved_bytes in taken:
        found.append(places.take(PEOPLE[name], since_s))
        found[-1].moved_bytes = moved_bytes
    return found


@pytest.mark.parametrize(
    ("taken", "waits", "ended"),
    [
        ([("eve", 0, 900), ("eve", 0, 10), ("eve", 0, 500)], "ann", 1),  # the slowest
        ([("eve", 0, 0), ("eve", 5, 0), ("eve", 9, 0)], "ann", 0),  # of those that move no bytes the oldest
        ([("eve", 0, 900), ("eve", 29, 800), ("eve", 0, 500)], "ann", 2),  # in bytes a second, not in bytes
        ([("eve", 0, 9), ("eve", 0, 8), ("bob", 0, 0)], "ann", 1),  # of him who has most, not the slowest of all
        ([("eve", 0, 9), ("eve", 0, 8), ("ann", 0, 0)], "ann", None),  # it would only change who has more
        ([("eve", 0, 9), ("bob", 0, 8)], "ann", None),
        ([("eve", 0, 9), ("eve", 0, 1), ("bob", 0, 0), ("bob", 0, 0)], "ann", 2),  # the slowest of those with most
        ([("eve", 0, 9), ("eve", 0, 8), ("eve", 0, 7), ("ann", 0, 0)], "ann", 2),
        ([("eve", 0, 9), ("eve", 0, 8), ("eve", 0, 7)], "eve", None),
    ],
)
def test_the_place_that_is_ended_is_the_slowest_of_the_person_who_has_most(
    taken: list[tuple[str, float, int]], waits: str, ended: int | None
) -> None:
    """Two persons sent a byte now and then of sixteen files each, and nobody else could upload any for days."""
    places = CallSlots(len(taken), len(taken) + 1, "files wait")
    found = held(places, *taken)
    refused_for(places, PEOPLE[waits], 30.0, 30.0 + PLACE_WAIT_S)
    one = places.end_one(30.0 + PLACE_WAIT_S)
    assert one is (None if ended is None else found[ended])
    assert [place for place in found if place.is_ended] == ([] if one is None else [one])
