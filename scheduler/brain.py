"""One job's decisions: event in, outputs out; the driver carries them out in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from swarm.messages import Command, Event, ParameterHash
from swarm.types import JobId, PeerId, Round, UnitName


@dataclass(frozen=True, slots=True)
class BrainSettings:
    """What a job's decisions depend on; `split` is decoder layers per stage, `units` the stages that share a unit."""

    job: JobId
    epoch: int
    timeline: int
    steps: int
    microbatches: int
    split: tuple[int, ...]
    spec_json: str
    staleness: int
    max_in_flight: int | None  # None = auto
    units: Mapping[UnitName, tuple[int, ...]]
    grad_clip_norm: float  # 0 = off
    averaging_timeout_s: float
    fail_on_nonfinite: bool
    learning_rate: Callable[[int], float] = field(repr=False)
    tokens_of: Callable[[int], int] = field(repr=False)
    recover: bool = False  # route around lost replicas; else the job fails when one is gone


@dataclass(frozen=True, slots=True)
class Replica:
    """A peer that serves a stage of this job."""

    peer: PeerId
    incarnation: int
    address: str
    stage: int


@dataclass(frozen=True, slots=True)
class CommitRow:
    """The durable record of a step; `loss` is the mean in nats per token (nan if a loss was not finite)."""

    timeline: int
    step: int
    rounds: Mapping[UnitName, Round]  # empty if skip
    loss: float
    norm: float  # before clipping; 0 if skip
    scale: float
    learning_rate: float
    skip: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to a peer. A Route comes without tokens and targets: the driver fills them in."""

    peer: PeerId
    command: Command


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """Make the row durable, then call `row_written(row.step, now_s)`."""

    row: CommitRow


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the job's log."""

    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job succeeded: all stages are saved, `brain.parameters` holds their hashes."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The job failed; peers that are still there were sent `Release` before."""

    code: str
    message: str
    hint: str


Output: TypeAlias = Send | WriteCommit | Note | Finish | Fail


class JobBrain:
    """All decisions of one job. After Finish, Fail or cancel every call gives nothing."""

    parameters: dict[int, tuple[ParameterHash, ...]]  # by stage, once saved

    def __init__(self, settings: BrainSettings, rng: Random) -> None: ...

    def start(self, replicas: Sequence[Replica], now_s: float) -> list[Output]:
        """Load every replica's stage."""
        raise NotImplementedError

    def handle(self, peer: PeerId, event: Event, now_s: float) -> list[Output]:
        """An event of a peer's present incarnation."""
        raise NotImplementedError

    def row_written(self, step: int, now_s: float) -> list[Output]:
        """The commit row is durable."""
        raise NotImplementedError

    def peer_suspect(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """Route the peer's unfinished hops around it (only with `recover`)."""
        raise NotImplementedError

    def peer_back(self, peer: PeerId, now_s: float) -> list[Output]:
        """A suspect was heard again."""
        raise NotImplementedError

    def peer_gone(self, peer: PeerId, reason: str, now_s: float) -> list[Output]:
        """The peer is lost: the job fails, or (with `recover`) its uncommitted work is done again elsewhere."""
        raise NotImplementedError

    def cancel(self, now_s: float) -> list[Output]:
        """Release all peers."""
        raise NotImplementedError

    # Views, all cheap
    @property
    def committed_steps(self) -> int:
        """Steps whose commit row is durable."""
        raise NotImplementedError

    @property
    def in_flight(self) -> int:
        """Microbatches fed and not yet accumulated at every stage."""
        raise NotImplementedError

    @property
    def replayed(self) -> int:
        """Accumulations that had to be done again."""
        raise NotImplementedError

    @property
    def duplicates(self) -> int:
        """Late repeats that were ignored."""
        raise NotImplementedError

    @property
    def violations(self) -> int:
        """Sets or digests that were not as expected; 0 in health."""
        raise NotImplementedError

    @property
    def stage_microbatches(self) -> tuple[int, ...]:
        """Microbatches in committed steps, per stage."""
        raise NotImplementedError

    def outstanding(self, peer: PeerId) -> int:
        raise NotImplementedError

    def pace_s(self, peer: PeerId) -> float:
        raise NotImplementedError

    def story(self, step: int, index: int) -> list[str]:
        """Every transition of a microbatch, with its cause."""
        raise NotImplementedError

    def waiting_for(self) -> str:
        """What the job waits for, for a person."""
        raise NotImplementedError

    def validate(self) -> None:
        """Assert the invariants."""
        raise NotImplementedError
