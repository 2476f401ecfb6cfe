"""The claim: whatever the wiring, the order of arrival and the replicas, the weights are those of one process.

Real flows, brain and torch; the transport delays and reorders every tensor at random and delivers some twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from swarm.config import JobSpec
from swarm.data import IGNORED, ByteTokenizer, ShardInfo, TokenManifest
from swarm.partition import resolve
from swarm.reference import StepReport, train_local
from swarm.sim import loop as sim
from swarm.sim.network import Counts
from swarm.types import JobState
from tests.rig import Done, Rig, Tokens, small_spec, write_text


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True)
class Run:
    """A simulated training: its weights, what was done to the traffic, and the virtual seconds that it took."""

    sha256: str
    counts: Counts
    training_s: float


def run_swarm(spec: JobSpec, tokens: Tokens, peers: int, seed: int) -> Run:
    """Train in simulation."""

    async def main() -> Run:
        result: Run | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                rig = await Rig.start(tokens, peers, tasks, Random(seed))
                while len(rig.membership.idle_peers()) < peers:
                    await asyncio.sleep(0.1)
                job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
                loop = asyncio.get_running_loop()
                started_s = 0.0
                async for view in rig.jobs.watch(job):
                    if view.record.state is JobState.RUNNING and not started_s:
                        started_s = loop.time()
                assert job.record.state is JobState.SUCCEEDED, job.record.reason
                result = Run(job.record.weights_sha256, rig.network.counts, loop.time() - started_s)
                await rig.network.close()
                raise Done
        except* Done:
            pass
        assert result is not None
        return result

    return sim.run(main(), seed=seed, limit_s=3600.0)


# (stages, replicas, staleness, tied, compression, recompute, microbatch_sequences, max_in_flight)
SHAPES = [
    (1, 1, 1, False, "none", False, 2, "auto"),
    (1, 2, 0, True, "none", True, 3, 1),
    (1, 3, 1, False, "none", False, 1, 4),
    (2, 1, 1, True, "bfloat16", False, 3, "auto"),
    (2, 2, 0, False, "none", True, 2, 4),
    (2, 2, 1, True, "none", True, 2, "auto"),
    (2, 3, 0, True, "none", False, 2, 1),
    (3, 1, 1, False, "float16", True, 1, 4),
    (3, 2, 0, True, "none", False, 1, "auto"),
    (3, 3, 1, False, "bfloat16", True, 2, "auto"),
    (3, 2, 1, True, "int8", False, 2, "auto"),
    (3, 2, 1, True, "none", False, 3, 1),
]


@pytest.mark.parametrize(
    ("stages", "replicas", "staleness", "tied", "compression", "recompute", "size", "in_flight"),
    SHAPES,
    ids=lambda value: str(value),
)
def test_the_swarm_ends_with_the_weights_of_one_process(
    tmp_path: Path,
    stages: int,
    replicas: int,
    staleness: int,
    tied: bool,
    compression: str,
    recompute: bool,
    size: int,
    in_flight: int | str,
) -> None:
    source = write_text(tmp_path)
    spec = small_spec(
        source,
        pipeline__stages=stages,
        pipeline__compression=compression,
        pipeline__staleness=staleness,
        pipeline__max_in_flight=in_flight,
        model__recompute=recompute,
        config__tie_word_embeddings=tied,
        training__microbatch_sequences=size,
    )
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    tokens = Tokens.make(tmp_path, resolved)
    expected = train_local(resolved, tokens.batches(resolved), device=torch.device("cpu"))
    run = run_swarm(resolved, tokens, stages * replicas, seed=stages * 100 + replicas * 10 + size)
    assert run.sha256 == expected.sha256
    if stages > 1:
        assert run.counts.reordered > 0
        assert run.counts.duplicated > 0


def test_another_family_ends_with_the_weights_of_one_process(tmp_path: Path) -> None:
    """GPT-2: learned positions in the first stage, embedding tied to the head, biases."""
    source = write_text(tmp_path)
    config = {"n_layer": 3, "n_embd": 32, "n_head": 4, "n_positions": 16}
    spec = small_spec(source, model__family="gpt2", model__config=config, pipeline__stages=2)
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    assert resolved.tied
    tokens = Tokens.make(tmp_path, resolved)
    expected = train_local(resolved, tokens.batches(resolved), device=torch.device("cpu"))
    assert run_swarm(resolved, tokens, 4, seed=42).sha256 == expected.sha256


def test_weights_do_not_depend_on_the_number_of_stages(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    seen = set()
    for stages in (1, 2, 3):
        spec = small_spec(source, pipeline__stages=stages, config__tie_word_embeddings=True)
        resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
        tokens = Tokens.make(tmp_path, resolved)
        seen.add(run_swarm(resolved, tokens, 2 * stages, seed=stages).sha256)
    assert len(seen) == 1


def test_masked_targets_and_held_out_samples_end_with_the_weights_of_one_process(tmp_path: Path) -> None:
    """Texts end inside sequences, some microbatches have no target that counts, and steps differ in their divisor."""
    spec = small_spec(
        write_text(tmp_path),
        pipeline__stages=2,
        training__microbatch_sequences=1,
        data__validation_ratio=0.25,
        data__shuffle=False,
    )
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    end = ByteTokenizer.END_OF_TEXT
    ends = np.random.default_rng(0).random(16 * 80 + 1) < 0.1
    ends[16:64] = ends[16 * 12 : 16 * 24] = True  # three rows of step 0, all of step 1
    row = np.where(ends, end, np.arange(ends.size) % 50).astype("<u2").tobytes()
    sha256 = hashlib.sha256(row).hexdigest()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / f"{sha256}.bin").write_bytes(row)
    shard = ShardInfo(sha256, ends.size, len(row), tmp_path / "shards" / f"{sha256}.bin")
    tokens = Tokens(tmp_path, TokenManifest((shard,), "uint16", ByteTokenizer.vocabulary_size, 3.0, end))

    batches = tokens.batches(resolved)
    assert (batches.samples, batches.validation_samples) == (60, 20)
    assert len({batches.tokens_of(step) for step in range(4)}) == 4
    assert (batches.microbatch(0, 2)[1] == IGNORED).all()
    reports: list[StepReport] = []
    expected = train_local(resolved, batches, device=torch.device("cpu"), on_step=reports.append)
    assert [report.tokens for report in reports] == [batches.tokens_of(step) for step in range(4)]
    assert (reports[1].loss, reports[1].norm, reports[1].skipped) == (0.0, 0.0, False)
    assert run_swarm(resolved, tokens, 4, seed=8).sha256 == expected.sha256


@pytest.mark.parametrize("routing", ["iwrr", "uniform"])
def test_weights_do_not_depend_on_the_wiring(tmp_path: Path, routing: str) -> None:
    spec = small_spec(write_text(tmp_path), pipeline__stages=2, pipeline__routing=routing)
    resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
    tokens = Tokens.make(tmp_path, resolved)
    expected = train_local(resolved, tokens.batches(resolved), device=torch.device("cpu"))
    assert run_swarm(resolved, tokens, 6, seed=3).sha256 == expected.sha256


def test_without_flush_steps_overlap(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    seconds = {}
    for staleness in (0, 1):
        spec = small_spec(source, pipeline__stages=3, pipeline__staleness=staleness, training__steps=8)
        resolved = resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)
        tokens = Tokens.make(tmp_path, resolved)
        seconds[staleness] = run_swarm(resolved, tokens, 3, seed=5).training_s
    assert seconds[1] < 0.8 * seconds[0], seconds
