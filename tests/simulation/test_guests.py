"""Sites whose island was lost come back over a slow link, whatever else is lost: what was exchanged counts once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.simulation.engine.islands import History, Rows, Shape, exchanges, faults, play

# A joiner needs more turns for the state than an island for a step.
PLAIN = Shape(replicas=1, steps=24, losses=8, arrivals=30, fetch=40)
HARD = Shape(steps=24, every=4, losses=8, arrivals=30, fetch=40, deaths=3, restarts=3, failures=30, refusals=50)
STREAMING = Shape(
    islands=3, steps=24, lease=6, fragments=2, overlap=2, late=1, losses=8, arrivals=30, fetch=40, restarts=3
)
SHAPES = (PLAIN, HARD, STREAMING)


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("shape", SHAPES)
def test_what_was_exchanged_counts_once_while_sites_are_lost_and_come_back(shape: Shape, seed: int) -> None:
    assert faults(play(shape, seed), shape) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_lost_sites_come_back(shape: Shape) -> None:
    """With so many losses not before the end in each play."""
    calm = replace(shape, losses=4, deaths=0, restarts=0)
    plays = [play(calm, seed) for seed in range(8)]
    assert sum(back(history, calm) for history in plays) >= 4


def back(history: History, shape: Shape) -> int:
    """How often one exchange had more islands than that before it."""
    counts = [len(rows) for _, rows in sorted(exchanges(history, shape).items())]
    return sum(later > earlier for earlier, later in pairwise(counts))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_arrivals_they_do_not(shape: Shape) -> None:
    """Otherwise the claim above would be about nothing."""
    alone = replace(shape, replicas=1, deaths=0, restarts=0, losses=4, arrivals=0)
    assert not any(one.forks for seed in range(4) for one in play(alone, seed) if isinstance(one, Rows))
