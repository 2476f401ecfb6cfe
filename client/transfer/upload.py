"""Uploads ahead of a submission, by hash: token shards, weights, a checkpoint to start from, tokenizer files."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from client.connection import CHUNK_BYTES, Scheduler
from client.shell import Shell, bytes_bar
from swarm.checkpoint.reader import Checkpoint, open_folder
from swarm.checkpoint.storage import MANIFEST, LocalStorage
from swarm.data.corpus import Corpus
from swarm.errors import InvalidConfig, InvalidModel, NotFound
from swarm.hf.own_files import open_own, read_own
from swarm.hf.pretrained import MODEL_FOLDER, weight_files
from swarm.job.changes import JOB_AND_STEP, check_state, check_steps, places_of, with_places_of
from swarm.job.spec import JobSpec
from swarm.limits import MANIFEST_BYTES_MAX
from swarm.text import counted, printable, size
from swarm.wire import jobs_pb2 as pb

NAMED_MAX = 40  # files of a line
_STATE_FILES = (MANIFEST, "trainer_state.json")


@dataclass(frozen=True, slots=True)
class File:
    """A file by its hash. `content` is its path or its bytes; `tokens` is set for a token shard."""

    sha256: str
    size_bytes: int
    content: Path | bytes
    tokens: int = 0

    @classmethod
    def of(cls, content: bytes) -> File:
        return cls(hashlib.sha256(content).hexdigest(), len(content), content)

    @property
    def shard(self) -> pb.Shard:
        return pb.Shard(sha256=self.sha256, tokens=self.tokens, size_bytes=self.size_bytes)


def upload(shell: Shell, scheduler: Scheduler, files: Mapping[str, File], what: str) -> list[pb.JobFile]:
    """Send the files that the scheduler lacks, each distinct one once; returns the files, by path, to submit.

    The scheduler keeps what has arrived, so a repeated upload sends only the rest.
    """
    by_hash = {file.sha256: file for file in files.values()}
    asked = pb.ShardList(shards=[file.shard for file in by_hash.values()])
    missing = {shard.sha256 for shard in scheduler.call("MissingShards", asked).shards}
    lacking = [file for sha256, file in by_hash.items() if sha256 in missing]
    listed = [pb.JobFile(path=path, sha256=file.sha256, size_bytes=file.size_bytes) for path, file in files.items()]
    if not lacking:
        shell.say(f"the scheduler has the {what} already")
        return listed
    total_bytes, before_bytes = sum(file.size_bytes for file in lacking), 0
    with bytes_bar(shell, "uploading") as advance:

        def pieces(file: File, before_bytes: int, start: int) -> Iterator[bytes]:
            sent_bytes = before_bytes + start
            with io.BytesIO(file.content) if isinstance(file.content, bytes) else open_own(file.content) as opened:
                opened.seek(start)
                for piece in _pieces(opened, file.size_bytes - start):
                    yield piece
                    sent_bytes += len(piece)
                    advance(sent_bytes, total_bytes)

        for file in lacking:
            scheduler.put_shard(file.shard, partial(pieces, file, before_bytes), shell.say)
            before_bytes += file.size_bytes
    there = len(by_hash) - len(lacking)
    known = f"; {there} of {counted(len(by_hash), 'file')} {'was' if there == 1 else 'were'} there" if there else ""
    shell.say(f"uploaded {size(total_bytes)} of {what}{known}")
    return listed


def upload_weights(shell: Shell, scheduler: Scheduler, spec: JobSpec) -> list[pb.JobFile]:
    """Send the local weights that a grounded spec starts from, if any; returns the files to submit.

    InvalidModel names a file that cannot be read.
    """
    files = weight_files(spec)
    if not files:
        return []
    total_bytes, done_bytes = sum(file.size_bytes for file in files), 0
    found = {}
    with bytes_bar(shell, "hashing weights") as advance:
        for file in files:
            digest = hashlib.sha256()
            with _reading(file.location), open_own(file.location) as opened:
                for piece in _pieces(opened, file.size_bytes):
                    digest.update(piece)
                    done_bytes += len(piece)
                    advance(done_bytes, total_bytes)
            found[file.path] = File(digest.hexdigest(), file.size_bytes, file.location)
    shell.say(f"weights: {named(found)}")
    return upload(shell, scheduler, found, "weights")


def open_start(spec: JobSpec, corpus: Corpus, say: Callable[[str], None]) -> tuple[JobSpec, Checkpoint | None]:
    """The spec with the narrow places of the checkpoint on this machine that it starts from, and that, if it names any.

    Every byte is checked, and `say` hears of newer ones that are damaged. NotFound, CheckpointDamaged; InvalidConfig if
    the job cannot go on from it.
    """
    where = spec.checkpoint.resume_from
    if not where or (JOB_AND_STEP.match(where) and not Path(where).exists()):
        return spec, None
    try:
        found = open_folder(Path(where).expanduser(), say)
    except NotFound as error:
        raise NotFound(error.message, hint=f"{error.hint}; of a job of the scheduler: JOB:STEP or JOB:latest") from None
    state = found.trainer_state()
    spec = with_places_of(places_of(state), spec)
    check_state(state, resolved := corpus.resolve(spec))
    check_steps(resolved, found.step)
    return spec, found


def upload_start(shell: Shell, scheduler: Scheduler, start: Checkpoint) -> list[pb.JobFile]:
    """Send the files of a checkpoint on this machine; returns the files to submit."""
    if not isinstance(start.storage, LocalStorage):
        raise InvalidConfig(f"{start.storage.where} is no folder of this machine")
    home = start.storage.root / start.name
    with _reading(home / MANIFEST):
        files = {MANIFEST: File.of(read_own(home / MANIFEST, MANIFEST_BYTES_MAX))}
    for file in start.files:
        if file.path.endswith(".safetensors") or file.path in _STATE_FILES:
            files[file.path] = File(file.sha256, file.size_bytes, home / file.path)
    shell.say(f"checkpoint {start.name}: {named(files)}")
    return upload(shell, scheduler, files, f"checkpoint {start.name}")


def named(paths: Collection[str]) -> str:
    """The names of the files that `swarm` sends, for their owner to read."""
    names = [path.removeprefix(f"{MODEL_FOLDER}/") for path in sorted(paths)]
    more = len(names) - NAMED_MAX
    return printable(", ".join(names[:NAMED_MAX])) + (f" and {more} more" if more > 0 else "")


def _pieces(file: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """The next bytes of a file, as many as it was announced with: one that grows would have no end."""
    while size_bytes and (piece := file.read(min(size_bytes, CHUNK_BYTES))):
        yield piece
        size_bytes -= len(piece)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidModel(f"{path} cannot be read: {error.strerror or error}") from error
