"""The nouns of the protocol: ids, states, microbatches and attempts.

ARCHITECTURE.md ("Words") says what each word means; one word has one meaning in every module. Standard library and
swarm.text only: the deciding modules of the scheduler and of the stage server are built on this file.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, groupby
from typing import Generic, Literal, NewType, TypeAlias, TypeVar

from swarm.text import size

JobId = NewType("JobId", str)
PeerId = NewType("PeerId", str)
UnitName = NewType("UnitName", str)

PROTOCOL_VERSION = 24  # of the messages between scheduler, stage servers and relays
NO_JOB = JobId("")
TIED_UNIT = UnitName("tied")  # the embedding, where first and last stage share it

Routing: TypeAlias = Literal["least_completion", "iwrr", "uniform"]
"""How replicas are chosen for a microbatch."""

OnStall: TypeAlias = Literal["wait", "pause", "fail"]
"""What a job does when a stage has lost its last replica, or no step is committed for too long."""

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True, order=True)
class Microbatch:
    """One share of a step's batch: microbatch `index` of optimizer step `step`, as fed on `timeline`."""

    timeline: int
    step: int
    index: int

    def __str__(self) -> str:
        return f"microbatch {self.step}.{self.index}" + (f" (timeline {self.timeline})" if self.timeline else "")


@dataclass(frozen=True, slots=True, order=True)
class EvaluationBatch:
    """One share of the validation data: evaluation microbatch `index`, computed with weights `version`."""

    timeline: int
    version: int
    index: int

    def __str__(self) -> str:
        return f"evaluation microbatch {self.index} of version {self.version}"


@dataclass(frozen=True, slots=True)
class Hop:
    """One replica's turn in a route.

    `attempt` is drawn from a counter of the step that only rises, so `Void(step, attempt)` names all that came before.
    """

    peer: PeerId
    incarnation: int
    attempt: int
    address: str


@dataclass(frozen=True, slots=True, order=True)
class Round:
    """One attempt to average one unit; ordered by scheduler epoch first: a restarted scheduler's rounds are newer."""

    epoch: int
    number: int


@dataclass(frozen=True, slots=True)
class Decision(Generic[Plan]):
    """A decision and its reason; `plan` is None if nothing can or should be done."""

    plan: Plan | None
    reason: str


class Direction(StrEnum):
    """One of a cell's two computations, or of its two inputs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class RoundFault(StrEnum):
    """Why a member could not finish a round of averaging."""

    MEMBER = "member"  # another one did not deliver, or anything else
    SET = "set"  # it holds another set than the ledger
    RELAYS = "relays"  # no relay that leads to another one answers


class JobState(StrEnum):
    """States of a job that this version enters; each is shown with a reason and a time."""

    QUEUED = "queued"
    PLACING = "placing"
    LOADING = "loading"
    RUNNING = "running"
    STALLED = "stalled"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)

    @property
    def phrase(self) -> str:
        """The state in a sentence, behind the name of the job: has failed, was cancelled, is running."""
        verbs = {JobState.SUCCEEDED: "has", JobState.FAILED: "has", JobState.CANCELLED: "was"}
        return f"{verbs.get(self, 'is')} {self.value}"


class IslandState(StrEnum):
    """What an island does."""

    LOADING = "loading"  # also while its replicas come back after a restart of the scheduler
    TRAINING = "training"
    EVALUATING = "evaluating"  # it has come to an exchange, and the weights that this changes are still evaluated
    WAITING = "waiting"  # it has come to an exchange, and others have not
    EXCHANGING = "exchanging"  # until it has merged
    SAVING = "saving"  # all its steps are made
    LATE = "late"  # an exchange was made without it; it keeps what it trained, and is in the next one
    LOST = "lost"


class PeerState(StrEnum):
    """States of a peer; each is shown with a reason and a time."""

    IDLE = "idle"
    LOADING = "loading"
    SERVING = "serving"
    SUSPECT = "suspect"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    GONE = "gone"


def set_digest(indexes: Iterable[int]) -> str:
    """Name a set of microbatch indexes, so that scheduler and replica can compare what was accumulated."""
    members = ",".join(str(index) for index in sorted(indexes))
    return hashlib.blake2b(members.encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, order=True, slots=True)
class Memory:
    """Bytes on a device and in its host's memory: offered, or needed.

    An offer of 0 bytes on the device is not known; with 0 bytes on the host, the device is the host.
    """

    device_bytes: int = 0
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.device_bytes + self.host_bytes

    def holds(self, need: Memory) -> bool:
        """Whether this offer has room for `need`; an offer that is not known holds anything."""
        device_bytes, host_bytes = need._beside(self)
        return not self.device_bytes or (device_bytes <= self.device_bytes and host_bytes <= self.host_bytes)

    def lacking(self, need: Memory) -> Memory:
        """What each memory of this offer is too small by."""
        if not self.device_bytes:
            return Memory()
        device_bytes, host_bytes = need._beside(self)
        return Memory(max(0, device_bytes - self.device_bytes), max(0, host_bytes - self.host_bytes))

    def beside(self, offer: Memory) -> Memory:
        """This need as a machine with such memories has it: one sum where the device is the host."""
        return Memory(*self._beside(offer))

    def _beside(self, offer: Memory) -> tuple[int, int]:
        return (self.device_bytes, self.host_bytes) if offer.host_bytes else (self.device_bytes + self.host_bytes, 0)

    def __str__(self) -> str:
        """24.0 GiB; with two memories 24.0 GiB on the device and 32.0 GiB of host memory."""
        if not self.host_bytes:
            return size(self.device_bytes)
        on_device = f"{size(self.device_bytes)} on the device and " if self.device_bytes else ""
        return f"{on_device}{size(self.host_bytes)} of host memory"

    def short_text(self, need: Memory) -> str:
        """By how much which memory of this offer is too small, for people; empty if none is."""
        lack = self.lacking(need)
        if not lack.total_bytes:
            return ""
        device_alone = self.host_bytes and not lack.host_bytes
        return f"{lack} on the device" if device_alone else str(lack)


def needs_text(needs: Sequence[Memory]) -> str:
    """What each stage takes, for people; neighbours that take the same together."""
    runs = ((text, [stage for stage, _ in run]) for text, run in groupby(enumerate(needs), lambda need: str(need[1])))
    return ", ".join(
        f"stages {stages[0]} to {stages[-1]} {text} each" if stages[1:] else f"stage {stages[0]} {text}"
        for text, stages in runs
    )


class Pieces:
    """A payload whose bytes lie in several places, without a copy of them; a slice of it, with a step of 1, is one."""

    def __init__(self, *parts: bytes | memoryview) -> None:
        self.parts = parts
        self._ends = tuple(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, span: slice) -> bytes:
        start, stop, _ = span.indices(len(self))
        found = []
        for number in range(bisect_right(self._ends, start), len(self.parts)):
            begin = self._ends[number] - len(self.parts[number])
            if begin >= stop:
                break
            found.append(self.parts[number][max(0, start - begin) : stop - begin])
        return b"".join(found)

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(part)
        return digest.hexdigest()
