"""stage_server.brain.rejoin: what is asked of whom, and what follows from each answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_server.brain.rejoin import (
    AskChunk,
    AskRecords,
    Chunk,
    CommitLog,
    Digest,
    Drop,
    GiveUp,
    Order,
    Piece,
    ReadyToJoin,
    Rejoin,
    RejoinSettings,
    Replay,
    StoreChunk,
    TensorSize,
    cut,
)
from swarm.types import PeerId

A, B = PeerId("a"), PeerId("b")


def joiner(chunks: int = 1, **options: int) -> Rejoin:
    settings = RejoinSettings(**options)  # type: ignore[arg-type]
    return Rejoin(PeerId("me"), [Chunk(index, (), 100, 10) for index in range(chunks)], settings)


def asks(orders: list[Order]) -> list[AskChunk | AskRecords]:
    return [order for order in orders if isinstance(order, AskChunk | AskRecords)]


def only(orders: list[Order]) -> AskChunk | AskRecords:
    (ask,) = asks(orders)
    return ask


def complete(rejoin: Rejoin, version: int, previous: bool = True, orders: list[Order] | None = None) -> list[Order]:
    """All chunks from one donor; what was ordered last."""
    orders = rejoin.donors([A], 0.0) if orders is None else orders
    while asks(orders):
        orders = [
            order
            for ask in asks(orders)
            for order in rejoin.pulled(ask.ticket, version, previous=previous, reach=0, now_s=0.0)
        ]
    return orders


@pytest.fixture
def rejoin() -> Rejoin:
    return joiner()


def test_a_chunk_is_pulled_brought_up_to_date_and_admitted_with_the_right_digest(rejoin: Rejoin) -> None:
    assert rejoin.committed(9, 0.0) == []
    ask = only(rejoin.donors([A], 0.0))
    orders = rejoin.pulled(ask.ticket, 7, previous=False, reach=3, now_s=0.0)
    records = only(orders)
    assert orders == [StoreChunk(0, 7), AskRecords(records.ticket, A, 0, 7, 9)]
    *replays, digest = rejoin.recorded(records.ticket, 9, reach=3, now_s=0.0)
    assert replays == [Replay(0, 7), Replay(0, 8)]
    assert isinstance(digest, Digest)
    assert digest.version == 9
    assert rejoin.digested(digest.ticket, "right", 0.0) == []  # what the others hold is not known yet
    assert rejoin.agreed(9, "right", 0.0) == [ReadyToJoin(9, first_step=9)]


def test_without_the_weights_of_the_version_before_a_joiner_serves_one_step_later() -> None:
    for staleness, version, previous, first_step in (
        (1, 5, False, 6),
        (1, 5, True, 5),
        (1, 0, False, 0),
        (0, 5, False, 5),
    ):
        rejoin = joiner(2, staleness=staleness)
        rejoin.agreed(version, "right", 0.0)
        *_, digest = complete(rejoin, version, previous)
        assert isinstance(digest, Digest)
        assert rejoin.digested(digest.ticket, "right", 0.0) == [ReadyToJoin(version, first_step)]


def test_a_commit_during_the_digest_postpones_admission(rejoin: Rejoin) -> None:
    rejoin.agreed(5, "five", 0.0)
    *_, digest = complete(rejoin, 5)
    assert isinstance(digest, Digest)
    records = only(rejoin.committed(6, 0.0))
    assert rejoin.digested(digest.ticket, "five", 0.0) == []
    _, second = rejoin.recorded(records.ticket, 6, reach=0, now_s=0.0)
    assert isinstance(second, Digest)
    rejoin.digested(second.ticket, "six", 0.0)
    assert rejoin.agreed(6, "six", 0.0) == [ReadyToJoin(6, 6)]


def test_a_wrong_digest_drops_everything_and_after_three_the_joiner_gives_up() -> None:
    rejoin = joiner(2)
    rejoin.agreed(5, "right", 0.0)
    again: list[Order] | None = None
    for _ in range(3):
        *_, digest = complete(rejoin, 5, orders=again)
        assert isinstance(digest, Digest)
        drop, *again = rejoin.digested(digest.ticket, "wrong", 0.0)
        assert drop == Drop()
    assert again == [GiveUp("the state of version 5 differs from the other replicas', 3 times in a row")]
    assert rejoin.donors([A, B], 1.0) == []


def test_what_a_dead_donor_was_asked_is_asked_of_another_and_its_late_answer_is_ignored(rejoin: Rejoin) -> None:
    ask = only(rejoin.donors([A], 0.0))
    assert rejoin.donors([], 0.0) == []
    again = only(rejoin.donors([B], 0.0))
    assert again.donor == B
    assert rejoin.pulled(ask.ticket, 5, previous=True, reach=0, now_s=0.0) == []
    assert rejoin.failed(ask.ticket, 0.0) == []


def test_a_donor_that_fails_is_left_alone_for_longer_and_longer(rejoin: Rejoin) -> None:
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


def test_a_log_that_no_longer_reaches_back_means_that_the_chunk_is_pulled_again(rejoin: Rejoin) -> None:
    rejoin.committed(9, 0.0)
    ask = only(rejoin.donors([A], 0.0))
    records = only(rejoin.pulled(ask.ticket, 7, previous=True, reach=3, now_s=0.0))
    again = only(rejoin.out_of_reach(records.ticket, reach=8, now_s=0.0))
    assert isinstance(again, AskChunk)
    assert isinstance(rejoin.pulled(again.ticket, 9, previous=True, reach=8, now_s=0.0)[0], StoreChunk)


def test_records_come_from_a_donor_whose_log_reaches_back_while_another_does_not() -> None:
    rejoin = joiner(2, asks_max=2)
    first, second = asks(rejoin.donors([A, B], 0.0))
    assert first.donor != second.donor
    rejoin.pulled(first.ticket, 5, previous=True, reach=5, now_s=0.0)
    rejoin.pulled(second.ticket, 5, previous=True, reach=2, now_s=0.0)
    records = asks(rejoin.committed(6, 0.0))
    assert {ask.donor for ask in records} == {A, B}
    refused = records[0]
    retry = only(rejoin.out_of_reach(refused.ticket, reach=6, now_s=0.0))
    assert isinstance(retry, AskRecords)
    assert retry.donor != refused.donor


def test_a_chunk_far_behind_is_pulled_again_because_that_is_fewer_bytes(rejoin: Rejoin) -> None:
    rejoin.committed(16, 0.0)
    ask = only(rejoin.donors([A], 0.0))
    assert isinstance(only(rejoin.pulled(ask.ticket, 5, previous=True, reach=0, now_s=0.0)), AskChunk)


def test_a_donor_that_lags_behind_does_not_set_a_chunk_back(rejoin: Rejoin) -> None:
    rejoin.committed(30, 0.0)
    ask = only(rejoin.donors([A], 0.0))
    again = only(rejoin.pulled(ask.ticket, 9, previous=True, reach=9, now_s=0.0))
    assert rejoin.pulled(again.ticket, 8, previous=True, reach=8, now_s=0.0) == []


def test_a_chunk_that_the_logs_may_soon_forget_goes_before_one_that_is_missing() -> None:
    rejoin = joiner(3, asks_max=1)
    ask = only(rejoin.donors([A], 0.0))
    following = only(rejoin.pulled(ask.ticket, 10, previous=True, reach=6, now_s=0.0))
    assert isinstance(following, AskChunk)
    rejoin.committed(14, 0.0)
    urgent = only(rejoin.pulled(following.ticket, 14, previous=True, reach=8, now_s=0.0))
    assert isinstance(urgent, AskRecords)
    assert (urgent.chunk, urgent.start, urgent.stop) == (ask.chunk, 10, 14)


def test_open_asks_are_bounded_in_all_and_per_donor() -> None:
    rejoin = joiner(50, asks_max=8, asks_per_donor_max=2)
    assert len(asks(rejoin.donors([A, B], 0.0))) == 4
    more = rejoin.donors([A, B, *(PeerId(f"d{number}") for number in range(9))], 0.0)
    assert len(asks(more)) == 4
    assert max(Counter(ask.donor for ask in asks(more)).values()) == 1


def test_after_admission_it_follows_until_the_replica_is_a_member(rejoin: Rejoin) -> None:
    rejoin.agreed(5, "five", 0.0)
    *_, digest = complete(rejoin, 5)
    assert isinstance(digest, Digest)
    rejoin.digested(digest.ticket, "five", 0.0)
    records = only(rejoin.committed(6, 0.0))
    replay, second = rejoin.recorded(records.ticket, 6, reach=0, now_s=0.0)
    assert replay == Replay(0, 5)
    assert isinstance(second, Digest)
    rejoin.agreed(6, "six", 0.0)
    assert rejoin.digested(second.ticket, "six", 0.0) == [ReadyToJoin(6, 6)]


def test_a_joiner_is_no_donor_of_its_own() -> None:
    rejoin = joiner(2)
    assert rejoin.donors([PeerId("me")], 0.0) == []


def test_an_answer_to_another_question_is_a_programming_error(rejoin: Rejoin) -> None:
    ask = only(rejoin.donors([A], 0.0))
    with pytest.raises(AssertionError, match="another question"):
        rejoin.recorded(ask.ticket, 3, reach=0, now_s=0.0)


def test_a_digest_of_a_state_that_was_dropped_is_no_digest_of_the_next_one(rejoin: Rejoin) -> None:
    *_, fifth = complete(rejoin, 5)
    records = only(rejoin.committed(6, 0.0))
    _, sixth = rejoin.recorded(records.ticket, 6, reach=0, now_s=0.0)
    assert isinstance(fifth, Digest)
    assert isinstance(sixth, Digest)
    rejoin.agreed(5, "five", 0.0)
    rejoin.agreed(6, "six", 0.0)
    drop, *again = rejoin.digested(fifth.ticket, "wrong", 0.0)
    assert drop == Drop()
    *_, anew = complete(rejoin, 6, orders=again)
    assert isinstance(anew, Digest)
    assert rejoin.digested(sixth.ticket, "of what was dropped", 0.0) == []
    assert rejoin.digested(anew.ticket, "six", 0.0) == [ReadyToJoin(6, 6)]


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
    log.append(0, 5)
    assert log.append(1, 11) == range(2)
    assert (log.reach, log.version, log.size_bytes) == (2, 2, 0)


def test_a_gap_is_a_programming_error() -> None:
    log = CommitLog(100, 3)
    log.append(3, 10)
    with pytest.raises(AssertionError, match="at version 4"):
        log.append(5, 10)
