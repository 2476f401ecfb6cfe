"""From texts to microbatches: (seed, step, microbatch) decides which tokens are read.

    files, data sets ── documents ──▶ texts
    texts ── tokenizer ──▶ token ids ── shards ──▶ files named by their sha256
    shards ── TokenData ──▶ one long row of tokens
    row ── Batches.microbatch(t, m) ──▶ tokens and targets [B, T]

The client tokenises and the scheduler feeds, both without torch.
"""

from swarm.data.batches import (
    IGNORED,
    TOKEN_DTYPES,
    Batches,
    TokenData,
    TokenIds,
    sample_count,
    shuffled,
    split_samples,
)
from swarm.data.documents import Source, find_sources
from swarm.data.shards import Corpus, ShardInfo, TokenisingProgress, TokenManifest, open_corpus, tokenise
from swarm.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORED",
    "TOKEN_DTYPES",
    "Batches",
    "ByteTokenizer",
    "Corpus",
    "HuggingFaceTokenizer",
    "ShardInfo",
    "Source",
    "TokenData",
    "TokenIds",
    "TokenManifest",
    "TokenisingProgress",
    "Tokenizer",
    "find_sources",
    "load_tokenizer",
    "open_corpus",
    "sample_count",
    "shuffled",
    "split_samples",
    "tokenise",
]
