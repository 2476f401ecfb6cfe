"""Places for callers: some for all, fewer for one, and the next free one for the person who has fewest."""

from __future__ import annotations

import pytest

from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.brain.members.places import CallSlot, CallSlots
from swarm.errors import Crowded
from swarm.limits import PLACE_ASKED_S, PLACE_WAIT_S
from swarm.pki.names import Role

EVE, ANN, BOB = (Person(Role.VIEWER, name) for name in ("eve", "ann", "bob"))
PEOPLE = {person.name: person for person in (EVE, ANN, BOB)}


def test_one_person_cannot_take_the_places_of_all_others() -> None:
    """A viewer watched a job 256 times, and nobody else could follow any."""
    places = CallSlots(5, 2, "calls follow jobs")
    first, _ = places.take(EVE, 0.0), places.take(EVE, 0.0)
    with pytest.raises(Crowded, match="2 of your calls follow jobs already"):
        places.take(EVE, 0.0)
    places.take(ANN, 0.0)
    places.take(ANN, 0.0)
    places.take(BOB, 0.0)
    with pytest.raises(Crowded, match="5 calls follow jobs already"):
        places.take(BOB, 0.0)
    places.leave(first)
    places.take(BOB, 0.0)


def test_a_place_is_left_with_the_block_also_by_an_error() -> None:
    places = CallSlots(5, 1, "files wait")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), places.taken(EVE, 0.0):
            _ = 1 // 0
    with places.taken(EVE, 0.0), pytest.raises(Crowded):
        places.take(EVE, 0.0)
    places.take(EVE, 0.0)


def test_over_plaintext_all_share_the_places_as_nobody_is_known() -> None:
    places = CallSlots(3, 1, "files wait")
    for _ in range(3):
        places.take(ANYBODY, 0.0)
    with pytest.raises(Crowded, match="3 files wait already"):
        places.take(ANYBODY, 0.0)
    refused_for(places, ANYBODY, 0.0, PLACE_WAIT_S)
    assert places.end_one(PLACE_WAIT_S) is None


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


def test_no_place_is_ended_before_somebody_has_waited_long_enough() -> None:
    places = CallSlots(2, 2, "files wait")
    held(places, ("eve", 0, 0), ("eve", 0, 0))
    refused_for(places, ANN, 0.0, PLACE_WAIT_S - 1.0)
    assert places.end_one(PLACE_WAIT_S - 1.0) is None
    refused_for(places, ANN, PLACE_WAIT_S, PLACE_WAIT_S)
    assert places.end_one(PLACE_WAIT_S) is not None


def test_who_does_not_ask_again_does_not_wait() -> None:
    places = CallSlots(2, 2, "files wait")
    first, _ = held(places, ("eve", 0, 0), ("eve", 0, 0))
    refused_for(places, ANN, 0.0, PLACE_WAIT_S)
    assert places.end_one(PLACE_WAIT_S + PLACE_ASKED_S + 0.1) is None
    refused_for(places, ANN, PLACE_WAIT_S + PLACE_ASKED_S + 0.1, PLACE_WAIT_S + PLACE_ASKED_S + 0.1)
    assert places.end_one(PLACE_WAIT_S + PLACE_ASKED_S + 0.1) is None, "the wait began anew"
    places.leave(first)
    with pytest.raises(Crowded, match="1 files wait already, and others wait"):
        places.take(EVE, 40.0)
    places.take(EVE, 60.0)


def test_one_place_is_ended_for_one_who_waits() -> None:
    places = CallSlots(4, 4, "files wait")
    held(places, *[("eve", 0, 0)] * 4)
    refused_for(places, ANN, 0.0, PLACE_WAIT_S)
    ended = places.end_one(PLACE_WAIT_S)
    assert ended is not None
    assert places.end_one(PLACE_WAIT_S + 1.0) is None, "he has not come yet"
    refused_for(places, BOB, PLACE_WAIT_S + 2.0, PLACE_WAIT_S + 2.0)
    assert places.end_one(PLACE_WAIT_S + 2.0) is None, "he has not waited for long"
    places.take(ANN, PLACE_WAIT_S + 3.0)
    with pytest.raises(Crowded, match="4 files wait"):
        places.take(BOB, PLACE_WAIT_S + 3.0)


def test_a_place_that_was_ended_counts_for_its_holder_until_he_leaves_it() -> None:
    """Else a person who does not read what he asked for would have more and more calls."""
    places = CallSlots(2, 2, "files wait")
    held(places, ("eve", 0, 0), ("eve", 0, 0))
    refused_for(places, ANN, 0.0, PLACE_WAIT_S)
    ended = places.end_one(PLACE_WAIT_S)
    assert ended is not None
    first = places.take(ANN, PLACE_WAIT_S)
    places.leave(first)
    with pytest.raises(Crowded, match="2 of your files"):
        places.take(EVE, PLACE_WAIT_S + 1.0)
    places.leave(ended)
    places.take(EVE, PLACE_WAIT_S + 1.0)


def test_a_place_that_was_ended_is_for_the_person_who_waited() -> None:
    """The person whose upload was ended dialled again at once, before the one who had waited."""
    places = CallSlots(3, 3, "files wait")
    held(places, *[("eve", 0, 0)] * 3)
    refused_for(places, ANN, 0.0, PLACE_WAIT_S)
    ended = places.end_one(PLACE_WAIT_S)
    assert ended is not None
    places.leave(ended)
    with pytest.raises(Crowded, match="2 files wait already, and others wait for the next place"):
        places.take(EVE, PLACE_WAIT_S)
    with pytest.raises(Crowded):
        places.take(BOB, PLACE_WAIT_S)
    places.take(ANN, PLACE_WAIT_S + 0.5)
    refused_for(places, BOB, PLACE_WAIT_S + 1.0, PLACE_WAIT_S + 1.0)


def test_whoever_waits_longer_is_first_among_those_who_have_as_many() -> None:
    places = CallSlots(1, 1, "files wait")
    (first,) = held(places, ("eve", 0, 0))
    refused_for(places, ANN, 0.0, 0.0)
    refused_for(places, BOB, 1.0, 1.0)
    places.leave(first)
    refused_for(places, BOB, 2.0, 2.0)
    places.take(ANN, 2.0)
