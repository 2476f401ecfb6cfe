"""The claim: whatever the wiring, the order of arrival and the replicas, the weights are those of one process.

Real flows, brain and torch; the transport delays and reorders every tensor at random and delivers some twice.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarm.data.batches import IGNORED
from swarm.data.shards import ShardInfo, TokenManifest
from swarm.data.tokenizer import ByteTokenizer
from swarm.model import compiled
from swarm.reference.trainer import StepReport, train_local
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, run_swarm, small_spec, stale, write_text


def test_weights_do_not_depend_on_the_number_of_stages(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    seen = set()
    for stages in (1, 2, 3):
        spec = resolved(
            small_spec(source, pipeline__stages=stages, pipeline__overlap=3, config__tie_word_embeddings=True)
        )
        tokens = Tokens.make(tmp_path, spec)
        seen.add(run_swarm(spec, tokens, 2 * stages, seed=stages).sha256)
    assert len(seen) == 1


def test_an_embedding_and_a_head_alone_and_an_optimizer_on_the_host_change_no_bit(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    seen = set()
    for split, place in (((2,), "device"), ((0, 2, 0), "device"), ((0, 1, 1, 0), "host"), ((1, 1), "host")):
        spec = small_spec(
            source, config__num_hidden_layers=2, pipeline__split=split, pipeline__stages="auto", pipeline__overlap=3,
            training__optimizer_on=place,
        )  # fmt: skip
        spec = resolved(spec)
        tokens = Tokens.make(tmp_path, spec)
        seen.add(run_swarm(spec, tokens, 2 * len(split), seed=len(split)).sha256)
        seen.add(train_local(spec, tokens.batches(spec), device=torch.device("cpu")).sha256)
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
    spec = resolved(spec)
    end = ByteTokenizer.END_OF_TEXT
    ends = np.random.default_rng(0).random(16 * 80 + 1) < 0.1
    ends[16:64] = ends[16 * 12 : 16 * 24] = True  # three rows of step 0, all of step 1
    row = np.where(ends, end, np.arange(ends.size) % 50).astype("<u2").tobytes()
    sha256 = hashlib.sha256(row).hexdigest()
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / f"{sha256}.bin").write_bytes(row)
    shard = ShardInfo(sha256, ends.size, len(row), tmp_path / "shards" / f"{sha256}.bin")
    tokens = Tokens(tmp_path, TokenManifest((shard,), "uint16", ByteTokenizer.vocabulary_size, 3.0, end))

    batches = tokens.batches(spec)
    assert (batches.samples, batches.validation_samples) == (60, 20)
    assert len({batches.tokens_of(step) for step in range(4)}) == 4
    assert (batches.microbatch(0, 2)[1] == IGNORED).all()
    reports: list[StepReport] = []
    expected = train_local(spec, batches, device=torch.device("cpu"), on_step=reports.append)
    assert [report.tokens for report in reports] == [batches.tokens_of(step) for step in range(4)]
    assert (reports[1].loss, reports[1].norm, reports[1].skipped) == (0.0, 0.0, False)
    assert run_swarm(spec, tokens, 4, seed=8).sha256 == expected.sha256


@pytest.mark.parametrize("routing", ["iwrr", "uniform"])
def test_weights_do_not_depend_on_the_wiring(tmp_path: Path, routing: str) -> None:
    spec = resolved(small_spec(write_text(tmp_path), pipeline__stages=2, pipeline__routing=routing))
    tokens = Tokens.make(tmp_path, spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    assert run_swarm(spec, tokens, 6, seed=3).sha256 == expected.sha256


def test_without_flush_steps_overlap(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    seconds = {}
    for staleness in (0, 1):
        spec = resolved(small_spec(source, pipeline__stages=3, **stale(staleness), training__steps=8))
        tokens = Tokens.make(tmp_path, spec)
        seconds[staleness] = run_swarm(spec, tokens, 3, seed=5).training_s
    assert seconds[1] < 0.8 * seconds[0], seconds


def test_a_job_whose_layers_are_compiled_trains_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage servers of the simulation share a process, so each new stage makes the others compile once more."""
    graphs = []

    def count(graph: Any, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled, "_BACKEND", count)
    spec = small_spec(write_text(tmp_path), training__reproducible=False, model__compile=True, pipeline__stages=2)
    run_swarm(resolved(spec), Tokens.make(tmp_path, resolved(spec)), 4, seed=1)
    assert graphs
