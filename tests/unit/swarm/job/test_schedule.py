"""swarm.job.schedule: learning rate and clip factor."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarm.job.schedule import clip, learning_rate, not_finite_fault, version_of
from swarm.job.spec import TrainingSection


def training(**values: Any) -> TrainingSection:
    return TrainingSection(**({"steps": 110, "warmup_steps": 10, "learning_rate": 1.0, "min_lr_ratio": 0.1} | values))


def test_warm_up_rises_in_equal_steps_and_ends_at_the_full_rate() -> None:
    rates = [learning_rate(training(), step) for step in range(10)]
    assert rates == pytest.approx([0.1 * (step + 1) for step in range(10)])


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_schedule_meets_its_middle_and_its_end(schedule: str, middle: float, end: float) -> None:
    values = training(schedule=schedule)
    assert learning_rate(values, 10) == pytest.approx(1.0)
    assert learning_rate(values, 60) == pytest.approx(middle)
    assert learning_rate(values, 110) == pytest.approx(end)


def test_a_job_of_warm_up_only_has_a_rate_at_every_step() -> None:
    assert learning_rate(training(steps=10), 9) == pytest.approx(1.0)


def test_clip_brings_the_norm_to_the_limit() -> None:
    norm, scale = clip([9.0, 16.0], 1.0)
    assert norm == 5.0
    assert norm * scale == pytest.approx(1.0, rel=1e-6)


def test_small_gradients_and_no_limit_are_not_clipped() -> None:
    assert clip([0.25], 1.0) == (0.5, 1.0)
    assert clip([1e6], 0.0) == (1e3, 1.0)
    assert clip([], 1.0) == (0.0, 1.0)


def test_norm_does_not_depend_on_the_order_of_parameters() -> None:
    values = [1e16, 1.0, -0.0, 3.7, 1e-8] * 7
    assert clip(values, 0.0) == clip(sorted(values), 0.0)
    assert clip(values, 0.0)[0] == math.sqrt(math.fsum(values))


@pytest.mark.parametrize("squared", [[1.0, math.inf], [1.0, math.nan], [1e308, 1e308]])
def test_a_norm_with_a_part_that_is_not_finite_is_not_finite(squared: list[float]) -> None:
    assert not math.isfinite(clip(squared, 1.0)[0])


@pytest.mark.parametrize(
    ("in_a_row", "fault"),
    [(1, ""), (9, ""), (10, "10 steps in a row were not finite"), (30, "all 30 steps were not finite")],
)
def test_many_steps_in_a_row_that_are_not_finite_end_a_job(in_a_row: int, fault: str) -> None:
    found = not_finite_fault(in_a_row + 1, in_a_row, steps=30, most=10)
    assert fault in found
    assert bool(found) == bool(fault)


def test_a_job_whose_steps_were_all_not_finite_has_failed_however_short_it_is() -> None:
    assert not_finite_fault(0, 1, steps=1, most=10)
    assert not_finite_fault(1, 2, steps=2, most=10)
    assert not not_finite_fault(1, 1, steps=2, most=10)


@pytest.mark.parametrize(
    ("overlap", "sync_steps", "versions"),
    [
        (0, 0, [(0, 0, 0), (1, 1, 1), (2, 2, 2), (3, 3, 3)]),
        (1, 0, [(0, 0, 0), (0, 1, 1), (1, 2, 2), (2, 3, 3)]),
        (2, 0, [(0, 0, 0), (0, 0, 1), (1, 1, 2), (2, 2, 3)]),
        (3, 0, [(0, 0, 0), (0, 0, 0), (1, 1, 1), (2, 2, 2)]),
        (1, 2, [(0, 0, 0), (1, 1, 1), (1, 2, 2), (2, 3, 3)]),
        (3, 3, [(0, 0, 0), (1, 1, 1), (2, 2, 2), (2, 2, 2)]),
    ],
)
def test_the_first_microbatches_of_a_step_use_the_version_before_its_own(
    overlap: int, sync_steps: int, versions: list[tuple[int, ...]]
) -> None:
    found = [
        tuple(version_of(step, index, overlap=overlap, sync_steps=sync_steps) for index in range(3))
        for step in range(4)
    ]
    assert found == versions


def test_half_of_the_gradient_one_step_late_on_a_parabola() -> None:
    """f(w) = w squared / 2, two microbatches, one of them late, learning rate 1/4: worked out by hand."""
    weights = [1.0]
    for step in range(3):
        gradients = [weights[version_of(step, index, overlap=1, sync_steps=0)] for index in range(2)]
        weights.append(weights[-1] - 0.25 * sum(gradients) / 2)
    assert weights == [1.0, 0.75, 0.53125, 0.37109375]
