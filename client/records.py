"""The scheduler's answers as values: jobs, stages, steps, stage servers, checkpoints, log lines, explanations.

The fields come from the messages in protos/swarm/wire/jobs.proto, by name. Times are seconds since 1970, losses nats
per token; NaN and 0 stand where there is no measurement yet.

An answer of which no number can be true is an error here, where it becomes a value, and not where it is shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import Any, TypeVar

from swarm.errors import CorruptFrame, JobDidNotFit, JobEnded, OutOfMemory
from swarm.limits import ISLANDS_MAX
from swarm.text import as_date
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

Kind = TypeVar("Kind")

STEPS_MAX = 10**9  # of a job


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a job: its decoder layers, its replicas, and how many microbatches it has committed."""

    stage: int = 0
    layers: int = 0
    peers: tuple[str, ...] = ()
    microbatches: int = 0


@dataclass(frozen=True, slots=True)
class Island:
    """An island of a job at work: its replicas, the steps and exchanges that all of them made, and the reason why it
    waits. It trains `microbatches` of a step, and can do `microbatches_per_s` (0: not measured)."""

    island: int = 0
    peers: tuple[str, ...] = ()
    step: int = 0
    exchanges: int = 0
    waits_for: str = ""
    state: str = ""
    microbatches: int = 0
    microbatches_per_s: float = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether it has no replicas until it begins anew; its steps and exchanges mean nothing."""
        return not self.peers


@dataclass(frozen=True, slots=True)
class Job:
    """A job at a moment. `step` of `steps` are committed; `reason` says why it is in its state."""

    id: str = ""
    name: str = ""
    state: str = ""
    reason: str = ""
    since_unix_s: float = 0.0
    created_unix_s: float = 0.0
    step: int = 0
    steps: int = 0
    loss: float = nan
    learning_rate: float = 0.0
    grad_norm: float = 0.0
    tokens_per_s: float = 0.0
    eta_s: float = nan
    tokens: int = 0
    unigram_entropy: float = 0.0
    stages: tuple[Stage, ...] = ()
    microbatches_committed: int = 0
    microbatches_in_flight: int = 0
    microbatches_replayed: int = 0
    weights_sha256: str = ""  # of the final weights; empty until the job has succeeded
    spec_json: str = field(default="", repr=False)  # empty in lists
    error_code: str = ""
    hint: str = ""
    evaluation_loss: float = nan
    evaluation_step: int = 0  # after how many steps it was measured; 0: never
    checkpoint_step: int = 0  # of the newest checkpoint; 0: there is none
    skipped_steps: int = 0
    owner: str = ""
    islands: tuple[Island, ...] = ()  # of a job at work that has some
    priority: int = 0
    times_s: Mapping[str, float] = field(default_factory=dict)  # in each state, with the present one
    peer_s: float = 0.0  # for which it held stage servers, of all together
    lost_steps: int = 0  # so far, as a stage lost all replicas
    lost: str = ""  # what the newest such loss cost, until the job has come as far again
    checkpoint_unix_s: float = 0.0  # when the newest was written; 0: there is none

    @property
    def has_ended(self) -> bool:
        """Whether the job is in a final state; one that this client does not know is not."""
        return self.state in [state.value for state in JobState] and JobState(self.state).is_final

    @property
    def spec(self) -> dict[str, Any]:
        """The job file with every value resolved; empty in lists. CorruptFrame if it is none."""
        try:
            values = json.loads(self.spec_json) if self.spec_json else {}
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise CorruptFrame(f"the scheduler sent a job file of job {self.id} that is none")
        return values


@dataclass(frozen=True, slots=True)
class Link:
    """How fast boundary tensors lately reached the stage server `to`: the best rate, and the shortest time from sending
    one to its receipt."""

    to: str = ""
    bytes_per_s: float = 0.0
    receipt_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A stage server at a moment; `pace_s` is its time per microbatch, `stage` is of the job that it serves."""

    id: str = ""
    state: str = ""
    reason: str = ""
    since_unix_s: float = 0.0
    address: str = ""
    http_address: str = ""
    device: str = ""
    threads: int = 0
    memory_bytes: int = 0
    job: str = ""
    stage: int = -1
    pace_s: float = 0.0
    outstanding: int = 0
    product: str = ""
    incarnation: int = 0
    island: str = ""  # the number of the one that it serves; empty: its job has none
    slow_bfloat16: bool = False  # its device computes it many times slower than float32
    site: str = ""  # where it is, as its owner named the place
    links: tuple[Link, ...] = ()  # to others, while it serves a job
    host_bytes: int = 0  # of host memory; 0: the device is the host
    multiply_adds_per_s: float = 0.0  # of a forward, over the time of forward and backward; 0: not known
    up_bytes_per_s: float = 0.0  # of its line, as it measured itself
    down_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        digits = len(str(ISLANDS_MAX))
        is_number = self.island.isascii() and self.island.isdigit() and len(self.island) <= digits
        _check(is_number or not self.island, "the island of a stage server")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint of a job; `fault` names the first fault found, and is empty if none was found."""

    step: int = 0
    created_unix_s: float = 0.0
    size_bytes: int = 0
    weights_sha256: str = ""
    loss: float = nan
    optimizer: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """A committed step; `step` counts from 1. A `skipped` one changed no weight: its gradients were not finite."""

    step: int = 0
    loss: float = nan
    grad_norm: float = 0.0  # before clipping
    learning_rate: float = 0.0
    tokens: int = 0
    skipped: bool = False
    committed_unix_s: float = 0.0  # 0: of islands it is not known
    evaluation_loss: float = nan  # nan: none was measured after this step

    def __post_init__(self) -> None:
        _check(self.step <= STEPS_MAX and has_date(self.committed_unix_s), "a step")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line that a process of a job logged; no `peer`: the scheduler."""

    time_unix_s: float = 0.0
    level: str = ""
    peer: str = ""
    stage: int = -1
    message: str = ""
    number: int = 0  # counts up through the log of the job


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence of an explanation, and the numbers in it by name, units last."""

    topic: str = ""
    text: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job, a stage server or a microbatch is as it is; `kind` says which of them it is about."""

    kind: str = ""
    id: str = ""
    facts: tuple[Fact, ...] = ()


def has_date(unix_s: float) -> bool:
    """Whether a time that the scheduler sent is one."""
    return as_date(unix_s) == unix_s


def _check(is_sound: bool, what: str) -> None:
    """CorruptFrame unless the numbers of an answer are what they can be: the scheduler is not trusted."""
    if not is_sound:
        raise CorruptFrame(f"the scheduler sent numbers about {what} that are none", hint="do not trust this scheduler")


def file_name(text: str) -> str:
    """The name of a job as a file name; CorruptFrame if it leads elsewhere: the scheduler is not trusted."""
    if text in ("", ".", "..") or any(character in text for character in "/\\\0"):
        raise CorruptFrame(f"the scheduler sent a job named {text!r}", hint="do not trust this scheduler")
    return text


def raise_unless_succeeded(job: Job) -> None:
    """JobEnded if the job failed, was cancelled or is paused, JobDidNotFit if it ran out of memory."""
    if job.state != JobState.SUCCEEDED:
        next_ = "go on with: swarm resume" if job.state == JobState.PAUSED else "see what happened with: swarm logs"
        kind = JobDidNotFit if job.error_code == OutOfMemory.code else JobEnded
        raise kind(
            f"job {job.id} {job.state}: {job.reason}",
            hint=job.hint or f"{next_} {job.id}",
            job_code=job.error_code,
        )


_PARTS = {pb.LinkView: Link, pb.StageView: Stage, pb.IslandView: Island, pb.Fact: Fact}


def record(kind: type[Kind], message: Any) -> Kind:
    """The message as a value of `kind`, which has fields of the same names."""
    return kind(**{field.name: _value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields})


def _value(value: Any) -> Any:
    if isinstance(value, str | bytes | int | float):
        return value
    if hasattr(value, "items"):
        return dict(value)
    return tuple(record(_PARTS[type(item)], item) if type(item) in _PARTS else item for item in value)
