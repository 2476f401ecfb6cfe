"""stage_server.brain.rejoin: what is asked of whom, and what follows from each answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_server.brain.rejoin import (
    AskChunk,
    AskRecords,
    Chunk,
    CommitLog,
    Order,
    Piece,
    Rejoin,
    RejoinSettings,
    TensorSize,
    cut,
)
from swarm.types import PeerId
from tests.support.situations import Situation, beside, value_of

A, B = PeerId("a"), PeerId("b")


ANSWERS = ("pulled", "recorded", "out_of_reach", "failed", "committed", "agreed", "digested")
ELSE: dict[str, dict[str, Any]] = {"pulled": {"previous": True, "reach": 0}, "recorded": {"reach": 0}}


class Player:
    """Plays a joiner named "me". Tickets are those that the text shows.

    joiner(3, asks_max=1)          a joiner of a stage of three chunks, and settings
    donors("a", "b")               whom it may ask
    pulled(1, 7, previous=False)   the state of a chunk came, of version 7, without the weights of version 6
    recorded(2, 9, reach=3)        records up to version 9 came; the donor's log reaches back to 3
    out_of_reach(2, reach=8) | failed(1)     they did not
    committed(9)                   the others are at version 9
    agreed(9, "right")             ... and hold this
    digested(3, "right")           so does the joiner, or not
    complete(5)                    all chunks that were asked for come, of this version
    """

    def __init__(self) -> None:
        self.names = {verb: partial(self._answer, verb) for verb in ANSWERS}
        self.names |= {name: getattr(self, name) for name in ("joiner", "donors", "complete")}
        self.rejoin: Any = None
        self.asked: list[int] = []

    def play(self, line: str) -> list[str]:
        return [repr(order) for order in self._noted(value_of(line, self.names))]

    def joiner(self, chunks: int = 1, **options: int) -> list[Order]:
        self.rejoin, self.asked = joiner(chunks, **options), []
        return []

    def donors(self, *peers: str) -> list[Order]:
        return self.rejoin.donors([PeerId(peer) for peer in peers], 0.0)

    def complete(self, version: int, **options: bool) -> list[Order]:
        told: list[Order] = []
        while self.asked:
            told += self._noted(self._answer("pulled", self.asked.pop(0), version, **options))
        return told

    def _answer(self, verb: str, *arguments: Any, **options: Any) -> list[Order]:
        return getattr(self.rejoin, verb)(*arguments, now_s=0.0, **ELSE.get(verb, {}) | options)

    def _noted(self, orders: list[Order]) -> list[Order]:
        self.asked += [
            order.ticket for order in orders if isinstance(order, AskChunk) and order.ticket not in self.asked
        ]
        return orders


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_a_joiner_asks_for_what_the_text_says(situation: Situation) -> None:
    situation.check(Player().play)


def asks(orders: list[Order]) -> list[AskChunk | AskRecords]:
    return [order for order in orders if isinstance(order, AskChunk | AskRecords)]


def only(orders: list[Order]) -> AskChunk | AskRecords:
    (ask,) = asks(orders)
    return ask


def joiner(chunks: int = 1, **options: int) -> Rejoin:
    settings = RejoinSettings(**options)  # type: ignore[arg-type]
    return Rejoin(PeerId("me"), [Chunk(index, (), 100, 10) for index in range(chunks)], settings)


def test_a_donor_that_fails_is_left_alone_for_longer_and_longer() -> None:
    rejoin = joiner()
    ask = only(rejoin.donors([A], 0.0))
    now_s, pauses = 0.0, []
    for _ in range(12):
        assert rejoin.failed(ask.ticket, now_s) == []
        due_s = rejoin.due_s(now_s)
        assert due_s is not None
        assert rejoin.tick(due_s - 1e-6) == []
        pauses.append(due_s - now_s)
        now_s = due_s
        ask = only(rejoin.tick(now_s))
    assert 0.05 <= pauses[0] <= 0.15
    assert pauses[5] > 4 * pauses[0]
    assert max(pauses) <= 7.5


def test_open_asks_are_bounded_in_all_and_per_donor() -> None:
    rejoin = joiner(50, asks_max=8, asks_per_donor_max=2)
    assert len(asks(rejoin.donors([A, B], 0.0))) == 4
    more = rejoin.donors([A, B, *(PeerId(f"d{number}") for number in range(9))], 0.0)
    assert len(asks(more)) == 4
    assert max(Counter(ask.donor for ask in asks(more)).values()) == 1


def test_an_answer_to_another_question_is_a_programming_error() -> None:
    rejoin = joiner()
    ask = only(rejoin.donors([A], 0.0))
    with pytest.raises(AssertionError, match="another question"):
        rejoin.recorded(ask.ticket, 3, reach=0, now_s=0.0)


def elements_of(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
    return [(piece.tensor, at) for chunk in chunks for piece in chunk.pieces for at in range(piece.start, piece.stop)]


sizes = st.lists(st.integers(0, 40), max_size=8).map(
    lambda counts: [TensorSize(f"t{number}", count) for number, count in enumerate(counts)]
)


@settings(max_examples=100, deadline=None)
@given(sizes, st.integers(1, 200), st.integers(1, 16), st.booleans())
def test_each_element_is_in_one_chunk_in_order_and_chunks_are_small(
    tensors: list[TensorSize], chunk_bytes: int, element_bytes: int, whole_tensors: bool
) -> None:
    chunks = cut(
        tensors,
        chunk_bytes=chunk_bytes,
        element_bytes=element_bytes,
        gradient_bytes=4,
        whole_tensors=whole_tensors,
    )
    assert elements_of(chunks) == [(tensor.name, at) for tensor in tensors for at in range(tensor.elements)]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for chunk in chunks:
        count = len(elements_of([chunk]))
        assert count >= 1
        assert (chunk.size_bytes, chunk.record_bytes) == (count * element_bytes, count * 4)
        if whole_tensors:
            assert all((piece.start, piece.stop) == (0, dict(_sizes(tensors))[piece.tensor]) for piece in chunk.pieces)
            assert len(chunk.pieces) == 1 or chunk.size_bytes <= chunk_bytes
        else:
            assert chunk.size_bytes <= max(chunk_bytes, element_bytes)


def _sizes(tensors: Sequence[TensorSize]) -> list[tuple[str, int]]:
    return [(tensor.name, tensor.elements) for tensor in tensors]


def test_small_tensors_share_a_chunk_and_large_ones_are_cut() -> None:
    tensors = [TensorSize("norm", 2), TensorSize("bias", 1), TensorSize("weight", 8)]
    pieces = [chunk.pieces for chunk in cut(tensors, chunk_bytes=64, element_bytes=16, gradient_bytes=8)]
    assert pieces == [
        (Piece("norm", 0, 2), Piece("bias", 0, 1), Piece("weight", 0, 1)),
        (Piece("weight", 1, 5),),
        (Piece("weight", 5, 8),),
    ]


def test_a_tensor_listed_twice_is_a_programming_error() -> None:
    with pytest.raises(AssertionError, match="listed once"):
        cut([TensorSize("a", 1)] * 2, chunk_bytes=1, element_bytes=1, gradient_bytes=1)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(0, 120), st.integers(0, 1000))
def test_the_newest_records_that_fit_are_kept(sizes: list[int], limit: int, first: int) -> None:
    log = CommitLog(limit, first)
    kept: dict[int, int] = {}
    for step, size in enumerate(sizes, first):
        kept[step] = size
        log.want()
        for dropped in log.append(step, size):
            assert dropped == min(kept)
            del kept[dropped]
        assert log.size_bytes == sum(kept.values()) <= limit
        assert log.version == step + 1
        assert list(kept) == list(range(log.reach, log.version))
    older = log.reach - 1
    if older >= first:  # one more record would not have fitted
        assert log.size_bytes + sizes[older - first] > limit


def test_it_gives_the_records_that_it_has_and_says_when_it_does_not_reach_back() -> None:
    log = CommitLog(30, 4)
    log.want()
    for step in range(4, 9):
        log.append(step, 10)
    assert (log.reach, log.version) == (6, 9)
    assert log.steps(5, 9) is None
    assert log.steps(6, 8) == range(6, 8)
    assert log.steps(7, 20) == range(7, 9)
    assert list(log.steps(9, 20) or ()) == []
    assert list(log.steps(11, 20) or ()) == []  # the asker is ahead of this replica


def test_a_record_over_the_limit_leaves_an_empty_log_and_is_dropped_itself() -> None:
    log = CommitLog(10)
    log.want()
    log.append(0, 5)
    assert log.append(1, 11) == range(2)
    assert (log.reach, log.version, log.size_bytes) == (2, 2, 0)


def test_a_gap_is_a_programming_error() -> None:
    log = CommitLog(100, 3)
    log.append(3, 10)
    with pytest.raises(AssertionError, match="at version 4"):
        log.append(5, 10)
