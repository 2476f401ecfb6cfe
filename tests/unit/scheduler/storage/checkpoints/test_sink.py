"""Collecting a checkpoint: only what belongs comes in, all of it or nothing comes out."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from safetensors.numpy import save

from scheduler.brain.outputs import PublishCheckpoint, Vouch
from scheduler.storage.checkpoints import sink
from scheduler.storage.checkpoints.sink import CheckpointSink, Subject, _stage_bytes_max, _try_out
from scheduler.storage.state_files import CheckpointFiles
from swarm.checkpoint.reader import Checkpoint, fault_of, list_checkpoints, newest
from swarm.checkpoint.storage import LocalStorage, open_storage
from swarm.errors import CheckpointFailed, CorruptFrame, NotFound, Refused
from swarm.types import JobId, PeerId
from swarm.wire.messages import FetchRequest, StoreHeader
from tests.support.checkpoints import JOB, TOKENIZER, WITH_MEMORY, facts, hashes, spec, tensors, write

JOB_ID = JobId(JOB)
WEIGHTS = "model/model-00001-of-00002.safetensors"


@dataclass(slots=True)
class Heard:
    """What the keeper told."""

    kept_: list[Checkpoint] = field(default_factory=list)
    failed_: list[tuple[int, CheckpointFailed]] = field(default_factory=list)
    stored_: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    signs: int = 0  # of life

    def stored(self, header: StoreHeader, sha256: str) -> None:
        self.stored_.append((header.path, sha256))

    def kept(self, checkpoint: Checkpoint, duration_s: float) -> None:
        assert duration_s >= 0
        self.kept_.append(checkpoint)

    def failed(self, version: int, error: CheckpointFailed) -> None:
        self.failed_.append((version, error))

    def note(self, level: str, text: str) -> None:
        self.notes.append(text)

    def at_work(self) -> None:
        self.signs += 1


def header(stage: int, path: str, payload: bytes, *, version: int = 4, timeline: int = 0) -> StoreHeader:
    return StoreHeader(JOB_ID, PeerId("p"), 1, timeline, version, stage, len(payload), path)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def keeper(
    root: Path, heard: Heard, tasks: asyncio.TaskGroup, executor: ThreadPoolExecutor | None = None
) -> CheckpointSink:
    return CheckpointSink(LocalStorage(root), Subject(JOB_ID, spec(), 0, TOKENIZER), facts, heard, tasks, executor)


@asynccontextmanager
async def collecting(root: Path, heard: Heard | None = None) -> AsyncIterator[CheckpointSink]:
    """Version 4 is being collected, and then given up."""
    async with asyncio.TaskGroup() as tasks:
        made = keeper(root, heard or Heard(), tasks)
        made.begin(4)
        yield made
        made.drop()
        await made.close()


async def put_all(made: CheckpointSink, version: int) -> PublishCheckpoint:
    made.begin(version)
    for stage in (0, 1):
        payload = save(tensors(version, stage))
        path = f"model/model-{stage + 1:05d}-of-00002.safetensors"
        stored = await made.put(header(stage, path, payload, version=version), chunks(payload[:7], payload[7:]))
        assert stored == hashlib.sha256(payload).hexdigest()
    return PublishCheckpoint(version, {stage: hashes(tensors(version, stage)) for stage in (0, 1)})


async def test_stages_come_in_and_a_checkpoint_comes_out(tmp_path: Path) -> None:
    heard = Heard()
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, heard, tasks)
        for version in (2, 4, 6, 8):
            made.publish(await put_all(made, version))
            await made.close()
    assert [checkpoint.step for checkpoint in heard.kept_] == [2, 4, 6, 8]
    assert [checkpoint.step for checkpoint in list_checkpoints(LocalStorage(tmp_path), JOB_ID)[0]] == [4, 6, 8]
    assert heard.notes == ["removed step-00000002"]


def whole(payload: bytes) -> StoreHeader:
    return replace(header(0, WEIGHTS, payload), sha256=hashlib.sha256(payload).hexdigest())


async def broken_off(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    raise asyncio.CancelledError


async def test_a_file_that_broke_off_goes_on_at_its_next_byte(tmp_path: Path) -> None:
    heard, payload = Heard(), save(tensors(4, 0))
    async with collecting(tmp_path, heard) as made:
        with pytest.raises(asyncio.CancelledError):
            await made.put(whole(payload), broken_off(payload[:7], payload[7:9]))
        assert await made.held(whole(payload)) == 9
        assert await made.put(whole(payload), chunks(payload[9:])) == hashlib.sha256(payload).hexdigest()
        # Its sender may not have heard the last word.
        assert await made.held(whole(payload)) == len(payload)
        assert await made.put(whole(payload), chunks()) == hashlib.sha256(payload).hexdigest()
        assert heard.stored_ == [(WEIGHTS, hashlib.sha256(payload).hexdigest())]
    assert not list(tmp_path.rglob("*.safetensors*"))


async def test_nobody_goes_on_with_a_file_of_another_header_or_hash(tmp_path: Path) -> None:
    payload = save(tensors(4, 0))
    others = [
        replace(whole(payload), peer=PeerId("q")),
        replace(whole(payload), incarnation=2),
        replace(whole(payload), sha256="0" * 64),
        replace(whole(payload), total_bytes=len(payload) - 1),
        replace(whole(payload), sha256=""),
    ]
    async with collecting(tmp_path) as made:
        with pytest.raises(asyncio.CancelledError):
            await made.put(whole(payload), broken_off(payload[:9]))
        assert [await made.held(other) for other in others] == [0] * len(others)
        again = replace(whole(payload), peer=PeerId("q"))
        assert await made.put(again, chunks(payload)) == hashlib.sha256(payload).hexdigest()
        assert await made.held(whole(payload)) == 0
        await made.put(whole(payload), chunks(bytes(len(payload))))
        assert await made.held(whole(payload)) == 0, "it arrived with another hash"


async def test_a_sender_that_dialled_again_does_not_wait_for_its_broken_connection(tmp_path: Path) -> None:
    payload, has_begun = save(tensors(4, 0)), asyncio.Event()

    async def stuck() -> AsyncIterator[bytes]:
        yield payload[:9]
        has_begun.set()
        await asyncio.Event().wait()

    async with collecting(tmp_path) as made:
        before = asyncio.create_task(made.put(whole(payload), stuck()))
        await has_begun.wait()
        assert await made.held(whole(payload)) == 9
        assert before.cancelled()
        assert await made.put(whole(payload), chunks(payload[9:])) == hashlib.sha256(payload).hexdigest()


async def test_only_files_that_are_vouched_for_are_published(tmp_path: Path) -> None:
    """A member could store a file again after others had said that the first one was right."""
    heard = Heard()
    payload = save(tensors(4, 0))
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, heard, tasks)
        for replaced in (False, True):
            move = await put_all(made, 4)
            made.vouch(Vouch(4, dict(heard.stored_)))
            if replaced:
                false = save(tensors(5, 0))
                await made.put(header(0, WEIGHTS, false), chunks(false))
            made.publish(move)
            with pytest.raises(Refused, match="has all its files"):
                await made.put(header(0, WEIGHTS, payload), chunks(payload))
            while len(heard.kept_) + len(heard.failed_) < 1 + replaced:
                await asyncio.sleep(0.01)
            if replaced:
                made.drop()
    assert len(heard.kept_) == 1
    assert [(version, error.reason) for version, error in heard.failed_] == [(4, "peer")]
    assert "in the place of those that others have hashed" in heard.failed_[0][1].message


async def test_an_island_writes_its_own_files_and_the_first_one_what_all_share(tmp_path: Path) -> None:
    """Places count through all islands: 2 and 3 are the stages of the second."""
    plain = spec()
    islands, averaging = plain.islands, plain.averaging
    two = plain.model_copy(
        update={
            "islands": islands.model_copy(update={"count": 2}),
            "averaging": averaging.model_copy(update={"mode": "diloco"}),
        }
    )
    weights, own, shared = (
        WEIGHTS,
        "optimizer/embed.safetensors",
        "outer/embed.safetensors",
    )
    async with asyncio.TaskGroup() as tasks:
        made = CheckpointSink(LocalStorage(tmp_path), Subject(JOB_ID, two, 0, TOKENIZER), facts, Heard(), tasks, None)
        made.begin(4)
        for place, path in ((0, weights), (0, own), (0, shared), (2, f"islands/01/{own}")):
            await made.put(header(place, path, b"abc"), chunks(b"abc"))
        wrong = [(2, weights), (2, own), (2, shared), (0, f"islands/01/{own}"), (3, f"islands/01/{own}")]
        for place, path in (*wrong, (4, f"islands/02/{own}"), (-1, own), (2, f"islands/01/{shared}")):
            with pytest.raises(Refused, match="writes no file"):
                await made.put(header(place, path, b"abc"), chunks(b"abc"))
        made.drop()
        await made.close()
    async with collecting(tmp_path) as made:
        with pytest.raises(Refused, match="writes no file"):
            await made.put(header(0, shared, b"abc"), chunks(b"abc"))


async def test_only_what_belongs_comes_in(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, Heard(), tasks)
        with pytest.raises(Refused, match="collects no state of version 4"):
            await made.put(header(0, WEIGHTS, b"x"), chunks(b"x"))
        made.begin(4)
        for stage, path in (
            (1, WEIGHTS),
            (0, "model/model-00001-of-00003.safetensors"),
            (0, "../../etc/passwd"),
            (0, "manifest.json"),
            (0, ""),
            (0, "optimizer/layer-0002.safetensors"),
            (0, "optimizer/layer-0000.safetensors\n"),
            (0, "optimizer/layer-٠٠٠٠.safetensors"),
            (1, "optimizer/embed.safetensors"),
            (0, "optimizer/head.safetensors"),
            (7, WEIGHTS),
        ):
            with pytest.raises(Refused, match="writes no file"):
                await made.put(header(stage, path, b"x"), chunks(b"x"))
        for version, timeline in ((5, 0), (4, 1)):
            with pytest.raises(Refused):
                await made.put(header(0, WEIGHTS, b"x", version=version, timeline=timeline), chunks(b"x"))
        with pytest.raises(CorruptFrame, match="announced with 9 bytes and has 3"):
            await made.put(header(0, WEIGHTS, b"x" * 9), chunks(b"abc"))
        await made.put(header(1, "optimizer/head.safetensors", b"abc"), chunks(b"abc"))
        made.drop()
        with pytest.raises(Refused):
            await made.put(header(0, WEIGHTS, b"x"), chunks(b"x"))
        await made.close()
    assert list(tmp_path.iterdir()) == []


async def test_hashes_that_are_not_those_of_the_files_make_no_checkpoint(tmp_path: Path) -> None:
    heard = Heard()
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, heard, tasks)
        move = await put_all(made, 4)
        made.publish(PublishCheckpoint(4, {stage: hashes(tensors(9, stage)) for stage in (0, 1)}))
        await made.close()
        assert move.version == 4
    assert heard.kept_ == []
    assert "does not read back" in heard.failed_[0][1].message
    assert newest(LocalStorage(tmp_path), JOB_ID).checkpoint is None


async def test_a_folder_that_cannot_be_written_is_an_error_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path / "file" / "x", Heard(), tasks)
        made.begin(4)
        with pytest.raises(CheckpointFailed, match="Not a directory"):
            await made.put(header(0, WEIGHTS, b"x"), chunks(b"x"))
        await made.close()


async def test_reading_back_gives_signs_of_life_from_its_thread(tmp_path: Path) -> None:
    heard = Heard()
    with ThreadPoolExecutor(1) as executor:
        async with asyncio.TaskGroup() as tasks:
            made = keeper(tmp_path, heard, tasks, executor)
            made.publish(await put_all(made, 4))
            await made.close()
    (kept,) = heard.kept_
    assert heard.signs >= len(kept.files)


async def test_a_job_that_could_not_save_learns_it_before_it_trains(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    async with asyncio.TaskGroup() as tasks:
        await keeper(tmp_path / "new" / "x", Heard(), tasks).prepare(at_start=True)
        assert list((tmp_path / "new" / "x").iterdir()) == []
        with pytest.raises(CheckpointFailed, match="Not a directory") as caught:
            await keeper(tmp_path / "file" / "x", Heard(), tasks).prepare(at_start=True)
        assert "writable" in caught.value.hint
        heard = Heard()
        await keeper(tmp_path / "file" / "x", heard, tasks).prepare(at_start=False)
        assert "Not a directory" in heard.notes[0]


def test_a_url_that_takes_files_is_left_as_it_was() -> None:
    storage = open_storage("memory://tried-out/x", WITH_MEMORY)
    _try_out(storage)
    assert storage.names() == []


async def test_what_was_given_up_while_it_came_in_is_refused_and_removed(tmp_path: Path) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        made.drop()
        yield b"b"

    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, Heard(), tasks)
        made.begin(4)
        with pytest.raises(Refused, match="given up"):
            await made.put(header(0, WEIGHTS, b"ab"), slow())
        await made.close()
    assert list(tmp_path.iterdir()) == []


async def test_parts_of_a_checkpoint_are_served(tmp_path: Path) -> None:
    made = write(LocalStorage(tmp_path), 4)
    files = CheckpointFiles(made)
    assert [file.path for file in files.listed][-1] == "optimizer/layer-0001.safetensors"
    path = files.listed[0].path
    whole = b"".join(made.chunks(path))

    async def read(path: str, start: int, stop: int) -> bytes:
        return b"".join([part async for part in files.read(FetchRequest(JOB_ID, 0, path, start, stop), None)])

    assert await read(path, 3, 50) == whole[3:50]
    with pytest.raises(Refused):
        await read(path, 3, len(whole) + 1)
    for other in ("manifest.json", "../x", "model/config.json"):
        with pytest.raises(NotFound):
            await read(other, 0, 1)


async def test_one_with_wrong_bytes_is_not_kept_although_it_is_being_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica was expelled for wrong bytes while what it had handed over was read back: it became the newest."""
    is_reading, may_go_on = threading.Event(), threading.Event()
    heard = Heard()

    def wait(checkpoint: Checkpoint, **_: object) -> str:
        is_reading.set()
        assert may_go_on.wait(60.0)
        return ""

    executor = ThreadPoolExecutor(2)
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, heard, tasks, executor)
        made.publish(await put_all(made, 2))
        await made.close()
        monkeypatch.setattr(sink, "fault_of", wait)
        for reason, kept in (("peer", [2]), ("timeout", [2, 4])):
            made.publish(await put_all(made, 4))
            assert await asyncio.to_thread(is_reading.wait, 60.0)
            made.drop(is_false=reason == "peer")
            if reason == "peer":  # the same version is collected again, from others
                made.begin(4)
                payload = save(tensors(4, 0))
                again = asyncio.create_task(made.put(header(0, WEIGHTS, payload), chunks(payload)))
                await asyncio.sleep(0)
                may_go_on.set()
                await again
                made.drop()
            may_go_on.set()
            await made.close()
            assert [checkpoint.step for checkpoint in list_checkpoints(LocalStorage(tmp_path), JOB_ID)[0]] == kept
            assert (tmp_path / "latest").read_text() == f"step-{kept[-1]:08d}\n"
            is_reading.clear()
            may_go_on.clear()
    executor.shutdown()
    assert [checkpoint.step for checkpoint in heard.kept_] == [2, 4]
    assert (heard.failed_, heard.notes) == ([], [])
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-00000002", "step-00000004"}


async def test_one_with_wrong_bytes_is_read_back_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the newest for as long as it took to read all of it."""
    is_reading, is_dropped = threading.Event(), threading.Event()
    heard, parts = Heard(), 0

    def read(checkpoint: Checkpoint, *, progress: Callable[[], None]) -> str:
        def one_more() -> None:
            nonlocal parts
            parts += 1
            is_reading.set()
            assert is_dropped.wait(60.0)
            progress()

        return fault_of(checkpoint, progress=one_more)

    monkeypatch.setattr(sink, "fault_of", read)
    executor = ThreadPoolExecutor(2)
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, heard, tasks, executor)
        made.publish(await put_all(made, 2))
        assert await asyncio.to_thread(is_reading.wait, 60.0)
        made.drop(is_false=True)
        is_dropped.set()
        await made.close()
    executor.shutdown()
    assert parts == 1
    assert (heard.kept_, heard.failed_, heard.notes) == ([], [], [])
    assert list(tmp_path.iterdir()) == [], "nor does latest name one that is gone"


@pytest.mark.parametrize("is_threaded", [False, True])
async def test_a_version_that_is_dropped_as_its_first_file_comes_stops_nothing(
    tmp_path: Path, is_threaded: bool
) -> None:
    heard = Heard()
    async with asyncio.TaskGroup() as tasks:
        made = keeper(tmp_path, heard, tasks, ThreadPoolExecutor(1) if is_threaded else None)
        made.begin(4)
        put = asyncio.create_task(made.put(header(0, WEIGHTS, b"xyz"), chunks(b"xyz")))
        await asyncio.sleep(0)  # it has asked for a writer, and that has not had its turn
        made.drop()
        async with asyncio.timeout(60.0):
            await asyncio.gather(put, return_exceptions=True)
            made.publish(await put_all(made, 4))
            await made.close()
    assert [checkpoint.step for checkpoint in heard.kept_] == [4]


async def test_a_stage_stores_no_more_than_it_can_weigh(tmp_path: Path) -> None:
    """One peer announced a tebibyte, and filled the disk."""
    announced = replace(header(0, WEIGHTS, b"x"), total_bytes=1 << 40)
    async with collecting(tmp_path) as made:
        with pytest.raises(Refused, match="it can have"):
            await made.put(announced, chunks(b"x"))
        most = _stage_bytes_max(spec(), 0)
        await made.put(header(0, WEIGHTS, b"x"), chunks(b"x"))
        with pytest.raises(Refused, match="it can have"):  # all its files together
            await made.put(replace(header(0, "optimizer/embed.safetensors", b""), total_bytes=most), chunks())
        await made.put(header(0, WEIGHTS, b"xy"), chunks(b"xy"))  # again: in the place of the first


async def test_one_file_is_stored_by_one_at_a_time(tmp_path: Path) -> None:
    """Two at once wrote through each other."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        begun.set()
        await go_on.wait()
        yield b"b"

    async with collecting(tmp_path) as made:
        first = asyncio.create_task(made.put(header(0, WEIGHTS, b"ab"), slow()))
        await begun.wait()
        with pytest.raises(Refused, match="is being stored already"):
            await made.put(header(0, WEIGHTS, b"xy"), chunks(b"xy"))
        go_on.set()
        assert await first == hashlib.sha256(b"ab").hexdigest()
        await made.put(header(0, WEIGHTS, b"xy"), chunks(b"xy"))
