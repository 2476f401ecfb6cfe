"""The claim: what a scheduler refuses without looking at uploads, it refuses when it is asked before the upload."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.storage.job_record import JobTokens
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidConfig, OutOfMemory, SwarmError
from swarm.job.spec import JobSpec
from swarm.limits import HOPS_MAX
from tests.support.scenes import play
from tests.support.simulated import Rig, Tokens, small_spec, write_text

HUGE = {
    "config__hidden_size": 1 << 15,
    "config__intermediate_size": 1 << 17,
    "config__num_attention_heads": 64,
    "config__num_key_value_heads": 64,
}


def answers(folder: Path, spec: JobSpec) -> tuple[JobSpec | SwarmError, JobSpec | SwarmError]:
    """What the scheduler says of the job when it is asked before the upload, and when the job is submitted."""
    tokens = Tokens.make(folder, small_spec(write_text(folder), pipeline__stages=2))
    told: list[JobSpec | SwarmError] = []

    async def act(rig: Rig) -> None:
        of_job = tokens.of_job()
        nothing_yet = JobTokens((), of_job.token_dtype, of_job.vocabulary_size, 0.0, of_job.end_of_text)
        try:
            told.append(await rig.jobs.check(spec, nothing_yet))
        except SwarmError as error:
            told.append(error)
        assert list(rig.jobs.registry.all()) == []
        try:
            told.append((await rig.jobs.submit(spec, of_job, ByteTokenizer().tokenizer_files())).spec)
        except SwarmError as error:
            told.append(error)

    play(tokens, 4, act, rng=Random(3))
    before, after = told
    return before, after


def test_a_job_that_is_taken_is_resolved_as_the_answer_before_the_upload_said(tmp_path: Path) -> None:
    before, taken = answers(tmp_path, small_spec(write_text(tmp_path), pipeline__stages="auto"))
    assert isinstance(before, JobSpec)
    assert before == taken
    assert before.pipeline.stages != "auto"


@pytest.mark.parametrize(
    ("changes", "name", "kind"),
    [
        (HUGE, "big", OutOfMemory),
        (
            {"training__global_batch_sequences": HOPS_MAX + 1, "training__microbatch_sequences": 1},
            "many",
            InvalidConfig,
        ),
        ({}, "--demo", InvalidConfig),
        ({"checkpoint__dir": "/nowhere/that/is/allowed"}, "elsewhere", SwarmError),
    ],
    ids=["it fits nowhere", "too many hops", "a flag for a name", "a folder that is not allowed"],
)
def test_a_job_that_is_refused_is_refused_before_anything_is_uploaded(
    tmp_path: Path, changes: dict[str, Any], name: str, kind: type[SwarmError]
) -> None:
    """The client heard of a model that fits nowhere once all data was uploaded."""
    stages = "auto" if changes is HUGE else 2
    spec = small_spec(write_text(tmp_path), pipeline__stages=stages, **changes).model_copy(update={"name": name})
    before, after = answers(tmp_path, spec)
    assert isinstance(before, kind)
    assert isinstance(after, kind)
    assert (before.message, before.hint) == (after.message, after.hint)
