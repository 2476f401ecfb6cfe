"""Who is wrong about a slice, given what its owner and its readers say: a table."""

from __future__ import annotations

import pytest

from scheduler.brain.trust.reductions import ReductionFinding, Stand, Sums, finding
from swarm.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")  # a owns the slice
PARTS = ("1", "2", "3")
RIGHT = Sums(PARTS, "m", "m")  # the mean is that of the parts
FALSE = Sums(PARTS, "m", "x")  # the owner gave out another one
OTHER = Sums(PARTS, "y", "m")  # a reader that says that it got something else
ODD_B = Sums(("1", "other", "3"), "z", "m")  # b's part was another one
WRONG, PAIR = Stand.WRONG, Stand.CONTRADICTED


@pytest.mark.parametrize(
    ("said", "may_ask", "expected"),
    [
        ({}, True, ReductionFinding(Stand.ASKS)),
        ({A: RIGHT}, True, ReductionFinding(Stand.ASKS)),
        ({}, False, ReductionFinding(Stand.UNANSWERED)),
        ({A: RIGHT, B: RIGHT}, True, ReductionFinding(Stand.ALIKE)),
        ({B: RIGHT}, True, ReductionFinding(Stand.ALIKE)),
        ({A: RIGHT, B: FALSE}, True, ReductionFinding(Stand.ASKS)),
        ({A: RIGHT, B: FALSE, C: FALSE}, True, ReductionFinding(WRONG, wrong=(A,))),
        ({A: FALSE, B: FALSE, C: FALSE}, True, ReductionFinding(WRONG, wrong=(A,))),
        ({B: FALSE, C: FALSE}, False, ReductionFinding(WRONG, wrong=(A,))),
        ({A: Sums(PARTS, "x", "x"), B: FALSE, C: FALSE}, False, ReductionFinding(WRONG, wrong=(A,))),
        ({A: RIGHT, B: OTHER, C: RIGHT}, False, ReductionFinding(WRONG, wrong=(B,))),
        ({A: RIGHT, B: FALSE, C: RIGHT}, False, ReductionFinding(WRONG, wrong=(B,))),
        ({A: RIGHT, B: FALSE}, False, ReductionFinding(PAIR, pair=(B, A))),
        ({B: FALSE}, False, ReductionFinding(PAIR, pair=(B, A))),
        ({B: OTHER, C: RIGHT}, False, ReductionFinding(PAIR, pair=(B, C))),
        ({A: ODD_B, B: FALSE, C: FALSE}, False, ReductionFinding(PAIR, pair=(B, A))),
        ({A: RIGHT, B: RIGHT, C: Sums(("1", "other", "3"), "z", "m")}, False, ReductionFinding(PAIR, pair=(B, C))),
        ({A: RIGHT, B: ODD_B, C: RIGHT}, False, ReductionFinding(PAIR, pair=(B, A))),
    ],
)
def test_what_follows_from_what_is_said(said: dict[PeerId, Sums], may_ask: bool, expected: ReductionFinding) -> None:
    assert finding(A, (A, B, C), said, may_ask=may_ask) == expected
