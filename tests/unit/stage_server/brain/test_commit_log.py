"""stage_server.brain.commit_log: what is kept within the bytes, and how far back it reaches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage_server.brain.commit_log import CommitLog


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
