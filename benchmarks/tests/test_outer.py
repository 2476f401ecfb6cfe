"""benchmarks.learning.outer: what an island sends, and how gaia stands beside streaming."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.learning.outer import BESIDE, Way, gaia_rows, loss_and_bytes
from tests.support.simulated import write_text


@pytest.mark.parametrize(
    ("mode", "outer", "sent"),
    [
        ("streaming", (("every_steps", 1), ("compression", "bfloat16")), 2.0),
        ("streaming", (("every_steps", 2), ("compression", "none")), 2.0),
        ("gaia", (("threshold", 0.0),), 2.0),  # exchanges behind steps 3 and 4
    ],
)
def test_each_exchange_counts_with_the_bytes_that_travel(
    tmp_path: Path, mode: str, outer: tuple[tuple[str, object], ...], sent: float
) -> None:
    loss, found = loss_and_bytes(Way(mode, 2, outer), 0, 4e-3, 4, str(write_text(tmp_path)))
    assert found == sent
    assert loss < 6.0


def test_what_gaia_leaves_out_is_not_counted(tmp_path: Path) -> None:
    way = Way("gaia", 2, (("threshold", 0.5),))
    _, found = loss_and_bytes(way, 0, 4e-3, 4, str(write_text(tmp_path)))
    assert 1.0 < found < 2.0, "the closing exchange alone is 1.0"


def test_each_way_of_gaia_stands_beside_one_of_streaming_with_the_means_over_seeds() -> None:
    found = {way: [(2.0, 1.0), (4.0, 2.0)] for pair in BESIDE for way in pair}
    (first, *_) = gaia_rows(found, 2.5)
    assert first[:3] == ["gaia, threshold 0.0", "1.5", "3.000 ± 1.414 (+20.0 %)"]
    assert first[3:] == ["streaming, H 1, compression bfloat16", "1.5", "3.000 ± 1.414 (+20.0 %)"]
