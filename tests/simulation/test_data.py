"""From many texts to the bits of one process, with the tokenizer in the model folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import BinaryIO

import pytest
import torch

from scheduler.api.job_service import JobService
from swarm.checkpoint.storage import Files
from swarm.data.corpus import open_corpus
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.wire import jobs_pb2 as pb
from tests.support.scenes import play
from tests.support.simulated import Rig, Tokens, small_spec, write_text
from tests.support.tokenizer import write_tokenizer


def run_swarm(spec: JobSpec, tokens: Tokens, files: dict[str, bytes]) -> tuple[str, dict[str, bytes]]:
    """Train in simulation, submitted as a client does; gives the hash of the weights and the model folder."""

    async def act(rig: Rig) -> tuple[str, dict[str, bytes]]:
        service = JobService(rig.jobs, rig.membership, "0", lambda: 0.0)
        listed = []
        for name, content in files.items():
            sha256 = hashlib.sha256(content).hexdigest()
            rig.jobs.stores.files.shard("", sha256).write_bytes(content)
            listed.append(pb.JobFile(path=f"model/{name}", sha256=sha256, size_bytes=len(content)))
        of_job = tokens.of_job()
        request = pb.SubmitRequest(
            spec_json=spec.model_dump_json(),
            shards=[pb.Shard(sha256=sha256) for sha256 in of_job.shards],
            token_dtype=of_job.token_dtype,
            vocabulary_size=of_job.vocabulary_size,
            unigram_entropy=of_job.unigram_entropy,
            end_of_text=of_job.end_of_text,
            files=listed,
        )
        view = await service.Submit(request, SimpleNamespace())  # type: ignore[arg-type]
        job = rig.jobs.registry.find(view.id)
        await rig.finished(job)
        (model,) = (tokens.root / "jobs" / job.record.id / "checkpoints").glob("step-*/model")
        return job.record.weights_sha256, {path.name: path.read_bytes() for path in model.iterdir()}

    return play(tokens, 4, act, rng=Random(3))


@pytest.mark.parametrize("packing", [True, False])
def test_many_texts_of_a_hugging_face_tokenizer_train_to_the_bits_of_one_process(tmp_path: Path, packing: bool) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", begin=True)
    texts = [f"line {n}: the square of {n} is {n * n}.\n" * (1 + n % 3) for n in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    spec = small_spec(
        tmp_path / "a.jsonl",
        model__tokenizer=str(folder),
        data__packing=packing,
        data__validation_ratio=0.2,
        pipeline__stages=2,
    )
    corpus = open_corpus(spec)
    resolved = corpus.resolve(spec)
    assert resolved.model.config["eos_token_id"] == 0
    tokens = Tokens.make(tmp_path, resolved)
    batches = tokens.batches(resolved)
    assert len({batches.tokens_of(step) for step in range(4)}) > 1
    expected = train_local(resolved, batches, device=torch.device("cpu"))
    sha256, model = run_swarm(resolved, tokens, corpus.tokenizer.tokenizer_files())
    assert sha256 == expected.sha256
    assert json.loads(model["generation_config.json"])["eos_token_id"] == 0
    assert {name: model[name] for name in ("tokenizer.json", "tokenizer_config.json")} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


class Context:
    """What a call that goes wrong tells its client."""

    async def abort(self, _code: object, message: str, _metadata: object) -> None:
        raise PermissionError(message)

    async def write(self, _reply: object) -> None:
        pass


def test_a_file_has_its_name_only_once_it_is_on_the_disk_and_no_tokenizer_hides_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Recorded(Files):
        def sync(self, file: BinaryIO) -> None:
            done.append("sync")
            super().sync(file)

        def rename(self, source: Path, target: Path) -> None:
            done.append("rename")
            super().rename(source, target)

        def sync_folder(self, path: Path) -> None:
            done.append("sync folder")
            super().sync_folder(path)

    monkeypatch.setattr("scheduler.api.uploads._FILES", Recorded())
    spec = small_spec(write_text(tmp_path))
    tokens = Tokens.make(tmp_path, spec)
    content = b"0123456789"
    shard = pb.Shard(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))

    async def upload(*payloads: bytes) -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=shard)
        for payload in payloads:
            yield pb.ShardChunk(payload=payload)

    async def act(rig: Rig) -> None:
        service = JobService(rig.jobs, rig.membership, "0", lambda: 0.0)
        with pytest.raises(PermissionError, match="arrived as 4 bytes"):
            await service.PutShard(upload(content[:4]), Context())  # type: ignore[arg-type]
        assert not rig.jobs.stores.files.shard("", shard.sha256).exists()
        done.clear()
        await service.PutShard(upload(content[:4], content[4:]), Context())  # type: ignore[arg-type]
        assert done == ["sync", "rename", "sync folder"]
        assert rig.jobs.stores.files.shard("", shard.sha256).read_bytes() == content
        for name in ("config.json", "model-00001-of-00002.safetensors", "../x", "tokenizer.json\n"):
            request = pb.SubmitRequest(token_dtype="uint16", vocabulary_size=257, tokenizer_files={name: b"x"})
            with pytest.raises(PermissionError, match="no name of a file that goes with"):
                await service.Submit(request, Context())  # type: ignore[arg-type]

    play(tokens, 0, act, rng=Random(3))
