"""Uploads: whoever sends files can neither fill the disk nor hold its places."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from scheduler.api import uploads
from scheduler.api.uploads import Uploads
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.errors import InvalidData, NotAllowed
from swarm.wire import jobs_pb2 as pb

CONTENT = b"some tokens"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


async def made(folder: Path) -> Uploads:
    return Uploads(Stores.under(folder, await Database.open("sqlite://", None)))


async def sent(size_bytes: int = len(CONTENT), *, then: asyncio.Event | None = None) -> AsyncIterator[pb.ShardChunk]:
    yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=size_bytes))
    if then is not None:
        await then.wait()
    yield pb.ShardChunk(payload=CONTENT)


async def test_what_is_uploaded_is_there(tmp_path: Path) -> None:
    one = await made(tmp_path)
    shard = pb.Shard(sha256=SHA256)
    assert await one.missing([shard]) == [shard]
    assert await one.put(sent()) == SHA256
    assert one.path(SHA256).read_bytes() == CONTENT
    assert await one.missing([shard]) == []


async def test_an_upload_that_stands_still_is_ended_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_IDLE_S_MAX", 0.05)
    one = await made(tmp_path)
    with pytest.raises(InvalidData, match="stood still"):
        await asyncio.wait_for(one.put(sent(then=asyncio.Event())), 5)
    assert list((tmp_path / "shards").iterdir()) == []


async def test_an_upload_that_never_begins_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> AsyncIterator[pb.ShardChunk]:
        await asyncio.Event().wait()
        yield pb.ShardChunk()

    monkeypatch.setattr(uploads, "UPLOAD_IDLE_S_MAX", 0.05)
    one = await made(tmp_path)
    with pytest.raises(InvalidData, match="stood still"):
        await asyncio.wait_for(one.put(nothing()), 5)


async def test_so_many_uploads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 2)
    one, go_on = await made(tmp_path), asyncio.Event()
    waiting = [asyncio.create_task(one.put(sent(then=go_on))) for _ in range(2)]
    await asyncio.sleep(0)  # no more than a turn of the event loop: what begins counts at once
    with pytest.raises(NotAllowed, match="2 files are being uploaded"):
        await one.put(sent())
    go_on.set()
    assert await asyncio.gather(*waiting) == [SHA256, SHA256]
    assert await one.put(sent()) == SHA256


async def test_a_disk_is_never_promised_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = uploads.UPLOAD_DISK_RESERVE_BYTES
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: reserve + 100)
    one, go_on = await made(tmp_path), asyncio.Event()
    (tmp_path / "shards").mkdir()
    with pytest.raises(InvalidData, match="does not fit") as caught:
        await one.put(sent(101))
    assert "disk" in caught.value.hint
    first = asyncio.create_task(one.put(sent(60, then=go_on)))
    await asyncio.sleep(0.01)
    with pytest.raises(InvalidData, match="60 B of them promised"):
        await one.put(sent(60))
    go_on.set()
    with pytest.raises(InvalidData, match="arrived as"):
        await first
    assert await one.put(sent()) == SHA256


async def test_uploads_that_begin_together_are_not_promised_the_same_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES + 100)
    one = await made(tmp_path)
    (tmp_path / "shards").mkdir()
    begun = [asyncio.create_task(one.put(sent(60, then=asyncio.Event()))) for _ in range(2)]
    (refused,), (waiting,) = await asyncio.wait(begun, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(InvalidData, match="60 B of them promised"):
        await refused
    waiting.cancel()


async def test_files_that_no_job_names_go_after_a_while(tmp_path: Path) -> None:
    one = await made(tmp_path)
    await one.put(sent())
    files = one._files
    path = one.path(SHA256)
    await files.remove_unused({SHA256}, path.stat().st_mtime + 1)
    await files.remove_unused(set(), path.stat().st_mtime - 1)
    assert path.exists()
    os.utime(path, (0, 0))
    assert await one.missing([pb.Shard(sha256=SHA256)]) == []  # somebody is about to submit a job with it
    await files.remove_unused(set(), 1.0)
    assert path.exists()
    await files.remove_unused(set(), path.stat().st_mtime + 1)
    assert not path.exists()
