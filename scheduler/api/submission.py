"""What a submit request says of its data and files, checked."""

from __future__ import annotations

import math

from scheduler.api.uploads import Uploads
from scheduler.storage.database import JobTokens
from swarm.data.batches import TOKEN_DTYPES
from swarm.data.tokenizer_files import TOKENIZER_MESSAGE_BYTES_MAX, tokenizer_file_name
from swarm.errors import InvalidConfig
from swarm.messages import StateFile
from swarm.wire import jobs_pb2 as pb

MODEL = "model/"


def read_request(request: pb.SubmitRequest, uploads: Uploads) -> tuple[JobTokens, tuple[StateFile, ...]]:
    """The job's tokens, and the files that it starts from; InvalidConfig or Refused."""
    for shard in request.shards:
        uploads.path(shard.sha256)
    if request.token_dtype not in TOKEN_DTYPES:
        raise InvalidConfig(f"token_dtype is one of {', '.join(TOKEN_DTYPES)}, not {request.token_dtype!r}")
    if not math.isfinite(request.unigram_entropy) or request.unigram_entropy < 0:
        raise InvalidConfig(f"unigram_entropy is a number of nats, not {request.unigram_entropy}")
    if not -1 <= request.end_of_text < request.vocabulary_size:
        raise InvalidConfig(
            f"end_of_text is -1 or a token of the vocabulary of {request.vocabulary_size}, not {request.end_of_text}"
        )
    for name in request.tokenizer_files:
        if tokenizer_file_name(f"{MODEL}{name}") is None:  # beside it lie config.json and the weights
            raise InvalidConfig(f"{name[:100]!r} is no name of a tokenizer file")
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
        uploads.path(file.sha256)
    files = tuple(
        StateFile(file.path, file.size_bytes, file.sha256)
        for file in request.files
        if tokenizer_file_name(file.path) is None  # stage servers have no use for those
    )
    return tokens, files
