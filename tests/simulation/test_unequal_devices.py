"""A pool of unequal devices trains with equal bits, or says why it does not start."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import TypeVar

import torch

from scheduler.jobs.job import Job
from stage_server.device import Timed
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import ReplicaDiverged
from swarm.reference.trainer import train_local
from swarm.types import JobState, PeerId
from swarm.wire.messages import LoadStage
from tests.support.devices import InlineDevice
from tests.support.other_products import OtherProducts
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text

T = TypeVar("T")
H100 = "cuda:0 NVIDIA H100"


class FlushingDevice(InlineDevice):
    """Its optimizer gives other bits: it has no denormals."""

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        def flushing() -> T:
            torch.set_flush_denormal(True)
            try:
                return work()
            finally:
                torch.set_flush_denormal(False)

        return super().run(flushing)


class OtherDevice(InlineDevice):
    """Its processor adds up matrix products in another order."""

    def run(self, work: Callable[[], T]) -> Awaitable[T]:
        return super().run(lambda: elsewhere(work))

    def timed(self, work: Callable[[], T]) -> Awaitable[Timed[T]]:
        return super().timed(lambda: elsewhere(work))


def elsewhere(work: Callable[[], T]) -> T:
    with OtherProducts():
        return work()


def train(
    folder: Path, peers: Sequence[tuple[str, type[InlineDevice], int]], **changes: object
) -> tuple[Job, dict[int, str], str]:
    """The ended job, where each stage stepped, and the hash that one process gives; peers are (device, type, pin)."""
    spec = resolved(small_spec(write_text(folder), pipeline__stages=2, training__steps=2, **changes))
    tokens = Tokens.make(folder, spec)
    step_on: dict[int, str] = {}

    async def act(rig: Rig) -> Job:
        send = rig.parts.connections.send

        def watched(peer: PeerId, command: object) -> None:
            if isinstance(command, LoadStage):
                step_on[command.stage] = command.step_on
            send(peer, command)  # type: ignore[arg-type]

        rig.parts.connections.send = watched  # type: ignore[method-assign, assignment]
        for number, (name, kind, pin) in enumerate(peers):
            rng = Random(number)
            peer = PeerId(f"peer-{number}")
            rig.add_peer(peer, rig.tasks, rng, stage=pin, device_name=name, device_type=kind)
        while len(rig.membership.idle_peers()) < len(peers):
            await asyncio.sleep(0.1)
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
        await rig.finished(job)
        return job

    job = play(tokens, 0, act)
    return job, step_on, train_local(spec, tokens.batches(spec)).sha256


def test_a_mixed_stage_steps_on_the_cpu_and_ends_with_the_weights_of_one_process(tmp_path: Path) -> None:
    peers = [(H100, InlineDevice, 0), ("cpu", InlineDevice, 0), (H100, InlineDevice, 1)]
    job, step_on, expected = train(tmp_path, peers)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert step_on == {0: "cpu", 1: "device"}
    assert job.record.weights_sha256 == expected


def test_stages_that_share_the_embedding_step_alike(tmp_path: Path) -> None:
    peers = [(H100, InlineDevice, 0), ("cpu", InlineDevice, 1)]
    job, step_on, expected = train(tmp_path, peers, config__tie_word_embeddings=True)
    assert step_on == {0: "cpu", 1: "cpu"}
    assert job.record.weights_sha256 == expected


def test_a_device_whose_optimizer_gives_other_bits_is_not_mixed_and_named(tmp_path: Path) -> None:
    peers = [("cpu", InlineDevice, 0), (H100, FlushingDevice, 0), ("cpu", InlineDevice, 1)]
    job, _, _ = train(tmp_path, peers)
    assert job.record.state is JobState.FAILED
    assert job.record.error_code == ReplicaDiverged.code
    assert "peer-0 (cpu) against peer-1 (cuda:0 NVIDIA H100)" in job.record.reason
    assert "--stage" in job.record.hint
    assert job.progress.steps_done == 0


def test_such_a_device_may_have_a_stage_of_its_own(tmp_path: Path) -> None:
    peers = [("cpu", InlineDevice, 0), (H100, FlushingDevice, 1)]
    job, step_on, _ = train(tmp_path, peers)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert step_on == {0: "device", 1: "device"}


def test_processors_whose_matrix_products_differ_are_not_mixed_and_a_person_is_told_what_to_do(tmp_path: Path) -> None:
    peers = [("cpu", InlineDevice, 0), ("cpu", OtherDevice, 0), ("cpu", InlineDevice, 1)]
    job, _, _ = train(tmp_path, peers, training__optimizer="muon")
    assert job.record.state is JobState.FAILED
    assert job.record.error_code == ReplicaDiverged.code
    assert "cannot be mixed: let machines of one kind serve it" in job.record.reason
    assert "--stage" in job.record.hint
