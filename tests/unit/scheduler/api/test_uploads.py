"""Uploads: whoever sends files can neither fill the disk nor hold its places."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from scheduler.api import uploads
from scheduler.api.uploads import Uploads
from scheduler.brain.members import persons, places
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.storage.database import Database
from scheduler.storage.stores import Stores
from swarm.checkpoint.storage import Files
from swarm.errors import Crowded, InvalidData, NotAllowed, QuotaReached
from swarm.pki.names import Role
from swarm.wire import jobs_pb2 as pb

ANN, EVE = (Person(Role.SUBMITTER, name) for name in ("ann", "eve"))
CONTENT = b"some tokens"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
async def one(tmp_path: Path) -> Uploads:
    return await made(tmp_path)


async def made(folder: Path) -> Uploads:
    return Uploads(Stores.under(folder, await Database.open("sqlite://", None)))


async def sent(size_bytes: int = len(CONTENT), *, then: asyncio.Event | None = None) -> AsyncIterator[pb.ShardChunk]:
    yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=size_bytes))
    if then is not None:
        await then.wait()
    yield pb.ShardChunk(payload=CONTENT)


BREAKS = None  # the line breaks


async def sending(
    *parts: bytes | asyncio.Event | None, content: bytes = CONTENT, resumes: bool = True
) -> AsyncIterator[pb.ShardChunk]:
    """These parts of a content, with pauses until something has happened."""
    sha256 = hashlib.sha256(content).hexdigest()
    yield pb.ShardChunk(shard=pb.Shard(sha256=sha256, size_bytes=len(content)), resumes=resumes)
    for part in parts:
        match part:
            case bytes():
                yield pb.ShardChunk(payload=part)
            case asyncio.Event():
                await part.wait()
            case _:
                raise asyncio.CancelledError


class Told(list[int]):
    """Of how many bytes a sender was told that they are there."""

    async def arrived(self, held_bytes: int) -> None:
        self.append(held_bytes)


async def test_what_is_uploaded_is_there(one: Uploads) -> None:
    shard = pb.Shard(sha256=SHA256)
    assert await one.missing(ANYBODY, [shard]) == [shard]
    assert await one.put(sent()) == SHA256
    assert one.path("", SHA256).read_bytes() == CONTENT
    assert await one.missing(ANYBODY, [shard]) == []


async def test_an_upload_that_stands_still_is_ended_and_leaves_nothing(
    one: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing() -> AsyncIterator[pb.ShardChunk]:
        await asyncio.Event().wait()
        yield pb.ShardChunk()

    monkeypatch.setattr(uploads, "UPLOAD_IDLE_S_MAX", 0.05)
    for upload in (nothing(), sent(then=asyncio.Event())):
        with pytest.raises(InvalidData, match="stood still"):
            await one.put(upload)
    assert list((tmp_path / "shards").iterdir()) == []


async def test_uploads_at_a_time_are_bounded_for_one_person_and_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody sent a byte now and then of so many files that nobody else could send any."""
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 2)
    monkeypatch.setattr(uploads, "UPLOADS_OF_ONE_MAX", 1)
    one, go_on = await made(tmp_path), asyncio.Event()
    waiting = [asyncio.create_task(one.put(sent(then=go_on), EVE))]
    await asyncio.sleep(0)  # no more than a turn of the event loop: what begins counts at once
    with pytest.raises(NotAllowed, match="1 of your files"):
        await one.put(sent(), EVE)
    waiting.append(asyncio.create_task(one.put(sent(then=go_on), ANN)))
    await asyncio.sleep(0)
    with pytest.raises(NotAllowed, match="2 files are being uploaded"):
        await one.put(sent())
    go_on.set()
    assert await asyncio.gather(*waiting) == [SHA256, SHA256]
    assert await one.put(sent()) == SHA256


async def test_the_slowest_upload_of_who_has_most_gives_its_place_up_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two persons sent a byte now and then of sixteen files each, and nobody else sent any for days."""
    monkeypatch.setattr(uploads, "UPLOADS_MAX", 2)
    monkeypatch.setattr(places, "PLACE_WAIT_S", 0.2)
    one, told, go_on = await made(tmp_path), Told(), asyncio.Event()
    faster = asyncio.create_task(one.put(sending(b"another ", go_on, b"file", content=b"another file"), EVE))
    slower = asyncio.create_task(one.put(sending(CONTENT[:4], go_on, CONTENT[4:]), EVE))
    while sorted(upload.arrived_bytes for upload in one._open) != [4, 8]:
        await asyncio.sleep(0.01)
    while True:
        with suppress(Crowded):
            assert await one.put(sent(), ANN) == SHA256
            break
        await asyncio.sleep(0.02)
    with pytest.raises(Crowded, match="others, who had fewer"):
        await slower
    assert not faster.done()
    assert await one.put(sending(CONTENT[4:]), EVE, told.arrived) == SHA256
    assert told == [4, len(CONTENT)]
    go_on.set()
    await faster


async def test_a_disk_is_never_promised_twice(one: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = uploads.UPLOAD_DISK_RESERVE_BYTES
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: reserve + 100)
    go_on = asyncio.Event()
    (tmp_path / "shards").mkdir()
    with pytest.raises(InvalidData, match="does not fit") as caught:
        await one.put(sent(101))
    assert "disk" in caught.value.hint
    both = [asyncio.create_task(one.put(sent(60, then=go_on))) for _ in range(2)]  # they begin together
    (refused,), (first,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    for second in (refused, one.put(sent(60))):
        with pytest.raises(InvalidData, match="60 B of them promised"):
            await second
    go_on.set()
    with pytest.raises(InvalidData, match="arrived as"):
        await first
    assert await one.put(sent()) == SHA256


async def test_a_slow_upload_leaves_room_to_others(one: Uploads, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submitter promised the whole disk to one upload, which may take hours for a GiB."""
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES + 400)
    monkeypatch.setattr(persons, "UPLOADED_BYTES_MIN", 1)
    go_on = asyncio.Event()
    with pytest.raises(QuotaReached, match="half of the 400 B"):
        await one.put(sent(201), EVE)
    slow = asyncio.create_task(one.put(sent(200, then=go_on), EVE))
    while not any(upload.promised_bytes for upload in one._open):
        await asyncio.sleep(0)
    with pytest.raises(QuotaReached, match="you are sending 200 B"):
        await one.put(sent(), EVE)
    with pytest.raises(QuotaReached, match="half of the 200 B"):
        await one.put(sent(101), ANN)
    assert await one.put(sent(), ANN) == SHA256
    go_on.set()
    with pytest.raises(InvalidData, match="arrived as"):
        await slow


async def test_a_person_has_at_most_so_many_uploaded_files(
    one: Uploads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A submitter sent files of a byte for days: the bytes were bounded, and the scheduler's disk had no inode left."""
    monkeypatch.setattr(persons, "UPLOADED_OF_ONE_MAX", 3)
    go_on = asyncio.Event()
    for number in range(2):
        await one.put(sent_as(*numbered(number)), EVE)
    third = asyncio.create_task(one.put(sent(then=go_on), EVE))
    while not any(upload.counts for upload in one._open):
        await asyncio.sleep(0)
    with pytest.raises(QuotaReached, match="you have 3 uploaded files") as caught:  # also while the third is under way
        await one.put(sent_as(*numbered(4)), EVE)
    assert "swarm rm" in caught.value.hint
    go_on.set()
    assert await third == SHA256
    again = await made(tmp_path)  # another start of the scheduler counts what is there
    await again._files.load()
    for uploads_of_both in (one, again):
        with pytest.raises(QuotaReached, match="you have 3 uploaded files"):
            await uploads_of_both.put(sent_as(*numbered(4)), EVE)
        assert await uploads_of_both.put(sent(), ANN) == SHA256
    await again._files.remove_unused({again.path(EVE.owner, SHA256)}, 4e9)
    assert again._files.taken_by(EVE.owner)[0] == 1
    await again.put(sent_as(*numbered(4)), EVE)


async def test_files_that_a_person_has_count_towards_his_half_of_the_disk_with_a_block_at_least(
    one: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person was promised half of the room at a time, and took half of the rest with the next file, until the disk
    was full."""
    free_bytes = 64 << 10
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES + free_bytes)
    for number in range(8):
        await one.put(sent_as(*numbered(number, 1)), EVE)
        free_bytes -= 4096
    assert one._files.taken_by(EVE.owner) == (8, 8 * 4096)
    with pytest.raises(QuotaReached, match=r"your files take 32\.0 KiB, .* half of the 64\.0 KiB") as caught:
        await one.put(sent_as(*numbered(8, 1)), EVE)
    assert "swarm rm" in caught.value.hint
    assert await one.put(sent(), ANN) == SHA256


async def test_files_that_no_job_names_go_after_a_while(one: Uploads) -> None:
    await one.put(sent())
    files = one._files
    path = one.path("", SHA256)
    await files.remove_unused({path}, path.stat().st_mtime + 1)
    await files.remove_unused(set(), path.stat().st_mtime - 1)
    assert path.exists()
    os.utime(path, (0, 0))
    assert await one.missing(ANYBODY, [pb.Shard(sha256=SHA256)]) == []  # somebody is about to submit a job with it
    await files.remove_unused(set(), 1.0)
    assert path.exists()
    await files.remove_unused(set(), path.stat().st_mtime + 1)
    assert not path.exists()


async def test_files_of_before_people_had_folders_are_found_by_everybody(one: Uploads, tmp_path: Path) -> None:
    """So are those that came over plaintext."""
    old = tmp_path / "shards" / f"{SHA256}.bin"
    old.parent.mkdir()
    old.write_bytes(CONTENT)
    await one.put(sent_as(*numbered(1)), ANN)
    again = await made(tmp_path)
    await again._files.load()
    for person in (ANN, EVE, ANYBODY):
        assert await again.missing(person, [pb.Shard(sha256=SHA256)]) == []
        assert again.path(person.owner, SHA256) == tmp_path / "shards" / f"{SHA256}.bin"
    assert await again.missing(ANN, [pb.Shard(sha256=numbered(1)[0])]) == []
    await again._files.remove_unused(set(), 4e9)
    assert await again.missing(EVE, [pb.Shard(sha256=SHA256)]) != []
    assert await again.put(sent(), EVE) == SHA256
    assert again.path(EVE.owner, SHA256).parent == tmp_path / "shards" / "submitter" / "eve"


def numbered(number: int, size_bytes: int = 100) -> tuple[str, bytes]:
    content = number.to_bytes(min(4, size_bytes), "big").ljust(size_bytes, b".")
    return hashlib.sha256(content).hexdigest(), content


async def sent_as(sha256: str, content: bytes) -> AsyncIterator[pb.ShardChunk]:
    yield pb.ShardChunk(shard=pb.Shard(sha256=sha256, size_bytes=len(content)))
    for start in range(0, len(content), 10):
        await asyncio.sleep(0)
        yield pb.ShardChunk(payload=content[start : start + 10])


async def test_an_upload_that_broke_off_goes_on_at_its_next_byte_for_who_resumes(one: Uploads, tmp_path: Path) -> None:
    told = Told()

    with pytest.raises(asyncio.CancelledError):
        await one.put(sending(CONTENT[:4], BREAKS), arrived=told.arrived)
    with pytest.raises(InvalidData, match="arrived as 6 bytes"):  # gRPC shows a stream that broke as ended
        await one.put(sending(CONTENT[4:6]), arrived=told.arrived)
    assert await one.put(sending(CONTENT[6:]), arrived=told.arrived) == SHA256
    assert told == [0, 4, 4, 6, 6, len(CONTENT)]
    assert one.path("", SHA256).read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [f"{SHA256}.bin"]


async def test_nobody_goes_on_with_what_another_person_left(one: Uploads) -> None:
    """Another person could leave wrong first bytes under the hash of a file that others were to send: their
    own upload went on behind these, and was refused at its end."""
    told = Told()
    mallory, alice = (Person(Role.SUBMITTER, name) for name in ("mallory", "alice"))

    with pytest.raises(asyncio.CancelledError):
        await one.put(sending(b"wrong", BREAKS), mallory)
    assert await one.put(sending(CONTENT), alice, told.arrived) == SHA256
    assert told == [0, len(CONTENT)]
    assert await one.put(sent(), mallory) == SHA256, "who does not resume begins at the first byte"
    assert [path.name for path in one.path(mallory.owner, SHA256).parent.iterdir()] == [f"{SHA256}.bin"]


async def test_a_sender_that_dials_again_goes_on_before_its_old_line_is_known_to_be_broken(
    one: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler sees a cut line seconds later than a client that dials again at once. What it had was not found
    then, and was sent a second time."""
    monkeypatch.setattr(uploads, "SILENT_S", 0.05)
    told = Told()

    async def kept(held_bytes: int) -> None:
        if held_bytes:
            has_come.set()

    has_come = asyncio.Event()
    before = asyncio.create_task(one.put(sending(CONTENT[:4], asyncio.Event()), arrived=kept))
    await has_come.wait()
    assert await one.put(sending(CONTENT[4:]), arrived=told.arrived) == SHA256
    assert told == [4, len(CONTENT)]
    assert before.cancelled()


async def test_an_upload_for_which_there_is_no_room_now_is_kept_as_long_as_any(
    one: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file stayed on the disk, and nobody could go on with it."""
    breaks = asyncio.Event()
    long = asyncio.create_task(one.put(sending(CONTENT[:4], breaks, BREAKS)))
    await asyncio.sleep(0.05)
    broke_s = asyncio.get_running_loop().time()
    breaks.set()
    with pytest.raises(asyncio.CancelledError):
        await long
    (part,) = one._parts.values()
    assert part.since_s >= broke_s, "it is kept from then on, however long it was under way"
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES)
    with pytest.raises(InvalidData, match="does not fit"):
        await one.put(sending(BREAKS))
    assert list(one._parts.values()) == [part]
    assert part.path.read_bytes() == CONTENT[:4]


async def test_few_broken_uploads_are_kept_and_the_oldest_of_him_who_has_most_makes_room(
    one: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person whose line broke while he sent two files began one of them from its start."""
    monkeypatch.setattr(uploads, "PARTS_KEPT_MAX", 3)

    async def breaks(content: bytes, person: Person) -> None:
        with pytest.raises(asyncio.CancelledError):
            await one.put(sending(content[:3], BREAKS, content=content), person)

    def kept(person: Person) -> list[bytes]:
        hashes = {
            hashlib.sha256(content).hexdigest(): content for content in (b"first", b"second", b"third", b"fourth")
        }
        found = [hashes[path.name.partition(".")[0]] for path in one.path(person.owner, SHA256).parent.glob("*.part")]
        assert len(found) == sum(owner == person.owner for owner, _ in one._parts)
        return sorted(found)

    await breaks(b"fourth", ANN)
    for content in (b"first", b"second", b"third"):
        await breaks(content, EVE)
    assert (kept(ANN), kept(EVE)) == ([b"fourth"], [b"second", b"third"])
    await breaks(b"second", EVE)
    assert (kept(ANN), kept(EVE)) == ([b"fourth"], [b"second", b"third"])
    monkeypatch.setattr(uploads, "PARTS_KEPT_S", -1.0)
    await breaks(b"third", ANN)
    assert (kept(ANN), kept(EVE)) == ([b"third"], [])


async def test_what_is_kept_of_broken_uploads_counts_towards_the_half_of_the_disk(
    one: Uploads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a person could let one upload after the other break off."""
    monkeypatch.setattr(persons, "UPLOADED_BYTES_MIN", 1)
    monkeypatch.setattr(uploads, "_free_bytes", lambda folder: uploads.UPLOAD_DISK_RESERVE_BYTES + 100)
    with pytest.raises(asyncio.CancelledError):
        await one.put(sending(b"a" * 40, BREAKS, content=b"a" * 50), EVE)
    with pytest.raises(QuotaReached, match="your files take 40 B"):
        await one.put(sent_as(*numbered(1, 31)), EVE)
    await one.put(sent_as(*numbered(1, 30)), EVE)
    await one.put(sent_as(*numbered(1, 31)), ANN)


async def test_all_of_an_upload_is_written_aside_from_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part was hashed and written on it, and may have 4 MiB."""
    wrote: list[int] = []

    class Noting(Files):
        def write(self, file: BinaryIO, content: bytes | memoryview) -> None:
            wrote.append(threading.get_ident())
            super().write(file, content)

    async def parts() -> AsyncIterator[pb.ShardChunk]:
        yield pb.ShardChunk(shard=pb.Shard(sha256=SHA256, size_bytes=len(CONTENT)), payload=CONTENT[:4])
        yield pb.ShardChunk(payload=CONTENT[4:])

    monkeypatch.setattr(uploads, "_FILES", Noting())
    with ThreadPoolExecutor(1) as threads:
        one = Uploads(Stores.under(tmp_path, await Database.open("sqlite://", None), threads))
        assert await one.put(parts()) == SHA256
    assert len(wrote) == 2
    assert threading.get_ident() not in wrote
