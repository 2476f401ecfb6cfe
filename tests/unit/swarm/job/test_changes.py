from __future__ import annotations

import re
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from scheduler.storage.checkpoints.catalog import job_and_step
from swarm.errors import InvalidConfig, UsageError
from swarm.job.changes import changed_spec, changed_values, check_changes, check_leases, check_state, check_steps
from swarm.job.islands import courses
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec, apply_overrides, parse_job, put_value
from tests.support.simulated import small_spec


def spec() -> JobSpec:
    return resolve(small_spec(Path("x"), pipeline__stages=3), Basis(257))


def changed(*overrides: str) -> JobSpec:
    values = changed_values(spec().model_dump(mode="json"), overrides)
    return resolve(parse_job(apply_overrides(values, overrides)), Basis(257, stages=2))


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=99",
        "training.learning_rate=0.5",
        'training.schedule="linear"',
        "training.warmup_steps=0",
        "training.grad_clip_norm=0.0",
        "training.weight_decay=0.0",
        "training.microbatch_sequences=3",
        "pipeline.stages=2",
        "pipeline.split=[1, 2]",
        "pipeline.overlap=0",
        'pipeline.compression="int8"',
        "limits.max_runtime_s=5.0",
        "checkpoint.every_steps=3",
        "model.recompute=true",
    ],
)
def test_how_it_is_done_may_change(override: str) -> None:
    check_changes(spec(), changed(override))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ('name="other"', "name"),
        ("model.config.hidden_size=64", "model.config.hidden_size"),
        ("data.sequence_length=8", "data.sequence_length"),
        ('data.source="other"', "data.source"),
        ("data.shuffle=false", "data.shuffle"),
        ("training.global_batch_sequences=6", "training.global_batch_sequences"),
        ("training.seed=3", "training.seed"),
        ('training.optimizer="lamb"', "training.optimizer"),
        ('checkpoint.resume_from="x:1"', "checkpoint.resume_from"),
        ('averaging.mode="diloco"', "averaging.mode"),
    ],
)
def test_what_is_trained_may_not(override: str, key: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(key)) as caught:
        check_changes(spec(), changed(override))
    assert "cannot change from" in caught.value.message


def test_the_number_of_islands_stays_since_their_timelines_follow_from_it() -> None:
    two, four = (
        resolve(
            small_spec(Path("x"), averaging__mode="diloco", islands__count=count, training__global_batch_sequences=16),
            Basis(257),
        )
        for count in (2, 4)
    )
    with pytest.raises(InvalidConfig, match=r"islands\.count cannot change from 2 to 4"):
        check_changes(two, four)


def test_another_number_of_stages_cuts_anew() -> None:
    assert changed("pipeline.stages=2").pipeline.split == (2, 1)
    assert changed("pipeline.split=[1, 2]").pipeline.stages == 2
    assert changed("training.steps=99").pipeline.split == spec().pipeline.split
    with pytest.raises(UsageError):
        changed("pipeline.stages")


def test_nothing_left_to_train_is_said_with_what_to_do() -> None:
    check_steps(spec(), 3)
    with pytest.raises(InvalidConfig, match=r"training\.steps = 4 is reached") as caught:
        check_steps(spec(), 4)
    assert "--set training.steps=8" in caught.value.hint


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"seeds": {"training": 4}}, "training.seed"),
        ({"data": {"sequence_length": 32}}, "data.sequence_length"),
        ({"data": {"shuffle": False}}, "data.shuffle"),
        ({"data": {"validation_ratio": 0.5}}, "data.validation_ratio"),
        ({"data": {"global_batch_sequences": 7}}, "training.global_batch_sequences"),
        ({"optimizer": {"name": "lamb", "state": True}}, "training.optimizer"),
        ({"optimizer": {"name": "lamb", "state": False}}, ""),
        ({"data": [], "seeds": 3}, ""),
        ({}, ""),
    ],
)
def test_a_new_job_fits_the_checkpoint_that_it_starts_from(state: dict[str, Any], key: str) -> None:
    if not key:
        check_state(state, spec())
        return
    with pytest.raises(InvalidConfig, match=re.escape(key)):
        check_state(state, spec())


def test_a_checkpoint_of_an_optimizer_that_is_gone_gives_its_weights_alone() -> None:
    with pytest.raises(InvalidConfig, match="trained with 'nadamw'") as refused:
        check_state({"optimizer": {"name": "nadamw", "state": True}}, spec())
    assert refused.value.hint == "to train on from its weights alone, set model.id to its model/ folder"


def leased(steps: int, every_steps: int, islands: int) -> JobSpec:
    """A job of so many steps in which islands divide each lease of data."""
    return resolve(
        small_spec(
            Path("x"),
            averaging__mode="streaming",
            islands__count=islands,
            outer__every_steps=every_steps,
            outer__overlap_steps=0,
            training__steps=steps,
            training__global_batch_sequences=12,
            training__microbatch_sequences=1,
        ),
        Basis(257),
    )


def sequences(spec: JobSpec, steps: range) -> list[int]:
    """What all islands of a job train in these steps."""
    each = 12 // spec.island_count
    portions = [course.at(step).portion for course in courses(spec) for step in steps]
    return [portion * each + sequence for portion in portions for sequence in range(each)]


@given(data=st.data())
def test_no_sequence_is_trained_twice_or_never_by_a_job_that_goes_on_with_other_leases(data: st.DataObject) -> None:
    """A job with streaming that resumed with more steps amid its last lease trained some sequences twice and as many
    never.
    """
    sizes = st.tuples(st.integers(2, 12), st.integers(1, 6), st.sampled_from([1, 2, 3]))
    old, new = (leased(*data.draw(sizes)) for _ in range(2))
    step = data.draw(st.integers(1, old.training.steps))
    assume(step < new.training.steps)
    seen = sequences(old, range(step)) + sequences(new, range(step, new.training.steps))
    is_exact = sorted(seen) == list(range(12 * new.training.steps))
    islands = {"count": old.island_count, "every_steps": old.outer.every_steps}
    state = {"step": step, "schedule": {"steps": old.training.steps}, "islands": islands}
    with nullcontext() if is_exact else pytest.raises(InvalidConfig, match="would be trained twice"):
        check_leases(state, new)


@pytest.mark.parametrize("text", ["", "x", "x:", ":3", "a/b:3", "x:-1", "x:3.5", "C:\\x"])
def test_a_start_is_a_job_and_a_step(text: str) -> None:
    assert job_and_step("demo-1a:500") == ("demo-1a", "500")
    assert job_and_step("demo:latest") == ("demo", "latest")
    with pytest.raises(InvalidConfig, match="JOB:STEP"):
        job_and_step(text)


@pytest.mark.parametrize(
    ("key", "value"), [("model.family", "gpt2"), ("model.config.n_layer", 2), ("model.config.hidden_sise", 64)]
)
def test_a_change_of_the_model_is_told_as_that_and_not_as_an_unknown_key(
    tmp_path: Path, key: str, value: object
) -> None:
    """`resume --set model.family=gpt2` said: unknown key model.config.intermediate_size, and listed 18 others."""
    before = resolved(tmp_path)
    after = put(before, key, value)
    with pytest.raises(InvalidConfig, match=f"{key} cannot change .* when a job goes on: the weights are"):
        changed_spec(before, after, "--set")


def test_other_changes_are_told_as_they_are(tmp_path: Path) -> None:
    before = resolved(tmp_path)
    with pytest.raises(InvalidConfig, match=r"unknown key training\.stepps"):
        changed_spec(before, put(before, "training.stepps", 5), "--set")
    same = put(before, "model.config.hidden_size", before["model"]["config"]["hidden_size"])
    assert changed_spec(before, put(same, "training.steps", 50), "--set").training.steps == 50


def resolved(folder: Path) -> dict[str, Any]:
    values = resolve(small_spec(folder / "a.txt", pipeline__stages=2), Basis(257, stages=2))
    return values.model_dump(mode="json")


def put(values: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    changed = deepcopy(values)
    put_value(changed, key, value)
    return changed
