"""Who is asked next about one hop, and when enough was said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.trust.inquiries import TRIES_MAX, Inquiry, Stand
from scheduler.brain.trust.verdicts import Place, Work
from swarm.types import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")
TRUE = Work("x", "y", "g", "dx", True, "0.0")
FALSE, ELSE = replace(TRUE, y="false"), replace(TRUE, y="else")


def inquiry(**said: Work) -> Inquiry:
    return Inquiry(Place(0, 0, 0), A, "cpu", "spot check", {PeerId(name): work for name, work in said.items()})


@pytest.mark.parametrize(
    ("said", "others", "stand", "asked"),
    [
        ({"a": TRUE}, "abc", Stand.ASKS, "bc"),
        ({"a": TRUE}, "a", Stand.UNANSWERED, ""),
        ({"a": TRUE, "b": TRUE}, "abc", Stand.ALIKE, "c"),
        ({"a": TRUE, "b": FALSE}, "abc", Stand.ASKS, "c"),
        ({"a": TRUE, "b": FALSE}, "ab", Stand.ASKS, "ab"),  # both once more
        ({"a": TRUE, "b": FALSE, "c": FALSE}, "abc", Stand.ODD, ""),
        ({"a": TRUE, "b": FALSE, "c": ELSE}, "abcd", Stand.ASKS, "d"),
        ({"a": TRUE, "b": FALSE, "c": ELSE}, "abc", Stand.SPLIT, "abc"),
    ],
)
def test_others_are_asked_until_most_agree(said: dict[str, Work], others: str, stand: Stand, asked: str) -> None:
    one = inquiry(**said)
    names = [PeerId(name) for name in others]
    assert one.stand(names) is stand
    if stand is Stand.ASKS:
        assert one.candidates(names) == list(asked)


def test_two_that_have_spoken_twice_are_not_asked_a_third_time() -> None:
    one = inquiry(a=TRUE, b=FALSE)
    assert one.answered(A, TRUE)
    assert one.answered(B, FALSE)
    assert one.stand([A, B]) is Stand.SPLIT
    assert one.again == {A: TRUE, B: FALSE}


def test_an_answer_about_other_inputs_is_no_word_and_some_of_them_are_enough() -> None:
    one = inquiry(a=TRUE)
    others = [A, B, C, D, PeerId("e")]
    for checker in others[1 : 1 + TRIES_MAX]:
        assert one.stand(others) is Stand.ASKS
        assert not one.answered(checker, replace(FALSE, x="of a false neighbour"))
    assert one.said == {A: TRUE}
    assert one.stand(others) is Stand.UNANSWERED
