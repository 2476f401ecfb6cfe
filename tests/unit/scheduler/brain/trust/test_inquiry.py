"""When enough was said for a verdict, and who may still be asked."""

from __future__ import annotations

import pytest

from scheduler.brain.trust.inquiry import ANSWER_S_MAX, TRIES_MAX, Inquiry, InquiryState, vote
from swarm.types import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")


@pytest.mark.parametrize(
    ("said", "if_others", "if_none"),
    [
        ("", InquiryState.ASKS, InquiryState.UNANSWERED),
        ("x", InquiryState.ASKS, InquiryState.UNANSWERED),
        ("xx", InquiryState.ALIKE, InquiryState.ALIKE),
        ("xy", InquiryState.ASKS, InquiryState.SPLIT),
        ("xyy", InquiryState.ODD, InquiryState.ODD),
        ("xyz", InquiryState.ASKS, InquiryState.SPLIT),
        ("xxyy", InquiryState.ASKS, InquiryState.SPLIT),
    ],
)
def test_others_are_asked_until_most_agree(said: str, if_others: InquiryState, if_none: InquiryState) -> None:
    words = dict(zip((A, B, C, D), said, strict=False))
    assert vote(words, may_ask=True) is if_others
    assert vote(words, may_ask=False) is if_none


def test_a_replica_is_asked_once_and_some_tries_are_enough() -> None:
    inquiry, others = Inquiry[str, str]("of a", {A: "x"}), [PeerId(name) for name in "abcdefg"]
    for number in range(TRIES_MAX):
        peer = inquiry.next_ones(others)[0]
        assert peer == others[number + 1]
        inquiry.ask(peer, number, 10.0)
        assert inquiry.awaits(peer, number)
        assert not inquiry.awaits(peer, number - 1)
        inquiry.gave_up()
        inquiry.gave_up()
    assert inquiry.next_ones(others) == []


def test_an_answer_is_waited_for_until_it_is_overdue_or_cannot_come() -> None:
    inquiry = Inquiry[str, str]("of a", {A: "x"})
    inquiry.ask(B, 1, 10.0)
    assert inquiry.waits(9.9 + ANSWER_S_MAX, lambda peer: True)
    assert not inquiry.waits(inquiry.due_s, lambda peer: True)
    inquiry.ask(C, 2, 50.0)
    inquiry.answered(A, "y")
    assert inquiry.waits(50.0, lambda peer: peer == C), "the answer of another changes nothing"
    assert not inquiry.waits(50.0, lambda peer: peer != C)
    assert inquiry.passed == {B, C}
    inquiry.ask(D, 3, 60.0)
    inquiry.answered(D, "y")
    assert not inquiry.waits(60.0, lambda peer: True)
    assert (inquiry.said, inquiry.tries) == ({A: "y", D: "y"}, 2)
