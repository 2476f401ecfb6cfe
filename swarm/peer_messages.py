"""Messages between stage servers, as values; each class mirrors the message of its name in frame.proto."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from swarm.types import Direction, EvaluationBatch, JobId, Microbatch, PeerId, Round, UnitName


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor that crosses to the next stage (FORWARD: an activation) or to the one before (BACKWARD: a gradient)."""

    job: JobId
    microbatch: Microbatch
    direction: Direction
    stage: int  # that the receiver serves
    attempt: int  # of the sender's hop
    sender: PeerId
    incarnation: int
    dtype: str
    shape: tuple[int, ...]
    codec: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class EvaluationBoundary:
    """An activation of an evaluation microbatch on its way to the next stage."""

    job: JobId
    batch: EvaluationBatch
    stage: int  # that the receiver serves
    attempt: int  # of the sender's hop
    sender: PeerId
    incarnation: int
    dtype: str
    shape: tuple[int, ...]
    codec: str
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements of a unit from `start` on, in one round: the sender's part of the sum or, if `averaged`, the mean."""

    job: JobId
    timeline: int
    step: int
    unit: UnitName
    round: Round
    averaged: bool
    start: int
    sender: PeerId
    incarnation: int
    dtype: str
    elements: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Need:
    """Asks for an input that the sender lacks: FORWARD an activation, BACKWARD a gradient. It has no payload."""

    job: JobId
    microbatch: Microbatch
    direction: Direction
    stage: int  # that the receiver serves
    attempt: int  # of the sender's hop
    sender: PeerId
    incarnation: int


TensorHeader: TypeAlias = Boundary | EvaluationBoundary | Slice | Need
"""What a tensor between stage servers is; `TensorHeader` of protos/swarm/wire/frame.proto is the envelope."""


@dataclass(frozen=True, slots=True)
class Pass:
    """The scheduler's word on a stage server's job and stage, shown to the stage servers that it dials."""

    cluster: str
    job: JobId
    timeline: int
    peer: PeerId
    incarnation: int
    stage: int
    stages: int
    issued_unix_s: float  # both by the scheduler's clock
    expires_unix_s: float


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks a replica for a part of its stage's state; `chunk` as in stage_server.brain.chunks.

    `part` is "state" (the chunk as it is now) or "records" (the averaged gradients of steps [start, stop) for the
    chunk's parameters, or as many from `start` on as there are).
    """

    job: JobId
    timeline: int
    stage: int
    part: str
    chunk: int
    start: int
    stop: int
    sender: PeerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class StateReply:
    """The kind of bytes that follow: state of `version`, or records up to it; the replica's log begins at `reach`."""

    version: int
    reach: int
    total_bytes: int
    checksum: str
