"""The claim with real processes: gRPC, SQLite, one compute thread each; the weights are those of one process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.data.tokenizer import ByteTokenizer
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.types import Microbatch
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text

EVALUATING = {"data__validation_ratio": 0.01, "training__eval_every_steps": 4}
TWO_ISLANDS = {"islands__count": 2}
# (stages, replicas) in order of the processes that they need; the pool grows from one to the next.
ROWS: list[tuple[int, int, dict[str, object]]] = [
    (2, 1, {"config__tie_word_embeddings": True, "pipeline__overlap": 0, "pipeline__compression": "int8"}),
    (1, 2, {"training__optimizer": "lamb", "model__recompute": True}),
    (2, 2, {"config__tie_word_embeddings": True, "training__optimizer": "muon", "pipeline__routing": "iwrr"}),
    # Two islands, so every stage has a replica of each.
    (2, 2, {"config__tie_word_embeddings": True, "averaging__mode": "diloco", "outer__every_steps": 4} | TWO_ISLANDS),
    (3, 2, {"pipeline__compression": "bfloat16", "training__optimizer": "sgd", "training__momentum": 0.9}),
    (4, 3, {"config__tie_word_embeddings": True, "pipeline__routing": "uniform", "model__narrow": {"kind": "maxout"}}),
]


@pytest.mark.timeout(900)
def test_the_swarm_ends_with_the_weights_of_one_process(tmp_path: Path) -> None:
    source = write_text(tmp_path)
    servers = 0
    with Cluster(tmp_path, broker="embedded") as cluster:
        for stages, replicas, own in ROWS:
            cluster.add_servers(stages * replicas - servers)
            servers = stages * replicas
            changes = (
                own | EVALUATING | {"pipeline__stages": stages, "config__num_hidden_layers": 4, "training__steps": 6}
            )
            spec = resolved(small_spec(source, **changes))
            tokens = Tokens.make(tmp_path / f"{stages}-{replicas}", spec)
            expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
            job = cluster.submit(spec, tokens.manifest)
            view = cluster.succeeds(job.id)
            assert [len(stage.peers) for stage in view.stages] == [replicas] * stages
            assert view.weights_sha256 == expected.sha256
            assert view.loss == expected.losses[-1]
            last = expected.evaluations[-1]
            assert (view.evaluation_step, view.evaluation_loss) == (last.version, last.loss)
            assert view.microbatches_committed == 6 * spec.training.microbatches

            folder = tmp_path / f"model-{job.id}"
            cluster.pull(job.id, folder)
            assert loss_of_folder(folder, tokens, spec) == pytest.approx(
                loss_of_stages(expected.stages, tokens, spec), rel=1e-5
            )


@pytest.mark.timeout(900)
def test_payloads_by_memory_give_the_same_weights_although_a_replica_is_killed(tmp_path: Path) -> None:
    """Boundary tensors and slices are large enough here; what was under way to the dead one goes elsewhere."""
    spec = resolve(
        small_spec(
            write_text(tmp_path),
            config__num_hidden_layers=2,
            config__hidden_size=128,
            config__intermediate_size=256,
            data__sequence_length=128,
            training__global_batch_sequences=8,
            training__steps=6,
            pipeline__stages=2,
        ),
        Basis(ByteTokenizer.vocabulary_size, stages=2),
    )
    tokens = Tokens.make(tmp_path / "tokens", spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    with Cluster(tmp_path, "--insecure") as cluster:
        peers = cluster.add_servers(4)
        job = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(job.id, 2)
        seen = files_of(cluster, peers)
        cluster.servers[peers[0]].kill()
        view = cluster.succeeds(job.id)
        assert view.weights_sha256 == expected.sha256
        assert view.loss == expected.losses[-1]
        seen |= files_of(cluster, peers[1:])
        assert "/memfd:swarm-link (deleted)" in seen, "nothing went by memory"


def files_of(cluster: Cluster, peers: Sequence[str]) -> set[str]:
    """What these stage servers have open."""
    found: set[str] = set()
    for peer in peers:
        for path in Path(f"/proc/{cluster.servers[peer].child.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found.add(os.readlink(path))
    return found


def loss_of_folder(folder: Path, tokens: Tokens, spec: JobSpec) -> float:
    """Loss sum of the pulled model on the first microbatch, computed by Transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids, targets = (torch.from_numpy(part).long() for part in tokens.batches(spec).microbatch(0, 0))
    with torch.no_grad():
        logits = model(ids).logits.float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))


def loss_of_stages(stages: tuple, tokens: Tokens, spec: JobSpec) -> float:  # type: ignore[type-arg]
    """The same of the reference's stages."""
    ids, targets = (torch.from_numpy(part).long() for part in tokens.batches(spec).microbatch(0, 0))
    hidden, loss = None, 0.0
    for stage in stages:
        hidden, loss = stage.forward(
            Microbatch(0, 99, 0), stage.version, portion=0, x=hidden, tokens=ids, targets=targets
        )
    return loss
