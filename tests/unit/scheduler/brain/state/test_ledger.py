"""The book that makes every gradient count exactly once. The situations stand in the text beside this file."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from scheduler.brain.state.ledger import STEPS_KEPT_MIN, STORIES_MAX, STORY_LINES_MAX, Ledger, Verdict
from swarm.types import Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated
from tests.support.situations import Calls, Situation, beside, value_of

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def hop(peer: PeerId, attempt: int = 1) -> Hop:
    return Hop(peer, 1, attempt, f"at {peer}")


class Book:
    """A ledger with step 0 open; `fed[index]` has the hop at stage 0, C those behind it."""

    def __init__(self, stages: int = 1, microbatches: int = 2, fed: tuple[PeerId, ...] = ()) -> None:
        self.ledger = Ledger(0, stages, microbatches)
        self.ledger.open(0)
        for peer in fed or (A, A):
            self.ledger.feed(0, [hop(peer)] + [hop(C)] * (stages - 1), 0.0)

    def adds(self, peer: PeerId, index: int, stage: int = 0, attempt: int = 1, **facts: int) -> Verdict:
        """The peer says that it has added a microbatch, with 10.0 + index as loss."""
        microbatch = Microbatch(facts.get("timeline", 0), facts.get("step", 0), index)
        finite = bool(facts.get("finite", True))
        event = Accumulated(microbatch, stage, attempt, finite, 10.0 + index, 0.1, 0.2, 0.0)
        return self.ledger.accumulated(peer, event, 0.0)

    def gives(self, index: int, peer: PeerId) -> None:
        """A microbatch of step 0 gets a new hop at stage 0."""
        self.ledger.reroute(0, 0, index, hop(peer, self.ledger.attempt(0)), "refill", 0.0)


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_the_ledger_counts_as_the_text_says(situation: Situation) -> None:
    book = Book()

    def play(line: str) -> Iterable[str]:
        nonlocal book
        if line.startswith("book("):
            book = value_of(line, {"book": Book})
            return []
        said = Calls(book.ledger, adds=book.adds, gives=book.gives, hop=hop).play(line)
        book.ledger.validate()
        return said

    situation.check(play)


def test_the_story_tells_every_transition_with_its_cause_and_is_bounded() -> None:
    ledger = Book().ledger
    ledger.withdraw(0, A, "suspect, silent for 3 s", 1.5)
    ledger.reroute(0, 0, 0, hop(B, ledger.next_attempt(0)), "refill", 1.5)
    ledger.accumulated(B, Accumulated(Microbatch(0, 0, 0), 0, 2, True, 0.0, 0.1, 0.2, 0.0), 1.5)
    assert ledger.story(0, 0) == [
        "0.000 s fed: stage 0 to a",
        "1.500 s stage 0 taken from a: suspect, silent for 3 s",
        "1.500 s stage 0 given to b (attempt 2): refill",
        "1.500 s stage 0 accumulated at b (attempt 2)",
    ]
    for _ in range(2 * STORY_LINES_MAX):
        ledger.tell(0, 0, "again", 2.0)
    assert len(ledger.story(0, 0)) == STORY_LINES_MAX
    ledger.close(0)
    assert ledger.story(0, 0)[0].endswith("fed: stage 0 to a")
    kept = max(STEPS_KEPT_MIN, STORIES_MAX // ledger.microbatches)
    for step in range(1, kept + 1):
        assert ledger.story(0, 0)
        ledger.open(step)
        ledger.close(step)
    assert ledger.story(0, 0) == [], "only the newest closed steps are kept"
