from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler.checkpoints import CheckpointFailed, CheckpointFolder, newest_model
from swarm.config import JobSpec
from swarm.errors import CorruptFrame, NotFound
from swarm.messages import ParameterHash, StoreHeader
from swarm.partition import resolve
from swarm.types import JobId, PeerId
from swarm.weights import weights_sha256
from tests.rig import small_spec

JOB = JobId("demo-1")


def spec() -> JobSpec:
    return resolve(small_spec(Path("x"), pipeline__stages=2), vocabulary_size=257, stages_if_auto=1)


def header(stage: int, size_bytes: int) -> StoreHeader:
    return StoreHeader(
        job=JOB, peer=PeerId("p"), incarnation=1, timeline=0, version=4, stage=stage, total_bytes=size_bytes
    )


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def hashes(stage: int) -> tuple[ParameterHash, ...]:
    return (ParameterHash(f"model.layers.{stage}.w", "float32", (2,), f"{stage}" * 64),)


async def folder(root: Path) -> CheckpointFolder:
    made = CheckpointFolder(root, JOB, spec(), timeline=0, version=4, executor=None)
    await made.begin()
    return made


async def test_a_checkpoint_appears_whole_with_a_manifest_that_names_every_file(tmp_path: Path) -> None:
    made = await folder(tmp_path)
    for stage in (0, 1):
        stored = await made.put_stage(header(stage, 6), chunks(b"abc", b"de%d" % stage))
        assert stored == hashlib.sha256(b"abcde%d" % stage).hexdigest()
    assert not (tmp_path / "latest").exists()
    parameters = {stage: hashes(stage) for stage in (0, 1)}
    sha256 = await made.publish(parameters, {"tokenizer.json": b"{}"}, {"loss": 1.5})
    assert sha256 == weights_sha256([*hashes(0), *hashes(1)])

    home = tmp_path / "step-00000004"
    manifest = json.loads((home / "manifest.json").read_text())
    assert {file["path"] for file in manifest["files"]} == {
        str(path.relative_to(home)) for path in home.glob("model/*")
    }
    for file in manifest["files"]:
        content = (home / file["path"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
    assert newest_model(tmp_path, JOB)[0] == sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000004"]


async def test_without_all_stages_nothing_is_published(tmp_path: Path) -> None:
    made = await folder(tmp_path)
    await made.put_stage(header(0, 3), chunks(b"abc"))
    with pytest.raises(CheckpointFailed, match="model-00002-of-00002"):
        await made.publish({0: hashes(0), 1: hashes(1)}, {}, {})
    with pytest.raises(NotFound):
        newest_model(tmp_path, JOB)
    await made.discard()
    assert list(tmp_path.iterdir()) == []


async def test_a_stage_of_another_size_than_announced_is_refused(tmp_path: Path) -> None:
    made = await folder(tmp_path)
    with pytest.raises(CorruptFrame, match="announced 9 bytes and sent 3"):
        await made.put_stage(header(0, 9), chunks(b"abc"))


async def test_a_folder_that_cannot_be_written_is_an_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    made = CheckpointFolder(tmp_path / "file", JOB, spec(), timeline=0, version=4, executor=None)
    with pytest.raises(CheckpointFailed, match="Not a directory"):
        await made.begin()


async def test_a_second_attempt_replaces_what_an_interrupted_one_left(tmp_path: Path) -> None:
    await (await folder(tmp_path)).put_stage(header(1, 3), chunks(b"old"))
    made = await folder(tmp_path)
    with pytest.raises(CheckpointFailed):
        await made.publish({0: hashes(0), 1: hashes(1)}, {}, {})
