"""`swarm history`: the steps of a job with their losses and speeds, as a table, CSV or JSON."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from client.board import sparkline
from client.connection import dial
from client.flags import JobName
from client.records import Step
from client.shell import Shell, finite, local, utc
from client.views import FittedTable, number
from swarm.errors import UsageError

ROWS = 30  # of a table, about


def history(
    context: typer.Context,
    job: JobName,
    every: Annotated[
        int | None,
        typer.Option(min=1, help="Only every N-th step, and the last.", show_default="all, of a table about 30 in all"),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Show loss, validation loss, gradient norm, learning rate, tokens and time of a job's committed steps."""
    shell: Shell = context.obj
    if as_csv and shell.json:
        raise UsageError("--csv and --output json exclude each other", hint="leave one of them out")
    is_table = not (as_csv or shell.json)
    with dial(shell) as scheduler:
        view = scheduler.get(job)
        every_shown = every or (max(1, -(-view.step // ROWS)) if is_table else 1)
        steps = list(scheduler.history(view.id, every_shown))
    if shell.json:
        shell.data([step_values(step) for step in steps])
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, list(step_values(Step())), lineterminator="\n")
        writer.writeheader()
        writer.writerows(step_values(step) for step in steps)
    elif steps:
        shell.out.print(_table(steps))
        if every_shown > 1:
            shell.say(f"one step in {every_shown} is shown; all of them: swarm history {view.id} --csv")
        shell.out.print(Text.assemble(("loss  ", "dim"), sparkline(step.loss for step in steps)))
    else:
        shell.say(f"job {view.id} has committed no step yet: {view.reason or view.state}")


def step_values(step: Step) -> dict[str, Any]:
    """A step as JSON values."""
    values = asdict(step)
    values["committed"] = utc(values.pop("committed_unix_s"))
    return values | {name: finite(values[name]) for name in ("loss", "grad_norm", "evaluation_loss")}


def _table(steps: Sequence[Step]) -> FittedTable:
    rows = [
        (
            Text(str(step.step)),
            Text("skipped" if step.skipped else number(step.loss)),
            Text(number(step.evaluation_loss)),
            Text("-" if step.skipped else number(step.grad_norm)),
            Text(f"{step.learning_rate:.3e}"),
            Text(str(step.tokens)),
            Text(local(step.committed_unix_s)),
        )
        for step in steps
    ]
    columns = ("STEP", "LOSS", "VALIDATION", "GRADIENT", "RATE", "TOKENS", "COMMITTED")
    return FittedTable(columns, rows, dropped_first=("TOKENS", "RATE", "GRADIENT", "VALIDATION"))
