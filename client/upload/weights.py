"""Upload the weights of a local model: hash each file, then send it like a token shard."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from client.connection import CHUNK_BYTES, Scheduler
from client.shell import Shell, bytes_bar
from client.upload.blobs import File, upload
from swarm.errors import InvalidModel
from swarm.hf.pretrained import WeightFile, weight_files
from swarm.job.spec import JobSpec
from swarm.wire import jobs_pb2 as pb


def upload_weights(shell: Shell, scheduler: Scheduler, spec: JobSpec) -> list[pb.JobFile]:
    """Send the local weights that a grounded spec starts from, if any; returns the files to submit.

    InvalidModel names a file that cannot be read.
    """
    files = weight_files(spec)
    if not files:
        return []
    total_bytes = sum(file.size_bytes for file in files)
    done_bytes = 0
    found = []
    with bytes_bar(shell, "hashing weights") as advance:
        for file in files:
            digest = hashlib.sha256()
            for piece in _pieces(file):
                digest.update(piece)
                done_bytes += len(piece)
                advance(done_bytes, total_bytes)
            found.append(File(digest.hexdigest(), file.size_bytes, file.location))
    upload(shell, scheduler, found, "weights")
    return [
        pb.JobFile(path=file.path, sha256=hashed.sha256, size_bytes=hashed.size_bytes)
        for file, hashed in zip(files, found, strict=True)
    ]


def _pieces(file: WeightFile) -> Iterator[bytes]:
    try:
        with file.location.open("rb") as opened:
            while piece := opened.read(CHUNK_BYTES):
                yield piece
    except OSError as error:
        raise InvalidModel(f"{file.location} cannot be read: {error.strerror or error}") from error
