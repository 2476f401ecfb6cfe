"""benchmarks.models.streaming_links: the published figures, and what can be computed by hand."""

from __future__ import annotations

from math import log

import pytest

from benchmarks.models.streaming_links import (
    DATA_PARALLEL,
    DILOCO,
    FP4,
    GBIT,
    LARGE,
    OVERLAP,
    PUBLISHED,
    SMALL,
    STREAMING,
    UTILISATIONS,
    closed_form,
    required_bits_per_s,
    utilisation,
)

GRID = 10 ** (4 / 49)  # 50 values from 0.1 to 1,000


def test_the_published_figures_come_out() -> None:
    """Most within 15 %, and all within a step of the grid that the published ones lie on."""
    ratios = [
        required_bits_per_s(model, method, least) / GBIT / published
        for (model, method), figures in PUBLISHED.items()
        for least, published in zip(UTILISATIONS, figures, strict=True)
    ]
    assert len(ratios) == 35
    assert all(1 / GRID < ratio < GRID for ratio in ratios)
    assert max(ratios) < 1.19
    assert sum(abs(ratio - 1) <= 0.15 for ratio in ratios) == 29


def test_the_published_figures_in_16_bits_lie_on_a_grid() -> None:
    for (_, method), figures in PUBLISHED.items():
        for figure in figures if method.bits == 16 else ():
            place = log(figure / 0.1, GRID)
            assert 0.1 * GRID ** round(place) == pytest.approx(figure, rel=0.04)


def test_a_link_without_end_takes_no_time() -> None:
    for model, method in PUBLISHED:
        assert utilisation(model, method, 1e18) == pytest.approx(1.0)


def test_of_what_diloco_sends_all_but_one_step_is_waited_for() -> None:
    """The layers leave while the last backward goes on, and the next forward begins with the last of them."""
    sends_s = 16 * SMALL.parameters / (10 * GBIT)
    layer_s = SMALL.step_s / (3 * SMALL.layers - 1)
    hidden_s = SMALL.step_s - (SMALL.layers + 1) * layer_s  # backward, but for the layer that is sent first
    expected = 100 * SMALL.step_s / (100 * SMALL.step_s + sends_s - hidden_s)
    assert utilisation(SMALL, DILOCO, 10 * GBIT) == pytest.approx(expected)


def test_every_change_of_the_paper_needs_less() -> None:
    needed = [required_bits_per_s(SMALL, way, 0.95) for way in (DATA_PARALLEL, DILOCO, STREAMING, OVERLAP, FP4)]
    assert needed == sorted(needed, reverse=True)


def test_the_closed_form_is_what_a_site_waits_for() -> None:
    assert closed_form(LARGE, DILOCO, 0.9) == pytest.approx(18 * GBIT)
    assert required_bits_per_s(LARGE, DILOCO, 0.5) == pytest.approx(closed_form(LARGE, DILOCO, 0.5), rel=0.01)
