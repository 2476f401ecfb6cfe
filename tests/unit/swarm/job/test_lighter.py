"""What a job does without where memory is short: in which order, and what people are told."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from swarm.job.lighter import choice_text, choices, lighter
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from tests.support.simulated import small_spec


def open_job(**changes: object) -> JobSpec:
    """A job that leaves all that takes memory at "auto"; microbatches of up to 4 sequences."""
    values: dict[str, object] = {
        "training__global_batch_sequences": 64, "training__microbatch_sequences": "auto", "data__sequence_length": 512,
        "pipeline__stages": "auto", "pipeline__overlap": "auto", "pipeline__max_in_flight": "auto",
        "model__recompute": "auto", "training__optimizer_on": "auto",
    }  # fmt: skip
    return small_spec(Path("text.txt"), **(values | changes))


def plain(spec: JobSpec) -> JobSpec:
    return resolve(spec, vocabulary_size=257, stages_if_auto=2, peers=2)


def test_the_first_choice_is_what_the_job_does_where_memory_is_not_short() -> None:
    spec = open_job()
    first = next(choices(spec, plain(spec)))
    assert plain(first.in_flight(2, 2)) == plain(spec)
    assert choice_text(plain(spec), plain(spec)) == ""


def test_what_costs_least_is_given_up_first_and_the_optimizers_place_last() -> None:
    spec = open_job()
    tried = [
        (
            choice.spec.training.optimizer_on, choice.spec.model.recompute, choice.fewest,
            choice.spec.pipeline.overlap, choice.spec.training.microbatch_sequences,
        )
        for choice in choices(spec, plain(spec))
    ]  # fmt: skip
    assert tried[:4] == [
        ("device", False, False, "auto", 4), ("device", False, False, "auto", 2),
        ("device", False, False, "auto", 1), ("device", False, False, 0, 4),
    ]  # fmt: skip
    assert tried[-1] == ("host", True, True, 0, 1)
    kept = {place: [one[place] for one in tried] for place in range(3)}
    assert all(before <= after for before, after in pairwise(kept[0])), "device before host"
    assert kept[1] == sorted(kept[1][: len(tried) // 2]) * 2
    assert len(set(tried)) == len(tried) == 48


def test_what_the_job_file_says_is_no_choice() -> None:
    spec = open_job(
        training__microbatch_sequences=4, pipeline__overlap=2, pipeline__max_in_flight=7, model__recompute=False,
        training__optimizer_on="device",
    )  # fmt: skip
    (only,) = choices(spec, plain(spec))
    assert plain(only.in_flight(2, 2)) == plain(spec)


def test_the_fewest_in_flight_keep_each_stage_of_each_replica_at_work() -> None:
    spec = open_job()
    few = next(choice for choice in choices(spec, plain(spec)) if choice.fewest)
    assert few.in_flight(3, 7).pipeline.max_in_flight == 6
    assert few.in_flight(4, 2).pipeline.max_in_flight == 4


def test_people_are_told_each_choice() -> None:
    spec = open_job()
    *_, last = choices(spec, plain(spec))
    assert choice_text(plain(last.in_flight(2, 2)), plain(spec)) == (
        "to fit the memory on offer: microbatches of 1 sequence, steps do not overlap, at most 2 microbatches in "
        "flight, forward is computed again for backward, the optimizer runs on the hosts"
    )


def test_each_setting_that_is_left_comes_once_and_with_those_before() -> None:
    ways = list(lighter(plain(open_job(pipeline__overlap=2))))
    assert [setting for setting, _ in ways] == [
        "training.microbatch_sequences = 1", "model.recompute = true", "pipeline.overlap = 0",
        'training.optimizer_on = "host"', 'model.dtype = "bfloat16_parameters"', "pipeline.max_in_flight = 1",
    ]  # fmt: skip
    assert not list(lighter(ways[-1][1]))
    assert [setting for setting, _ in lighter(ways[1][1])] == [setting for setting, _ in ways[2:]]
