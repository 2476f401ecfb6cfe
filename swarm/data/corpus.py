"""A job's data before it is read: which sources, which tokenizer, and which process reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarm.data.apart import ReaderProcess
from swarm.data.documents import Source, find_sources
from swarm.data.shards import TokenisingProgress, TokenManifest, write_shards
from swarm.data.tokenizer import FoundTokenizer, Tokenizer, find_tokenizer
from swarm.errors import InvalidConfig
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Corpus:
    """The sources of a job, and the tokenizer for their texts.

    Files and rules that could take all time or all memory are read by a process of their own, the `reader`.
    """

    sources: tuple[Source, ...]
    tokenizer: Tokenizer
    reader: ReaderProcess | None = None

    @property
    def size_bytes(self) -> int:
        """The size of all sources together; data sets on the hub count as 0."""
        return sum(source.size_bytes for source in self.sources)

    def resolve(self, spec: JobSpec) -> JobSpec:
        """The resolved spec of a job on this corpus; an "auto" number of stages becomes one. InvalidConfig."""
        tokenizer = self.tokenizer
        size, end = tokenizer.vocabulary_size, tokenizer.end_of_text
        return resolve(spec, vocabulary_size=size, stages_if_auto=1, end_of_text=end)


def open_corpus(spec: JobSpec) -> Corpus:
    """The sources and the tokenizer of a job; texts are not read. InvalidData or InvalidConfig."""
    sources = tuple(find_sources(spec.data))
    ids_given = sources[0].format == "bin"
    if ids_given and not spec.data.packing:
        raise InvalidConfig(
            "data.packing = false needs texts; token ids (.bin) are used as they are", hint="leave data.packing out"
        )
    found = find_tokenizer(spec, ids_given=ids_given)
    if isinstance(found, FoundTokenizer):
        reader = ReaderProcess(spec)
        return Corpus(sources, reader.load(found), reader)
    return Corpus(sources, found, ReaderProcess(spec) if any(source.unpacks for source in sources) else None)


def tokenise(
    spec: JobSpec, out_dir: Path, progress: TokenisingProgress | None = None, corpus: Corpus | None = None
) -> TokenManifest:
    """Write the token shards of `spec.data.source` into `out_dir`, as `write_shards`, wherever they are read."""
    corpus, report = corpus or open_corpus(spec), progress or _unheard
    if corpus.reader is not None:
        return corpus.reader.tokenise(corpus.sources, out_dir, report)
    return write_shards(spec, out_dir, corpus.sources, corpus.tokenizer, report)


def _unheard(done_bytes: int, total_bytes: int) -> None:
    """Nobody wants to know how far it is."""
