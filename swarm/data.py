"""From text files to microbatches: every token's place is a function of (seed, step, microbatch).

    files ── tokenise ──▶ shards (flat little-endian token ids, named by their sha256)
    shards ── TokenData ──▶ one long row of tokens
    row ── Batches.microbatch(t, m) ──▶ tokens and targets [B, T]

Sample i is tokens[i*T : i*T + T + 1]: its first T are the input, its last T the targets, so neighbours share one token
and nothing else. A pass uses every sample once, in an order drawn by a keyed bijection: no list of indexes is kept and
no position is saved, the step number is the data cursor.

numpy only: the client tokenises and the scheduler feeds, both without torch.

Legend: B sequences of a microbatch, T tokens of a sequence.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.config import JobSpec, TrainingSection
from swarm.errors import InvalidData

TokenIds: TypeAlias = NDArray[np.int32]
Progress: TypeAlias = Callable[[int, int], None]  # bytes read, bytes in all

IGNORED = -100  # a target that does not count
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
READ_BYTES = 4 << 20
FEISTEL_ROUNDS = 6
_WORD = (1 << 64) - 1


# Text -> tokens ------------------------------------------------------------------------------------------------------


class ByteTokenizer:
    """UTF-8 bytes as tokens: ids 0 to 255 are the bytes, 256 is the end of a text. Needs no files."""

    END_OF_TEXT = 256
    vocabulary_size = 257

    def encode(self, text: str) -> NDArray[np.uint16]:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; bytes that are no UTF-8 become U+FFFD, the end-of-text token is left out."""
        return bytes(token for token in tokens if token < self.END_OF_TEXT).decode(errors="replace")

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json: the same ids from transformers.AutoTokenizer.

        A byte-level BPE without merges. The library writes a byte as a printable character; the vocabulary maps it
        back to the byte. "<|endoftext|>" inside a text stays text.
        """
        end = "<|endoftext|>"
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        tokenizer: dict[str, object] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {
                    "id": self.END_OF_TEXT,
                    "content": end,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                    "special": True,
                }
            ],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(_byte_characters())}
                | {end: self.END_OF_TEXT},
                "merges": [],
            },
        }
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end,
            "eos_token": end,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
        }
        return {"tokenizer.json": _json(tokenizer), "tokenizer_config.json": _json(config)}


def _byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE vocabularies (GPT-2's convention).

    Printable Latin-1 stands for itself, the other bytes follow in order from U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Document:
    """One text, read in pieces so that a large file needs little memory."""

    path: Path
    size_bytes: int

    def pieces(self) -> Iterator[str]:
        """The text in order; InvalidData names the first byte that is no UTF-8."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = 0
        try:
            with self.path.open("rb") as file:
                while block := file.read(READ_BYTES):
                    held_back = len(decoder.getstate()[0])
                    yield decoder.decode(block)
                    position += len(block)
                held_back = len(decoder.getstate()[0])
                decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise InvalidData(
                f"{self.path} is not UTF-8: byte {position - held_back + error.start}",
                hint="convert the file to UTF-8, or choose data.source so that it is left out",
            ) from None
        except OSError as error:
            raise InvalidData(f"{self.path} cannot be read: {error.strerror or error}") from error


def read_documents(source: str, format: str = "auto") -> list[Document]:
    """The documents that `source` names: one per file, in order of path, empty files left out.

    `source` is a glob, or several between commas; "**" descends into folders. Both formats of this version, "auto" and
    "text", take a whole file as one text. InvalidData if nothing matches or a file cannot be looked at.
    """
    assert format in ("auto", "text"), format
    if source.startswith("hf:"):
        raise InvalidData(
            f'data.source = "{source}": hub data sets are not supported', hint='name files: "corpus/*.txt"'
        )
    patterns = [part.strip() for part in source.split(",") if part.strip()]
    paths = sorted({path for pattern in patterns for path in glob.glob(os.path.expanduser(pattern), recursive=True)})
    try:
        files = [(Path(path), os.stat(path).st_size) for path in paths if os.path.isfile(path)]
    except OSError as error:
        raise InvalidData(f"{error.filename} cannot be read: {error.strerror}") from error
    if not files:
        hint = "a folder needs a pattern: DIR/**/*.txt" if paths else "check the path; it is relative to where you are"
        raise InvalidData(f'data.source = "{source}" matches no file', hint=hint)
    return [Document(path, size_bytes) for path, size_bytes in files if size_bytes > 0]


# Tokens -> shards ----------------------------------------------------------------------------------------------------


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
    manifest = TokenManifest(tuple(writer.shards), dtype, tokenizer.vocabulary_size, _entropy(counts))
    sample_count(manifest.tokens, spec.data.sequence_length)
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


# Shards -> microbatches ----------------------------------------------------------------------------------------------


class TokenData:
    """Token shards as one long row, mapped from their files."""

    def __init__(self, shards: Sequence[NDArray[Any]], vocabulary_size: int | None = None) -> None:
        self._shards = tuple(shards)
        self._starts = np.cumsum([0, *(shard.size for shard in shards)])
        self._vocabulary_size = vocabulary_size

    @classmethod
    def open(cls, paths: Sequence[Path], token_dtype: str, vocabulary_size: int | None = None) -> TokenData:
        """The shards in the order given; with `vocabulary_size`, ids are checked whenever they are read.

        InvalidData if a file is missing, empty or no whole number of tokens.
        """
        if token_dtype not in TOKEN_DTYPES:
            raise InvalidData(f"token dtype {token_dtype!r} is unknown; known are {', '.join(TOKEN_DTYPES)}")
        dtype = TOKEN_DTYPES[token_dtype]
        shards = []
        for path in paths:
            try:
                size_bytes = path.stat().st_size
                if size_bytes == 0 or size_bytes % dtype.itemsize:
                    raise InvalidData(f"token shard {path} has {size_bytes} bytes, no whole number of {token_dtype}")
                shards.append(np.memmap(path, dtype=dtype, mode="r"))
            except OSError as error:
                raise InvalidData(f"token shard {path} cannot be read: {error.strerror or error}") from error
        return cls(shards, vocabulary_size)

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> TokenIds:
        """Tokens [start, start + count) of the row."""
        assert 0 <= start <= start + count <= self.tokens
        out = np.empty(count, dtype=np.int32)
        filled = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < count:
            offset = start + filled - int(self._starts[shard])
            piece = self._shards[shard][offset : offset + count - filled]
            out[filled : filled + piece.size] = piece
            filled += piece.size
            shard += 1
        if self._vocabulary_size is not None and count and int(out.max()) >= self._vocabulary_size:
            raise InvalidData(f"the token shards hold id {int(out.max())}, the vocabulary has {self._vocabulary_size}")
        return out


def sample_count(tokens: int, sequence_length: int) -> int:
    """Samples in a pass over so many tokens; InvalidData if there is not even one."""
    samples = (tokens - 1) // sequence_length
    if samples < 1:
        raise InvalidData(
            f"the data has {tokens} tokens, one sample needs {sequence_length + 1}",
            hint="add text to data.source, or lower data.sequence_length",
        )
    return samples


class Batches:
    """Which tokens are microbatch m of step t: a pure function of the data, the seed and (t, m)."""

    def __init__(
        self, data: TokenData, training: TrainingSection, sequence_length: int, shuffle: bool, seed: int
    ) -> None:
        self._data = data
        self._batch = training.global_batch_sequences
        self._microbatches = training.microbatches
        self._sequences = self._batch // self._microbatches
        self._length = sequence_length
        self._shuffle = shuffle
        self._seed = seed
        self.samples = sample_count(data.tokens, sequence_length)

    def sample_indexes(self, step: int, microbatch: int) -> list[int]:
        """The samples of microbatch `microbatch` of step `step`."""
        assert 0 <= microbatch < self._microbatches
        first = step * self._batch + microbatch * self._sequences
        return [self._sample(number) for number in range(first, first + self._sequences)]

    def microbatch(self, step: int, microbatch: int) -> tuple[TokenIds, TokenIds]:
        """Tokens and targets, int32 [B, T] each; a target of -100 does not count (none in this version)."""
        rows = [
            self._data.read(index * self._length, self._length + 1) for index in self.sample_indexes(step, microbatch)
        ]
        block = np.stack(rows)
        return np.ascontiguousarray(block[:, :-1]), np.ascontiguousarray(block[:, 1:])

    def tokens_of(self, step: int) -> int:
        """Targets that count in the whole of step `step`: the divisor of its gradient and of its loss."""
        return self._batch * self._length

    def _sample(self, number: int) -> int:
        a_pass, position = divmod(number, self.samples)
        return shuffled(position, self.samples, self._seed, a_pass) if self._shuffle else position


def shuffled(position: int, size: int, seed: int, a_pass: int) -> int:
    """Where `position` of range(size) goes: a bijection of range(size) drawn by (seed, a_pass), without a table.

    A Feistel network permutes the numbers of 2 * half bits whatever its round function is; walking along its cycle
    until the value is below `size` (fewer than 4 steps expected) restricts it to range(size).

    Source: cycle walking, Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002).
    """
    assert 0 <= position < size
    half = max(1, math.ceil((size - 1).bit_length() / 2))
    mask = (1 << half) - 1
    digest = hashlib.blake2b(f"{seed}:{a_pass}".encode(), digest_size=8 * FEISTEL_ROUNDS).digest()
    keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(FEISTEL_ROUNDS)]
    value = position
    while True:
        left, right = value >> half, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        value = (left << half) | right
        if value < size:
            return value


def _mix(word: int) -> int:
    """A 64-bit finaliser: every input bit reaches every output bit."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
