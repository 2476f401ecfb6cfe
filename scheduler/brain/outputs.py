"""What a job's brain decides: outputs, to be carried out in the given order; and where they gather until then."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from scheduler.brain.checkpoint.schedule import BeginCheckpoint, DropCheckpoint, EnterState, PublishCheckpoint, Stopped
from scheduler.brain.routing.evaluation import EvaluationRow
from scheduler.brain.state.step import CommitRow
from swarm.messages import Command
from swarm.types import PeerId


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
class WriteEvaluation:
    """Make the result of an evaluation durable; nothing waits for it."""

    row: EvaluationRow


@dataclass(frozen=True, slots=True)
class Admitted:
    """A peer that joined is a replica from now on."""

    peer: PeerId
    stage: int


@dataclass(frozen=True, slots=True)
class Independent:
    """A replica that joined needs nothing of the others any more: the stage would live on with it alone."""

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


Output: TypeAlias = (
    Send
    | WriteCommit
    | WriteEvaluation
    | Admitted
    | Independent
    | Left
    | Note
    | Finish
    | Fail
    | BeginCheckpoint
    | PublishCheckpoint
    | DropCheckpoint
    | Stopped
    | EnterState
)


class Outbox:
    """Outputs of one job that were not handed out yet; `replicas` are those to whom commands go."""

    def __init__(self, replicas: Container[PeerId]) -> None:
        self._replicas = replicas
        self._outputs: list[Output] = []

    def put(self, output: Output) -> None:
        """Anything, to anybody."""
        self._outputs.append(output)

    def send(self, peer: PeerId, command: Command) -> None:
        """A command to a replica; whoever is none any more gets nothing."""
        if peer in self._replicas:
            self._outputs.append(Send(peer, command))

    def note(self, level: str, message: str) -> None:
        """A line for the job's log."""
        self._outputs.append(Note(level, message))

    def take(self) -> list[Output]:
        """All since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs


def listed(names: Iterable[str]) -> str:
    """Names for a person."""
    return ", ".join(sorted(names)) or "nobody"
