"""Sending the weights of a local model: hashed, then uploaded file by file, those that the scheduler has left out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from client.connection import CHUNK_BYTES, Scheduler
from client.shell import Shell, bytes_bar, size
from swarm.config import JobSpec
from swarm.errors import InvalidModel
from swarm.pretrained import WeightFile, weight_files
from swarm.wire import jobs_pb2 as pb


def upload_weights(shell: Shell, scheduler: Scheduler, spec: JobSpec) -> list[pb.JobFile]:
    """Send the local weights that a grounded spec starts from, if any; gives what to submit.

    A transfer that broke goes on with the first file that the scheduler lacks. InvalidModel names a file that cannot be
    read.
    """
    files = weight_files(spec)
    if not files:
        return []
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = 0
    by_hash: dict[str, WeightFile] = {}
    listed = []
    with bytes_bar(shell, "hashing weights") as advance:
        for file in files:
            digest = hashlib.sha256()
            for piece in _pieces(file):
                digest.update(piece)
                done_bytes += len(piece)
                advance(done_bytes, total_bytes)
            by_hash[digest.hexdigest()] = file
            listed.append(pb.JobFile(path=file.path, sha256=digest.hexdigest(), size_bytes=file.size_bytes))
    blobs = {sha256: pb.Shard(sha256=sha256, size_bytes=file.size_bytes) for sha256, file in by_hash.items()}
    missing = [shard.sha256 for shard in scheduler.missing_shards(list(blobs.values()))]
    missing_bytes = sum(blobs[sha256].size_bytes for sha256 in missing)
    sent_bytes = 0

    with bytes_bar(shell, "uploading weights") as advance:

        def sent(file: WeightFile) -> Iterator[bytes]:
            nonlocal sent_bytes
            for piece in _pieces(file):
                yield piece
                sent_bytes += len(piece)
                advance(sent_bytes, missing_bytes)

        for sha256 in missing:
            scheduler.put_shard(blobs[sha256], sent(by_hash[sha256]))
    shell.say(f"weights: {len(files)} files, {size(total_bytes)}, of which {size(missing_bytes)} were uploaded")
    return listed


def _pieces(file: WeightFile) -> Iterator[bytes]:
    try:
        with file.location.open("rb") as opened:
            while piece := opened.read(CHUNK_BYTES):
                yield piece
    except OSError as error:
        raise InvalidModel(f"{file.location} cannot be read: {error.strerror or error}") from error
