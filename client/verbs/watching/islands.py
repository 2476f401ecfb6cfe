"""`swarm islands`: a row for each island of a job, with what it does and waits for."""

from __future__ import annotations

import typer

from client.connection import dial
from client.flags import JobName
from client.shell import Shell
from client.views import islands_table, islands_values
from swarm.types import JobState

ALLREDUCE = "allreduce"  # averaging.mode of a job without islands
AT_WORK = (JobState.LOADING, JobState.RUNNING, JobState.PAUSING, JobState.CANCELLING)


def islands(context: typer.Context, job: JobName) -> None:
    """Show what each island of a job does and waits for: itself (training), the others (waiting), the exchange between
    all of them (exchanging), evaluations (evaluating), or to begin anew (lost). The others have exchanged without
    a late island.

    REPLICAS are those of each stage, MICROBATCHES how many of a step the island trains, SPEED how many its slowest
    stage can do in a second.
    """
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        view = scheduler.get(job)
        peers = scheduler.peers() if view.islands else []
    if shell.json:
        shell.data(islands_values(view, peers))
    elif view.islands:
        shell.out.print(islands_table(view, peers))
    elif view.state in AT_WORK and view.spec.get("averaging", {}).get("mode", ALLREDUCE) != ALLREDUCE:
        told = f"{view.state}, step {view.step} of {view.steps}: {view.reason}"
        shell.say(f"job {view.id} has islands, but the scheduler has not heard of them since it started ({told})")
    elif view.state in AT_WORK:
        shell.say(f"job {view.id} has no islands: its replicas average every step (averaging.mode in the job file)")
    else:
        shell.say(f"job {view.id} is {view.state}: only a job at work has islands")
