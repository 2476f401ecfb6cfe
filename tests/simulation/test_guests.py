"""Sites whose island was lost come back over a slow link, whatever else is lost: what was exchanged counts once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from tests.simulation.engine.islands import History, Rows, Shape, exchanges, faults
from tests.simulation.engine.shapes import GUESTS, cases, played
from tests.support.effort import seeds

SHAPES = [plays.shape for plays in GUESTS.values()]


@pytest.mark.parametrize(("shape", "seed"), cases(GUESTS))
def test_what_was_exchanged_counts_once_while_sites_are_lost_and_come_back(shape: Shape, seed: int) -> None:
    assert faults(played(shape, seed), shape) == []


@pytest.mark.parametrize("shape", SHAPES)
def test_lost_sites_come_back(shape: Shape) -> None:
    """With so many losses not before the end in each play."""
    calm = replace(shape, losses=4, deaths=0, restarts=0)
    plays = [played(calm, seed) for seed in seeds(8, 0, 1)]
    assert 2 * sum(back(history, calm) for history in plays) >= len(plays)


def back(history: History, shape: Shape) -> int:
    """How often one exchange had more islands than that before it."""
    counts = [len(rows) for _, rows in sorted(exchanges(history, shape).items())]
    return sum(later > earlier for earlier, later in pairwise(counts))


@pytest.mark.parametrize("shape", SHAPES)
def test_without_arrivals_they_do_not(shape: Shape) -> None:
    """Otherwise the claim above would be about nothing."""
    alone = replace(shape, replicas=1, deaths=0, restarts=0, losses=4, arrivals=0)
    assert not any(one.forks for seed in seeds(4, 0) for one in played(alone, seed) if isinstance(one, Rows))
