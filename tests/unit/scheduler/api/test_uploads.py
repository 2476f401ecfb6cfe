"""Uploads: whoever sends files can neither fill the disk nor hold its places."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scheduler.api import uploads
from scheduler.api.uploads import Uploads
from scheduler.brain.members.projects import Person, Quota
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.errors import InvalidData, NotAllowed, QuotaReached
from swarm.pki.names import Role
from swarm.types import DEFAULT_PROJECT
from swarm.wire import jobs_pb2 as pb
from tests.support.members import database_url

P = DEFAULT_PROJECT
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
    assert await one.missing(P, [shard]) == [shard]
    assert await one.put(P, sent()) == SHA256
    assert one.path(P, SHA256).read_bytes() == CONTENT
    assert await one.missing(P, [shard]) == []


async def test_an_upload_that_stands_still_is_ended_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "UPLOAD_IDLE_S_MAX", 0.05)
    one = await made(tmp_path)
    with pytest.raises(InvalidData, match="stood still"):
        await one.put(P, sent(then=asyncio.Event()))
    assert list((tmp_path / "shards").iterdir()) == []


async def test_an_upload_that_never_begins_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing() -> AsyncIterator[pb.ShardChunk]:
        await asyncio.Event().wait()
        yield pb.ShardChunk()

    monkeypatch.setattr(uploads, "UPLOAD_IDLE_S_MAX", 0.05)
    one = await made(tmp_path)
    with pytest.raises(InvalidData, match="stood still"):
        await one.put(P, nothing())


async def test_so_many_uploads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 2)
    one, go_on = await made(tmp_path), asyncio.Event()
    waiting = [asyncio.create_task(one.put(P, sent(then=go_on))) for _ in range(2)]
    await asyncio.sleep(0)  # no more than a turn of the event loop: what begins counts at once
    with pytest.raises(NotAllowed, match="2 files are being uploaded"):
        await one.put(P, sent())
    go_on.set()
    assert await asyncio.gather(*waiting) == [SHA256, SHA256]
    assert await one.put(P, sent()) == SHA256


async def test_one_person_leaves_uploads_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody sent a byte now and then of so many files that nobody of another project could send any."""
    monkeypatch.setattr(uploads, "UPLOADS_OF_ONE_MAX", 1)
    one, go_on = await made(tmp_path), asyncio.Event()
    eve, ann = (Person(Role.SUBMITTER, name, P) for name in ("eve", "ann"))
    waiting = asyncio.create_task(one.put(P, sent(then=go_on), eve))
    await asyncio.sleep(0)
    with pytest.raises(NotAllowed, match="1 of your files"):
        await one.put(P, sent(), eve)
    assert await one.put(P, sent(), ann) == SHA256
    go_on.set()
    assert await waiting == SHA256


async def test_a_disk_is_never_promised_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = uploads.UPLOAD_DISK_RESERVE_BYTES
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: reserve + 100)
    one, go_on = await made(tmp_path), asyncio.Event()
    await one._projects.set(P, Quota(upload_bytes=1000))
    (tmp_path / "shards").mkdir()
    with pytest.raises(InvalidData, match="does not fit") as caught:
        await one.put(P, sent(101))
    assert "disk" in caught.value.hint
    first = asyncio.create_task(one.put(P, sent(60, then=go_on)))
    await asyncio.sleep(0.01)
    with pytest.raises(InvalidData, match="60 B of them promised"):
        await one.put(P, sent(60))
    go_on.set()
    with pytest.raises(InvalidData, match="arrived as"):
        await first
    assert await one.put(P, sent()) == SHA256


async def test_a_slow_upload_leaves_room_to_other_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submitter whose project had no quota promised the whole disk to one upload, which may take hours for a GiB."""
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES + 400)
    one, go_on = await made(tmp_path), asyncio.Event()
    for name in ("red", "blue", "green"):
        await one._projects.create(name, Quota(upload_bytes=400) if name == "green" else Quota())
    with pytest.raises(QuotaReached, match="half of the 400 B") as caught:
        await one.put("red", sent(201))
    assert "swarm project set red --quota-bytes" in caught.value.hint
    slow = asyncio.create_task(one.put("red", sent(200, then=go_on)))
    while not any(upload.promised_bytes for upload in one._open):
        await asyncio.sleep(0)
    with pytest.raises(QuotaReached, match="is sending 200 B"):
        await one.put("red", sent())
    with pytest.raises(QuotaReached, match="half of the 200 B"):
        await one.put("blue", sent(101))
    assert await one.put("blue", sent()) == SHA256
    with pytest.raises(InvalidData, match="arrived as"):
        await one.put("green", sent(150))  # the disk has room, and an admin allows it
    go_on.set()
    with pytest.raises(InvalidData, match="arrived as"):
        await slow


async def test_uploads_that_begin_together_are_not_promised_the_same_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES + 100)
    one = await made(tmp_path)
    await one._projects.set(P, Quota(upload_bytes=1000))
    (tmp_path / "shards").mkdir()
    begun = [asyncio.create_task(one.put(P, sent(60, then=asyncio.Event()))) for _ in range(2)]
    (refused,), (waiting,) = await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(InvalidData, match="60 B of them promised"):
        await refused
    waiting.cancel()


async def test_files_that_no_job_names_go_after_a_while(tmp_path: Path) -> None:
    one = await made(tmp_path)
    await one.put(P, sent())
    files = one._files
    path = one.path(P, SHA256)
    await files.remove_unused({path}, path.stat().st_mtime + 1)
    await files.remove_unused(set(), path.stat().st_mtime - 1)
    assert path.exists()
    os.utime(path, (0, 0))
    assert await one.missing(P, [pb.Shard(sha256=SHA256)]) == []  # somebody is about to submit a job with it
    await files.remove_unused(set(), 1.0)
    assert path.exists()
    await files.remove_unused(set(), path.stat().st_mtime + 1)
    assert not path.exists()


async def test_a_project_is_told_of_its_own_files_only_and_sends_again_what_others_have(tmp_path: Path) -> None:
    one, shard = await made(tmp_path), pb.Shard(sha256=SHA256)
    await one._projects.create("red", Quota())
    await one.put(P, sent())
    assert await one.missing("red", [shard]) == [shard]
    asked = pb.SubmitRequest(files=[pb.JobFile(path="model/tokenizer.json", sha256=SHA256)])
    unknown = pb.SubmitRequest(files=[pb.JobFile(path="model/tokenizer.json", sha256="0" * 64)])
    told = []
    for request in (asked, unknown):
        with pytest.raises(InvalidData) as caught:
            await one.tokenizer("red", request)
        told.append((caught.value.message, caught.value.hint))
    assert told[0] == told[1]
    assert await one.put("red", sent()) == SHA256
    assert await one.missing("red", [shard]) == []
    assert one.path("red", SHA256) != one.path(P, SHA256)


def numbered(number: int, size_bytes: int = 100) -> tuple[str, bytes]:
    content = number.to_bytes(4, "big").ljust(size_bytes, b".")
    return hashlib.sha256(content).hexdigest(), content


async def sent_as(sha256: str, content: bytes) -> AsyncIterator[pb.ShardChunk]:
    yield pb.ShardChunk(shard=pb.Shard(sha256=sha256, size_bytes=len(content)))
    for start in range(0, len(content), 10):
        await asyncio.sleep(0)
        yield pb.ShardChunk(payload=content[start : start + 10])


async def test_a_quota_of_bytes_is_exact_for_fifty_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 100)
    with ThreadPoolExecutor(4) as threads:
        one = Uploads(Stores.under(tmp_path, await Database.open(database_url(tmp_path), None), threads))
        await one._projects.create("red", Quota(upload_bytes=1050))
        files = [numbered(number) for number in range(50)]
        done = await asyncio.gather(*(one.put("red", sent_as(*file)) for file in files), return_exceptions=True)
        assert sorted({type(each).__name__ for each in done}) == ["QuotaReached", "str"]
        assert sum(isinstance(each, str) for each in done) == 10
        assert one._files.held_bytes("red") == 1000
        # One that is here counts once, however often it is sent, and one that failed not at all.
        await one._projects.set("red", Quota(upload_bytes=1150))
        await one.put("red", sent_as(*files[[isinstance(each, str) for each in done].index(True)]))
        with pytest.raises(InvalidData, match="arrived as"):
            await one.put("red", sent_as(numbered(60)[0], numbered(61)[1]))
        await one.put("red", sent_as(*numbered(62)))
        assert one._files.held_bytes("red") == 1100
        with pytest.raises(QuotaReached, match="quota of bytes"):
            await one.put("red", sent_as(*numbered(63)))
        await one.put(P, sent_as(*numbered(63)))  # others are not concerned

        again = Uploads(Stores.under(tmp_path, one._projects._database, threads))
        await again._files.load()
        assert (again._files.held_bytes("red"), again._files.held_bytes(P)) == (1100, 100)
        await again._files.remove_unused({again.path("red", numbered(62)[0])}, 4e9)
        assert (again._files.held_bytes("red"), again._files.held_bytes(P)) == (100, 0)
        await one._projects._database.close()


async def test_an_upload_that_broke_off_goes_on_at_its_next_byte_for_who_resumes(tmp_path: Path) -> None:
    one, told = await made(tmp_path), list[int]()

    async def resuming(*payloads: bytes, ends: bool) -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), resumes=True)
        for payload in payloads:
            yield pb.ShardChunk(payload=payload)
        if not ends:
            raise asyncio.CancelledError

    async def arrived(held_bytes: int) -> None:
        told.append(held_bytes)

    with pytest.raises(asyncio.CancelledError):
        await one.put(P, resuming(CONTENT[:4], ends=False), arrived=arrived)
    with pytest.raises(InvalidData, match="arrived as 6 bytes"):  # gRPC shows a stream that broke as ended
        await one.put(P, resuming(CONTENT[4:6], ends=True), arrived=arrived)
    assert await one.put(P, resuming(CONTENT[6:], ends=True), arrived=arrived) == SHA256
    assert told == [0, 4, 4, 6, 6, len(CONTENT)]
    assert one.path(P, SHA256).read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [f"{SHA256}.bin"]


async def left(content: bytes, first: bytes) -> AsyncIterator[pb.ShardChunk]:
    """An upload of `content` that begins with these bytes and breaks off."""
    sha256 = hashlib.sha256(content).hexdigest()
    yield pb.ShardChunk(shard=pb.Shard(sha256=sha256, size_bytes=len(content)), resumes=True)
    yield pb.ShardChunk(payload=first)
    raise asyncio.CancelledError


async def test_nobody_goes_on_with_what_another_person_left(tmp_path: Path) -> None:
    """Another one of the project could leave wrong first bytes under the hash of a file that others were to send: their
    own upload went on behind these, and was refused at its end."""
    one, told = await made(tmp_path), list[int]()
    mallory, alice = (Person(Role.SUBMITTER, name, P) for name in ("mallory", "alice"))

    async def arrived(held_bytes: int) -> None:
        told.append(held_bytes)

    async def resuming() -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), resumes=True)
        yield pb.ShardChunk(payload=CONTENT[told[-1] :])

    with pytest.raises(asyncio.CancelledError):
        await one.put(P, left(CONTENT, b"wrong"), mallory)
    assert await one.put(P, resuming(), alice, arrived) == SHA256
    assert told == [0, len(CONTENT)]


async def test_a_sender_that_dials_again_goes_on_before_its_old_line_is_known_to_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler sees a cut line seconds later than a client that dials again at once. What it had was not found
    then, and was sent a second time."""
    monkeypatch.setattr(uploads, "SILENT_S", 0.05)
    one, told = await made(tmp_path), list[int]()

    async def silent() -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), resumes=True)
        yield pb.ShardChunk(payload=CONTENT[:4])
        await asyncio.Event().wait()

    async def resuming() -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), resumes=True)
        yield pb.ShardChunk(payload=CONTENT[4:])

    async def arrived(held_bytes: int) -> None:
        told.append(held_bytes)

    async def kept(held_bytes: int) -> None:
        if held_bytes:
            has_come.set()

    has_come = asyncio.Event()
    before = asyncio.create_task(one.put(P, silent(), arrived=kept))
    await has_come.wait()
    assert await one.put(P, resuming(), arrived=arrived) == SHA256
    assert told == [4, len(CONTENT)]
    assert before.cancelled()


async def test_an_upload_for_which_there_is_no_room_now_is_kept_as_long_as_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file stayed on the disk, and nobody could go on with it."""
    one = await made(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        await one.put(P, left(CONTENT, CONTENT[:4]))
    (part,) = one._parts.values()
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES)
    with pytest.raises(InvalidData, match="does not fit"):
        await one.put(P, left(CONTENT, b""))
    assert list(one._parts.values()) == [part]
    assert part.path.read_bytes() == CONTENT[:4]


async def test_what_broke_off_is_kept_from_then_on_however_long_it_was_under_way(tmp_path: Path) -> None:
    one, loop = await made(tmp_path), asyncio.get_running_loop()
    broke_s = 0.0

    async def long() -> AsyncIterator[pb.ShardChunk]:
        nonlocal broke_s
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), resumes=True)
        yield pb.ShardChunk(payload=CONTENT[:4])
        broke_s = loop.time()
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await one.put(P, long())
    (part,) = one._parts.values()
    assert part.since_s >= broke_s


async def test_of_each_project_one_broken_upload_is_kept_and_not_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await made(tmp_path)

    async def broken(content: bytes) -> AsyncIterator[pb.ShardChunk]:
        sha256 = hashlib.sha256(content).hexdigest()
        yield pb.ShardChunk(shard=pb.Shard(sha256=sha256, size_bytes=len(content)), resumes=True)
        yield pb.ShardChunk(payload=content[:3])
        raise asyncio.CancelledError

    for content in (b"first", b"second", CONTENT):
        with pytest.raises(asyncio.CancelledError):
            await one.put(P, broken(content))
        assert len(list((tmp_path / "shards").iterdir())) == 1
    monkeypatch.setattr(uploads, "PARTS_KEPT_S", -1.0)
    await one._projects.create("other", Quota())
    with pytest.raises(asyncio.CancelledError):
        await one.put("other", broken(b"third"))
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["other"]


async def test_who_does_not_resume_begins_at_the_first_byte(tmp_path: Path) -> None:
    one = await made(tmp_path)

    async def broken() -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), resumes=True)
        yield pb.ShardChunk(payload=CONTENT[:3])
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await one.put(P, broken())
    assert await one.put(P, sent()) == SHA256
    assert len(list((tmp_path / "shards").iterdir())) == 1
