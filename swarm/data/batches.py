"""Token shards to microbatches, without a list of indexes and without a saved position: the portion is the cursor.

Sample i is tokens[i*T : i*T + T + 1]: its first T tokens are the input, its last T the targets, so neighbouring samples
share one token only. The last samples, in the order of the documents, may be held out for validation. A pass uses each
of the others once, in an order drawn by a keyed bijection.

Documents follow one another, each closed by the end-of-text token. A text does not predict the next one, so a target
whose input is the end of a text does not count (-100).

Legend: B sequences of a microbatch, T tokens of a sequence.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from swarm.errors import InvalidData
from swarm.job.islands import island_spec
from swarm.job.leases import Leases
from swarm.job.spec import JobSpec, TrainingSection
from swarm.text import counted

TokenIds: TypeAlias = NDArray[np.int32]

IGNORED = -100  # a target that does not count
NO_END_OF_TEXT = -1
TOKEN_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
FEISTEL_ROUNDS = 6
COUNTED_PORTIONS_MAX = 64  # portions whose token counts are remembered: more than are ever open at once
PIECE_TOKENS = 1 << 20  # tokens looked at together, so that a long stretch takes little memory
_WORD = (1 << 64) - 1


class TokenData:
    """Token shards as one long row, mapped from their files."""

    def __init__(self, shards: Sequence[NDArray[Any]], vocabulary_size: int | None = None) -> None:
        self._shards = tuple(shard for shard in shards if shard.size)
        self._starts = list(itertools.accumulate((shard.size for shard in self._shards), initial=0))
        self._vocabulary_size = vocabulary_size

    @classmethod
    def open(cls, paths: Sequence[Path], token_dtype: str, vocabulary_size: int | None = None) -> TokenData:
        """The shards in the order given; with `vocabulary_size` ids are checked when they are read. InvalidData."""
        if token_dtype not in TOKEN_DTYPES:
            raise InvalidData(f"token dtype {token_dtype!r} is unknown; known are {', '.join(TOKEN_DTYPES)}")
        dtype = TOKEN_DTYPES[token_dtype]
        shards = []
        for path in paths:
            try:
                size_bytes = path.stat().st_size
                if size_bytes == 0 or size_bytes % dtype.itemsize:
                    raise InvalidData(f"token shard {path} has {size_bytes} bytes, no whole number of {token_dtype}")
                shards.append(np.asarray(np.memmap(path, dtype=dtype, mode="r")))
            except OSError as error:
                raise InvalidData(f"token shard {path} cannot be read: {error.strerror or error}") from error
        return cls(shards, vocabulary_size)

    @property
    def tokens(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> TokenIds:
        out = np.empty(count, dtype=np.int32)
        filled = 0
        for piece in self._pieces(start, count):
            out[filled : filled + piece.size] = piece
            filled += piece.size
        if self._vocabulary_size is not None and count and int(out.max()) >= self._vocabulary_size:
            raise InvalidData(f"the token shards hold id {int(out.max())}, the vocabulary has {self._vocabulary_size}")
        return out

    def occurrences(self, token: int, start: int, count: int) -> int:
        return sum(int(np.count_nonzero(piece == token)) for piece in self._pieces(start, count))

    def _pieces(self, start: int, count: int) -> Iterator[NDArray[Any]]:
        """Tokens [start, start + count) as they lie in the shards."""
        assert 0 <= start <= start + count <= self.tokens
        shard = bisect.bisect_right(self._starts, start) - 1
        while count:
            offset = start - self._starts[shard]
            piece = self._shards[shard][offset : offset + min(count, PIECE_TOKENS)]
            yield piece
            start, count = start + piece.size, count - piece.size
            shard += offset + piece.size == self._shards[shard].size


def sample_count(tokens: int, sequence_length: int) -> int:
    """How many samples `tokens` tokens hold; InvalidData if not even one."""
    samples = (tokens - 1) // sequence_length
    if samples < 1:
        raise InvalidData(
            f"the data has {counted(tokens, 'token')}, one sample needs {sequence_length + 1}",
            hint="add text to data.source, or lower data.sequence_length",
        )
    return samples


def split_samples(tokens: int, sequence_length: int, validation_ratio: float) -> tuple[int, int]:
    """Samples to train on and, behind them, held out: both at least 1 if the ratio is not 0. InvalidData."""
    samples = sample_count(tokens, sequence_length)
    if validation_ratio == 0:
        return samples, 0
    if samples < 2:
        raise InvalidData(
            f"the data has {counted(tokens, 'token')}, {counted(samples, 'sample')} of {sequence_length}: "
            "nothing is left to hold out for validation",
            hint="add text to data.source, lower data.sequence_length, or set data.validation_ratio = 0",
        )
    held_out = min(max(1, round(validation_ratio * samples)), samples - 1)
    return samples - held_out, held_out


class Batches:
    """The tokens of microbatch m of portion q: a pure function of the data, the seed and (q, m).

    A portion is the data of one step; `Course` (swarm/job/course.py) says which step trains which.

    `samples` is the length of a pass; the `validation_samples` behind it are never trained on.
    """

    def __init__(
        self,
        data: TokenData,
        training: TrainingSection,
        sequence_length: int,
        shuffle: bool,
        seed: int,
        *,
        end_of_text: int = NO_END_OF_TEXT,
        validation_ratio: float = 0.0,
    ) -> None:
        self._data = data
        microbatches = training.microbatches
        self._sequences = training.global_batch_sequences // microbatches
        self._numbers_of: Callable[[int], Sequence[int]] = lambda portion: range(
            portion * microbatches, (portion + 1) * microbatches
        )
        self._length = sequence_length
        self._shuffle = shuffle
        self._seed = seed
        self._end_of_text = end_of_text
        self.samples, self.validation_samples = split_samples(data.tokens, sequence_length, validation_ratio)
        self._counted: OrderedDict[Sequence[int], NDArray[np.int64]] = OrderedDict()  # targets that count, of each

    @classmethod
    def of_job(cls, spec: JobSpec, data: TokenData, end_of_text: int) -> Batches:
        """The batches of a resolved spec, of whichever island; `end_of_text` closes a document, -1 if nothing does."""
        section, training = spec.data, island_spec(spec).training
        return cls(
            data,
            training,
            section.sequence_length,
            section.shuffle,
            training.seed,
            end_of_text=end_of_text,
            validation_ratio=section.validation_ratio,
        )

    def leased(self, leases: Leases) -> Batches:
        """The same data, with portions as these leases say, whenever they are asked for."""
        made = copy(self)
        made._numbers_of, made._counted = leases.numbers, OrderedDict()
        return made

    # Training ----------------------------------------------------------------------------------------------------

    def sample_indexes(self, portion: int, microbatch: int) -> list[int]:
        first = self._numbers_of(portion)[microbatch] * self._sequences
        return [self._sample(number) for number in range(first, first + self._sequences)]

    def microbatch(self, portion: int, microbatch: int) -> tuple[TokenIds, TokenIds]:
        """Tokens and targets, int32 [B, T] each; a target of -100 does not count."""
        tokens, targets = self._rows(self.sample_indexes(portion, microbatch))
        if self._end_of_text != NO_END_OF_TEXT:
            self._counts(portion)[microbatch] = int(np.count_nonzero(targets != IGNORED))
        return tokens, targets

    def microbatches_of(self, portion: int) -> int:
        """How many microbatches make up a portion."""
        return len(self._numbers_of(portion))

    def tokens_of(self, portion: int) -> int:
        """Targets that count in a portion, at least 1: the divisor of its step's gradient and loss."""
        if self._end_of_text == NO_END_OF_TEXT:
            return self.microbatches_of(portion) * self._sequences * self._length
        known = self._counts(portion)
        for microbatch in map(int, np.flatnonzero(known < 0)):
            starts = [index * self._length for index in self.sample_indexes(portion, microbatch)]
            ends = sum(self._ends(start, self._length) for start in starts)
            known[microbatch] = self._sequences * self._length - ends
        return max(1, int(known.sum()))

    def _counts(self, portion: int) -> NDArray[np.int64]:
        """Those of the microbatches that were read, and -1: a step that is fed is counted on the way."""
        numbers = self._numbers_of(portion)  # a portion that is still to be trained may get others
        if (known := self._counted.get(numbers)) is None:
            known = self._counted[numbers] = np.full(len(numbers), -1, dtype=np.int64)
            if len(self._counted) > COUNTED_PORTIONS_MAX:
                self._counted.popitem(last=False)
        return known

    # Validation --------------------------------------------------------------------------------------------------

    @property
    def evaluation_microbatches(self) -> int:
        """Microbatches of the validation set; 0 if nothing is held out."""
        return math.ceil(self.validation_samples / self._sequences)

    def evaluation(self, microbatch: int) -> tuple[TokenIds, TokenIds]:
        """Tokens and targets, int32 [B, T] each, of a microbatch of the validation set, in the order of the documents.

        The last microbatch is filled up with rows in which no target counts.
        """
        assert 0 <= microbatch < self.evaluation_microbatches
        first = self.samples + microbatch * self._sequences
        stop = min(first + self._sequences, self.samples + self.validation_samples)
        tokens, targets = self._rows(range(first, stop))
        missing = ((0, self._sequences - len(tokens)), (0, 0))
        return np.pad(tokens, missing), np.pad(targets, missing, constant_values=IGNORED)

    @cached_property
    def evaluation_tokens(self) -> int:
        """Targets that count in the whole validation set, at least 1: the divisor of its loss."""
        tokens = self.validation_samples * self._length
        return max(1, tokens - self._ends(self.samples * self._length, tokens))

    # Both --------------------------------------------------------------------------------------------------------

    def _rows(self, samples: Sequence[int]) -> tuple[TokenIds, TokenIds]:
        block = np.stack([self._data.read(index * self._length, self._length + 1) for index in samples])
        tokens, targets = block[:, :-1].copy(), block[:, 1:].copy()  # one row is contiguous, views would be one memory
        if self._end_of_text != NO_END_OF_TEXT:
            targets[tokens == self._end_of_text] = IGNORED
        return tokens, targets

    def _ends(self, start: int, count: int) -> int:
        """How many of the tokens [start, start + count) end a text."""
        if self._end_of_text == NO_END_OF_TEXT:
            return 0
        return self._data.occurrences(self._end_of_text, start, count)

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
