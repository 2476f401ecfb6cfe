"""Where a job may keep its checkpoints: its words come from whoever may submit."""

from __future__ import annotations

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.storage.checkpoints import catalog as checkpoint_catalog
from scheduler.storage.checkpoints.catalog import CheckpointCatalog, root_of
from scheduler.storage.job_record import JobRecord, JobTokens
from swarm.checkpoint.reader import Checkpoint, Fault
from swarm.checkpoint.storage import LocalStorage
from swarm.errors import CheckpointDamaged, InvalidConfig, NotAllowed, StorageError, UsageError
from swarm.types import JobId, JobState
from tests.support.checkpoints import JOB, WITH_MEMORY, spec, write

JOB_ID = JobId(JOB)
TOKENS = JobTokens((), "uint16", 257, 1.0, 256)


def where(catalog: CheckpointCatalog, folder: str) -> str:
    return catalog.storage(spec(checkpoint__dir=folder), JOB_ID).where


def test_a_job_says_where_its_checkpoints_go(tmp_path: Path) -> None:
    catalog = CheckpointCatalog(tmp_path / "data", None, [tmp_path / "shared", "memory://b"], WITH_MEMORY)
    assert where(catalog, "") == str(tmp_path / "data" / "jobs" / JOB / "checkpoints")
    assert where(catalog, f"{tmp_path}/shared/x/") == f"{tmp_path}/shared/x/{JOB}"
    assert where(catalog, f"file://{tmp_path}/shared") == f"{tmp_path}/shared/{JOB}"
    assert where(catalog, f"{tmp_path}/data/mine") == f"{tmp_path}/data/mine/{JOB}"
    assert where(catalog, "memory://b/c") == f"memory://b/c/{JOB}"
    with pytest.raises(InvalidConfig, match="relative"):
        where(catalog, "here")


@pytest.mark.parametrize(
    "folder",
    [
        *("/etc", "local:///etc", "{root}/elsewhere", "file://{root}/elsewhere", "{root}/data/../elsewhere"),
        *("{root}/data-of-another", "{root}/data/link", "{root}/data/jobs/other-1/checkpoints", "{root}/data/shards"),
        *("{root}/data/pki", "{root}/data/profiles/mine", "{root}/data/audit.jsonl"),
    ],
)
def test_a_folder_that_nobody_gave_the_scheduler_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path)
    (tmp_path / "data" / "audit.jsonl").touch()
    with pytest.raises(InvalidConfig, match="may keep checkpoints") as caught:
        where(CheckpointCatalog(tmp_path / "data", None), folder.format(root=tmp_path))
    assert "--checkpoint-root" in caught.value.hint


@pytest.mark.parametrize("folder", ["data/pki", "data/jobs/other-1", "file"])
def test_a_folder_that_was_given_opens_neither_the_schedulers_rooms_below_it_nor_files(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / "data" / "pki").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="may keep checkpoints"):
        where(CheckpointCatalog(tmp_path / "data", None, [tmp_path]), str(tmp_path / folder))


@pytest.mark.parametrize(
    "folder",
    [
        *("ftp://127.0.0.1:9/x", "hf://datasets/me/x", "http://127.0.0.1/x", "memory://b/c", "/tmp/a\0b"),
        *("simplecache::file:///etc", "simplecache::s3://bucket/x", "s3://bucket/x::ftp://127.0.0.1/y"),
        "s3://me:SECRET@bucket/x",
    ],
)
def test_a_url_that_could_dial_anywhere_is_refused_before_anything_is_dialled(tmp_path: Path, folder: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        where(CheckpointCatalog(tmp_path, None), folder)
    assert "s3://" in caught.value.hint or "password" in caught.value.message
    assert "SECRET" not in str(caught.value)


ROOTS = ("memory://bucket/runs", "memory://other/")


def test_a_url_below_one_that_the_scheduler_was_given_is_opened(tmp_path: Path) -> None:
    for url in ("bucket/runs", "bucket/runs/", "bucket/runs/ann/first try", "other", "other/ann"):
        opened = where(CheckpointCatalog(tmp_path, None, ROOTS, WITH_MEMORY), f"memory://{url}")
        assert opened == f"memory://{url.rstrip('/')}/{JOB}"


@pytest.mark.parametrize(
    "url",
    [
        *("memory://bucket", "memory://bucket/", "memory://bucket/runs-of-another", "memory://bucket/run"),
        *("memory://bucket/ann/runs", "memory://bucket-of-another/runs", "memory://other.example/runs"),
        *("memory://Bucket/runs", "s3://bucket/runs", "gs://other/runs", "memory://", "memory:///"),
        *("memory://bucket/runs/../secrets", "memory://bucket/runs/..", "memory://bucket/./runs"),
        *("memory://bucket//runs", "memory://bucket/runs//x", "memory:///bucket/runs", "memory://bucket/runs/x\n"),
        *("memory://bucket/runs/%2e%2e/secrets", "memory://bucket/runs/*", "memory://bucket/runs/[a-z]"),
        *("memory://bucket/runs/x?versionId=3", "memory://bucket/runs/x#7", "memory://bucket/runs\\..\\secrets"),
    ],
)
def test_a_url_that_nobody_gave_the_scheduler_is_refused_and_not_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str
) -> None:
    """A submitter named any bucket in which the scheduler could write, and it wrote there with its own access."""
    monkeypatch.setattr(checkpoint_catalog, "open_storage", lambda *_: pytest.fail("it was opened"))
    for roots in (ROOTS, ()):
        with pytest.raises(InvalidConfig, match=r"is no plain URL|is no URL below which|are not kept at") as caught:
            where(CheckpointCatalog(tmp_path, None, roots, WITH_MEMORY), url)
        assert caught.value.hint


def test_a_root_is_a_folder_or_a_plain_url(tmp_path: Path) -> None:
    assert root_of("s3://bucket/runs") == "s3://bucket/runs"
    assert root_of(f"file://{tmp_path}") == root_of(str(tmp_path)) == tmp_path
    assert root_of("runs") == Path.cwd() / "runs"
    for wrong in ("ftp://host/x", "s3://", "s3://b/../c", "a::b", "s3://me:SECRET@b", "s3://b/*"):
        with pytest.raises(UsageError, match="--checkpoint-root") as caught:
            root_of(wrong)
        assert "SECRET" not in str(caught.value)


def test_what_a_server_says_stays_out_of_the_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    storage = CheckpointCatalog(tmp_path, None, ["memory://b"], WITH_MEMORY).storage(
        spec(checkpoint__dir="memory://b"), JOB_ID
    )

    def answer(*_: object, **__: object) -> None:
        raise ValueError("220 secret-host FTP of the inner network")

    monkeypatch.setattr(storage._filesystem, "ls", answer)  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="ValueError") as caught:
        storage.names()
    assert "220" not in str(caught.value)


async def test_a_place_that_hangs_does_not_hold_up_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answered = threading.Event()

    def hang(*_: object) -> LocalStorage:
        assert answered.wait(60)
        return LocalStorage(tmp_path)

    monkeypatch.setattr(checkpoint_catalog, "open_storage", hang)
    with ThreadPoolExecutor(1) as threads:
        opening = asyncio.create_task(
            CheckpointCatalog(tmp_path, threads, ["s3://b"]).open(spec(checkpoint__dir="s3://b"), JOB_ID)
        )
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not opening.done()
        answered.set()
        await opening


async def test_checkpoints_are_verified_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(LocalStorage(tmp_path / "jobs" / JOB / "checkpoints"), 4)
    go_on = threading.Event()

    def slow(checkpoint: Checkpoint, *, contents: bool = True) -> Fault | None:
        assert not contents or go_on.wait(60)
        return None

    monkeypatch.setattr(checkpoint_catalog, "fault_of", slow)
    record = JobRecord(JOB_ID, "demo", JobState.PAUSED, "", 0.0, 0.0, spec().model_dump_json(), TOKENS)
    with ThreadPoolExecutor(2) as threads:
        catalog = CheckpointCatalog(tmp_path, threads)
        first = asyncio.create_task(catalog.shown(record, spec(), verify=True))
        await asyncio.sleep(0.05)
        with pytest.raises(NotAllowed, match="being verified"):
            await catalog.shown(record, spec(), verify=True)
        assert len(await catalog.shown(record, spec(), verify=False)) == 1
        first.cancel()  # its reader hangs up, and the threads are still at work
        await asyncio.wait({first})
        with pytest.raises(NotAllowed, match="being verified"):
            await catalog.shown(record, spec(), verify=True)
        go_on.set()
        while True:
            try:
                assert len(await catalog.shown(record, spec(), verify=True)) == 1
                break
            except NotAllowed:
                await asyncio.sleep(0.01)


async def test_a_checkpoint_that_is_removed_while_it_is_read_has_no_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    storage = LocalStorage(tmp_path / "jobs" / JOB / "checkpoints")
    old, damaged, _ = (write(storage, step) for step in (2, 4, 6))

    def removed_meanwhile(checkpoint: Checkpoint, *, contents: bool = True) -> str:
        if checkpoint.name == old.name and contents:
            shutil.rmtree(tmp_path / "jobs" / JOB / "checkpoints" / old.name)
        return "no such file" if checkpoint.name in (old.name, damaged.name) else ""

    monkeypatch.setattr(checkpoint_catalog, "fault_of", removed_meanwhile)
    record = JobRecord(JOB_ID, "demo", JobState.PAUSED, "", 0.0, 0.0, spec().model_dump_json(), TOKENS)
    with ThreadPoolExecutor(2) as threads:
        shown = await CheckpointCatalog(tmp_path, threads).shown(record, spec(), verify=True)
    assert [(checkpoint.step, fault) for checkpoint, fault in shown] == [(4, "no such file"), (6, "")]


async def test_a_start_at_a_url_that_was_taken_from_the_scheduler_is_not_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A job from before it was asked where checkpoints may be, or from before its scheduler got other flags."""
    opened: list[str] = []
    monkeypatch.setattr(
        checkpoint_catalog, "open_storage", lambda where, _: opened.append(where) or LocalStorage(tmp_path)
    )
    begins = {"start_where": f"memory://bucket/runs/{JOB}", "start_name": "step-00000004"}
    text = spec().model_dump_json()
    record = replace(JobRecord(JOB_ID, "demo", JobState.PAUSED, "", 0.0, 0.0, text, TOKENS), **begins)
    with pytest.raises(InvalidConfig, match="is no URL below which"):
        await CheckpointCatalog(tmp_path, None, ["memory://other"], WITH_MEMORY).start_of(record)
    assert opened == []
    with pytest.raises(CheckpointDamaged):  # there is none in that folder
        await CheckpointCatalog(tmp_path, None, ["memory://bucket"], WITH_MEMORY).start_of(record)
    assert opened == [begins["start_where"]]
