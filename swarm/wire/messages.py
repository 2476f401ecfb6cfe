"""The messages of session.proto and frame.proto as values; written by `make protos`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.types import Direction, EvaluationBatch, Hop, JobId, Microbatch, PeerId, Round, RoundFault, UnitName


@dataclass(frozen=True, slots=True)
class ReportedCell:
    """An open or accumulated cell, as a stage server reports it when it attaches."""

    microbatch: Microbatch
    attempt: int
    accumulated: bool
    finite: bool
    loss: float
    stamp: bytes = field(default=b"", repr=False, compare=False)  # of its newest route


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
    job: JobId = JobId("")  # nothing; all that follows means nothing
    timeline: int = 0
    version: int = 0
    cells: tuple[ReportedCell, ...] = ()
    stage: int = 0
    attempt: int = 0  # the greatest known here of any open step: new hops must carry a greater one
    join: int = 0  # the number under which it fetches the stage's state; 0 = it is a replica, or idle
    via_relay: bool = False  # it listens at relays
    slow_bfloat16: bool = False  # its device computes bfloat16 many times slower than float32
    site: str = ""  # where it is, as its owner names the place; links within a site are fast
    forwarded: bool = False  # others dial it at a port that something else listens at, as a router or a tunnel
    host_bytes: int = 0  # beside `memory_bytes` of the device; 0: the device is the host


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
    links: tuple[LinkSpeed, ...] = ()  # that carried boundary tensors lately; now and then


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
    `digests` are there if the job checks its replicas ([trust]).
    """

    microbatch: Microbatch
    stage: int
    attempt: int
    finite: bool
    loss: float
    forward_s: float
    backward_s: float
    wait_s: float
    digests: tuple[str, ...] = ()  # sha256 of x, y, g, dx as they travel; empty where there is none
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
    up_bytes_per_s: float = 0.0  # not measured
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
    """The stage's state of `version` was handed to the scheduler completely, or `fault` says why it was not. `again`: as in
    its SaveStage.
    """

    job: JobId
    timeline: int
    version: int
    stage: int
    parameters: tuple[ParameterHash, ...]
    fault: str = ""
    again: int = 0


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
class Calibrated:
    """What an idle stage server measured of itself, or `fault` says why not; 0 = not measured.

    Multiply-adds are of a forward, over the time of forward and backward. Rates and receipt are of files that went to
    the scheduler and came from it.
    """

    multiply_adds_per_s: float
    up_bytes_per_s: float
    down_bytes_per_s: float
    receipt_s: float
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The first command of a session: the peer is known under this id and must send something every `heartbeat_s`.

    With a `pass_key` (Ed25519) it lets in only callers with a pass that this key signed; `unix_s` is the clock by which
    passes end. `cut_off` names revoked stage servers whose passes may still be good. `relays` as in UseRelays.
    """

    peer: PeerId
    heartbeat_s: float
    pass_key: bytes = field(default=b"", repr=False)  # this scheduler gives no passes
    unix_s: float = 0.0  # the scheduler's clock, by which passes are issued and end
    cut_off: tuple[CutOff, ...] = ()  # revoked so lately that their passes have not ended
    relays: tuple[RelayAt, ...] = ()


@dataclass(frozen=True, slots=True)
class TakePass:
    """The pass that a stage server shows from now on when it dials; it comes before the stage that it is for."""

    token: bytes = field(repr=False)


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
class UseRelays:
    """The relays that are here now; from them follows which two lead to each peer (swarm/rpc/links/dialling.py)."""

    relays: tuple[RelayAt, ...]


@dataclass(frozen=True, slots=True)
class Calibrate:
    """Measure how fast you are, for so many seconds at most, unless a job wants you first; answered by Calibrated."""

    seconds_max: float


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
    replicas, which `Follow` names, and the peer becomes a replica with `Admit`. With `held` an island begins as a copy
    of another: the peer goes on with what it holds of the stage, on this timeline, if that is this version.
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
    held: int = 0  # nothing


@dataclass(frozen=True, slots=True)
class Follow:
    """To a peer that joins a running job: `version` is the newest, `digest` that of the stage's state at `agreed`.

    The peer asks `donors` for state (their attempt means nothing). `answered` counts the reports (`Loaded`) of this join
    that the scheduler has seen: the peer keeps what it reported until it is answered.
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

    `tokens` (stage 0, or every stage where narrow places are by token) and `targets` (last stage) are little-endian int32
    of shape [B, T]. `stamp` is that of the receiver's own hop, if it has one: its cell is reported with it. No decision
    depends on the bytes of a stamp.
    """

    microbatch: Microbatch
    version: int
    hops: tuple[Hop, ...]
    tokens: bytes = field(default=b"", repr=False)
    targets: bytes = field(default=b"", repr=False)
    stamp: bytes = field(default=b"", repr=False, compare=False)


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
class Recount:
    """Add up the gradients of these microbatches beside the sums of the step; Checks of the same number bring them.

    `Recounted` names elements [start, stop) of the unit.
    """

    timeline: int
    step: int
    stage: int
    number: int
    unit: UnitName
    start: int
    stop: int
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Take part in one evaluation microbatch: forward only, nothing is accumulated; otherwise as Route."""

    batch: EvaluationBatch
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
    """A member of a round: it owns elements [start, stop) of the unit and must hold the set named `digest`.

    That set has `microbatches` microbatches of its stage. Members of one `group` add up their parts before these go to
    the owner in another group (stage_server/brain/ways.py).
    """

    peer: PeerId
    incarnation: int
    address: str
    start: int
    stop: int
    digest: str
    stage: int = 0
    microbatches: int = 0
    group: str = ""  # alone; the site of the member, where a round goes by site


@dataclass(frozen=True, slots=True)
class Average:
    """Seal `step` and average `unit` with `members` (in order of peer id), dividing by `tokens`.

    `ahead`: seal it once the sums hold what `members` say, however long that takes. The same round comes again, without
    `ahead`, when the step is full.
    """

    timeline: int
    step: int
    unit: UnitName
    round: Round
    members: tuple[Member, ...]
    tokens: int
    timeout_s: float
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Envoy:
    """A replica that takes part in an outer round for its island, on the island's `timeline`.

    Its island's proposal counts by `tokens`; with none the envoy only receives.
    """

    peer: PeerId
    incarnation: int
    address: str
    timeline: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Propose how far the island has moved `unit`, and compute the mean of all envoys' proposals, in order of `envoys`.

    Answered as `Average` is. `step` is an outer step, the next one to be committed.
    """

    timeline: int
    step: int
    unit: UnitName
    round: Round
    envoys: tuple[Envoy, ...]
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Recheck:
    """Reduce the slice of `owner` in a complete round once more: all members send `verifier` their parts of it again.

    Owner and verifier report `Rechecked`.
    """

    timeline: int
    step: int
    unit: UnitName
    round: Round
    number: int  # names this request
    owner: PeerId
    verifier: PeerId


@dataclass(frozen=True, slots=True)
class AbortRound:
    """Give the round up; `step` accumulates again until the next `Average`."""

    timeline: int
    step: int
    unit: UnitName
    round: Round


@dataclass(frozen=True, slots=True)
class UnitRound:
    """The round of a unit that a commit makes effective."""

    unit: UnitName
    round: Round


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply the optimizer for `step`: afterwards the replica holds `version` = step + 1.

    `scale` is the global-norm clip factor. With `skip` the sums are used up and no weight changes. If the job's course
    has an outer step there, the replica merges instead; with `skip` it goes back to the outer weights.
    """

    timeline: int
    step: int
    version: int
    rounds: tuple[UnitRound, ...]
    learning_rate: float
    scale: float
    skip: bool
    donors: tuple[Hop, ...] = ()  # they hold the averaged gradients, for a replica that was no member of the rounds
    rebases: bool = False  # the outer step was made without the replica's island, which keeps what it has made


@dataclass(frozen=True, slots=True)
class SaveStage:
    """Hand the weights of `version` to the scheduler (Session.Store); with `optimizer` also what a resume needs.

    The checkpoint has the state of `island` under that number. `again`: how often it was asked for before.
    """

    job: JobId
    timeline: int
    version: int
    optimizer: bool = False
    island: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class HashStage:
    """Hash the files that SaveStage would send, and report `Hashed`: a second opinion on another replica's files."""

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
    sha256: str = ""  # of the whole file; a store that broke goes on if all of the header is the same


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks the scheduler for bytes [start, stop) of a file named in LoadStage.files."""

    job: JobId
    timeline: int
    path: str
    start: int
    stop: int


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


@dataclass(frozen=True, slots=True)
class StateRequest:
    """Asks a replica for a part of its stage's state; `chunk` as in stage_server.brain.rejoin.

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
class StateReply:
    """The kind of bytes that follow: state of `version`, or records up to it; the replica's log begins at `reach`."""

    version: int
    reach: int
    total_bytes: int
    checksum: str  # xxh3-64 of the whole payload, hexadecimal.


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
    | EvaluationUndelivered
    | Checked
    | Hashed
    | Rechecked
    | Recounted
    | Calibrated
)

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
    | Exchange
    | Check
    | HashStage
    | Recheck
    | Recount
    | Calibrate
)

TensorHeader: TypeAlias = (
    Boundary
    | EvaluationBoundary
    | Slice
    | Need
)
