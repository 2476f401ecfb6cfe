"""What scheduler and stage servers say to each other, as values.

Each class mirrors the protobuf message of the same name in protos/swarm/wire/session.proto, field for field
(`swarm.rpc.mapping` translates, a test holds the two equal). The deciding modules see only these. What stage servers
say to each other is in `swarm.peer_messages`.

Commands flow from the scheduler to a stage server, events flow back. A command is fenced by the scheduler's `epoch`
(on the envelope); whatever carries training content also carries `timeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.types import EvaluationBatch, Hop, JobId, Microbatch, PeerId, Round, UnitName

PROTOCOL_VERSION = 6
NO_JOB = JobId("")


@dataclass(frozen=True, slots=True)
class ReportedCell:
    """An open or accumulated cell, as a stage server reports it when it attaches."""

    microbatch: Microbatch
    attempt: int
    accumulated: bool
    finite: bool
    loss: float


# Events: stage server -> scheduler ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first event of a session: who dials, what it runs on, and what it still holds from before."""

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


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Sent every `heartbeat_s`; any other event counts as one too."""

    sequence: int


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
    `digests` are there if the job checks its replicas (trust.spot_check).
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
    """This member holds the complete averaged gradient of a unit; `digest` names its bytes."""

    timeline: int
    step: int
    unit: UnitName
    round: Round
    digest: str
    norms: tuple[ParameterNorm, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class RoundFailed:
    """This member could not finish a round: its set is another one, or it could not reach `accused`."""

    timeline: int
    step: int
    unit: UnitName
    round: Round
    reason: str
    accused: str


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
)


# Commands: scheduler -> stage server -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CutOff:
    """A stage server was revoked: its passes that were issued until `unix_s` are worth nothing, and its streams end."""

    peer: PeerId
    unix_s: float


@dataclass(frozen=True, slots=True)
class RelayAt:
    """A relay, and where it listens."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first command of a session: the peer is known under this id and must send something every `heartbeat_s`.

    With a `pass_key` (Ed25519) it lets in only those who show a pass that this key signed; `unix_s` is the clock by
    which passes end. `cut_off` names those who were revoked while passes of theirs may still be good. `relays` as
    in UseRelays.
    """

    peer: PeerId
    heartbeat_s: float
    pass_key: bytes = b""
    unix_s: float = 0.0
    cut_off: tuple[CutOff, ...] = ()
    relays: tuple[RelayAt, ...] = ()


@dataclass(frozen=True, slots=True)
class TakePass:
    """What a stage server shows those whom it dials from now on; it comes before the stage that it is for."""

    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UseRelays:
    """The relays that are here now; which of them lead to whom follows from that (swarm/rpc/paths.py)."""

    relays: tuple[RelayAt, ...]


@dataclass(frozen=True, slots=True)
class StateFile:
    """A file that a job starts from; Session.Fetch gives its bytes. `path` as in a checkpoint."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class LoadStage:
    """Become a replica of `stage` with weights `version`: from the job's seed, its pretrained model, or `files`.

    `split` is decoder layers per stage, `spec_json` the resolved job spec (swarm.job.spec.JobSpec). The optimizer runs
    where `step_on` says: "device" or "cpu". With `join` the job is running already: the state comes from the stage's
    replicas, which `Follow` names, and the peer becomes a replica with `Admit`.
    """

    job: JobId
    timeline: int
    stage: int
    split: tuple[int, ...]
    version: int
    spec_json: str
    files: tuple[StateFile, ...] = ()
    step_on: str = "device"
    join: int = 0  # numbers the attempts to join; 0 = the job starts


@dataclass(frozen=True, slots=True)
class Follow:
    """To a peer that joins a running job: `version` is the newest, `digest` that of the stage's state at `agreed`.

    The peer asks `donors` for state (their attempt means nothing). `answered` counts the reports (`Loaded`) of this
    join that the scheduler has seen: the peer keeps what it reported until it is answered.
    """

    job: JobId
    timeline: int
    join: int
    version: int
    agreed: int
    digest: str  # empty: not known yet
    donors: tuple[Hop, ...]
    answered: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The peer that joined is a replica from now on, with the state of `version` that it reported."""

    job: JobId
    timeline: int
    join: int
    version: int


@dataclass(frozen=True, slots=True)
class Route:
    """Take part in one microbatch with weights `version`; `hops` has one hop per stage.

    `tokens` (stage 0) and `targets` (last stage) are little-endian int32 of shape [B, T].
    """

    microbatch: Microbatch
    version: int
    hops: tuple[Hop, ...]
    tokens: bytes = field(default=b"", repr=False)
    targets: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Take part in one evaluation microbatch: forward only, nothing is accumulated; otherwise as Route."""

    batch: EvaluationBatch
    hops: tuple[Hop, ...]
    tokens: bytes = field(default=b"", repr=False)
    targets: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Check:
    """Compute a microbatch again at `stage`, to compare: nothing is accumulated, nothing is sent on.

    `hops` is its route, with the checker at `stage`. The checker reports `Checked`; the hops beside it send it the
    outputs that they hold. `tokens` and `targets` as in Route, for the checker only.
    """

    microbatch: Microbatch
    version: int
    stage: int
    number: int  # names this request: a later one replaces it
    hops: tuple[Hop, ...]
    tokens: bytes = field(default=b"", repr=False)
    targets: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Void:
    """Forget all cells and sums of `step` up to and including `attempt`."""

    timeline: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a round: it owns elements [start, stop) of the unit and must hold the set named `digest`."""

    peer: PeerId
    incarnation: int
    address: str
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True)
class Average:
    """Seal `step` and average `unit` with `members` (in order of peer id), dividing by `tokens`."""

    timeline: int
    step: int
    unit: UnitName
    round: Round
    members: tuple[Member, ...]
    tokens: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AbortRound:
    """Give the round up; `step` accumulates again until the next `Average`."""

    timeline: int
    step: int
    unit: UnitName
    round: Round


@dataclass(frozen=True, slots=True)
class UnitRound:
    """Which round of a unit a commit makes effective."""

    unit: UnitName
    round: Round


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply the optimizer for `step`: afterwards the replica holds `version` = step + 1.

    `scale` is the global-norm clip factor. With `skip` the sums are used up and no weight changes.
    """

    timeline: int
    step: int
    version: int
    rounds: tuple[UnitRound, ...]
    learning_rate: float
    scale: float
    skip: bool
    donors: tuple[Hop, ...] = ()  # they hold the averaged gradients, for a replica that was no member of the rounds


@dataclass(frozen=True, slots=True)
class SaveStage:
    """Hand the weights of `version` to the scheduler (Session.Store); with `optimizer` also what a resume needs."""

    job: JobId
    timeline: int
    version: int
    optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """The job is over for this peer: drop its state and be idle."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Chaos:
    """Harm yourself, if you were started with --allow-chaos.

    `harm`: "kill"; "freeze" (stop for `for_s`); "slow" (computing takes `factor` times as long); "partition" (nothing
    passes to and from `peer` at `address`, or anybody); "corrupt" (a byte is flipped in one of `factor` frames sent).
    """

    harm: str
    for_s: float
    factor: float
    peer: PeerId
    address: str
    seed: int


Command: TypeAlias = (
    Welcome
    | LoadStage
    | Route
    | Void
    | Average
    | AbortRound
    | Commit
    | SaveStage
    | Release
    | Evaluate
    | Follow
    | Admit
    | TakePass
    | CutOff
    | UseRelays
    | Chaos
    | Check
)


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """A safetensors file of a stage's state of `version` follows; answers SaveStage."""

    job: JobId
    peer: PeerId
    incarnation: int
    timeline: int
    version: int
    stage: int
    total_bytes: int
    path: str = ""  # as in a checkpoint: "optimizer/layer-0003.safetensors"


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks the scheduler for bytes [start, stop) of a file named in LoadStage.files."""

    job: JobId
    timeline: int
    path: str
    start: int
    stop: int
