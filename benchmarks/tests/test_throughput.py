"""The benchmark's arithmetic: what it counts and what it leaves out."""

import argparse
from pathlib import Path

import pytest

from benchmarks.measured.throughput import OVERLAPPING, SWARMS, Round, disagreement, left_to_scheduler
from benchmarks.measured.ways import Course, Spent, Timed, job_of, sample, spent_between, timed


def test_speed_leaves_out_the_warm_up_steps() -> None:
    slow_start = [100.0, 150.0, 152.0, 153.0, 157.0]
    one = timed(slow_start, warmup=2, tokens_per_step=700, cpu_s=6.0, loss=1.0)
    assert one.tokens_per_s == pytest.approx(3 * 700 / 7.0)
    assert one.step_s == 2.0
    assert one.cpu_s_per_step == 2.0


def test_a_ratio_above_one_says_that_the_swarm_is_faster() -> None:
    one = Round({"swarm": Timed(300.0, 1.0, 1.0, 5.0), "local": Timed(200.0, 1.0, 1.0, 5.0)})
    assert one.ratio("swarm", "local") == 1.5


def test_ways_that_trained_differently_are_named() -> None:
    same = Round({way: Timed(1.0, 1.0, 1.0, 5.0) for way in ("local", "swarm", "1f1b")})
    other = Round(same.ways | {"1f1b": Timed(1.0, 1.0, 1.0, 5.01)})
    assert disagreement([same], 1e-4) == ""
    assert "round 2" in disagreement([same, other], 1e-4)


def test_a_loss_that_is_no_number_never_agrees() -> None:
    nothing = Round({way: Timed(1.0, 1.0, 1.0, float("nan")) for way in ("local", "swarm", "1f1b")})
    assert disagreement([nothing], 1e-4) != ""


def test_metrics_are_summed_over_the_series_that_match() -> None:
    text = 'x_sum{direction="forward",stage="0"} 1.5\nx_sum{direction="forward",stage="1"} 2\nx_sum{direction="b"} 9\n'
    assert sample(text, r'x_sum\{direction="forward",stage="\d+"\}') == 3.5


def test_what_was_spent_is_what_was_added() -> None:
    before, after = Spent("stage 0", 10.0, 1.0, 2.0, 3.0, 4.0), Spent("stage 0", 20.0, 3.0, 5.0, 7.0, 9.0)
    assert spent_between(before, after) == Spent("stage 0", 10.0, 2.0, 3.0, 4.0, 5.0)


def test_the_time_to_a_loss_is_when_a_tenth_of_the_steps_has_it_from_the_end_of_the_first_one() -> None:
    course = Course([100.0 + second for second in range(20)], [5.0 - step / 10 for step in range(20)])
    assert course.loss_at(1.0) == pytest.approx((3.1 + 3.2) / 2)
    assert course.loss_at(0.5) == pytest.approx((4.1 + 4.2) / 2)
    assert course.seconds_to(5.0) == 1.0
    assert course.seconds_to(course.loss_at(0.5) + 1e-9) == 9.0
    assert course.seconds_to(3.0) is None


def test_the_ways_with_overlap_do_overlap(tmp_path: Path) -> None:
    # They once trained without lookahead, and without lookahead "auto" is no overlap: both columns were the same job.
    shape = {"stages": 2, "replicas": 1, "microbatch": 2, "microbatches": 8, "width": 32, "layers": 2, "sequence": 16}
    options = argparse.Namespace(**shape, warmup=1, steps=2, dtype="float32", compression="none", overlap=0)
    spec, _ = job_of(options, tmp_path)
    late = {way: job_for(spec).overlap for way, job_for in SWARMS.items()}
    narrow = {"maxout4": 2, "maxout16": 2, "anchor8": 2}
    most = {"swarm": 0, "overlap": 2, "int8": 2, "loopback": 2, "insecure": 0, "whole": 0, "wholelap": 2}
    assert late == most | narrow
    assert SWARMS["maxout16"](spec).boundary_width == spec.boundary_width // 16
    assert SWARMS["int8"](spec).pipeline.compression == "int8"
    assert set(OVERLAPPING) == {way for way, count in late.items() if count}, "what a scheduler chooses behind a link"
    assert left_to_scheduler(SWARMS["int8"](spec)).pipeline.overlap == "auto"
