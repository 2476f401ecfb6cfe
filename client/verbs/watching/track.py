"""`swarm track`: the steps of a job where other tools look for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from client.connection import Scheduler, dial
from client.flags import JobName
from client.records import Job, Step, file_name
from client.shell import Shell
from client.tracking import TensorBoard
from swarm.errors import NotAllowed
from swarm.text import counted


def track(
    context: typer.Context,
    job: JobName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the event files go; DIR/JOB is made.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
) -> None:
    """Write loss, validation loss, gradient norm, rate and tokens of a job's steps as TensorBoard event files, at any
    time, also of a job that ended long ago. See them with: tensorboard --logdir DIR"""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        view = scheduler.get(job)
        target = folder / file_name(view.id)
        if target.is_dir() and any(target.iterdir()):
            raise NotAllowed(
                f"{target} exists already: its curves would be drawn twice", hint=f"remove it: rm -r {target}"
            )
        board = TensorBoard(target)
        try:
            count = _write(scheduler, view, board, follow=follow, shell=shell)
        finally:
            board.close()
    if shell.json:
        shell.data({"path": str(target.resolve()), "steps": count})
    shell.say(f"{counted(count, 'step')} in {target}; see them with: tensorboard --logdir {folder}")


def _write(scheduler: Scheduler, job: Job, board: TensorBoard, *, follow: bool, shell: Shell) -> int:
    """Write the steps that there are, and with `follow` those to come; gives how many."""
    written = _Written(scheduler, board)
    written.take(job)
    if follow:
        for view in scheduler.follow(job.id, shell.say):
            written.take(view)
    return written.count


@dataclass(frozen=True, slots=True)
class _Row:
    """The facts that tell a written step from one made anew, and the tokens of all steps up to it."""

    step: int
    committed_unix_s: float
    loss: str  # nan is nan
    tokens: int

    def is_of(self, step: Step) -> bool:
        return (self.step, self.committed_unix_s, self.loss) == (step.step, step.committed_unix_s, str(step.loss))


class _Written:
    """The steps written so far. The job may go back to a checkpoint and make steps anew."""

    def __init__(self, scheduler: Scheduler, board: TensorBoard) -> None:
        self.count = 0
        self._scheduler = scheduler
        self._board = board
        self._rows: list[_Row] = []

    def take(self, job: Job) -> None:
        """Write the steps that are new with this view of the job."""
        newest = self._rows[-1].step if self._rows else 0
        if job.step == newest and not job.has_ended:
            return
        steps = self._scheduler.history(job.id, after=max(newest - 1, 0))
        if self._rows:
            first = next(steps, None)
            if first is None or not self._rows[-1].is_of(first):
                steps = self._gone_back(list(self._scheduler.history(job.id, after=0)))
        self._write(steps)
        self._board.flush()

    def _gone_back(self, steps: list[Step]) -> Iterator[Step]:
        """Go back, as the job did, to the last step that agrees with the written ones; gives the steps after it."""
        pairs = zip(self._rows, steps, strict=False)
        agreed = sum(1 for _ in takewhile(lambda pair: pair[0].is_of(pair[1]), pairs))
        del self._rows[agreed:]
        return iter(steps[agreed:])

    def _write(self, steps: Iterator[Step]) -> None:
        for step in steps:
            tokens = (self._rows[-1].tokens if self._rows else 0) + step.tokens
            self._rows.append(_Row(step.step, step.committed_unix_s, str(step.loss), tokens))
            self._board.write(step, tokens)
            self.count += 1
