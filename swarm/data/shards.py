"""Texts to token shards: flat little-endian token ids, each file named by its sha256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.data.batches import TOKEN_DTYPES, split_samples
from swarm.data.documents import Source, TextPiece, read_ids, read_texts
from swarm.data.patience import Patience
from swarm.data.room import check_room
from swarm.data.tokenizer import Ids, Tokenizer
from swarm.errors import InvalidData
from swarm.job.spec import JobSpec
from swarm.text import counted

TokenisingProgress: TypeAlias = Callable[[int, int], None]  # bytes read, bytes in all

BATCH_CHARACTERS = 2 << 20  # encoded together, on all cores
BATCH_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One file of token ids; equal tokens give an equal hash, so a shard is stored and uploaded once."""

    sha256: str
    tokens: int
    size_bytes: int
    path: Path


@dataclass(frozen=True, slots=True)
class TokenManifest:
    """The result of `tokenise`.

    `vocabulary_size` is the tokenizer's, or the model's rows if these are fewer: no id is beyond. `unigram_entropy`
    (nats) is the loss of a model that knows how often each token occurs and nothing else.
    """

    shards: tuple[ShardInfo, ...]
    token_dtype: str
    vocabulary_size: int
    unigram_entropy: float
    end_of_text: int  # the id that closes a document; -1: none does
    skipped_rows: int = 0  # that hold null

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)


def token_dtype(vocabulary_size: int) -> str:
    """The type of the ids in token shards: the smallest that holds the vocabulary."""
    return "uint16" if vocabulary_size <= 1 << 16 else "uint32"


def write_shards(
    spec: JobSpec,
    out_dir: Path,
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    report: TokenisingProgress,
    waiting: Patience | None = None,
) -> TokenManifest:
    """Write the token shards of the sources into `out_dir` (made if missing), each named by its hash.

    Documents follow one another, each closed by the end-of-text token. Without packing each begins at a multiple of the
    sequence length, and the gap before it is filled with that token. Ids (.bin) are taken as they are. The same sources
    and tokenizer files give the same shards on every machine. InvalidData if a source cannot be read or has no text, if
    an id is beyond the vocabulary, or if there are fewer tokens than one sample needs. `waiting` hears of each piece.
    """
    total_bytes = sum(source.size_bytes for source in sources)
    dtype = token_dtype(tokenizer.vocabulary_size)
    rows = min(tokenizer.vocabulary_size, rows_of(spec) or tokenizer.vocabulary_size)
    row = _TokenRow(tokenizer, 1 if spec.data.packing else spec.data.sequence_length, waiting or Patience())
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        with _ShardWriter(out_dir, TOKEN_DTYPES[dtype], spec.data.upload_shard_bytes) as writer:
            before_bytes = 0
            for source in sources:
                parts: Iterator[tuple[Ids, int]]
                if source.format == "bin":
                    read = read_ids(source, spec.data.bin_dtype, rows)
                    parts = ((row.given(ids), done_bytes) for ids, done_bytes in read)
                else:
                    parts = row.of(source, read_texts(source, spec.data))
                for ids, done_bytes in parts:
                    _check_rows(source, ids, rows, tokenizer)
                    writer.write(ids)
                    report(min(before_bytes + done_bytes, total_bytes), total_bytes)
                before_bytes += source.size_bytes
            writer.write(row.end())
    except OSError as error:
        raise InvalidData(
            f"token shards cannot be written to {out_dir}: {error.strerror or error}",
            hint="free some space there, or name another folder for temporary files: TMPDIR",
        ) from error
    counts = row.counts
    if not counts.sum():
        if row.letters:
            raise InvalidData(
                f'no token comes of the text in data.source = "{spec.data.source}"', hint="see model.tokenizer"
            )
        left = f": {counted(row.skipped, 'row')} left out, which hold no {spec.data.text_field}" if row.skipped else ""
        raise InvalidData(f'data.source = "{spec.data.source}" has no text in it{left}', hint="see data.text_field")
    manifest = TokenManifest(tuple(writer.shards), dtype, rows, _entropy(counts), tokenizer.end_of_text, row.skipped)
    split_samples(manifest.tokens, spec.data.sequence_length, spec.data.validation_ratio)
    return manifest


def remarks(spec: JobSpec, manifest: TokenManifest) -> Iterator[str]:
    """What a person should know of their tokenised data before it is trained on."""
    if manifest.skipped_rows:
        yield f"{counted(manifest.skipped_rows, 'row')} without a text left out (data.on_null)"
    section, batch = spec.data, spec.training.global_batch_sequences
    samples, _ = split_samples(manifest.tokens, section.sequence_length, section.validation_ratio)
    if samples < batch:
        yield (
            f"the data holds {counted(samples, 'sample')} of {section.sequence_length} tokens, and a step trains on "
            f"{batch}, so a step repeats samples: add data, or lower training.global_batch_sequences"
        )


def rows_of(spec: JobSpec) -> int | None:
    """For how many tokens the model has a row, if the job file or config.json says so."""
    size = spec.model.config.get("vocab_size")
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _check_rows(source: Source, ids: Ids, rows: int, tokenizer: Tokenizer) -> None:
    most = int(ids.max(initial=0))
    if most >= rows:
        raise InvalidData(
            f"{source.path} holds token {most}, for which the model has no row: vocab_size is {rows}, the tokenizer "
            f"has {tokenizer.vocabulary_size} tokens",
            hint="it may be a special token that is written out in the text: remove it there, or give the model a row "
            "for it (resize_token_embeddings)",
        )


class _TokenRow:
    """Turns texts into one row of ids: each text is closed, then padded to a multiple of `multiple` tokens.

    `counts` says how often each id occurs, padding left out.
    """

    def __init__(self, tokenizer: Tokenizer, multiple: int, waiting: Patience) -> None:
        self._waiting = waiting
        self.counts = np.zeros(tokenizer.vocabulary_size, dtype=np.int64)
        self._tokenizer = tokenizer
        self._multiple = multiple
        self._length = 0  # of the text so far
        self.skipped = 0  # rows that hold no text
        self.letters = 0

    def of(self, source: Source, pieces: Iterable[TextPiece]) -> Iterator[tuple[Ids, int]]:
        """The ids of the texts in order, many at a time, with the bytes of the source read so far."""
        held: list[TextPiece] = []
        characters = 0
        self._waiting.begin(partial(source.behind, 0))
        for piece in pieces:
            held.append(piece)
            characters += (length := len(piece.text))
            self.letters += length
            if not length:
                self.skipped += piece.skipped
            if characters >= BATCH_CHARACTERS or len(held) >= BATCH_TEXTS:
                yield self._encoded(source, held), piece.done_bytes
                self._waiting.begin(partial(source.behind, piece.at))
                held, characters = [], 0
        if held:
            yield self._encoded(source, held), held[-1].done_bytes

    def given(self, ids: Ids) -> Ids:
        """Ids that are taken as they are; they are only counted."""
        self.counts += np.bincount(ids, minlength=self.counts.size)
        return ids

    def end(self) -> Ids:
        """The ids behind the last text: without packing one more token, so that the last sample has all its targets."""
        return self._closing(1 if self._multiple > 1 and self.counts.any() else 0)

    def _encoded(self, source: Source, pieces: Sequence[TextPiece]) -> Ids:
        where = partial(source.between, pieces[0].at, pieces[-1].at)
        self._waiting.begin(where)
        check_room(where, self._tokenizer.memory_bytes([piece.text for piece in pieces]))
        return self._laid(pieces)

    def _laid(self, pieces: Sequence[TextPiece]) -> Ids:
        start = self._tokenizer.start
        parts = [start[:0]]
        fillings = 0
        for piece, ids in zip(pieces, self._tokenizer.encode_batch([piece.text for piece in pieces]), strict=True):
            if ids.size:
                if not self._length:
                    parts.append(start)
                    self._length = start.size
                parts.append(ids)
                self._length += ids.size
            if piece.ends and self._length:
                filling = -(self._length + 1) % self._multiple
                parts.append(self._closing(1 + filling))
                fillings += filling
                self._length = 0
        ids = self.given(np.concatenate(parts))
        if fillings:
            self.counts[self._tokenizer.end_of_text] -= fillings
        return ids

    def _closing(self, count: int) -> Ids:
        return np.full(count, self._tokenizer.end_of_text if count else 0, dtype=np.uint32)


class _ShardWriter:
    """Cuts a stream of tokens into files of a bounded size; a file gets its name when it is whole."""

    def __init__(self, out_dir: Path, dtype: np.dtype[Any], shard_bytes: int) -> None:
        self.shards: list[ShardInfo] = []
        self._out_dir = out_dir
        self._dtype = dtype
        self._room = self._capacity = shard_bytes // dtype.itemsize
        self._part = out_dir / f".part-{os.getpid()}"
        self._hash = hashlib.sha256()

    def __enter__(self) -> _ShardWriter:
        self._file = self._part.open("wb")
        return self

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
