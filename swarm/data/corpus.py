"""A job's data before it is read: which sources, and which tokenizer. Then all of it, as token shards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm.data.documents import Source, find_sources
from swarm.data.patience import patience
from swarm.data.shards import TokenisingProgress, TokenManifest, rows_of, write_shards
from swarm.data.tokenizer import Tokenizer, byte_text, load_tokenizer
from swarm.errors import InvalidConfig, InvalidData, SwarmError, unforeseen
from swarm.hf.companions import TOKENIZER_FILES, companions
from swarm.job.model_config import tokenizer_text
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Corpus:
    """The sources of a job, and the tokenizer for their texts."""

    sources: tuple[Source, ...]
    tokenizer: Tokenizer
    companions: Mapping[str, bytes] = field(default_factory=dict)  # of the model that the job starts from

    @property
    def small_files(self) -> dict[str, bytes]:
        """The files beside config.json and the weights in the folder of the trained model, by name."""
        return {**self.companions, **self.tokenizer.tokenizer_files()}

    @property
    def size_bytes(self) -> int:
        """The size of all sources together; data sets on the hub count as 0."""
        return sum(source.size_bytes for source in self.sources)

    def resolve(self, spec: JobSpec) -> JobSpec:
        """The resolved spec of a job on this corpus; an "auto" number of stages becomes one. InvalidConfig."""
        tokenizer = self.tokenizer
        size = tokenizer.vocabulary_size if rows_of(spec) is None else tokenizer.texts_size
        return resolve(spec, Basis(size, tokenizer.end_of_text))

    def remarks(self, spec: JobSpec) -> tuple[str, ...]:
        """A line each for a tokenizer that may not be the model's: none is named, or the model lacks rows for it."""
        rows, size = rows_of(spec), self.tokenizer.vocabulary_size
        lines = [byte_text(spec, self.tokenizer)]
        if rows is not None and size > rows:
            lines.append(
                f"{tokenizer_text(spec)} has {size} tokens, vocab_size is {rows}: none beyond may occur in the data"
            )
        return tuple(filter(None, lines))


def open_corpus(spec: JobSpec) -> Corpus:
    """The sources and the tokenizer of a job; texts are not read. InvalidData or InvalidConfig."""
    sources = tuple(find_sources(spec.data))
    ids_given = sources[0].format == "bin"
    if ids_given and not spec.data.packing:
        raise InvalidConfig(
            "data.packing = false needs texts; token ids (.bin) are used as they are", hint="leave data.packing out"
        )
    with patience() as waiting:
        waiting.begin(lambda: f"the tokenizer {spec.model.tokenizer or spec.model.id} is loaded")
        return Corpus(sources, load_tokenizer(spec, ids_given=ids_given), companions(spec, TOKENIZER_FILES))


def tokenise(
    spec: JobSpec, out_dir: Path, progress: TokenisingProgress | None = None, corpus: Corpus | None = None
) -> TokenManifest:
    """Write the token shards of `spec.data.source` into `out_dir`, as `write_shards`; errors name the place."""
    corpus, report = corpus or open_corpus(spec), progress or _unheard
    with patience() as waiting:
        try:
            return write_shards(spec, out_dir, corpus.sources, corpus.tokenizer, report, waiting)
        except SwarmError:
            raise
        except MemoryError as error:
            hint = "write it anew in smaller parts, or choose data.source so that it is left out"
            raise InvalidData(f"{waiting.doing()}: there is not enough memory for it", hint=hint) from error
        except Exception as error:
            raise unforeseen(error, waiting.doing()) from error


def _unheard(done_bytes: int, total_bytes: int) -> None:
    """Report no progress."""
