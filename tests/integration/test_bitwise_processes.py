"""The claim with real processes: gRPC, SQLite, one compute thread each; the weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.config import JobSpec
from swarm.data import ByteTokenizer
from swarm.partition import resolve
from swarm.reference import train_local
from swarm.types import Microbatch
from tests.cluster import Cluster
from tests.rig import Tokens, small_spec, write_text


def resolved(source: Path, stages: int, **changes: object) -> JobSpec:
    evaluating = {"data__validation_ratio": 0.01, "training__eval_every_steps": 4}
    spec = small_spec(source, pipeline__stages=stages, training__steps=6, **evaluating, **changes)
    return resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)


@pytest.mark.timeout(600)
def test_the_swarm_ends_with_the_weights_of_one_process(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = write_text(tmp_path)
    with Cluster(tmp_path, broker="embedded") as cluster:
        for stages in (1, 2, 3):
            cluster.add_servers(2)  # two replicas for each stage
            for tied in (True, False):
                # Both stalenesses, and each tie at two of the three cuts.
                staleness = (stages + tied) % 2
                spec = resolved(source, stages, config__tie_word_embeddings=tied, pipeline__staleness=staleness)
                tokens = Tokens.make(tmp_path / f"{stages}-{tied}", spec)
                expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
                job = cluster.submit(spec, tokens.manifest)
                view = cluster.wait(job.id)
                assert view.state == "succeeded", f"{view.reason}\n{cluster.tails()}"
                assert [len(stage.peers) for stage in view.stages] == [2] * stages
                assert view.weights_sha256 == expected.sha256
                assert view.loss == expected.losses[-1]
                last = expected.evaluations[-1]
                assert (view.evaluation_step, view.evaluation_loss) == (last.version, last.loss)
                assert view.microbatches_committed == 6 * spec.training.microbatches

                cluster.pull(job.id, tmp_path / f"model-{stages}-{tied}")
                assert loss_of_folder(tmp_path / f"model-{stages}-{tied}", tokens, spec) == pytest.approx(
                    loss_of_stages(expected.stages, tokens, spec), rel=1e-5
                )


def loss_of_folder(folder: Path, tokens: Tokens, spec: JobSpec) -> float:
    """Loss sum of the pulled model on the first microbatch, computed by Transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids, targets = (torch.from_numpy(part).long() for part in tokens.batches(spec).microbatch(0, 0))
    with torch.no_grad():
        logits = model(ids).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))


def loss_of_stages(stages: tuple, tokens: Tokens, spec: JobSpec) -> float:  # type: ignore[type-arg]
    """The same of the reference's stages."""
    ids, targets = (torch.from_numpy(part).long() for part in tokens.batches(spec).microbatch(0, 0))
    hidden, loss = None, 0.0
    for stage in stages:
        hidden, loss = stage.forward(Microbatch(0, 99, 0), stage.version, x=hidden, tokens=ids, targets=targets)
    return loss
