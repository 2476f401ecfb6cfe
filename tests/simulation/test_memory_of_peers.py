"""Peers with little memory get small stages, and a job that fits nobody says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from scheduler.jobs.job import Job
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import OutOfMemory
from swarm.job.footprint import stage_footprint, stage_needs
from swarm.job.spec import JobSpec
from swarm.model.stage import Stage
from swarm.types import JobState, Memory, PeerId
from tests.support.llamas import job_of
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text


def run(folder: Path, spec: JobSpec, memories: Sequence[int], late: Sequence[int] = ()) -> tuple[Job, list[str]]:
    """The ended job and the reasons that it gave; `late` peers come once the job waits."""
    tokens = Tokens.make(folder, resolved(spec))

    async def act(rig: Rig) -> tuple[Job, list[str]]:
        def add(kind: str, sizes: Sequence[int]) -> None:
            for number, size in enumerate(sizes):
                rig.add_peer(PeerId(f"{kind}-{number}"), rig.tasks, Random(number), memory_bytes=size)

        add("peer", memories)
        while len(rig.membership.idle_peers()) < len(memories):
            await asyncio.sleep(0.1)
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
        reasons: list[str] = []
        waiting = list(late)
        async for view in rig.jobs.watch(job):
            reasons.append(view.record.reason)
            if view.record.state is JobState.PLACING:
                add("late", waiting)
                waiting.clear()
        return job, reasons

    return play(tokens, 0, act)


def spec_of(folder: Path, **changes: object) -> JobSpec:
    return small_spec(write_text(folder), training__steps=1, **changes)


def size_of(spec: JobSpec, layers: int, stage: int, stages: int) -> int:
    return stage_footprint(resolved(spec), layers, stage, stages).total_bytes


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
    assert any(
        "stage 0 needs 1 replica more" in reason and "the largest idle peer is peer-1" in reason for reason in reasons
    )


# Large models on GPUs ------------------------------------------------------------------------------------------------


def placed(folder: Path, name: str, gpus: int, offer: Memory, **sections: dict[str, object]) -> Job:
    """The job of a large model that was submitted to stage servers with a GPU, as they were given its stages."""
    tokens = Tokens.make(folder, resolved(spec_of(folder)))
    spec = job_of(name, **sections)

    def build(*_: object, **__: object) -> Stage:
        raise OutOfMemory("no stage of a large model is built in a test")

    async def act(rig: Rig) -> Job:
        rig.build = build
        for number in range(gpus):
            rig.add_peer(
                PeerId(f"gpu-{number:02}"), rig.tasks, Random(number), device_name="cuda",
                memory_bytes=offer.device_bytes, host_bytes=offer.host_bytes,
            )  # fmt: skip
        while len(rig.membership.idle_peers()) < gpus:
            await asyncio.sleep(0.1)
        of_job = replace(tokens.of_job(), vocabulary_size=spec.model.config["vocab_size"])
        job = await rig.jobs.submit(spec, of_job, ByteTokenizer().tokenizer_files())
        while not job.stages:
            await asyncio.sleep(0.1)
        return job

    return play(tokens, 0, act)


def held(job: Job, offer: Memory) -> bool:
    """Whether each stage server with such memories holds the stage that it was given."""
    split = job.spec.pipeline.split
    assert split != "auto"
    return all(offer.holds(need) for need in stage_needs(job.spec, split)) and len(job.stages) == len(split)


def test_eight_billion_parameters_are_placed_on_twelve_cards_of_24_gb(tmp_path: Path) -> None:
    """By an estimate of 40 bytes per parameter no cut of this model fitted such cards, and the person learned it after
    the upload; the hint named what was set already."""
    offer = Memory(24 << 30, 32 << 30)
    job = placed(tmp_path, "8 B", 12, offer)
    assert len(job.spec.pipeline.split) == 12
    assert held(job, offer)
    host = placed(tmp_path, "8 B", 12, offer, training={"optimizer_on": "host"})
    assert host.spec.training.step_on == "cpu"
    assert held(host, offer)
    with pytest.raises(OutOfMemory, match=r"one decoder layer needs about .* too little") as caught:
        placed(tmp_path, "405 B", 12, offer)
    assert "on the device and" in caught.value.message
    for word in ("recompute", "optimizer_on", "microbatch_sequences"):
        assert word not in caught.value.hint, "it is chosen already"


def test_seventy_billion_parameters_are_placed_on_cards_of_80_gb_and_of_24(tmp_path: Path) -> None:
    large = Memory(80 << 30, 64 << 30)
    assert held(placed(tmp_path, "70 B", 32, large), large)
    small = Memory(24 << 30, 64 << 30)
    sections = {"data": {"sequence_length": 2048}, "training": {"microbatch_sequences": 1}}
    job = placed(tmp_path, "70 B", 82, small, **sections)
    split = job.spec.pipeline.split
    assert (split[0], split[-1], len(split)) == (0, 0, 82), "the embedding and the head alone, as no other cut fits"
    assert held(job, small)
