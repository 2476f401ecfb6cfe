"""The claim: the validation losses of a swarm are those of one process, to the last bit, and cost no exactness."""

from __future__ import annotations

from pathlib import Path

import pytest

from scheduler.brain.outputs import EvaluationRow
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.spec import JobSpec
from swarm.reference.trainer import EvaluationReport, train_local
from swarm.types import JobState
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, stale, write_text


def run_swarm(spec: JobSpec, tokens: Tokens, peers: int, seed: int) -> tuple[str, list[EvaluationRow], list[str]]:
    """Train in simulation: hash of the weights, stored evaluations, the job's log."""

    async def act(rig: Rig) -> tuple[str, list[EvaluationRow], list[str]]:
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files())
        await rig.finished(job)
        assert job.record.state is JobState.SUCCEEDED, job.record.reason
        rows = await rig.store.evaluations(job.record.id)
        assert (job.progress.evaluation_loss, job.progress.evaluation_step) == (rows[-1].loss, rows[-1].version)
        lines = [line.message for line in rig.jobs.stores.logs.of(job.record.id).kept()[0]]
        return job.record.weights_sha256, rows, lines

    return play(tokens, peers, act, seed=seed)


def spec_with_validation(folder: Path, **changes: object) -> JobSpec:
    values = {"data__validation_ratio": 0.01, "training__eval_every_steps": 2, "training__steps": 3} | changes
    spec = small_spec(write_text(folder), **values)
    return resolved(spec)


def test_validation_losses_are_those_of_one_process_at_every_number_of_stages(tmp_path: Path) -> None:
    seen: set[tuple[EvaluationReport, ...]] = set()
    for stages in (1, 2, 3):
        spec = spec_with_validation(
            tmp_path, pipeline__stages=stages, pipeline__overlap=2, config__tie_word_embeddings=True
        )
        tokens = Tokens.make(tmp_path, spec)
        batches = tokens.batches(spec)
        assert batches.evaluation_microbatches > 2
        expected = train_local(spec, batches)
        sha256, rows, lines = run_swarm(spec, tokens, 2 * stages, seed=stages)
        assert sha256 == expected.sha256
        assert [EvaluationReport(row.version, row.loss) for row in rows] == list(expected.evaluations)
        assert [row.version for row in rows] == [2, 3]
        assert rows[-1].loss < rows[0].loss
        assert sum(line.startswith("evaluation after step ") for line in lines) == 2
        seen.add(expected.evaluations)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("staleness", "compression", "every"), [(0, "none", 1), (1, "bfloat16", 1), (1, "int8", 3), (0, "float16", 9)]
)
def test_validation_losses_are_those_of_one_process_in_every_mode(
    tmp_path: Path, staleness: int, compression: str, every: int
) -> None:
    spec = spec_with_validation(
        tmp_path,
        pipeline__stages=2,
        **stale(staleness),
        pipeline__compression=compression,
        pipeline__max_in_flight=3,
        training__eval_every_steps=every,
        training__microbatch_sequences=3,
    )
    tokens = Tokens.make(tmp_path, spec)
    expected = train_local(spec, tokens.batches(spec))
    sha256, rows, _ = run_swarm(spec, tokens, 3, seed=every)
    assert sha256 == expected.sha256
    assert [EvaluationReport(row.version, row.loss) for row in rows] == list(expected.evaluations)


def test_evaluating_changes_no_weight(tmp_path: Path) -> None:
    spec = spec_with_validation(tmp_path)
    batches = Tokens.make(tmp_path, spec).batches(spec)
    silent = spec.having("training", eval_every_steps=0)
    assert train_local(silent, batches).sha256 == train_local(spec, batches).sha256
    assert train_local(silent, batches).evaluations == ()
