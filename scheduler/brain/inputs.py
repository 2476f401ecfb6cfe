"""All that can happen to a job's brain; each goes in through `JobBrain.step`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from scheduler.brain.outputs import CommitRow, Exchanged
from swarm.job.leases import Cut
from swarm.types import JobState, PeerId
from swarm.wire.messages import Event


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A peer that serves a stage of this job."""

    peer: PeerId
    incarnation: int
    address: str
    stage: int
    device: str = ""  # as the peer names it
    pinned: bool = False  # to its stage
    site: str = ""  # where it is; empty: not said
    room: int = 0  # the microbatches in flight that its memory holds; 0: not known


@dataclass(frozen=True, slots=True)
class Start:
    """The job was placed: every replica loads its stage. Each stage has at least one. The first input, or Resumed."""

    replicas: tuple[ReplicaRecord, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """An earlier scheduler start left the job at work; `rows` are its newest commits, two at most.

    The job goes on once the peers in `known` have come back with Hello, or `grace_s` is over.
    """

    known: Mapping[PeerId, int]  # peers at the last start, and their stages
    committed: int
    rows: tuple[CommitRow, ...]
    evaluated: Collection[int]  # versions whose evaluation is stored
    grace_s: float


@dataclass(frozen=True, slots=True)
class Happened:
    """A peer's present incarnation sent an event. Events of peers outside the job change nothing."""

    peer: PeerId
    event: Event
    room: int = 0  # with a Hello: the microbatches in flight that the memory of its stage holds; 0: not known
    doubted: bool = False  # with a Hello: some of its cells lack the stamp of their hop, and were left out


@dataclass(frozen=True, slots=True)
class RowDurable:
    """The commit row of a step is on disk: every replica may apply the step."""

    step: int


@dataclass(frozen=True, slots=True)
class RowsDurable:
    """These commit rows, of several islands, or these leases are on disk."""

    rows: tuple[CommitRow, ...]
    shares: tuple[Cut, ...] = ()


@dataclass(frozen=True, slots=True)
class EachIsland:
    """How each island begins, in their order; None: it is lost, as `absent` says."""

    begins: tuple[Start | Resumed | None, ...]
    absent: str = "before the scheduler was restarted"
    exchanges: tuple[Exchanged, ...] = ()  # the newest before a restart


@dataclass(frozen=True, slots=True)
class EvaluateHere:
    """The island that evaluated is lost, or late: this one does so from now on, or no longer."""

    is_here: bool = True


@dataclass(frozen=True, slots=True)
class OthersSave:
    """Told to an island that begins anew: the others are writing this checkpoint, in which it has no part.

    It saves nothing before that is done, so that all islands take part in the next one.
    """

    version: int


@dataclass(frozen=True, slots=True)
class SaveAnew:
    """An island was lost that had a part in this checkpoint: what is handed over of it is void.

    If the job stops or ends with that version, all at work save it anew; otherwise it is left out.
    """

    version: int


@dataclass(frozen=True, slots=True)
class PeerSuspect:
    """A peer is silent, or its session broke.

    With `recover` its unfinished hops go to others, though it may still finish them. Without `recover` a peer that lost
    its session is gone, because it gives up its stage with the session.
    """

    peer: PeerId
    reason: str
    session_lost: bool = False


@dataclass(frozen=True, slots=True)
class PeerBack:
    """A suspect was heard again: it may be given work, unless its session broke. Then it is trusted after its Hello."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The peer is lost: the job fails, or (with `recover`) its uncommitted work is done again elsewhere. Or it did not
    come back with its stage after a restart of the scheduler."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class RelaysHere:
    """The last relay of the swarm has left the scheduler, or one is here again; a brain takes them to be here."""

    here: bool


@dataclass(frozen=True, slots=True)
class Unreached:
    """The stage servers that the scheduler cannot dial now, of the whole swarm; before the first word there are none.

    Where the scheduler stands says nothing of where others stand, so it only tips the scales between two that do not
    reach each other.
    """

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Join:
    """An idle peer was given to the job: it fetches the stage's state and becomes a replica when it has it.

    `waits`: it builds its stage, and fetches nothing before a second Join.
    """

    replica: ReplicaRecord
    waits: bool = False


@dataclass(frozen=True, slots=True)
class AskToLeave:
    """A replica finishes what it has begun and is then released: out of the job, or for stage `target`."""

    peer: PeerId
    reason: str
    target: int | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of a stage that the peer sent for the checkpoint of `version` is written; only where it is compared."""

    peer: PeerId
    version: int
    stage: int
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointKept:
    """The checkpoint of `version` is complete and was read back."""

    version: int


@dataclass(frozen=True, slots=True)
class CheckpointNotKept:
    """The checkpoint of `version` could not be written: `fault` for a person, `reason` as in DropCheckpoint."""

    version: int
    reason: str
    fault: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Pause or cancel: feed no new step, commit what runs, save, then stop. At once if nothing was trained.

    `version`: train up to this one first, if it is newer.
    """

    state: JobState
    reason: str
    version: int = 0


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due at `JobBrain.due_s`."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """Nothing moved for so long: the job cannot go on, unless it waits for nothing but a checkpoint."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the job at once, with nothing saved."""

    reason: str


Input: TypeAlias = (
    Start
    | Resumed
    | Happened
    | RowDurable
    | RowsDurable
    | Exchanged
    | EachIsland
    | EvaluateHere
    | OthersSave
    | SaveAnew
    | PeerSuspect
    | PeerBack
    | PeerGone
    | RelaysHere
    | Unreached
    | Join
    | AskToLeave
    | Stored
    | CheckpointKept
    | CheckpointNotKept
    | Stop
    | Tick
    | Stuck
    | Cancel
)
