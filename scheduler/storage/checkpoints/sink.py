"""One job's checkpoints: collects files from stage servers, publishes checkpoints, removes old ones.

The brain decides when each stage is saved and by which replica, and what follows from a failure
(brain/checkpoint/schedule.py). The format is in swarm/checkpoint/writer.py. All blocking work runs on an executor of
its own, so no commit waits behind a checkpoint.

A checkpoint with wrong bytes is withdrawn, also when it is complete: otherwise a job that stalls would go back to it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from scheduler.brain.outputs import PublishCheckpoint, Vouch
from scheduler.storage.executor import run_blocking, run_to_its_end
from swarm.checkpoint.reader import OPTIMIZER_FOLDER, OUTER_FOLDER, WEIGHTS_FOLDER, Checkpoint, fault_of, island_folder
from swarm.checkpoint.storage import Storage
from swarm.checkpoint.writer import CheckpointWriter, Facts, FileWriter, prune
from swarm.errors import CheckpointFailed, CorruptFrame, Refused, StorageError, SwarmError
from swarm.hf.model_folder import shard_name
from swarm.job.footprint import stage_footprint
from swarm.job.spec import JobSpec
from swarm.types import JobId
from swarm.wire.messages import StoreHeader

T = TypeVar("T")

HEADERS_BYTES_MAX = 64 << 20  # of all files of a stage

_LAYER_FILE = re.compile(r"layer-([0-9]{4,5})\.safetensors")


class CheckpointListener(Protocol):
    """Hears what became of a checkpoint."""

    def stored(self, header: StoreHeader, sha256: str) -> None:
        """A file was written, with this hash."""

    def kept(self, checkpoint: Checkpoint, duration_s: float) -> None:
        """It is complete and was read back."""

    def failed(self, version: int, error: CheckpointFailed) -> None:
        """It could not be written."""

    def note(self, level: str, text: str) -> None:
        """There is something that a person should know."""

    def at_work(self) -> None:
        """A part was read back: the work goes on, however long it takes."""


@dataclass(slots=True)
class _Collecting:
    """A checkpoint that is being collected."""

    version: int
    facts: Facts
    since_s: float
    writer: asyncio.Future[CheckpointWriter] | None = None
    publishing: asyncio.Task[None] | None = None
    arriving: dict[str, tuple[StoreHeader, asyncio.Task[object] | None]] = field(default_factory=dict)  # by path
    stored: dict[str, tuple[StoreHeader, str]] = field(default_factory=dict)  # with their hashes, by path
    broken: dict[str, tuple[StoreHeader, FileWriter]] = field(default_factory=dict)  # files to go on with, by path
    sizes: dict[int, dict[str, int]] = field(default_factory=dict)  # announced bytes by place and path
    vouched: dict[str, str] = field(default_factory=dict)  # sha256 by path; empty: nobody is asked
    is_false: bool = False  # wrong bytes may be in it: it must not be kept, however far it is

    def reserve(self, header: StoreHeader, bytes_max: int) -> None:
        """Take a file in hand; Refused if it is being written already, or the stage cannot weigh so much."""
        if header.path in self.arriving:
            raise Refused(f"{header.path} is being stored already")
        sizes = {**self.sizes.get(header.stage, {}), header.path: header.total_bytes}
        if sum(sizes.values()) > bytes_max:
            raise Refused(
                f"stage {header.stage} would store {sum(sizes.values())} bytes, it can have {bytes_max} at most"
            )
        self.sizes[header.stage] = sizes
        self.arriving[header.path] = header, asyncio.current_task()

    def has_stored(self, header: StoreHeader) -> bool:
        """Whether exactly this file is here, with the hash that was announced."""
        known = self.stored.get(header.path)
        return known is not None and known[0] == header and known[1] == header.sha256

    def give_up_parts(self) -> None:
        """Forget the files that broke off: their senders will not go on."""
        for _, file in self.broken.values():
            file.abort()
        self.broken.clear()

    @property
    def is_being_published(self) -> bool:
        """Whether it is being completed; it then ends by itself."""
        return self.publishing is not None and not self.publishing.done()


@dataclass(frozen=True, slots=True)
class Subject:
    """The job and the timeline that the checkpoints are of."""

    job: JobId
    spec: JobSpec
    timeline: int
    tokenizer_files: Mapping[str, bytes]


@dataclass(eq=False, slots=True)
class CheckpointSink:
    """Collects and publishes the checkpoints of one job at work, on one timeline."""

    _storage: Storage
    _subject: Subject
    _facts: Callable[[int], Facts]
    _listener: CheckpointListener
    _tasks: asyncio.TaskGroup
    _executor: ThreadPoolExecutor | None
    _protected: Callable[[], set[str]] = set  # names of checkpoints that others start from
    _open: _Collecting | None = None
    _working: set[asyncio.Task[None]] = field(default_factory=set)
    _discarding: asyncio.Task[None] | None = None

    async def prepare(self, *, at_start: bool) -> None:
        """Remove what an interrupted writer left.

        `at_start`, CheckpointFailed if nothing can be written, so that a job fails at its start, not at its end. A job
        that has trained already does not fail for it: the storage may come back.
        """
        try:
            await self._run(self._storage.clean)
            await self._run(lambda: _try_out(self._storage))
        except StorageError as error:
            if not at_start:
                self._listener.note("warning", f"checkpoints at {self._storage.where}: {error}")
                return
            raise CheckpointFailed(
                f"no checkpoint can be written: {error.message}", hint=error.hint, reason=error.reason
            ) from error

    def begin(self, version: int) -> None:
        """Take files of `version` from now on."""
        assert self._open is None
        self._open = _Collecting(version, self._facts(version), asyncio.get_running_loop().time())

    async def held(self, header: StoreHeader) -> int:
        """How many first bytes of exactly this file an earlier `put` took before it broke off; `put` goes on there.

        A `put` of the file that is under way ends: its sender dialled again, and this end has not noticed the break.
        """
        if self._open is None or not header.sha256:
            return 0
        before, task = self._open.arriving.get(header.path, (None, None))
        if before == header and task is not None:
            task.cancel()
            await asyncio.wait({task})
        if self._open is None:
            return 0
        if self._open.has_stored(header):
            return header.total_bytes
        known = self._open.broken.get(header.path)
        return known[1].size_bytes if known is not None and known[0] == header else 0

    async def put(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Write one file of a stage. Returns its sha256. A second file of the same name replaces the first.

        `chunks` begin at the byte that `held` names. What has arrived of a file that breaks off is kept as long as the
        checkpoint is collected: one part for each path, of no more bytes than a stage can have.

        With islands `header.stage` is a place: each island writes its own files, the first island what all share.

        Refused if it does not belong here, CorruptFrame if its length is not the announced one, CheckpointFailed if it
        cannot be written.
        """
        held = self._open
        if held is None or (self._subject.timeline, held.version) != (header.timeline, header.version):
            raise Refused(f"job {header.job} collects no state of version {header.version}")
        if held.is_being_published:
            raise Refused(f"the checkpoint of version {header.version} has all its files")
        if not _belongs(header, self._subject.spec):
            raise Refused(f"stage {header.stage} writes no file {header.path[:100]!r}")
        held.reserve(header, _stage_bytes_max(self._subject.spec, header.stage))
        try:
            return await self._put(held, header, chunks)
        finally:
            del held.arriving[header.path]

    async def _put(self, held: _Collecting, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        if held.has_stored(header):
            async for _ in chunks:
                raise CorruptFrame(f"{header.path} is here, and more of it comes")
            return held.stored[header.path][1]
        held.stored.pop(header.path, None)
        file = await self._file(held, header)
        is_whole = True  # nothing is half written
        try:
            async for chunk in chunks:
                if self._open is not held:
                    raise Refused(f"the checkpoint of version {header.version} was given up")
                is_whole = False
                await run_to_its_end(self._executor, lambda chunk=chunk: file.write(chunk))  # type: ignore[misc]
                is_whole = True
            if file.size_bytes != header.total_bytes:
                raise CorruptFrame(
                    f"{header.path} was announced with {header.total_bytes} bytes and has {file.size_bytes}"
                )
        except BaseException as error:
            if header.sha256 and self._open is held and (is_whole or isinstance(error, asyncio.CancelledError)):
                file.pause()
                held.broken[header.path] = header, file
            else:
                file.abort()
            raise
        finishing = asyncio.ensure_future(self._run(file.finish))
        try:
            stored = await asyncio.shield(finishing)
        except asyncio.CancelledError:
            await asyncio.wait({finishing})
            self._note_stored(held, header, finishing.result().sha256)
            raise
        return self._note_stored(held, header, stored.sha256)

    def _note_stored(self, held: _Collecting, header: StoreHeader, sha256: str) -> str:
        held.stored[header.path] = header, sha256
        if self._open is held:
            self._listener.stored(header, sha256)
        return sha256

    def vouch(self, vouch: Vouch) -> None:
        """Publish with these files, and others that are vouched for, only."""
        assert self._open is not None
        self._open.vouched |= vouch.files

    def publish(self, move: PublishCheckpoint) -> None:
        """Complete the checkpoint in the background; the listener hears what became of it."""
        assert self._open is not None
        self._open.give_up_parts()
        self._open.publishing = self._start(self._publish(self._open, move))

    def drop(self, *, is_false: bool = False) -> None:
        """Forget what was collected. A checkpoint that is being published may still be completed, unless `is_false`:
        then a replica that handed over a part may have held wrong bytes, and nothing is kept."""
        held, self._open = self._open, None
        if held is not None:
            held.give_up_parts()
        if held is None or held.writer is None:
            return
        if not held.is_being_published:
            self._discarding = self._start(self._discard(held.writer, self._discarding))
        elif is_false:
            held.is_false, self._discarding = True, held.publishing

    async def close(self) -> None:
        """Finish what is being published; drop what is not complete."""
        while self._working:
            await asyncio.wait(set(self._working))
        self.drop()
        while self._working:
            await asyncio.wait(set(self._working))

    async def _file(self, held: _Collecting, header: StoreHeader) -> FileWriter:
        """The file to go on with, or a new one."""
        known = held.broken.pop(header.path, None)
        if known is not None:
            if header.sha256 and known[0] == header:
                return known[1]
            known[1].abort()
        writer = await self._writer(held)
        creating = asyncio.ensure_future(self._run(lambda: writer.create(header.path)))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            await asyncio.wait({creating})
            if creating.exception() is None:
                creating.result().abort()
            raise

    async def _writer(self, held: _Collecting) -> CheckpointWriter:
        """The writer; the first file makes it."""
        if held.writer is None:
            held.writer = asyncio.ensure_future(self._make_writer(held.version, self._discarding))
        return await asyncio.shield(held.writer)

    async def _make_writer(self, version: int, before: asyncio.Task[None] | None) -> CheckpointWriter:
        """Make the writer once what was dropped is gone: a second try at a version has the same name."""
        if before is not None:  # only what was dropped before this one began: a later drop waits for this one
            await asyncio.wait([before])
        return await self._run(
            lambda: CheckpointWriter(self._storage, self._subject.spec, version, f"{self._subject.timeline}")
        )

    async def _publish(self, held: _Collecting, move: PublishCheckpoint) -> None:
        loop = asyncio.get_running_loop()
        failed: CheckpointFailed | None = None

        def at_work() -> None:
            if held.is_false:  # withdraw it at once: a scheduler that is killed meanwhile would leave it
                raise CheckpointFailed("wrong bytes may be in it", reason="peer")
            loop.call_soon_threadsafe(self._listener.at_work)

        try:
            writer = await self._writer(held)
            if held.vouched and (held.arriving or writer.hashes() != held.vouched):
                raise CheckpointFailed("files came in the place of those that others have hashed", reason="peer")
            checkpoint = await self._run(
                lambda: writer.publish(held.facts, move.parameters, self._subject.tokenizer_files)
            )
            duration_s = loop.time() - held.since_s
            at_work()
            if fault := await self._run(lambda: fault_of(checkpoint, progress=at_work)):
                hint = "check the disk: what was written is not what is read back"
                raise CheckpointFailed(f"it does not read back: {fault}", hint=hint)
        except CheckpointFailed as error:
            failed = error
        except SwarmError as error:  # hashes that contradict each other, or a report that makes no sense
            failed = CheckpointFailed(error.message, hint=error.hint, reason="peer")
        except Exception as error:
            failed = CheckpointFailed(f"internal error: {error!r}", reason="internal")
        if held.is_false:
            assert held.writer is not None
            await self._withdraw(held.writer)
            return
        if failed is not None:
            self._listener.failed(held.version, failed)
            return
        if self._open is held:
            self._open = None
        self._listener.kept(checkpoint, duration_s)
        await self._prune(checkpoint)

    async def _prune(self, proven: Checkpoint) -> None:
        rules = self._subject.spec.checkpoint
        try:
            removed = await self._run(
                lambda: prune(
                    self._storage,
                    self._subject.job,
                    proven,
                    keep_last=rules.keep_last,
                    keep_every_steps=rules.keep_every_steps,
                    protected=self._protected(),
                )
            )
        except Exception as error:  # a library of a store's has its own: none may end the scheduler
            self._listener.note("warning", f"old checkpoints could not be removed: {error}")
        else:
            if removed:
                self._listener.note("info", f"removed {', '.join(sorted(removed))}")

    async def _discard(self, writer: asyncio.Future[CheckpointWriter], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            made = await asyncio.shield(writer)
        except SwarmError:
            return  # it never began
        await self._run(made.discard)

    async def _withdraw(self, writer: asyncio.Future[CheckpointWriter]) -> None:
        try:
            await self._run((await asyncio.shield(writer)).withdraw)
        except SwarmError as error:
            self._listener.note("error", f"a checkpoint with wrong bytes may be left, do not use it: {error.message}")

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._tasks.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    async def _run(self, work: Callable[[], T]) -> T:
        return await run_blocking(self._executor, work)


def _try_out(storage: Storage) -> None:
    """Write something and remove it again; StorageError."""
    draft = storage.begin("writable", "0")
    try:
        sink = draft.create("yes")
        try:
            sink.write(b"1")
            sink.finish()
        except BaseException:
            sink.abort()
            raise
    finally:
        draft.discard()


def _stage_bytes_max(spec: JobSpec, place: int) -> int:
    """The most bytes that the files of a stage may have: weights, those before, the optimizer's state, headers."""
    split = spec.pipeline.split
    assert split != "auto"
    stage = place % len(split)
    known = stage_footprint(spec, split[stage], stage, len(split))
    return 2 * (known.weights + known.optimizer) + HEADERS_BYTES_MAX


def _belongs(header: StoreHeader, spec: JobSpec) -> bool:
    """Whether a stage writes files of this name."""
    split = spec.pipeline.split
    assert split != "auto"
    island, stage = divmod(header.stage, len(split))
    if not 0 <= island < spec.island_count:
        return False
    if not island and header.path == f"model/{shard_name(stage, len(split))}":
        return True
    folder, _, name = header.path.rpartition("/")
    folders = {island_folder(island, OPTIMIZER_FOLDER)}
    if spec.has_outer_steps:
        folders |= {island_folder(island, WEIGHTS_FOLDER)} | ({OUTER_FOLDER} if not island else set())
    if not spec.checkpoint.optimizer or folder not in folders:
        return False
    if (layer := _LAYER_FILE.fullmatch(name)) is not None:
        first = sum(split[:stage])
        return first <= int(layer.group(1)) < first + split[stage]
    return stage == {"embed.safetensors": 0, "head.safetensors": len(split) - 1}.get(name)
