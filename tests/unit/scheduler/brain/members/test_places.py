"""Places for callers: some for all, fewer for one."""

from __future__ import annotations

import pytest

from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.brain.members.places import Places
from swarm.errors import Crowded
from swarm.pki.names import Role

EVE, ANN, BOB = (Person(Role.VIEWER, name) for name in ("eve", "ann", "bob"))


def test_one_person_cannot_take_the_places_of_all_others() -> None:
    """A viewer watched a job 256 times, and nobody else could follow any."""
    places = Places(5, 2, "calls follow jobs")
    places.take(EVE)
    places.take(EVE)
    with pytest.raises(Crowded, match="2 of your calls follow jobs already"):
        places.take(EVE)
    places.take(ANN)
    places.take(ANN)
    places.take(BOB)
    with pytest.raises(Crowded, match="5 calls follow jobs already"):
        places.take(BOB)
    places.leave(EVE)
    places.take(BOB)


def test_a_place_is_left_with_the_block_also_by_an_error() -> None:
    places = Places(5, 1, "files wait")
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), places.taken(EVE):
            _ = 1 // 0
    with places.taken(EVE), pytest.raises(Crowded):
        places.take(EVE)
    places.take(EVE)


def test_over_plaintext_all_share_the_places_as_nobody_is_known() -> None:
    places = Places(3, 1, "files wait")
    for _ in range(3):
        places.take(ANYBODY)
    with pytest.raises(Crowded, match="3 files wait already"):
        places.take(ANYBODY)
