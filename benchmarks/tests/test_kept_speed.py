"""benchmarks.sites.kept_speed: which rows are inner steps, what exchanges add, and what is compared with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sites.kept_speed import ALONE, COLUMNS, commits_of, exchanged, rows, speed_of
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from tests.support.simulated import small_spec


def test_outer_steps_are_no_steps_of_an_island() -> None:
    spec = small_spec(
        Path("text.txt"), training__steps=4, averaging__mode="diloco", islands__count=2, outer__every_steps=2
    )
    spec = resolve(spec, Basis(ByteTokenizer.vocabulary_size))
    steps = [(timeline, step, 10.0 * timeline + step) for step in range(6) for timeline in (0, 1)]
    assert commits_of(steps, spec) == {0: [0.0, 1.0, 3.0, 4.0], 1: [10.0, 11.0, 13.0, 14.0]}


def test_what_an_exchange_adds_is_told_from_the_steps() -> None:
    commits_s = [0.0, 1.0, 2.0, 3.0, 5.0, 6.0, 7.0]  # an exchange behind four inner steps
    speed = speed_of(commits_s, 1, 6, {4})
    assert speed.steps_per_s == pytest.approx(6 / 7)
    assert exchanged([speed]) == pytest.approx((1 / 7, 1 / 7))
    assert exchanged([speed_of(commits_s, 1, 6, ())]) == (0.0, 0.0)


def test_the_last_island_to_come_to_an_exchange_waits_for_nobody() -> None:
    first, last = [0.0, 1.0, 2.0, 3.0, 5.5, 6.5], [0.0, 1.2, 2.4, 3.6, 5.5, 6.7]
    found = exchanged([speed_of(run, 1, 5, {4}) for run in (first, last)])
    assert found == pytest.approx((1.5 / 6.5, 0.7 / 6.6), rel=0.01)


def test_a_way_is_compared_with_the_islands_alone_in_the_same_turn() -> None:
    alone = [(2.0, 0.0, 0.0), (4.0, 0.0, 0.0), (3.0, 0.0, 0.0)]
    found = rows({ALONE: alone, "diloco": [(1.9, 0.1, 0.01), (3.0, 0.02, 0.004), (3.0, 0.03, 0.006)]})
    assert [len(row) for row in found] == [len(COLUMNS)] * 2
    assert found[1] == ["diloco", "3.000", "0.950", "0.750 to 1.000 (3)", "3.0%", "0.6%"]
