"""Texts to token shards: flat little-endian token ids, each file named by its sha256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.config import JobSpec
from swarm.data.batches import TOKEN_DTYPES, split_samples
from swarm.data.documents import read_documents
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import InvalidData

Progress: TypeAlias = Callable[[int, int], None]  # bytes read, bytes in all


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of token ids; equal tokens give an equal hash, so a shard is stored and uploaded once."""

    sha256: str
    tokens: int
    size_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class TokenManifest:
    """What `tokenise` made.

    `unigram_entropy` (nats) is the loss of a model that knows how often each token occurs and nothing else.
    """

    shards: tuple[ShardInfo, ...]
    token_dtype: str
    vocabulary_size: int
    unigram_entropy: float
    end_of_text: int  # the id that closes a document; -1: none does

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def tokenise(spec: JobSpec, out_dir: Path, progress: Progress | None = None) -> TokenManifest:
    """Write the token shards of `spec.data.source` into `out_dir` (made if missing), each named by its hash.

    Documents follow one another, each closed by the end-of-text token. The same files give the same shards, whatever
    the machine. InvalidData: no file, bad UTF-8, or fewer tokens than one sample needs.
    """
    tokenizer = ByteTokenizer()
    dtype = "uint16" if tokenizer.vocabulary_size <= 1 << 16 else "uint32"
    documents = read_documents(spec.data.source, spec.data.format)
    total_bytes = sum(document.size_bytes for document in documents)
    counts = np.zeros(tokenizer.vocabulary_size, dtype=np.int64)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        writer = _ShardWriter(out_dir, TOKEN_DTYPES[dtype], spec.data.upload_shard_bytes)
        done_bytes = 0
        with writer:
            for document in documents:
                for piece in document.pieces():
                    tokens = tokenizer.encode(piece)
                    counts += np.bincount(tokens, minlength=counts.size)
                    writer.write(tokens)
                    done_bytes += tokens.size
                    if progress is not None:
                        progress(min(done_bytes, total_bytes), total_bytes)
                writer.write(np.array([tokenizer.END_OF_TEXT]))
                counts[tokenizer.END_OF_TEXT] += 1
    except OSError as error:
        raise InvalidData(f"token shards cannot be written to {out_dir}: {error.strerror or error}") from error
    manifest = TokenManifest(
        tuple(writer.shards), dtype, tokenizer.vocabulary_size, _entropy(counts), tokenizer.END_OF_TEXT
    )
    split_samples(manifest.tokens, spec.data.sequence_length, spec.data.validation_ratio)
    return manifest


class _ShardWriter:
    """Cuts a stream of tokens into files of a bounded size; a file gets its name when it is whole."""

    def __init__(self, out_dir: Path, dtype: np.dtype[Any], shard_bytes: int) -> None:
        self.shards: list[ShardInfo] = []
        self._out_dir = out_dir
        self._dtype = dtype
        self._room = self._capacity = shard_bytes // dtype.itemsize
        self._part = out_dir / f".part-{os.getpid()}"
        self._hash = hashlib.sha256()

    def __enter__(self) -> None:
        self._file = self._part.open("wb")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._room < self._capacity:
            self._close_shard()
        self._file.close()
        self._part.unlink(missing_ok=True)

    def write(self, tokens: NDArray[Any]) -> None:
        while tokens.size:
            head, tokens = tokens[: self._room], tokens[self._room :]
            raw = head.astype(self._dtype).tobytes()
            self._file.write(raw)
            self._hash.update(raw)
            self._room -= head.size
            if self._room == 0:
                self._close_shard()
                self._file = self._part.open("wb")

    def _close_shard(self) -> None:
        self._file.close()
        sha256 = self._hash.hexdigest()
        tokens = self._capacity - self._room
        path = self._out_dir / f"{sha256}.tokens"
        self._part.replace(path)
        self.shards.append(ShardInfo(sha256, tokens, tokens * self._dtype.itemsize, path))
        self._hash = hashlib.sha256()
        self._room = self._capacity


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / max(1, counts.sum())
    return abs(float(-(shares * np.log(shares)).sum()))
