"""Who is wrong about a slice, given what its owner and its readers say: a table."""

from __future__ import annotations

import pytest

from scheduler.brain.trust.reductions import Finding, Stand, Sums, finding
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
        ({}, True, Finding(Stand.ASKS)),
        ({A: RIGHT}, True, Finding(Stand.ASKS)),
        ({}, False, Finding(Stand.UNANSWERED)),
        ({A: RIGHT, B: RIGHT}, True, Finding(Stand.ALIKE)),
        ({B: RIGHT}, True, Finding(Stand.ALIKE)),
        ({A: RIGHT, B: FALSE}, True, Finding(Stand.ASKS)),
        ({A: RIGHT, B: FALSE, C: FALSE}, True, Finding(WRONG, wrong=(A,))),
        ({A: FALSE, B: FALSE, C: FALSE}, True, Finding(WRONG, wrong=(A,))),
        ({B: FALSE, C: FALSE}, False, Finding(WRONG, wrong=(A,))),
        ({A: Sums(PARTS, "x", "x"), B: FALSE, C: FALSE}, False, Finding(WRONG, wrong=(A,))),
        ({A: RIGHT, B: OTHER, C: RIGHT}, False, Finding(WRONG, wrong=(B,))),
        ({A: RIGHT, B: FALSE, C: RIGHT}, False, Finding(WRONG, wrong=(B,))),
        ({A: RIGHT, B: FALSE}, False, Finding(PAIR, pair=(B, A))),
        ({B: FALSE}, False, Finding(PAIR, pair=(B, A))),
        ({B: OTHER, C: RIGHT}, False, Finding(PAIR, pair=(B, C))),
        ({A: ODD_B, B: FALSE, C: FALSE}, False, Finding(PAIR, pair=(B, A))),
        ({A: RIGHT, B: RIGHT, C: Sums(("1", "other", "3"), "z", "m")}, False, Finding(PAIR, pair=(B, C))),
        ({A: RIGHT, B: ODD_B, C: RIGHT}, False, Finding(PAIR, pair=(B, A))),
    ],
)
def test_what_follows_from_what_is_said(said: dict[PeerId, Sums], may_ask: bool, expected: Finding) -> None:
    assert finding(A, (A, B, C), said, may_ask=may_ask) == expected
