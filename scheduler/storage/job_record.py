"""A job as the database knows it, and how long it was in which state.

Seconds are added up whenever the state or the stage servers change, so they are right after a kill -9. No prices: they
change by the hour and stand elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swarm.types import JobId, JobState, PeerId
from swarm.wire.messages import StateFile

# States in which a job holds the stage servers of its record; one that ended keeps their names.
HOLDING = frozenset({JobState.LOADING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING})


@dataclass(frozen=True, slots=True)
class JobTokens:
    """The job's tokenised data: shards by hash, in order."""

    shards: tuple[str, ...]
    token_dtype: str
    vocabulary_size: int
    unigram_entropy: float
    end_of_text: int = -1  # the id that closes a document; -1: none does (also in rows older than this field)


@dataclass(frozen=True, slots=True)
class Repeats:
    """What a job has done again so far, and what it lost last."""

    microbatches: int = 0  # at a stage, as their replicas were lost
    steps: int = 0  # that were lost with a stage
    reached: int = 0  # the step that it had come to before the newest loss
    told: str = ""  # what that loss cost, for a person

    def lost(self, reached: int, step: int, told: str) -> Repeats:
        """The job goes back from the step that it had `reached`."""
        return self if reached <= step else replace(self, steps=self.steps + reached - step, reached=reached, told=told)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the database knows it."""

    id: JobId
    name: str
    state: JobState
    reason: str
    since_unix_s: float
    created_unix_s: float
    spec_json: str
    tokens: JobTokens
    timeline: int = 0
    weights_sha256: str = ""
    error_code: str = ""
    hint: str = ""
    files: tuple[StateFile, ...] = ()  # the files that it starts from; none: it starts from the seed, or from the hub
    first_steps: tuple[int, ...] = (0,)  # the step at which each timeline began
    start_where: str = ""  # storage and name of the checkpoint that the present timeline started from
    start_name: str = ""
    peers: Mapping[PeerId, int] = field(default_factory=dict)  # which peer serves which stage, while the job is at work
    owner: str = ""  # ROLE/NAME of the submitter; empty for jobs over plaintext or from before owners
    times: Mapping[str, float] = field(default_factory=dict)  # seconds in each state
    peer_s: float = 0.0  # seconds for which it held stage servers, of all together
    counted_unix_s: float = 0.0  # both until then; 0: until `since_unix_s`
    repeats: Repeats = Repeats()

    def entered(self, state: JobState, reason: str, now_unix_s: float, **changes: Any) -> JobRecord:
        """The record in another state."""
        counted = self.counted(now_unix_s)
        return replace(counted, state=state, reason=reason, since_unix_s=now_unix_s, **changes)

    def counted(self, now_unix_s: float) -> JobRecord:
        """The record with its times until now; a job that has ended spends none."""
        if self.state.is_final:
            return replace(self, counted_unix_s=now_unix_s)
        passed_s = max(0.0, now_unix_s - (self.counted_unix_s or self.since_unix_s))
        times = {**self.times, self.state.value: self.times.get(self.state.value, 0.0) + passed_s}
        held = len(self.peers) if self.state in HOLDING else 0
        return replace(self, times=times, peer_s=self.peer_s + held * passed_s, counted_unix_s=now_unix_s)
