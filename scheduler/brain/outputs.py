"""The decisions of a job's brain: outputs, carried out in the given order, and the outbox that gathers them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from swarm.job.leases import Cut
from swarm.types import JobId, JobState, PeerId, Round, UnitName
from swarm.wire.messages import Command, ParameterHash, Release


@dataclass(frozen=True, slots=True)
class CommitRow:
    """The durable record of a step; `loss` is the mean in nats per token (nan if a loss was not finite)."""

    timeline: int
    step: int
    rounds: Mapping[UnitName, Round]  # empty if skip
    loss: float
    norm: float  # before clipping; 0 if skip, since databases have no NaN
    scale: float
    learning_rate: float
    skip: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """The result for one version; `loss` is the mean in nats per token (nan if a loss was not finite)."""

    timeline: int
    version: int
    loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to a peer. A Route comes without tokens and targets: the driver fills them in."""

    peer: PeerId
    command: Command


@dataclass(frozen=True, slots=True)
class WriteCommit:
    """Make the row durable, then say RowDurable before anything else that was decided is carried out."""

    row: CommitRow


@dataclass(frozen=True, slots=True)
class Fork:
    """The island on `timeline` begins with `version`, as a copy of the one on timeline `origin`."""

    timeline: int
    origin: int
    version: int


@dataclass(frozen=True, slots=True)
class OuterRound:
    """The round of one unit in which islands exchanged their proposals; `envoys` took part for one of the islands."""

    unit: UnitName
    round: Round
    envoys: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The durable record of an exchange: each island may make its outer step, once it has come to it.

    `skip`: the mean proposal is not finite. `norm`: its length. `islands`: the timelines of those that proposed;
    `late`: of those that keep what they trained for the next exchange of the fragment, and rebase. `whole`: all islands
    at work make the outer step at once, and hold the same behind it, so it may be saved, or divided.
    """

    step: int
    rounds: tuple[OuterRound, ...]
    skip: bool
    norm: float
    islands: tuple[int, ...] = ()
    whole: bool = False
    late: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Make rows of islands durable, all or none, then say RowsDurable; otherwise as WriteCommit.

    An `exchange` is durable with the rows of islands that have come to its outer step, and with the `forks` behind it:
    the islands that begin. `exchange_s` is how long its rounds took. `shares` come alone: leases that are cut anew.
    """

    rows: tuple[CommitRow, ...]
    forks: tuple[Fork, ...] = ()
    shares: tuple[Cut, ...] = ()
    exchange: Exchanged | None = None
    exchange_s: float | None = None


@dataclass(frozen=True, slots=True)
class IslandLost:
    """The others go on without an island, and their time limit begins anew. A Note goes beside it."""

    island: int


@dataclass(frozen=True, slots=True)
class WriteEvaluation:
    """Make the result of an evaluation durable; nothing waits for it."""

    row: EvaluationRow


@dataclass(frozen=True, slots=True)
class Released:
    """The peer was just sent Release: the job no longer has it."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """A peer that joined is a replica from now on."""

    peer: PeerId
    stage: int


@dataclass(frozen=True, slots=True)
class Independent:
    """A replica that joined no longer depends on the others: the stage could go on with it alone."""

    peer: PeerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Left:
    """A replica was released, and nothing depends on it any more; `target` is the stage to which it moves."""

    peer: PeerId
    stage: int
    target: int | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class Unfit:
    """A replica was expelled for its reports: this incarnation must not be given to the job again."""

    peer: PeerId
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Struck:
    """A replica computed wrong numbers: `evidence` for people. `is_proven`: others than its accuser say so too."""

    peer: PeerId
    evidence: str
    is_proven: bool
    checked: int  # hops of it that others have computed again for this job


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the job's log."""

    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job succeeded: the checkpoint after its last step is kept."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The job failed; peers that are still there were sent `Release` before."""

    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class BeginCheckpoint:
    """Get ready to take the files of `version`; the replicas are asked for them next."""

    version: int


@dataclass(frozen=True, slots=True)
class PublishCheckpoint:
    """All files of `version` are there: complete the checkpoint, then say CheckpointKept or CheckpointFailed."""

    version: int
    parameters: Mapping[int, tuple[ParameterHash, ...]]  # hashes of the weights, per stage


@dataclass(frozen=True, slots=True)
class Vouch:
    """The checkpoint of `version` may hold these files (sha256 by path), and the files of its other Vouch outputs."""

    version: int
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DropCheckpoint:
    """Forget what was collected of `version`, because of `fault`; `reason` as in CheckpointFailed."""

    version: int
    reason: str
    fault: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """The job stopped before its last step: paused or cancelled with all saved that can be, or without a stage.

    `hint` advises a person if a stage was lost or nothing moved; `error_code` is set in the latter case.
    """

    state: JobState
    reason: str
    hint: str = ""
    error_code: str = ""


@dataclass(frozen=True, slots=True)
class EnterState:
    """The job decided to pause, or gave a pause up and is running."""

    state: JobState
    reason: str


Effect: TypeAlias = (
    Released
    | Admitted
    | Independent
    | Left
    | Unfit
    | Struck
    | Note
    | BeginCheckpoint
    | PublishCheckpoint
    | Vouch
    | DropCheckpoint
    | EnterState
)
Output: TypeAlias = Send | WriteCommit | WriteRows | WriteEvaluation | IslandLost | Effect | Finish | Fail | Stopped


class Outbox:
    """Outputs of one job that were not handed out yet; commands go to `replicas` only."""

    def __init__(self, job: JobId, replicas: Container[PeerId]) -> None:
        self._job = job
        self._replicas = replicas
        self._outputs: list[Output] = []

    def put(self, output: Output) -> None:
        self._outputs.append(output)

    def send(self, peer: PeerId, command: Command) -> None:
        """A command to a replica; a peer that no longer is one gets nothing."""
        if peer in self._replicas:
            self._outputs.append(Send(peer, command))

    def release(self, peer: PeerId, reason: str) -> None:
        """Let go of a peer, be it a replica or not."""
        self._outputs += (Send(peer, Release(self._job, reason)), Released(peer, reason))

    def note(self, level: str, message: str) -> None:
        self._outputs.append(Note(level, message))

    def take(self) -> list[Output]:
        outputs, self._outputs = self._outputs, []
        return outputs
