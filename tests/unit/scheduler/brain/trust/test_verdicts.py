"""Who is wrong, and how that is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.trust.verdicts import Place, Work, evidence, inconstant, odd_ones, second_evidence
from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Checked

A, B, C = (PeerId(name) for name in "abc")
TRUE = Work("x", "y" * 64, "g", "d" * 64, True, "1.5")
FALSE = replace(TRUE, y="0" * 64)
PLACE = Place(120, 2, 7)


def test_of_one_answer_or_alike_ones_none_is_odd_and_without_a_majority_all_are() -> None:
    assert odd_ones({A: TRUE}) == ()
    assert odd_ones({A: TRUE, B: TRUE}) == ()
    assert odd_ones({A: TRUE, B: FALSE}) == (A, B)
    assert odd_ones({A: TRUE, B: FALSE, C: TRUE}) == (B,)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"y": "0" * 64}, "output y of step 120, microbatch 7, stage 2 was 00000000, a and c got yyyyyyyy"),
        ({"dx": "0" * 64}, "gradient dx of step 120, microbatch 7, stage 2 was 00000000, a and c got dddddddd"),
        ({"loss": "9.0"}, "loss of step 120, microbatch 7, stage 2 was 9.0, a and c got 1.5"),
        ({"finite": False}, "finiteness of step 120, microbatch 7, stage 2 was false, a and c got true"),
    ],
)
def test_every_result_counts_and_is_named_in_the_evidence(changes: dict[str, object], told: str) -> None:
    said = {A: TRUE, B: replace(TRUE, **changes), C: TRUE}  # type: ignore[arg-type]
    assert odd_ones(said) == (B,)
    assert evidence(PLACE, B, said, "spot check") == f"{told} (spot check)"


def test_of_two_the_one_that_contradicts_itself_is_wrong_but_not_if_it_was_given_other_inputs() -> None:
    said = {A: TRUE, B: FALSE}
    assert inconstant(said, {A: TRUE, B: FALSE}) is None
    assert inconstant(said, {A: TRUE, B: TRUE}) == B
    assert inconstant(said, {A: FALSE, B: TRUE}) is None
    assert inconstant(said, {A: TRUE, B: replace(TRUE, x="other")}) is None
    assert "was 00000000, and yyyyyyyy when it computed it again" in second_evidence(PLACE, B, said, {A: TRUE, B: TRUE})


def test_a_loss_that_is_no_number_is_like_itself() -> None:
    event = Checked(Microbatch(0, 1, 2), 1, 1, False, float("nan"), ("x", "", "", "d"))
    assert Work.of(event) == Work.of(event)
    assert Work.of(event).inputs == ("x", "")
