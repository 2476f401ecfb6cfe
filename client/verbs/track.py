"""`swarm track`: the steps of a job where other tools look for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from client.connection import Scheduler, dial
from client.flags import JobName
from client.records import Job
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
        target = folder / view.id
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


class _Written:
    """What is written of a job, which may go back to a checkpoint and take steps anew."""

    def __init__(self, scheduler: Scheduler, board: TensorBoard) -> None:
        self.count = 0
        self._scheduler = scheduler
        self._board = board
        self._newest = 0
        self._tokens = [0]  # up to each step, and before the first

    def take(self, job: Job) -> None:
        """Write the steps that are new with this view of the job."""
        self._newest = min(self._newest, job.step)
        del self._tokens[self._newest + 1 :]
        if job.step == self._newest:
            return
        for step in self._scheduler.history(job.id, after=self._newest):
            self._tokens.append(self._tokens[-1] + step.tokens)
            self._board.write(step, self._tokens[-1])
            self._newest = step.step
            self.count += 1
        self._board.flush()
