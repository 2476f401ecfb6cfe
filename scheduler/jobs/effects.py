"""What a job's driver can do to the world: each method carries one kind of the brain's outputs out."""

from __future__ import annotations

from typing import Protocol

from scheduler.brain.outputs import CommitRow, DropCheckpoint, EvaluationRow, Left, PublishCheckpoint, Unfit
from swarm.messages import Command
from swarm.types import JobState, PeerId


class JobEffects(Protocol):
    """The effects of one job. Only the two writes can wait; the driver decides nothing while they do."""

    def send(self, peer: PeerId, command: Command) -> None:
        """Send a command to a peer."""

    def routed(self, peer: PeerId, stage: int) -> None:
        """The peer was given a microbatch for its stage."""

    def released(self, peer: PeerId, reason: str) -> None:
        """The peer was sent Release."""

    async def write_row(self, row: CommitRow) -> None:
        """Make a commit row durable and show it, however long that takes."""

    async def write_evaluation(self, row: EvaluationRow) -> None:
        """Make the result of an evaluation durable and show it."""

    def say(self, level: str, text: str) -> None:
        """Add a line to the job's log."""

    def entered(self, state: JobState, reason: str) -> None:
        """The job decided to pause, or gave a pause up."""

    def admitted(self, peer: PeerId, stage: int) -> None:
        """A peer that joined is a replica."""

    def independent(self, peer: PeerId, incarnation: int) -> None:
        """A replica that joined needs no other any more."""

    def left(self, left: Left) -> None:
        """A replica was released, and nothing depends on it."""

    def unfit(self, unfit: Unfit) -> None:
        """A replica was expelled, and is not to come back."""

    def begin_checkpoint(self, version: int) -> None:
        """Get ready to take the files of a version."""

    def publish_checkpoint(self, publish: PublishCheckpoint) -> None:
        """Complete the checkpoint; what became of it comes back by `JobDriver.checkpoint_written`."""

    def drop_checkpoint(self, drop: DropCheckpoint) -> None:
        """Forget what was collected."""
