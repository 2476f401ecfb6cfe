"""Limits on the messages, memory and requests of others: one table, applied where bytes enter.

A caller that reaches a port can send anything, by intent or by accident. Nothing here is a rule of training: a limit is
far above the needs of an honest job and far below a load that would stop a process. docs/security.md lists them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

PEERS_MAX = 4096  # that one scheduler knows at a time
STAGES_MAX = 512  # of a job
ISLANDS_MAX = 64  # of a job
ISLANDS_IN_SWARM_MAX = 8  # each envoy holds what all others propose
LAYERS_MAX = 10_000  # of a model
STAGE_LAYERS_MAX = 1024  # of one stage: more take long to build, and are more tensors than a message may name
HOPS_MAX = 1 << 15  # of a step: its microbatches times the stages; the scheduler keeps an entry for each
SPEC_BYTES_MAX = 512 << 10  # of a job's spec, as sent and as resolved: it travels within LoadStage and JobView
SHARDS_MAX = 4096  # token shards of a job; each is a mapping of a file, of which a process has about 65,000
SHARDS_OPEN_MAX = 32_768  # of all jobs that have not ended
FILES_MAX = 10_000  # that a job starts from; they travel within LoadStage
JOBS_OPEN_MAX, JOBS_OPEN_OF_ONE_MAX = 1000, 64  # of one person
ENDED_OF_ONE_MAX = 200  # ended jobs without weights of one person; the oldest goes when another ends
HASHES_ASKED_MAX = 16_384  # of one MissingShards
JOBS_LISTED_MAX = 1000  # of one List
REFERENCE_CHARACTERS_MAX = 256  # by which a person names a job or a stage server; names have 128 at most
REPLY_BYTES_MAX = 3 << 20  # of a list; a message has 4 MiB
SUBMITS_MAX = 2  # that are worked on at a time; others wait
SUBMITS_OF_ONE_PER_S, SUBMITS_OF_ONE_AT_ONCE = 60 / 3600, 100  # of one person
CHANGES_OF_ONE_PER_S, CHANGES_OF_ONE_AT_ONCE = 1.0, 200  # cancels, pauses and resumes of one person
MANIFEST_BYTES_MAX = 8 << 20  # of a checkpoint
PARAMETERS_MAX = 1 << 16  # tensors of one stage
MESSAGE_ASIDE_BYTES = 64 << 10  # a message from here on is read on a thread, while the event loop turns

SESSIONS_PER_S, SESSIONS_AT_ONCE = 64.0, 512  # that begin; a scheduler that starts again is dialled by all at once
SESSIONS_OF_ONE_PER_S, SESSIONS_OF_ONE_AT_ONCE = 1.0, 32  # of one stage server or relay: others hear of each
INCARNATION_AHEAD_S = 3600.0  # of the scheduler's clock; a process takes its start as its incarnation
LINKS_TOLD_EVERY, LINKS_TOLD_MAX = 10, 64  # one in so many heartbeats tells how fast so many links are
LOG_LINES_PER_S, LOG_LINES_AT_ONCE = 100.0, 2000  # of one stage server
LOG_LINE_CHARACTERS_MAX = 4096
LOG_KEPT_CHARACTERS_MAX = 8 << 20  # of a job's lines in memory
FOLLOWERS_MAX, FOLLOWED_BY_ONE_MAX = 256, 64  # calls that follow jobs, logs and drains, or pull weights; of one person
READS_MAX, READS_OF_ONE_MAX = 256, 8  # calls that read lists, jobs, logs and checkpoints at a time; of one person
READS_PER_S, READS_AT_ONCE = 20.0, 200  # of one person; then each waits for its turn
DIALLED_MAX, DIALLED_OF_ONE_MAX = 16, 2  # callers whom the scheduler dials back at a time; of one person
UPLOADS_MAX, UPLOADS_OF_ONE_MAX = 32, 16  # files that are uploaded at a time; by one person
STREAMS_MAX, STREAMS_OF_ONE_MAX = 32, 8  # that show the page; to one person
PLACE_WAIT_S = 30.0  # that a person waits for one of these places until it is taken from who has most of them
PLACE_ASKED_S = 5.0  # who was refused waits for so long after he has asked
UPLOADED_OF_ONE_MAX = 50_000  # files of one person that the scheduler has
UPLOADED_BYTES_MIN = 4096  # that a file counts as: a small one takes a block of the disk
UPLOAD_IDLE_S_MAX = 30.0
UPLOAD_S_PER_MIB = 128.0  # as slow as a client may be; never less than the idle time
UPLOAD_DISK_RESERVE_BYTES = 1 << 30  # that uploads leave free: checkpoints and the database need room
UNUSED_SHARD_KEPT_S = 86_400.0  # an uploaded file that no job names
MEMBERS_MAX = 16_384  # in the scheduler's book, those who were revoked included
TOKENS_MAX = 1024  # that wait to be used
CERTIFICATES_PER_S, CERTIFICATES_AT_ONCE = 1.0, 30  # for one name; each is a row of the book
JOIN_BODY_BYTES_MAX = 16 << 10
JOIN_FAILURES_PER_S, JOIN_FAILURES_AT_ONCE = 5 / 60, 5  # of one address
HANDSHAKES_PER_S, HANDSHAKES_AT_ONCE = 20.0, 200  # of HTTPS, from one address; a join takes two
RPCS_MAX = 16_384  # calls that one process answers at a time
CONNECTIONS_TAKEN_MAX = 8192  # of gRPC, at a port; never more than half of what the process may open
HANDSHAKE_S_MAX = 10.0  # of gRPC
RELAYS_MAX = 64
LINE_BYTES_MAX = 4 << 20  # of a file by which an idle stage server measures its line
RELAY_LINKS_MAX, RELAY_LINKS_OF_ONE_MAX = 64, 16  # to one stage server, at one relay; from one other
RELAY_CHUNK_BYTES = 256 << 10  # of one message through a relay
RELAY_IDLE_S_MAX = 60.0  # of a link; the ends ping each other each second
RELAY_ROWS_MAX = 16_384  # (job, from, to) of which a scheduler remembers the bytes

# Elements of a repeated field of a message between scheduler and stage servers (swarm/rpc/mapping.py). A field that is
# not named here cannot be sent at all.
COUNTS_MAX: Mapping[str, int] = {
    "Hello.cells": 1 << 16,
    "Heartbeat.links": LINKS_TOLD_MAX,
    "Accumulated.digests": 4,
    "Checked.digests": 4,
    "Loaded.units": 1024,
    "Averaged.norms": PARAMETERS_MAX,
    "ParameterHash.shape": 16,
    "Saved.parameters": PARAMETERS_MAX,
    "Rechecked.took": PEERS_MAX,
    "Recount.indexes": 1 << 16,
    "Hashed.files": FILES_MAX,
    "Hashed.parameters": PARAMETERS_MAX,
    "LoadStage.split": STAGES_MAX,
    "LoadStage.files": FILES_MAX,
    "Follow.donors": PEERS_MAX,
    "Route.hops": STAGES_MAX,
    "Evaluate.hops": STAGES_MAX,
    "Check.hops": STAGES_MAX,
    "Average.members": PEERS_MAX,
    "Exchange.envoys": 2 * ISLANDS_MAX,
    "Commit.rounds": 1024,
    "Commit.donors": PEERS_MAX,
    "Welcome.cut_off": MEMBERS_MAX,
    "Welcome.relays": RELAYS_MAX,
    "UseRelays.relays": RELAYS_MAX,
    "Boundary.shape": 16,
    "EvaluationBoundary.shape": 16,
}


@dataclass(slots=True)
class Bucket:
    """Lets `per_s` things a second pass, and `at_once` after a pause."""

    per_s: float
    at_once: float
    _held: float = -1.0  # nothing was ever taken
    _filled_s: float = 0.0

    def wait_s(self, now_s: float) -> float:
        """How long until one more may pass; 0 = it may now."""
        return max(0.0, (1.0 - self._level(now_s)) / self.per_s)

    def _level(self, now_s: float) -> float:
        gained = (now_s - self._filled_s) * self.per_s
        return self.at_once if self._held < 0 else min(self.at_once, self._held + gained)

    def take(self, now_s: float) -> bool:
        """Whether one more may pass now."""
        self._held = self._level(now_s)
        self._filled_s = now_s
        if self._held < 1:
            return False
        self._held -= 1
        return True


class Buckets:
    """A bucket for each caller, of the `most` that came last; for a caller that was forgotten it is full again."""

    def __init__(self, per_s: float, at_once: float, most: int) -> None:
        self._per_s, self._at_once, self._most = per_s, at_once, most
        self._buckets: OrderedDict[Hashable, Bucket] = OrderedDict()

    def wait_s(self, caller: Hashable, now_s: float) -> float:
        """How long until one more of this caller may pass; 0 = it may now."""
        bucket = self._buckets.get(caller)
        return 0.0 if bucket is None else bucket.wait_s(now_s)

    def take(self, caller: Hashable, now_s: float) -> bool:
        """Whether one more of this caller may pass now."""
        bucket = self._buckets.setdefault(caller, Bucket(self._per_s, self._at_once))
        self._buckets.move_to_end(caller)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return bucket.take(now_s)
