"""How much others may send, hold and ask for: one table, applied where bytes enter.

Whoever reaches a port can send what he likes, by intent or by accident. Nothing here is a rule of training: a limit is
far above what an honest job needs and far below what would stop a process. docs/security.md lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

PEERS_MAX = 4096  # that one scheduler knows at a time
STAGES_MAX = 512  # of a job
SPEC_BYTES_MAX = 512 << 10  # of a job's spec, as sent and as resolved: it travels within LoadStage and JobView
SHARDS_MAX = 4096  # token shards of a job; each is a mapping of a file, of which a process has about 65,000
SHARDS_OPEN_MAX = 32_768  # of all jobs that have not ended
FILES_MAX = 10_000  # that a job starts from; they travel within LoadStage
JOBS_OPEN_MAX = 1000
HASHES_ASKED_MAX = 16_384  # of one MissingShards
JOBS_LISTED_MAX = 1000  # of one List
REPLY_BYTES_MAX = 3 << 20  # of a list; a message has 4 MiB
SUBMITS_MAX = 2  # that are worked on at a time; others wait
MANIFEST_BYTES_MAX = 8 << 20  # of a checkpoint
PARAMETERS_MAX = 1 << 16  # tensors of one stage
MESSAGE_ASIDE_BYTES = 64 << 10  # a message from here on is read on a thread, while the event loop turns

# Elements of a repeated field of a message between scheduler and stage servers (swarm/rpc/mapping.py). A field that is
# not named here cannot be sent at all.
COUNTS_MAX: Mapping[str, int] = {
    "Hello.cells": 1 << 16,
    "Loaded.units": 1024,
    "Averaged.norms": PARAMETERS_MAX,
    "ParameterHash.shape": 16,
    "Saved.parameters": PARAMETERS_MAX,
    "LoadStage.split": 10_000,
    "LoadStage.files": FILES_MAX,
    "Follow.donors": PEERS_MAX,
    "Route.hops": 10_000,
    "Evaluate.hops": 10_000,
    "Average.members": PEERS_MAX,
    "Commit.rounds": 1024,
    "Commit.donors": PEERS_MAX,
    "Boundary.shape": 16,
    "EvaluationBoundary.shape": 16,
}
