"""benchmarks.models.time_to_loss against what can be worked out by hand."""

from __future__ import annotations

from pathlib import Path

from benchmarks.learning.convergence import SYNCHRONOUS, WAYS, Run, Way, save, saved
from benchmarks.models.time_to_loss import SPLIT, rows, speedup, units_to

UNITS = {0: 10.0, 4: 5.0, 8: 4.0}
SLOW = Run(tuple(float(100 - step) for step in range(100)), sync_steps=10, overlap=0)
LATE = Run(SLOW.losses, sync_steps=10, overlap=4)
NEVER = Run((100.0,) * 100, sync_steps=0, overlap=8)


def runs_of(made: dict[str, Run]) -> dict[tuple[Way, float], list[Run]]:
    return {(way, 0.1): [made.get(way.name, SLOW)] for way in WAYS}


def test_steps_before_overlap_begins_take_as_long_as_synchronous_ones() -> None:
    half = SLOW.at(0.5)
    assert units_to(SLOW, half, UNITS.__getitem__) == 50 * 10
    assert units_to(LATE, half, UNITS.__getitem__) == 10 * 10 + 40 * 5
    assert units_to(NEVER, half, UNITS.__getitem__) is None


def test_a_way_of_which_one_seed_never_arrives_has_no_speedup() -> None:
    assert speedup([1.0, 2.0], [2.0, 4.0]) == "2.00"
    assert speedup([1.0, None], [2.0, 4.0]) == "never"


def test_each_way_stands_beside_the_synchronous_ones_and_only_they_compute_a_backward_in_one_call(
    tmp_path: Path,
) -> None:
    """With equal losses only the time of a step counts; runs come back from a file as they were."""
    runs = runs_of({"half late (auto)": LATE, "all late, lookahead": NEVER})
    save(tmp_path / "runs.json", runs)
    assert saved(tmp_path / "runs.json") == runs
    shown = {name: ratios for name, *ratios in rows(runs, 1.0, lambda whole, late: UNITS[late] + 2.0 * whole)}
    assert shown[SYNCHRONOUS.name] == ["1.00", "1.00", "0.83"]
    assert shown["synchronous, lookahead, split"] == ["1.20", "1.20", "1.00"]
    assert shown["half late (auto)"] == ["2.18", "2.18", "1.82"]  # of 1200 and 1000, in 100 + 90 x 5
    assert shown["all late, lookahead"] == ["never", "never", "never"]
    assert list(shown) == [*(way.name for way in WAYS), SPLIT]
