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
    assert learning_rate(training(steps=10), 9) == pytest.approx(1.0), "a job of warm-up only"


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_schedule_meets_its_middle_and_its_end(schedule: str, middle: float, end: float) -> None:
    values = training(schedule=schedule)
    assert learning_rate(values, 10) == pytest.approx(1.0)
    assert learning_rate(values, 60) == pytest.approx(middle)
    assert learning_rate(values, 110) == pytest.approx(end)


@pytest.mark.parametrize(
    ("squared", "limit", "norm", "scale"),
    [
        ([9.0, 16.0], 1.0, 5.0, pytest.approx(0.2, rel=1e-6)),
        ([0.25], 1.0, 0.5, 1.0),
        ([1e6], 0.0, 1e3, 1.0),
        ([], 1.0, 0.0, 1.0),
    ],
)
def test_clip_brings_the_norm_to_the_limit_if_there_is_one(
    squared: list[float], limit: float, norm: float, scale: float
) -> None:
    assert clip(squared, limit) == (norm, scale)


def test_norm_does_not_depend_on_the_order_of_parameters_and_is_not_finite_with_a_part_that_is_not() -> None:
    values = [1e16, 1.0, -0.0, 3.7, 1e-8] * 7
    assert clip(values, 0.0) == clip(sorted(values), 0.0)
    assert clip(values, 0.0)[0] == math.sqrt(math.fsum(values))
    for broken in ([1.0, math.inf], [1.0, math.nan], [1e308, 1e308]):
        assert not math.isfinite(clip(broken, 1.0)[0])


@pytest.mark.parametrize(
    ("in_a_row", "steps", "fault"),
    [
        (1, 30, ""),
        (9, 30, ""),
        (10, 30, "10 steps in a row were not finite"),
        (30, 30, "all 30 steps were not finite"),
        (1, 1, "the only step were not finite"),
        (2, 2, "all 2 steps were not finite"),
        (1, 2, ""),
    ],
)
def test_steps_that_are_not_finite_end_a_job_if_they_are_many_in_a_row_or_all(
    in_a_row: int, steps: int, fault: str
) -> None:
    found = not_finite_fault(in_a_row + 1, in_a_row, steps=steps, most=10)
    assert fault in found
    assert bool(found) == bool(fault)


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
