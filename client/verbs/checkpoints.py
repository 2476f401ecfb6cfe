"""`swarm checkpoints`: lists the checkpoints of a job, and whether they are sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from client.connection import dial
from client.flags import JobName
from client.records import Checkpoint
from client.shell import Shell, finite, local, utc
from client.views import number
from swarm.text import size


def checkpoints(
    context: typer.Context,
    job: JobName,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its hash; exit code 1 if a fault is found.")
    ] = False,
) -> int:
    """List the checkpoints of a job: step, time, size, loss, whether a resume from it is exact, faults."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        view = scheduler.get(job)
        found = scheduler.checkpoints(view.id, verify=verify)
    faults = sum(bool(checkpoint.fault) for checkpoint in found)
    if shell.json:
        shell.data([checkpoint_values(checkpoint, verified=verify) for checkpoint in found])
    elif found:
        shell.out.print(_table(found, verified=verify), soft_wrap=True)
    else:
        shell.say(f"job {view.id} has no checkpoints; it writes one every checkpoint.every_steps and at its end")
    if faults:
        shell.say(f"{faults} of {len(found)} cannot be used; resume takes the newest that verifies")
    return 1 if faults and verify else 0


def checkpoint_values(view: Checkpoint, *, verified: bool) -> dict[str, Any]:
    """A checkpoint as JSON values; `verified` is null if its contents were not read."""
    return {
        "step": view.step,
        "created": utc(view.created_unix_s),
        "size_bytes": view.size_bytes,
        "loss": finite(view.loss),
        "optimizer": view.optimizer,
        "weights_sha256": view.weights_sha256 or None,
        "verified": False if view.fault else (True if verified else None),
        "fault": view.fault or None,
    }


def _table(views: Sequence[Checkpoint], *, verified: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("STEP", "TIME", "SIZE", "LOSS", "OPTIMIZER", "STATE"):
        table.add_column(column, no_wrap=column != "STATE")
    for view in views:
        good = "verified" if verified else "complete"
        table.add_row(
            str(view.step),
            local(view.created_unix_s),
            size(view.size_bytes) if view.size_bytes else "-",
            number(view.loss),
            "yes" if view.optimizer else "no",
            Text(view.fault, style="red") if view.fault else Text(good, style="green" if verified else ""),
        )
    return table
