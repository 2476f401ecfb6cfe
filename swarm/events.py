"""Events: the messages of stage servers to the scheduler, as values.

Each class mirrors the protobuf message of the same name in protos/swarm/wire/session.proto, field for field. The
scheduler's commands are in `swarm.messages`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.messages import NO_JOB, StateFile
from swarm.types import EvaluationBatch, JobId, Memory, Microbatch, PeerId, Round, RoundFault, UnitName


@dataclass(frozen=True, slots=True)
class ReportedCell:
    """An open or accumulated cell, as a stage server reports it when it attaches; `stamp`: of its newest route."""

    microbatch: Microbatch
    attempt: int
    accumulated: bool
    finite: bool
    loss: float
    stamp: bytes = field(default=b"", repr=False, compare=False)


# Events: stage server -> scheduler ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first event of a session: the peer, its device, and the state that it still holds from before."""

    peer: PeerId
    incarnation: int
    protocol: int
    product: str
    address: str  # empty: nobody can dial it, but for relays
    http_address: str
    device: str
    threads: int
    memory_bytes: int
    pinned_stage: int  # -1 = any
    job: JobId = NO_JOB  # none: all that follows means nothing
    timeline: int = 0
    version: int = 0
    cells: tuple[ReportedCell, ...] = ()
    stage: int = 0
    attempt: int = 0  # the greatest known here of any open step: new hops must carry a greater one
    join: int = 0  # the number under which it fetches the stage's state; 0 = it is a replica, or idle
    via_relay: bool = False  # it listens at relays
    slow_bfloat16: bool = False  # its device computes bfloat16 many times slower than float32
    site: str = ""  # where it is, as its owner names the place; those of one site have fast links to each other
    forwarded: bool = False  # others dial it at a port that something else listens at, as a router or a tunnel
    host_bytes: int = 0  # of the host's memory, beside `memory_bytes` of the device; 0: the device is the host

    @property
    def memory(self) -> Memory:
        """What it offers."""
        return Memory(self.memory_bytes, self.host_bytes)


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast boundary tensors lately reached a neighbour: the best rate, and the shortest time until a receipt."""

    to: PeerId
    bytes_per_s: float
    receipt_s: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every `heartbeat_s`; any other event counts as one too. One in LINKS_TOLD_EVERY tells of links."""

    sequence: int
    links: tuple[LinkSpeed, ...] = ()


@dataclass(frozen=True, slots=True)
class UnitSize:
    """How many parameters a unit holds."""

    unit: UnitName
    elements: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The stage is built and can compute; `digest` covers parameters and optimizer state."""

    job: JobId
    timeline: int
    stage: int
    version: int
    digest: str
    units: tuple[UnitSize, ...]
    probe: str = ""  # digest of the optimizer's step on a fixed input, as this replica computes it
    join: int = 0  # the number under which it joined a job at work; 0 = it started with the job


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The gradient of one cell entered this replica's sum, once; or it was not finite and did not enter.

    `loss` is the sum of the token losses in nats (last stage, else 0). Times are seconds of device work and of waiting.
    `digests` are there if the job checks its replicas ([trust]), `sizes` with trust.norm_band.
    """

    microbatch: Microbatch
    stage: int
    attempt: int
    finite: bool
    loss: float
    forward_s: float
    backward_s: float
    wait_s: float
    digests: tuple[str, ...] = ()  # of what the replica took and sent, encoded: x, y, g, dx; empty where there is none
    sizes: tuple[float, ...] = ()  # root mean squares of x and g as they were taken; 0 where there is none
    overflow: str = ""  # the Direction of an output that pipeline.compression made infinite; empty: none


@dataclass(frozen=True, slots=True)
class Checked:
    """This replica computed a microbatch again as `Check` number `number` asked, or `fault` says why it did not."""

    microbatch: Microbatch
    stage: int
    number: int
    finite: bool
    loss: float
    digests: tuple[str, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Recounted:
    """The sum that `Recount` number `number` asked for, by hash, or `fault` says why there is none."""

    timeline: int
    step: int
    number: int
    digest: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """This replica's output of a microbatch is ready: it is the next stage's turn."""

    microbatch: Microbatch
    stage: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The last stage computed an evaluation microbatch; `loss` is the sum of its token losses in nats."""

    batch: EvaluationBatch
    attempt: int
    loss: float


@dataclass(frozen=True, slots=True)
class ParameterNorm:
    """Squared L2 norm of the averaged gradient of one parameter tensor, float64."""

    name: str
    squared_norm: float


@dataclass(frozen=True, slots=True)
class Averaged:
    """This member holds the complete averaged gradient of a unit; `digest` names its bytes.

    The rates are what it sent to and took from all others, where the round was large enough to tell; else 0.
    """

    timeline: int
    step: int
    unit: UnitName
    round: Round
    digest: str
    norms: tuple[ParameterNorm, ...]
    duration_s: float
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rechecked:
    """Hashes of a slice of a round: this member's parts, their mean, and the mean that all hold; or `fault`."""

    timeline: int
    step: int
    unit: UnitName
    round: Round
    number: int
    took: tuple[str, ...]  # parts, in the order of the round's members
    computed: str
    held: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """This member could not finish a round, as `cause` says; `reason` is for people."""

    timeline: int
    step: int
    unit: UnitName
    round: Round
    reason: str
    accused: str
    cause: RoundFault = RoundFault.MEMBER


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A boundary tensor or a question does not reach the hop (`to`, `attempt`) of `stage`: the link is at fault."""

    microbatch: Microbatch
    stage: int
    to: PeerId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationUndelivered:
    """An activation of an evaluation microbatch does not reach the hop (`to`, `attempt`) of `stage`."""

    batch: EvaluationBatch
    stage: int
    to: PeerId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """The optimizer ran for `step`; the replica now holds `version` with this digest of parameters and optimizer."""

    timeline: int
    step: int
    version: int
    stage: int
    digest: str


@dataclass(frozen=True, slots=True)
class ParameterHash:
    """sha256 of one parameter tensor's bytes; `name` is the Hugging Face name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Saved:
    """The stage's state of `version` was handed to the scheduler completely, or `fault` says why it was not."""

    job: JobId
    timeline: int
    version: int
    stage: int
    parameters: tuple[ParameterHash, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Hashed:
    """The files that the stage's state of `version` makes, and its weights, by hash; or `fault` says why not.

    Answers HashStage: nothing was handed over.
    """

    job: JobId
    timeline: int
    version: int
    stage: int
    files: tuple[StateFile, ...]
    parameters: tuple[ParameterHash, ...]
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The stage server cannot go on with this job; the error is for a person."""

    job: JobId
    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Logged:
    """One log line of a stage server, for `swarm logs`."""

    job: JobId
    time_unix_s: float
    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Leaving:
    """The stage server was asked to stop and wants to hand its work over."""

    reason: str


@dataclass(frozen=True, slots=True)
class ChaosBegun:
    """The harm that was ordered has begun, or (`refusal`) why not."""

    harm: str
    refusal: str = ""


Event: TypeAlias = (
    Hello
    | Heartbeat
    | Loaded
    | Accumulated
    | Averaged
    | RoundFailed
    | Committed
    | Saved
    | Failed
    | Logged
    | Leaving
    | Evaluated
    | Undelivered
    | Forwarded
    | ChaosBegun
    | EvaluationUndelivered
    | Checked
    | Hashed
    | Rechecked
    | Recounted
)
