"""Commands: the messages of the scheduler to stage servers, as values. Their reports are in `swarm.events`.

Each class mirrors the protobuf message of the same name in protos/swarm/wire/session.proto, field for field
(`swarm.rpc.mapping` translates, a test holds the two equal). The deciding modules see only these. Messages between
stage servers are in `swarm.peer_messages`.

Commands flow from the scheduler to a stage server, events flow back. A command is fenced by the scheduler's `epoch`
(on the envelope); every message with training content also carries `timeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from swarm.types import EvaluationBatch, Hop, JobId, Microbatch, PeerId, Round, UnitName

PROTOCOL_VERSION = 19
NO_JOB = JobId("")


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

    With a `pass_key` (Ed25519) it lets in only callers with a pass that this key signed; `unix_s` is the clock by which
    passes end. `cut_off` names revoked stage servers whose passes may still be good. `relays` as in UseRelays.
    """

    peer: PeerId
    heartbeat_s: float
    pass_key: bytes = b""
    unix_s: float = 0.0
    cut_off: tuple[CutOff, ...] = ()
    relays: tuple[RelayAt, ...] = ()


@dataclass(frozen=True, slots=True)
class TakePass:
    """The pass that a stage server shows from now on when it dials; it comes before the stage that it is for."""

    token: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class UseRelays:
    """The relays that are here now; from them follows which two lead to each peer (swarm/rpc/links/paths.py)."""

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
    replicas, which `Follow` names, and the peer becomes a replica with `Admit`. With `held` an island begins
    as a copy of another: the peer goes on with what it holds of the stage, on this timeline, if that is this version.
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
    held: int = 0  # 0 = nothing


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

    `tokens` (stage 0) and `targets` (last stage) are little-endian int32 of shape [B, T]. `stamp` is that of the
    receiver's own hop, if it has one: its cell is reported with it. No decision depends on the bytes of a stamp.
    """

    microbatch: Microbatch
    version: int
    hops: tuple[Hop, ...]
    tokens: bytes = field(default=b"", repr=False)
    targets: bytes = field(default=b"", repr=False)
    stamp: bytes = field(default=b"", repr=False, compare=False)


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
class Void:
    """Forget all cells and sums of `step` up to and including `attempt`."""

    timeline: int
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a round: it owns elements [start, stop) of the unit and must hold the set named `digest`.

    That set has `microbatches` microbatches of its stage.
    """

    peer: PeerId
    incarnation: int
    address: str
    start: int
    stop: int
    digest: str
    stage: int = 0
    microbatches: int = 0


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


@dataclass(frozen=True, slots=True)
class SaveStage:
    """Hand the weights of `version` to the scheduler (Session.Store); with `optimizer` also what a resume needs.

    The checkpoint has the state of `island` under that number.
    """

    job: JobId
    timeline: int
    version: int
    optimizer: bool = False
    island: int = 0


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
    | Exchange
    | Chaos
    | Check
    | HashStage
    | Recheck
    | Recount
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
    sha256: str = ""  # of the whole file; a store that broke goes on if all of the header is the same


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """Asks the scheduler for bytes [start, stop) of a file named in LoadStage.files."""

    job: JobId
    timeline: int
    path: str
    start: int
    stop: int
