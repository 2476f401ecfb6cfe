"""The shapes in which counting islands are played, and from which seeds.

`make test` plays each shape once, from the seed with which most islands are lost, come back and are asked again.
`make test-all` plays it from all seeds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
from _pytest.mark.structures import ParameterSet

from tests.simulation.engine.islands import History, Shape, play
from tests.support.effort import seeds

STILL_S = 60.0


@dataclass(frozen=True, slots=True)
class Plays:
    """A shape, and from which seeds it is played."""

    shape: Shape
    below: int  # all of these
    kept: int  # this one in `make test`
    too: tuple[int, ...] = ()  # and these, where one play does not show all

    @property
    def tried(self) -> tuple[int, ...]:
        """The seeds of this run."""
        return seeds(self.below, self.kept, *self.too)


_HELD_UP = Shape(islands=3, steps=12, still_s=STILL_S)
_SPLIT, _FROZEN = replace(_HELD_UP, splits=10), replace(_HELD_UP, freezes=10)
_SLOW = Shape(steps=12, slow=80, deaths=3, failures=20, restarts=3)
_BACK = Shape(steps=24, losses=8, arrivals=30, fetch=40)  # a joiner needs more turns for the state than a step takes


def streaming(shape: Shape) -> Shape:
    return replace(shape, steps=18, lease=6, fragments=2, overlap=2, late=1)


def by_speed(shape: Shape) -> Shape:
    return replace(shape, by_speed=True)


def hard(shape: Shape) -> Shape:
    return replace(shape, replicas=4, steps=16, every=4, deaths=3, failures=10, restarts=3, refusals=50)


PLAYS: Mapping[str, Plays] = {
    # Stage servers die, exchanges fail, schedulers are restarted.
    "calm": Plays(Shape(), 4, 0),
    "alone": Plays(Shape(islands=1, replicas=1, steps=4, lease=3), 4, 0),
    "short-lease": Plays(Shape(islands=3, replicas=1, steps=3, lease=1), 4, 0),
    "deaths": Plays(Shape(replicas=3, deaths=15), 4, 1),
    "failures": Plays(Shape(failures=100, deaths=5), 4, 3),
    "restarts": Plays(Shape(restarts=15), 4, 0),
    "all-of-these": Plays(Shape(islands=3, replicas=3, failures=50, deaths=5, restarts=10), 4, 1),
    "every-step": Plays(Shape(steps=9, every=1), 4, 1),
    "by-clock": Plays(Shape(steps=9, lease=3, every_s=0.1), 4, 0),
    "refusals": Plays(Shape(islands=3, replicas=3, steps=9, every=3, refusals=300, deaths=10, restarts=5), 4, 0),
    "streaming": Plays(Shape(steps=9, lease=4, fragments=2, overlap=1), 4, 0),
    "three-fragments": Plays(
        Shape(steps=17, lease=6, fragments=3, overlap=1, replicas=3, deaths=15, failures=50), 4, 1
    ),
    "no-overlap": Plays(Shape(islands=3, steps=11, lease=4, fragments=2, overlap=0, restarts=15), 4, 2),
    "two-steps-later": Plays(Shape(steps=13, lease=5, fragments=2, overlap=2, restarts=15, failures=50), 4, 3),
    "every-other": Plays(
        Shape(islands=3, replicas=3, steps=14, lease=6, fragments=2, overlap=2, every=2, deaths=5, restarts=5), 4, 2
    ),
    "late": Plays(Shape(steps=9, lease=4, late=1, deaths=15, restarts=15, failures=50), 4, 1),
    "late-and-lost": Plays(
        Shape(islands=3, steps=14, lease=6, fragments=2, overlap=2, late=2, every=3, deaths=5, restarts=10, losses=4),
        4,
        0,
    ),
    # All stage servers of a stage die, so islands are lost; they begin anew with those of others.
    "lost-lonely": Plays(Shape(islands=3, replicas=1, steps=8, losses=6), 12, 3),
    "lost-wide": Plays(Shape(replicas=4, steps=16, losses=8), 12, 7, (6,)),
    "lost-hard": Plays(
        Shape(islands=3, replicas=4, steps=16, every=4, losses=6, deaths=3, failures=50, restarts=10, refusals=100),
        12,
        1,
    ),
    "lost-streaming": Plays(
        Shape(islands=3, replicas=4, steps=18, lease=6, fragments=2, overlap=2, late=1, every=4, losses=6, restarts=5),
        12,
        0,
        (76, 100, 122),  # others could give replicas while a fragment was on its way
    ),
    # Nobody was there for some islands when the timeline began.
    "absent-short": Plays(
        Shape(islands=3, replicas=4, steps=14, absent=1, losses=4, deaths=2, restarts=15, failures=30), 6, 0
    ),
    "absent-shorter": Plays(
        Shape(islands=3, replicas=3, steps=18, lease=6, fragments=2, overlap=2, late=1, absent=2, every=4, restarts=15),
        6,
        5,
    ),
    "absent-by-speed": Plays(Shape(islands=2, replicas=3, steps=12, by_speed=True, absent=1, restarts=10), 6, 4),
    # A person asks for a pause.
    "stopping": Plays(
        Shape(islands=3, replicas=4, steps=16, every=4, losses=6, deaths=3, restarts=5, refusals=200, stops=8), 16, 0
    ),
    "stopping-slow": Plays(Shape(islands=4, replicas=4, steps=24, every=2, losses=12, refusals=300, stops=4), 16, 7),
    # Sites that were lost come back.
    "guests-plain": Plays(replace(_BACK, replicas=1), 16, 9),
    "guests-hard": Plays(replace(_BACK, every=4, deaths=3, restarts=3, failures=30, refusals=50), 16, 8),
    "guests-streaming": Plays(replace(_BACK, islands=3, lease=6, fragments=2, overlap=2, late=1, restarts=3), 16, 5),
    # Leases follow speed.
    "divided-quiet": Plays(Shape(by_speed=True, steps=16, lease=8, slow=80), 12, 5),
    "divided-dying": Plays(
        Shape(islands=3, by_speed=True, steps=16, lease=8, slow=80, deaths=3, failures=20, restarts=6), 12, 1
    ),
    "divided-losing": Plays(
        Shape(islands=3, replicas=4, by_speed=True, steps=24, lease=6, slow=80, losses=8, deaths=3, restarts=5), 12, 1
    ),
    "divided-streaming": Plays(
        Shape(3, 4, 24, 8, fragments=2, overlap=3, late=1, by_speed=True, slow=80, losses=6, deaths=3, restarts=8),
        12,
        0,
    ),
    "divided-hiding": Plays(
        Shape(2, 4, 24, 8, overlap=2, by_speed=True, slow=80, losses=6, deaths=3, restarts=8, every=4), 2, 0
    ),
    "divided-saving": Plays(
        Shape(islands=3, replicas=4, by_speed=True, steps=16, every=4, losses=6, restarts=5, refusals=200, stops=8),
        12,
        9,
    ),
    # Exchanges are made without islands that have not come.
    "late-slow": Plays(replace(_SLOW, islands=3, patience=0.1), 4, 2),
    "late-slow-streaming": Plays(replace(streaming(_SLOW), islands=3, patience=0.1), 4, 2),
    "late-slow-saving": Plays(replace(_SLOW, islands=3, replicas=3, patience=0.1, every=5, stops=1), 4, 2),
    "late-split": Plays(replace(_SPLIT, patience=0.2, restarts=1), 4, 3),
    "late-split-streaming": Plays(replace(streaming(_SPLIT), patience=0.2), 4, 2),
    "late-frozen": Plays(replace(_FROZEN, patience=0.2), 4, 0),
    "late-frozen-hard": Plays(replace(hard(_FROZEN), deaths=0, patience=0.2), 4, 3),
    "late-losing": Plays(replace(_SLOW, islands=4, replicas=4, patience=0.1, losses=2), 3, 1),
    "late-by-speed": Plays(replace(by_speed(_SLOW), islands=3, patience=0.05, restarts=6), 4, 2),
    "late-by-default": Plays(replace(by_speed(_SLOW), islands=3, lease=4, overlap=1, patience=0.05, restarts=6), 4, 3),
    # Islands do not reach each other, answer nothing, or are slow.
    "split": Plays(_SPLIT, 4, 3),
    "split-streaming": Plays(streaming(_SPLIT), 4, 2),
    "split-by-speed": Plays(by_speed(_SPLIT), 4, 2),
    "split-hard": Plays(hard(_SPLIT), 4, 1),
    "frozen": Plays(_FROZEN, 4, 0),
    "frozen-streaming": Plays(streaming(_FROZEN), 4, 1),
    "frozen-by-speed": Plays(by_speed(_FROZEN), 4, 0),
    "frozen-hard": Plays(hard(_FROZEN), 4, 1),
    "slow": Plays(_SLOW, 4, 2),
    "slow-streaming": Plays(streaming(_SLOW), 4, 2),
    "slow-by-speed": Plays(by_speed(_SLOW), 4, 2),
}

played = functools.cache(play)  # claims of one file look at the same histories


def cases() -> list[ParameterSet]:
    """(shape, seed) of each play that this run tries."""
    return [
        pytest.param(plays.shape, seed, id=f"{name}-{seed}") for name, plays in PLAYS.items() for seed in plays.tried
    ]


def histories(name: str) -> list[History]:
    """What happens in the plays of a shape that this run tries."""
    return [played(PLAYS[name].shape, seed) for seed in PLAYS[name].tried]
