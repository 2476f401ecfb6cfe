"""Peers with little memory get small stages, and a job that fits nobody says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from scheduler.jobs.job import Job
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import OutOfMemory
from swarm.job.footprint import stage_footprint
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec
from swarm.types import JobState, PeerId
from tests.support.sim import loop as sim
from tests.support.simulated import Done, Rig, Tokens, small_spec, write_text


def run(folder: Path, spec: JobSpec, memories: Sequence[int], late: Sequence[int] = ()) -> tuple[Job, list[str]]:
    """The ended job and the reasons that it gave; `late` peers come once the job waits."""
    tokens = Tokens.make(folder, resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1))

    async def main() -> tuple[Job, list[str]]:
        result: tuple[Job, list[str]] | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                rig = await Rig.start(tokens, 0, tasks, Random(1))
                for number, size in enumerate(memories):
                    rig.add_peer(PeerId(f"peer-{number}"), tasks, Random(number), memory_bytes=size)
                while len(rig.membership.idle_peers()) < len(memories):
                    await asyncio.sleep(0.1)
                job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
                reasons: list[str] = []
                waiting = list(late)
                async for view in rig.jobs.watch(job):
                    reasons.append(view.record.reason)
                    if view.record.state is JobState.PLACING:
                        for number, size in enumerate(waiting):
                            rig.add_peer(PeerId(f"late-{number}"), tasks, Random(number), memory_bytes=size)
                        waiting.clear()
                result = job, reasons
                await rig.network.close()
                raise Done
        except* OutOfMemory as group:
            raise group.exceptions[0] from None
        except* Done:
            pass
        assert result is not None
        return result

    return sim.run(main(), seed=1, limit_s=3600.0)


def spec_of(folder: Path, **changes: object) -> JobSpec:
    return small_spec(write_text(folder), training__steps=1, **changes)


def size_of(spec: JobSpec, layers: int, stage: int, stages: int) -> int:
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    return stage_footprint(resolved, layers, stage, stages).total_bytes


def test_the_cut_follows_the_memory_of_the_peers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, pipeline__stages=2, config__num_hidden_layers=4)
    one = size_of(spec, 1, 1, 2)
    job, _ = run(tmp_path, spec, [one, 1 << 30])
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert job.spec.pipeline.split == (3, 1)
    assert job.stages == {0: ["peer-1"], 1: ["peer-0"]}


def test_what_not_even_one_layer_fits_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"the largest of 2 stage servers offers 2\.0 KiB"):
        run(tmp_path, spec_of(tmp_path), [1000, 2000])


def test_a_cut_by_hand_that_does_not_fit_waits_for_a_peer_that_can_hold_it(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, pipeline__split=(2, 1))
    job, reasons = run(tmp_path, spec, [size_of(spec, 1, 1, 2)] * 2, late=[1 << 30])
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert job.stages[0] == ["late-0"]
    assert any("stage 0 needs 1 replica more" in one and "the largest idle peer is peer-1" in one for one in reasons)
