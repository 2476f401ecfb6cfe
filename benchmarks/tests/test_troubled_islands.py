"""benchmarks.sites.troubled_islands: which tokens count, what the islands could have made, and when trouble is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sites.troubled_islands import COLUMNS, SCENES, Row, between, kept, rows_of, shown, speeds_of, waits
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from tests.support.simulated import small_spec


def test_what_an_island_trained_behind_its_last_exchange_does_not_count() -> None:
    spec = small_spec(
        Path("text.txt"), training__steps=4, averaging__mode="diloco", islands__count=2, outer__every_steps=2
    )
    spec = resolve(spec, Basis(ByteTokenizer.vocabulary_size))
    found = rows_of(
        [(line, step, 10.0 * line + step, 32) for line in (0, 1) for step in range(6 - 2 * line)], spec, {0: 1, 1: 0}
    )
    assert [(row.site, row.step, row.counts) for row in found] == [
        *((1, step, True) for step in range(4)),
        *((0, step, step < 2) for step in range(3)),
    ]


STEADY = [Row(site, step, step + 1.0, 10, True) for site in (0, 1) for step in range(5)]


def test_tokens_are_compared_with_what_the_islands_could_make_meanwhile() -> None:
    speeds, span_s = speeds_of(STEADY, 2), between(STEADY, 1, 4)
    assert (speeds, span_s) == ([10.0, 10.0], (2.0, 5.0))
    assert kept(STEADY, span_s, speeds, (), 1.0) == 1.0
    assert kept(STEADY, span_s, speeds, [(0.0, 3.0), (4.5, 9.0)], 0.0) == pytest.approx(60 / 45)
    halved = [Row(row.site, row.step, row.at_s, row.tokens, row.site == 0) for row in STEADY]
    assert kept(halved, span_s, speeds, (), 1.0) == 0.5


def test_an_island_waits_for_what_its_tokens_do_not_take() -> None:
    rows = [Row(0, 0, 1.0, 10, True), Row(0, 1, 4.0, 20, True), Row(0, 2, 4.5, 5, True), Row(1, 2, 9.0, 5, True)]
    assert waits(rows, (0.0, 9.0), 10.0) == [1.0, 0.0]


def test_trouble_comes_as_often_as_a_scene_says() -> None:
    slow = next(scene for scene in SCENES if scene.each == 2.0)
    on = [slow.is_on(at / 10) for at in range(50)]
    assert [at for at in range(1, 50) if on[at] != on[at - 1]] == [7, 17, 27, 37, 47]
    assert not any(SCENES[0].is_on(at / 10) for at in range(50))


def test_a_run_has_a_row() -> None:
    found = {"kept": 0.9, "waits_s": [1.25, 0.5, 0.0], "late": 1, "lost": 0}
    row = shown("cut", "auto", found)
    assert row == ["cut", "auto", "0.900", "1.2, 0.5, 0.0", "1", "0"]
    assert len(row) == len(COLUMNS)
