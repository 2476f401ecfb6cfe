"""From texts to microbatches: (seed, portion, microbatch) decides which tokens are read.

    files, data sets ── documents ──▶ texts
    texts ── tokenizer ──▶ token ids ── shards ──▶ files named by their sha256
    shards ── TokenData ──▶ one long row of tokens
    row ── Batches.microbatch(q, m) ──▶ tokens and targets [B, T]

The client tokenises and the scheduler feeds, both without torch.
"""
