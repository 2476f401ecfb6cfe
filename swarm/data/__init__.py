"""From texts to microbatches: every token's place is a function of (seed, step, microbatch).

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
from swarm.data.documents import read_documents
from swarm.data.shards import Progress, ShardInfo, TokenManifest, tokenise
from swarm.data.tokenizer import ByteTokenizer

__all__ = [
    "IGNORED",
    "TOKEN_DTYPES",
    "Batches",
    "ByteTokenizer",
    "Progress",
    "ShardInfo",
    "TokenData",
    "TokenIds",
    "TokenManifest",
    "read_documents",
    "sample_count",
    "shuffled",
    "split_samples",
    "tokenise",
]
