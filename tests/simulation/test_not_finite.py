"""The claims: a job that learned nothing has failed, one that skipped a few steps says so; a restart forgets none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scheduler.jobs.driver import JobDriver
from swarm.data.tokenizer import ByteTokenizer
from swarm.types import JobState
from swarm.wire.messages import Accumulated
from tests.support.scenes import play
from tests.support.simulated import Rig, Tokens, small_spec, write_text


def train(
    folder: Path,
    poisoned: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
    *,
    restart: bool = False,
    **keys: Any,
) -> tuple[JobState, str, list[bool]]:
    """How a job ended whose steps are `poisoned`: its state, the reason, and which of its steps were skipped."""
    spec = small_spec(write_text(folder), training__steps=4, pipeline__stages=1, checkpoint__every_steps=0, **keys)
    tokens, real = Tokens.make(folder, spec), JobDriver.on_event

    def poison(driver: JobDriver, peer: Any, event: Any, *room: int, **doubted: bool) -> None:
        if isinstance(event, Accumulated) and poisoned(event.microbatch.step):
            event = replace(event, finite=False)
        real(driver, peer, event, *room, **doubted)

    monkeypatch.setattr(JobDriver, "on_event", poison)

    async def act(rig: Rig) -> tuple[JobState, str, list[bool]]:
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
        if restart:
            while job.progress.steps_done < 2:
                await asyncio.sleep(0.001)
            await rig.kill_scheduler()
            await rig.start_scheduler()
            job = rig.jobs.registry.find(job.record.id)
            assert job.progress.skipped == job.progress.steps_done >= 2
        await rig.finished(job)
        rows = await rig.store.commits(job.record.id)
        return job.record.state, job.record.reason, [row["skip"] for row in rows]

    return play(tokens, 1, act)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("most", "skipped", "reason"),
    [
        (64, 3, "the gradients of all 4 steps were not finite: no weight was ever changed"),
        (3, 2, "the gradients of 3 steps in a row were not finite (step 2 was the last of them)"),
    ],
)
def test_a_job_whose_steps_were_all_or_too_often_in_a_row_not_finite_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, skipped: int, reason: str, restart: bool
) -> None:
    """It also said that 3 steps were lost, although none of them had changed a weight."""
    found = train(tmp_path, lambda step: True, monkeypatch, restart=restart, limits__nonfinite_steps_max=most)
    assert found == (JobState.FAILED, reason, [True] * skipped)


def test_steps_that_changed_weights_are_lost_though_steps_after_them_were_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"limits__nonfinite_steps_max": 2}
    state, reason, skipped = train(tmp_path, lambda step: step > 0, monkeypatch, **most)
    assert (state, skipped) == (JobState.FAILED, [False, True])
    assert reason.endswith("; 2 steps are lost: no checkpoint")


def test_a_job_that_skipped_some_steps_succeeds_and_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = {"limits__nonfinite_steps_max": 2}
    state, reason, skipped = train(tmp_path, lambda step: step % 2 == 0, monkeypatch, **most)
    assert (state, skipped) == (JobState.SUCCEEDED, [True, False, True, False])
    assert reason == "all steps committed, weights saved; 2 of 4 steps skipped"
