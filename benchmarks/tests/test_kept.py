"""benchmarks.learning.kept: a run that was interrupted goes on."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning.kept import Kept


def test_what_was_found_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    assert Kept(path).once("a", lambda: {"loss": 1.5}) == {"loss": 1.5}
    again = Kept(path)
    assert again.once("a", lambda: 1 / 0) == {"loss": 1.5}
    assert again.once("b", lambda: 2.5) == 2.5


def test_nothing_is_written_without_a_file() -> None:
    kept = Kept(None)
    assert kept.once("a", lambda: 1) == 1
    assert kept.once("a", lambda: 2) == 1
