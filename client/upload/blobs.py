"""Upload files by their hash: each distinct file once, and only if the scheduler lacks it."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from client.connection import CHUNK_BYTES, Scheduler
from client.shell import Shell, bytes_bar
from swarm.text import size
from swarm.wire import jobs_pb2 as pb


@dataclass(frozen=True, slots=True)
class File:
    """A file by its hash. `content` is its path or its bytes; `tokens` is set for a token shard."""

    sha256: str
    size_bytes: int
    content: Path | bytes
    tokens: int = 0


def upload(shell: Shell, scheduler: Scheduler, files: Sequence[File], what: str) -> None:
    """Send the files that the scheduler lacks. It keeps what has arrived, so a repeated upload sends only the rest."""
    by_hash = {file.sha256: file for file in files}
    listed = [_wire(file) for file in by_hash.values()]
    missing = {shard.sha256 for shard in scheduler.missing_shards(listed)}
    lacking = [file for sha256, file in by_hash.items() if sha256 in missing]
    total_bytes = sum(file.size_bytes for file in lacking)
    if not lacking:
        shell.say(f"the scheduler has the {what} already")
        return
    sent_bytes = 0
    with bytes_bar(shell, "uploading") as advance:

        def pieces(file: File) -> Iterator[bytes]:
            nonlocal sent_bytes
            with io.BytesIO(file.content) if isinstance(file.content, bytes) else file.content.open("rb") as opened:
                while piece := opened.read(CHUNK_BYTES):
                    yield piece
                    sent_bytes += len(piece)
                    advance(sent_bytes, total_bytes)

        for file in lacking:
            scheduler.put_shard(_wire(file), pieces(file))
    there = len(by_hash) - len(lacking)
    known = f"; {there} of {len(by_hash)} files were there" if there else ""
    shell.say(f"uploaded {size(total_bytes)} of {what}{known}")


def _wire(file: File) -> pb.Shard:
    return pb.Shard(sha256=file.sha256, tokens=file.tokens, size_bytes=file.size_bytes)
