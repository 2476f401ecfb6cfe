"""`swarm track`: the steps of a job where other tools look for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

import typer

from client.connection import Scheduler, dial
from client.flags import JobName
from client.records import Job, Step, file_name
from client.shell import Shell
from client.tracking import TRACKERS, Tracker
from swarm.errors import SwarmError
from swarm.text import counted
from swarm.types import JobState


def track(
    context: typer.Context,
    job: JobName,
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="Where files go, if there are any.", show_default="runs")
    ] = Path("runs"),
    to: Annotated[
        Literal["tensorboard", "mlflow", "wandb"],
        typer.Option(help="TensorBoard, MLflow or Weights & Biases; the variables of the latter two say where."),
    ] = "tensorboard",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends, or Ctrl-C.")] = False,
) -> None:
    """Write loss, validation loss, gradient norm, rate and tokens of a job's steps for TensorBoard, MLflow or Weights &
    Biases, at any time, also of a job that ended long ago. Said again, it goes on with the run that is there."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        view = scheduler.get(job)
        tracker = TRACKERS[to](view, folder)
        try:
            count, ended = _write(scheduler, view, tracker, follow=follow, shell=shell)
        except BaseException:
            with suppress(SwarmError):  # the first error is the one to tell
                tracker.close()
            raise
        tracker.close(ended)
    if shell.json:
        path = folder / file_name(view.id) if to == "tensorboard" else folder
        shell.data({"to": to, "place": tracker.place, "path": str(path.resolve()), "steps": count})
    shell.say(f"{counted(count, 'step')} in {tracker.place}")


def _write(
    scheduler: Scheduler, job: Job, tracker: Tracker, *, follow: bool, shell: Shell
) -> tuple[int, JobState | None]:
    """Write the steps that there are, and with `follow` those to come until the job ends or Ctrl-C.

    Gives how many, and how the job ended if it did.
    """
    written = _Written(scheduler, tracker)
    written.take(job)
    last = job
    if follow:
        with suppress(KeyboardInterrupt):
            for view in scheduler.follow(job.id, shell.say):
                written.take(view)
                last = view
    return written.count, JobState(last.state) if last.has_ended else None


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

    def __init__(self, scheduler: Scheduler, tracker: Tracker) -> None:
        self.count = 0
        self._scheduler = scheduler
        self._tracker = tracker
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
        self._tracker.flush()

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
            self._tracker.write(step, tokens)
            self.count += 1
