"""Uploads before a submit, each file named by its hash; and the checks of the submit request."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from scheduler.api.holding import Holding
from scheduler.brain.members.persons import ANYBODY, Person, check_room
from scheduler.brain.members.places import CallSlot, CallSlots
from scheduler.storage.executor import run_blocking, run_to_its_end
from scheduler.storage.job_record import JobTokens
from scheduler.storage.stores import Stores
from swarm.checkpoint.storage import Files
from swarm.data.batches import TOKEN_DTYPES
from swarm.errors import InvalidConfig, InvalidData, Refused
from swarm.hf.companions import TOKENIZER_FILE_BYTES_MAX, TOKENIZER_MESSAGE_BYTES_MAX, small_file_name
from swarm.limits import (
    FILES_MAX,
    HASHES_ASKED_MAX,
    SHARDS_MAX,
    SPEC_BYTES_MAX,
    UPLOAD_DISK_RESERVE_BYTES,
    UPLOAD_IDLE_S_MAX,
    UPLOAD_S_PER_MIB,
    UPLOADS_MAX,
    UPLOADS_OF_ONE_MAX,
)
from swarm.text import size
from swarm.wire import jobs_pb2 as pb
from swarm.wire.messages import StateFile

T = TypeVar("T")
Arrived: TypeAlias = Callable[[int], Awaitable[None]]
_Key: TypeAlias = tuple[str, tuple[str, int]]  # owner, and hash and size of the file

MODEL = "model/"
BLOB_BYTES_MAX = 1 << 38  # one file of a model's weights
PARTS_KEPT_MAX, PARTS_KEPT_S = 16, 3600.0  # of uploads that broke off
SILENT_S = 2.0  # of an upload whose sender seems to have dialled again
_FILES = Files()
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True)
class _PartialUpload:
    """What has arrived of a file."""

    path: Path
    digest: Any  # of hashlib
    size_bytes: int
    since_s: float  # when it broke off


async def _nobody(held_bytes: int) -> None:
    """Hears how many bytes have arrived."""


@dataclass(eq=False, slots=True)
class _Upload:
    """A file that is under way."""

    owner: str
    task: asyncio.Task[object]
    place: CallSlot
    shard: tuple[str, int] = ("", 0)  # hash and size, once they are known
    part: _PartialUpload | None = None  # once it may begin
    promised_bytes: int = 0  # that count as taken until it is here, or has failed
    counts: bool = False  # as a file of its person, until then

    @property
    def arrived_bytes(self) -> int:
        return self.part.size_bytes if self.part is not None else 0

    @property
    def key(self) -> _Key:
        """Names what it sends; another person's is another, as its first bytes may be any."""
        return self.owner, self.shard


class Uploads:
    """Takes uploaded files into the data folder, each for the person who sent it."""

    def __init__(self, stores: Stores) -> None:
        self._files = stores.files
        self._open: set[_Upload] = set()
        self._parts: dict[_Key, _PartialUpload] = {}  # the oldest first
        self._places = Holding(CallSlots(UPLOADS_MAX, UPLOADS_OF_ONE_MAX, "files are being uploaded"))
        self._threads = stores.threads  # not the database's, which commits wait for

    def path(self, owner: str, sha256: str) -> Path:
        """Where the person's file with this hash is, or would be; Refused if that is no hash."""
        return self._files.shard(owner, _checked(sha256))

    async def missing(self, by: Person, shards: Sequence[pb.Shard]) -> list[pb.Shard]:
        """The files that this person has not sent, even if others have; Refused for too many at once."""
        if len(shards) > HASHES_ASKED_MAX:
            raise Refused(f"{len(shards)} files are asked for at once, at most {HASHES_ASKED_MAX}")
        return await run_blocking(
            self._threads, lambda: [shard for shard in shards if not _keep(self.path(by.owner, shard.sha256))]
        )

    async def put(self, chunks: AsyncIterator[pb.ShardChunk], by: Person = ANYBODY, arrived: Arrived = _nobody) -> str:
        """Take one file and give its hash; NotAllowed, QuotaReached, Refused or InvalidData.

        `arrived` hears of each byte count, first from where the sender is to go on: one that resumes waits for it. What
        has arrived of an upload that breaks off, or loses its place (Crowded), is kept for a while.
        """
        async with self._places.held(by) as place:
            return await self._put(by.owner, place, chunks, arrived)

    async def _put(self, owner: str, place: CallSlot, chunks: AsyncIterator[pb.ShardChunk], arrived: Arrived) -> str:
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        upload = _Upload(owner, task, place)
        self._open.add(upload)
        try:
            rest = _while_busy(aiter(chunks))
            first = await anext(rest, None)
            if first is None or not first.HasField("shard"):
                raise Refused("an upload begins with the shard's hash and size")
            path, wanted_bytes = self.path(owner, first.shard.sha256), first.shard.size_bytes
            if wanted_bytes > BLOB_BYTES_MAX:
                raise Refused(f"a file has at most {BLOB_BYTES_MAX} bytes, not {wanted_bytes}")
            upload.shard = first.shard.sha256, wanted_bytes
            if first.resumes:
                await self._end_silent(upload)
            free = await run_blocking(self._threads, lambda: _free_bytes(path.parent))
            kept = self._parts.get(upload.key) if first.resumes else None
            self._check_room(owner, wanted_bytes - (0 if kept is None else kept.size_bytes), free)
            upload.part = part = self._take_part(upload, first)
            upload.promised_bytes, upload.counts = wanted_bytes, True  # at once: whoever is checked next must see it
            async with asyncio.timeout(max(UPLOAD_IDLE_S_MAX, UPLOAD_S_PER_MIB * wanted_bytes / (1 << 20))):
                await self._write(upload, path, first, rest, part, arrived)
        except TimeoutError:
            raise InvalidData("the upload stood still", hint="submit again") from None
        finally:
            self._open.discard(upload)
        return first.shard.sha256

    def _check_room(self, owner: str, wanted_bytes: int, free: int) -> None:
        """QuotaReached or InvalidData if the file does not fit beside the running uploads."""
        promised_to_it = sum(upload.promised_bytes for upload in self._open if upload.owner == owner)
        promised = sum(upload.promised_bytes for upload in self._open)
        if free - promised - wanted_bytes < UPLOAD_DISK_RESERVE_BYTES:
            raise InvalidData(
                f"a file of {size(wanted_bytes)} does not fit: {size(free)} free, {size(promised)} of them promised",
                hint="free disk space in the scheduler's --data-dir",
            )
        files, held_bytes = self._files.taken_by(owner)
        held_bytes += sum(part.size_bytes for (whose, _), part in self._parts.items() if whose == owner)
        files += sum(upload.counts for upload in self._open if upload.owner == owner)
        room = free - (promised - promised_to_it) - UPLOAD_DISK_RESERVE_BYTES + held_bytes
        check_room(owner, room, promised_to_it, wanted_bytes, held_bytes, files)

    async def tokenizer(self, by: Person, request: pb.SubmitRequest) -> dict[str, bytes]:
        """The tokenizer files in a request and among the uploaded files, by name; InvalidData if one is missing."""

        def read() -> dict[str, bytes]:
            files = dict(request.tokenizer_files)
            paths = {
                name: self.path(by.owner, file.sha256)
                for file in request.files
                if (name := small_file_name(file.path)) is not None
            }
            for name, path in paths.items():
                if path.exists() and path.stat().st_size > TOKENIZER_FILE_BYTES_MAX:
                    raise InvalidConfig(f"{name} has more than {TOKENIZER_FILE_BYTES_MAX} bytes")
                files[name] = path.read_bytes()
            return files

        try:
            return await run_blocking(self._threads, read)
        except OSError as error:
            raise InvalidData(
                f"a tokenizer file of the job is not here: {error.strerror or error}", hint="submit again to upload it"
            ) from error

    async def _end_silent(self, upload: _Upload) -> None:
        """End an earlier upload of this file whose line broke unnoticed, so that this one goes on where it was."""
        for other in [other for other in self._open if other is not upload and other.key == upload.key]:
            arrived_bytes = other.arrived_bytes
            await asyncio.wait({other.task}, timeout=SILENT_S)
            if other.arrived_bytes == arrived_bytes:
                other.task.cancel()
                await asyncio.wait({other.task})

    def _take_part(self, upload: _Upload, first: pb.ShardChunk) -> _PartialUpload:
        """What to go on with: what is kept of this file if the sender resumes, or nothing yet."""
        now_s = asyncio.get_running_loop().time()
        found = self._parts.pop(upload.key, None)
        old = [key for key, part in self._parts.items() if now_s - part.since_s > PARTS_KEPT_S]
        for key in old:
            self._parts.pop(key).path.unlink(missing_ok=True)
        if found is not None and first.resumes:
            return found
        if found is not None:
            found.path.unlink(missing_ok=True)
        beside = self.path(upload.owner, first.shard.sha256)
        return _PartialUpload(beside.with_suffix(f".{secrets.token_hex(8)}.part"), hashlib.sha256(), 0, now_s)

    def _keep_part(self, upload: _Upload, part: _PartialUpload) -> None:
        """Keep it for its sender. Few are kept: the oldest of the person with the most makes room."""
        if (before := self._parts.pop(upload.key, None)) is not None:
            before.path.unlink(missing_ok=True)
        self._parts[upload.key] = part
        if len(self._parts) > PARTS_KEPT_MAX:
            kept = Counter(owner for owner, _ in self._parts)
            oldest = max(self._parts, key=lambda key: kept[key[0]])  # the first of those that are equal
            self._parts.pop(oldest).path.unlink(missing_ok=True)

    async def _write(
        self,
        upload: _Upload,
        path: Path,
        first: pb.ShardChunk,
        rest: AsyncIterator[pb.ShardChunk],
        part: _PartialUpload,
        arrived: Arrived,
    ) -> None:
        """Write beside `path`, check size and hash, then move into place: no broken upload has the name of a whole one.

        A file that has its name counts as whole ever after, so it is synced to disk before it is renamed.
        """
        goes_on, announced = first.resumes, first.shard
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.path.open("ab", buffering=0) as file:

                def take(payload: bytes) -> None:
                    part.digest.update(payload)
                    _FILES.write(file, payload)
                    part.size_bytes += len(payload)
                    upload.place.moved_bytes += len(payload)

                await run_to_its_end(self._threads, partial(take, first.payload))
                await arrived(part.size_bytes)
                async for chunk in rest:
                    goes_on = goes_on and part.size_bytes + len(chunk.payload) <= announced.size_bytes
                    await run_to_its_end(self._threads, partial(take, chunk.payload))
                    if part.size_bytes > announced.size_bytes:
                        break
                    await arrived(part.size_bytes)
                await run_blocking(self._threads, lambda: _FILES.sync(file))
            goes_on = goes_on and part.size_bytes < announced.size_bytes
            sha256 = part.digest.hexdigest()
            if (part.size_bytes, sha256) != (announced.size_bytes, announced.sha256):
                raise InvalidData(
                    f"the shard arrived as {part.size_bytes} bytes with sha256 {sha256[:12]}…, announced were "
                    f"{announced.size_bytes} bytes with {announced.sha256[:12]}…",
                    hint="submit again; if it happens again, the file changed while it was read",
                )
            self._take(upload, part.path, path)
            await run_blocking(self._threads, lambda: _FILES.sync_folder(path.parent))
        except OSError as error:
            goes_on = False
            raise InvalidData(
                f"the scheduler could not store the shard: {error}", hint="free disk space in its --data-dir"
            ) from error
        finally:
            if goes_on and part.path.exists():
                part.since_s = asyncio.get_running_loop().time()
                self._keep_part(upload, part)
            else:
                part.path.unlink(missing_ok=True)

    def _take(self, upload: _Upload, part: Path, path: Path) -> None:
        """Give a whole file its name. In one go, so no byte of a person is counted twice or not at all."""
        is_new, size_bytes = not path.exists(), part.stat().st_size
        _FILES.rename(part, path)
        upload.promised_bytes, upload.counts = 0, False
        if is_new:
            self._files.took(upload.owner, size_bytes)


async def _while_busy(chunks: AsyncIterator[T]) -> AsyncIterator[T]:
    """The chunks; TimeoutError if none comes for too long."""
    while True:
        try:
            async with asyncio.timeout(UPLOAD_IDLE_S_MAX):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        yield chunk


def _free_bytes(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return shutil.disk_usage(folder).free


def _keep(path: Path) -> bool:
    """Whether the file is here; it is then kept for a while, although no job names it yet."""
    try:
        os.utime(path)
    except OSError:
        return False
    return True


def _checked(sha256: str) -> str:
    """The text, if it is a hash; Refused otherwise."""
    if not _SHA256.fullmatch(sha256):
        raise Refused(f"{sha256[:80]!r} is no sha256")
    return sha256


def read_request(request: pb.SubmitRequest) -> tuple[JobTokens, tuple[StateFile, ...]]:
    """The job's tokens and the files that it starts from, checked; InvalidConfig or Refused."""
    _check_counts(request)
    for shard in request.shards:
        _checked(shard.sha256)
    if request.token_dtype not in TOKEN_DTYPES:
        raise InvalidConfig(f"token_dtype is one of {', '.join(TOKEN_DTYPES)}, not {request.token_dtype!r}")
    if not math.isfinite(request.unigram_entropy) or request.unigram_entropy < 0:
        raise InvalidConfig(f"unigram_entropy is a number of nats, not {request.unigram_entropy}")
    if not -1 <= request.end_of_text < request.vocabulary_size:
        raise InvalidConfig(
            f"end_of_text is -1 or a token of the vocabulary of {request.vocabulary_size}, not {request.end_of_text}"
        )
    for name in request.tokenizer_files:
        if small_file_name(f"{MODEL}{name}") is None:  # beside it lie config.json and the weights
            raise InvalidConfig(f"{name[:100]!r} is no name of a file that goes with a tokenizer or a model")
    if sum(map(len, request.tokenizer_files.values())) > TOKENIZER_MESSAGE_BYTES_MAX:
        raise InvalidConfig(f"tokenizer files in a message have at most {TOKENIZER_MESSAGE_BYTES_MAX} bytes together")
    tokens = JobTokens(
        shards=tuple(shard.sha256 for shard in request.shards),
        token_dtype=request.token_dtype,
        vocabulary_size=request.vocabulary_size,
        unigram_entropy=request.unigram_entropy,
        end_of_text=request.end_of_text,
    )
    for file in request.files:
        _checked(file.sha256)
    files = tuple(
        StateFile(file.path, file.size_bytes, file.sha256)
        for file in request.files
        if small_file_name(file.path) is None  # stage servers have no use for those
    )
    return tokens, files


def _check_counts(request: pb.SubmitRequest) -> None:
    """InvalidConfig for a request that would not fit a later message to a stage server or a client."""
    if (size_bytes := len(request.spec_json.encode())) > SPEC_BYTES_MAX:
        raise InvalidConfig(f"the job's spec has {size_bytes} bytes, at most {SPEC_BYTES_MAX}")
    if len(request.shards) > SHARDS_MAX:
        raise InvalidConfig(
            f"the job has {len(request.shards)} token shards, at most {SHARDS_MAX}",
            hint="raise data.upload_shard_bytes: at most 1 GiB each",
        )
    if len(request.files) > FILES_MAX:
        raise InvalidConfig(f"the job starts from {len(request.files)} files, at most {FILES_MAX}")
