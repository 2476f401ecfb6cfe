"""The formula behind the table of published step times."""

from __future__ import annotations

import pytest

from benchmarks.models.published_links import WAYS


@pytest.mark.parametrize("way", [way for way in WAYS if way.step_s], ids=lambda way: way.name)
def test_the_published_step_times_follow_the_formula(way: object) -> None:
    assert way.formula_s == pytest.approx(way.step_s, rel=0.03)  # type: ignore[attr-defined]
