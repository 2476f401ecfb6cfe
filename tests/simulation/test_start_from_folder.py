"""Fine-tuning a local model in a simulated swarm: its files go through the scheduler, in parts, to every peer."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from scheduler.jobs.job import Job
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidModel, NotFound, Refused
from swarm.hf.pretrained import ground, weight_files
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.types import JobId, JobState
from swarm.wire.messages import FetchRequest, StateFile
from tests.support.scenes import play, resolved
from tests.support.simulated import Rig, Tokens, small_spec, write_text

FIELDS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "gpt2": {"vocab_size": 260, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
}


def model(folder: Path, family: str = "llama") -> Path:
    torch.manual_seed(2)
    twin: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FIELDS[family]), dtype=torch.float32)
    twin.save_pretrained(folder, max_shard_size="20KB")
    return folder


def spec_of(folder: Path, source: Path, **changes: object) -> JobSpec:
    spec = small_spec(
        source, model__id=str(folder), model__config={}, model__tokenizer="byte", **{"training__steps": 3, **changes}
    )
    return resolved(ground(spec))


def uploaded(spec: JobSpec, root: Path) -> tuple[StateFile, ...]:
    """Put the model's files where the scheduler keeps what was uploaded."""
    (root / "shards").mkdir(exist_ok=True)
    files = []
    for file in weight_files(spec):
        sha256 = hashlib.sha256(file.location.read_bytes()).hexdigest()
        shutil.copy(file.location, root / "shards" / f"{sha256}.bin")
        files.append(StateFile(file.path, file.size_bytes, sha256))
    return tuple(files)


def run(spec: JobSpec, tokens: Tokens, files: tuple[StateFile, ...], peers: int, seed: int) -> tuple[Job, Rig]:
    """Train in simulation; gives the job as it ended."""

    async def act(rig: Rig) -> tuple[Job, Rig]:
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files(), files)
        await rig.finished(job)
        assert (await rig.store.jobs())[0].files == files
        return job, rig

    return play(tokens, peers, act, seed=seed)


@pytest.mark.parametrize(("stages", "replicas", "family"), [(2, 2, "gpt2"), (3, 2, "llama")])
def test_the_swarm_fine_tunes_a_folder_to_the_weights_of_one_process(
    stages: int, replicas: int, family: str, tmp_path: Path
) -> None:
    spec = spec_of(model(tmp_path / "hf", family), write_text(tmp_path), pipeline__stages=stages)
    tokens = Tokens.make(tmp_path, spec)
    expected = train_local(spec, tokens.batches(spec))
    files = uploaded(spec, tmp_path)
    assert len(files) > 2
    job, _ = run(spec, tokens, files, stages * replicas, seed=stages)
    assert job.record.state is JobState.SUCCEEDED, job.record.reason
    assert job.record.weights_sha256 == expected.sha256


def test_a_file_that_broke_at_the_scheduler_ends_the_job_with_its_name(tmp_path: Path) -> None:
    spec = spec_of(model(tmp_path / "hf"), write_text(tmp_path), pipeline__stages=2)
    tokens = Tokens.make(tmp_path, spec)
    files = uploaded(spec, tmp_path)
    broken = tmp_path / "shards" / f"{files[1].sha256}.bin"
    broken.write_bytes(broken.read_bytes()[:8] + b"x" * (files[1].size_bytes - 8))
    job, _ = run(spec, tokens, files, 2, seed=1)
    assert job.record.state is JobState.FAILED
    assert job.record.error_code == InvalidModel.code
    assert files[1].path in job.record.reason


def test_only_the_listed_files_of_a_job_at_work_are_served(tmp_path: Path) -> None:
    spec = spec_of(model(tmp_path / "hf"), write_text(tmp_path), pipeline__stages=1, training__steps=50)
    tokens = Tokens.make(tmp_path, spec)
    files = uploaded(spec, tmp_path)

    async def act(rig: Rig) -> None:
        bad = (StateFile("model/../x.safetensors", files[0].size_bytes, files[0].sha256),)
        with pytest.raises(InvalidModel, match="no path of a model's file"):
            await rig.jobs.submit(spec, tokens.of_job(), {}, bad)
        with pytest.raises(InvalidModel, match="is not here"):
            await rig.jobs.submit(spec, tokens.of_job(), {}, (StateFile("model/a.safetensors", 1, "0" * 64),))
        with pytest.raises(InvalidModel, match="comes twice"):
            await rig.jobs.submit(spec, tokens.of_job(), {}, (files[0], files[0]))
        with pytest.raises(InvalidModel, match="announced were"):
            await rig.jobs.submit(spec, tokens.of_job(), {}, (StateFile(files[0].path, 1, files[0].sha256),))
        job = await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files(), files)
        while job.record.state is not JobState.RUNNING:
            await asyncio.sleep(0.01)
        good = FetchRequest(job.record.id, 0, files[0].path, 0, 8)
        link = rig.network.scheduler_link("somebody", "scheduler")

        async def fetch(request: FetchRequest) -> bytes:
            return b"".join([chunk async for chunk in link.fetch(request)])

        assert len(await fetch(good)) == 8
        for path in ("model/../shards/x", "/etc/passwd", f"shards/{files[0].sha256}.bin", ""):
            with pytest.raises(NotFound):
                await fetch(FetchRequest(job.record.id, 0, path, 0, 8))
        for request in (
            FetchRequest(job.record.id, 1, files[0].path, 0, 8),
            FetchRequest(JobId("another"), 0, files[0].path, 0, 8),
            FetchRequest(job.record.id, 0, files[0].path, 8, 0),
            FetchRequest(job.record.id, 0, files[0].path, 0, files[0].size_bytes + 1),
        ):
            with pytest.raises(Refused):
                await fetch(request)

    play(tokens, 1, act)
