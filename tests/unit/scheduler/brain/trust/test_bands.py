"""Which tensors are of an unusual size: those far from the many before them, and those without a size."""

from __future__ import annotations

import math
from random import Random

import pytest

from scheduler.brain.trust.bands import LEARNED, SIGMAS, Bands
from swarm.types import Direction

FORWARD, BACKWARD = Direction


def learned(spread: float = 0.1, seed: int = 1, center: float = 3.0) -> Bands:
    bands, rng = Bands(), Random(seed)
    for _ in range(LEARNED):
        assert not bands.is_odd(0, FORWARD, center * math.exp(rng.gauss(0.0, spread)))
    return bands


def test_what_is_far_from_the_usual_is_odd_and_nothing_else_is() -> None:
    bands, rng = learned(), Random(2)
    assert not any(bands.is_odd(0, FORWARD, 3.0 * math.exp(rng.gauss(0.0, 0.1))) for _ in range(5000))
    for factor in (1000.0, 0.001, math.exp(0.1 * (SIGMAS + 2.0)), math.exp(-0.1 * (SIGMAS + 2.0))):
        assert learned().is_odd(0, FORWARD, 3.0 * factor), factor


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_what_has_no_size_is_odd_from_the_first_on_and_teaches_nothing(value: float) -> None:
    assert Bands().is_odd(0, FORWARD, value)
    bands = learned()
    for _ in range(1000):
        assert bands.is_odd(0, FORWARD, value)
    assert not bands.is_odd(0, FORWARD, 3.0)


def test_nothing_is_odd_that_has_a_size_until_the_usual_is_known() -> None:
    bands = Bands()
    assert not any(bands.is_odd(0, FORWARD, 10.0 ** (number % 9)) for number in range(LEARNED))


def test_each_link_and_direction_has_a_band_of_its_own() -> None:
    bands = learned()
    assert not bands.is_odd(0, BACKWARD, 3000.0)
    assert not bands.is_odd(1, FORWARD, 3000.0)
    assert bands.is_odd(0, FORWARD, 3000.0)


def test_a_liar_that_is_there_from_the_start_teaches_nothing() -> None:
    """By mean and deviation, a fifth of lies in the first values made all others of them usual."""
    bands, rng, found = Bands(), Random(4), 0
    for number in range(2 * LEARNED):
        is_lie = number % 5 == 0
        value = 3.0 * math.exp(rng.gauss(0.0, 0.1)) * (1000.0 if is_lie else 1.0)
        is_odd = bands.is_odd(0, FORWARD, value)
        assert not is_odd or is_lie
        found += is_odd
    assert found == len([number for number in range(LEARNED, 2 * LEARNED) if number % 5 == 0])


def test_a_band_follows_the_training_and_odd_ones_do_not_open_it() -> None:
    bands, rng, scale = learned(), Random(3), 3.0
    for _ in range(6000):
        scale *= 0.9995
        assert not bands.is_odd(0, FORWARD, scale * math.exp(rng.gauss(0.0, 0.1)))
    assert bands.is_odd(0, FORWARD, 3.0), "a twentieth is usual by now"
    for number in range(20):
        assert bands.is_odd(0, FORWARD, scale * 1e6), number


def test_where_all_are_alike_a_little_more_is_not_odd() -> None:
    assert not learned(spread=0.0).is_odd(0, FORWARD, 3.01)
    assert learned(spread=0.0).is_odd(0, FORWARD, 3.5)
