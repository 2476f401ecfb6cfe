"""Shares of a step that follow speed: whatever becomes of islands and the scheduler, each microbatch of a step is
trained by one island, and a durable row says by which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.simulation.engine.islands import (
    CHECKERS,
    Computed,
    History,
    Rows,
    Shape,
    faults,
    rows_in_order,
    shares_divide,
    succeeds,
)
from tests.simulation.engine.shapes import DIVIDED, DIVIDED_AND_STOPPING, cases, histories, played

QUIET, LOSING = DIVIDED["quiet"].shape, DIVIDED["losing"].shape


@pytest.mark.parametrize(("shape", "seed"), cases(DIVIDED))
def test_every_microbatch_of_a_step_is_trained_by_the_island_whose_share_it_is(shape: Shape, seed: int) -> None:
    assert faults(played(shape, seed), shape) == []


@pytest.mark.parametrize(("shape", "seed"), cases(DIVIDED_AND_STOPPING))
def test_shares_hold_through_checkpoints_and_pauses(shape: Shape, seed: int) -> None:
    history = played(shape, seed)
    claims = [checker for checker in CHECKERS if checker not in (succeeds, rows_in_order)]
    assert [fault for checker in claims for fault in checker(history, shape)] == []


def test_shares_change_and_a_lost_island_has_none() -> None:
    plays = histories(DIVIDED["losing"])
    found = [one.shares for history in plays for one in history if isinstance(one, Rows) and one.shares]
    assert len(set(found)) > 3
    assert any(0 in shares for shares in found)
    assert any(sum(shares) > LOSING.microbatches for shares in found), "of more than one step"


# Doctored histories --------------------------------------------------------------------------------------------------


def a_microbatch_is_missing(history: History) -> History:
    at = next(n for n, one in enumerate(history) if isinstance(one, Computed))
    gone = history[at]
    return [one for one in history if one != gone]


def one_too_many(history: History) -> History:
    at = next(n for n, one in enumerate(history) if isinstance(one, Computed))
    first = history[at]
    assert isinstance(first, Computed)
    return [*history[:at], replace(first, index=99), *history[at:]]


def shares_forgotten(history: History) -> History:
    return [replace(one, shares=()) if isinstance(one, Rows) else one for one in history]


def shares_too_large(history: History) -> History:
    return [
        replace(one, shares=(one.shares[0] + 1, *one.shares[1:])) if isinstance(one, Rows) and one.shares else one
        for one in history
    ]


@pytest.mark.parametrize("doctor", [a_microbatch_is_missing, one_too_many, shares_forgotten, shares_too_large])
def test_the_checker_objects_to_a_doctored_history(doctor: Callable[[History], History]) -> None:
    history = played(QUIET, 0)
    assert list(shares_divide(history, QUIET)) == []
    assert list(shares_divide(doctor(history), QUIET)) != []
