"""`swarm chaos`: harm a stage server on purpose and show how its job recovers."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from client.connection import dial
from client.flags import offers
from client.shell import Shell
from swarm.errors import NotAllowed
from swarm.text import counted
from swarm.wire import jobs_pb2 as pb

WATCH_S_MAX = 90.0  # the scheduler answers that long after the fault is over, at the latest
_WHAT = {
    "kill": "kill -9 {peer}",
    "freeze": "stop {peer} for {for_s:g} s",
    "slow": "make {peer} {factor:g} times as slow for {for_s:g} s",
    "partition": "cut {peer} off from {against} for {for_s:g} s",
    "corrupt": "flip a byte in one of {factor:g} frames that {peer} sends for {for_s:g} s",
}


def chaos(
    context: typer.Context,
    fault: Annotated[
        Literal["kill", "freeze", "slow", "partition", "corrupt"], typer.Argument(metavar="FAULT", help="See above.")
    ],
    peer: Annotated[
        str,
        typer.Argument(
            metavar="PEER",
            help="Id of a stage server, or its beginning; swarm peers lists them.",
            autocompletion=offers("peers"),
        ),
    ],
    for_: Annotated[float, typer.Option("--for", help="Duration in seconds; a kill is permanent.")] = 10.0,
    factor: Annotated[float, typer.Option(help="slow: how many times slower; corrupt: one frame in this many.")] = 4.0,
    seed: Annotated[int, typer.Option(min=0, help="corrupt: which frames.")] = 0,
    against: Annotated[
        str, typer.Option(metavar="PEER", help="partition: only from this neighbour.", show_default="all")
    ] = "",
) -> int:
    """Harm a stage server on purpose and show how its job recovers.

    kill: SIGKILL, no farewell. freeze: SIGSTOP, then SIGCONT. slow: computing takes --factor times as long. partition:
    no tensor passes between it and its neighbours, while the scheduler still hears it. corrupt: a byte of one in
    --factor frames that it sends is flipped.

    It works only where it was allowed: swarm up --allow-chaos, or swarm scheduler --allow-chaos and swarm stage-server
    --allow-chaos. Pass --yes in scripts.

    The report comes when the fault is over and the job has committed two more steps. It gives the seconds from the
    order until the stage server was suspect, its work was re-routed, it was gone and the job had recovered. The ledger
    follows: microbatches fed, committed and open, contributions done again, and the balance, which must be 0 lost and 0
    counted twice. The exit code is 1 if it is not, or if the job has not recovered within a minute after the fault.

    Example: swarm chaos freeze vm-1a2b3c --for 3 --yes
    """
    shell: Shell = context.obj
    what = _WHAT[fault].format(peer=peer, for_s=for_, factor=factor, against=against or "all its neighbours")
    if not shell.yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NotAllowed(f"this would {what}", hint="say that it is meant: --yes")
        typer.confirm(f"{what}?", abort=True, err=True)
    request = pb.ChaosRequest(fault=fault, peer=peer, for_s=for_, factor=factor, seed=seed, against=against)
    with dial(shell, max(shell.timeout_s, for_ + WATCH_S_MAX)) as scheduler:
        shell.say(f"{what} ...")
        report = scheduler.call("Chaos", request)
    if shell.json:
        shell.data(chaos_values(report))
    else:
        shell.out.print(chaos_table(report), soft_wrap=True)
    return 0 if is_well(report) else 1


def is_well(report: pb.ChaosReport) -> bool:
    """Whether the job, if the peer served one, goes on and nothing was counted wrong."""
    if not report.job:
        return True
    ended_well = report.job_state == "succeeded"
    counted_right = not (report.violations or report.lost or report.counted_twice)
    return counted_right and (ended_well or (report.recovered_s >= 0 and report.job_state != "failed"))


def chaos_values(report: pb.ChaosReport) -> dict[str, Any]:
    """A report as JSON values. An event that did not happen is null; without a job, all its numbers are null."""
    moments = ("suspect_s", "rerouted_s", "gone_s", "recovered_s")
    counts = (
        *("microbatches_fed", "microbatches_committed", "microbatches_in_flight"),
        *("committed", "replayed", "rerouted", "duplicates", "violations", "lost", "counted_twice"),
    )
    return {
        "fault": report.fault,
        "peer": report.peer,
        "job": report.job or None,
        "stage": report.stage if report.job else None,
        "job_state": report.job_state or None,
        "job_reason": report.job_reason or None,
        **{name: _moment(getattr(report, name)) for name in moments},
        "watched_s": round(report.watched_s, 3),
        "ledger": {name: getattr(report, name) for name in counts} if report.job else None,
        "well": is_well(report),
    }


def chaos_table(report: pb.ChaosReport) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("stage server", report.peer + (f", stage {report.stage}" if report.job else ""))
    if not report.job:
        table.add_row("job", "none: it served nobody")
        return table
    table.add_row("job", f"{report.job}: {report.job_state}, {report.job_reason}")
    moments = (
        ("suspect", report.suspect_s, "never suspect"),
        ("re-routed", report.rerouted_s, "it had no work to give away"),
        ("gone", report.gone_s, "never gone"),
        ("recovered", report.recovered_s, f"NOT within {report.watched_s:.0f} s"),
    )
    for name, at_s, never in moments:
        table.add_row(name, f"- ({never})" if at_s < 0 else f"after {at_s:.3f} s")
    open_ = report.microbatches_fed - report.microbatches_committed
    table.add_row(
        "ledger",
        f"{counted(report.microbatches_fed, 'microbatch')} fed = "
        f"{report.microbatches_committed} committed + {open_} open",
    )
    table.add_row(
        "since then",
        f"{report.committed} committed, {report.rerouted} hops re-routed, {report.replayed} contributions done again, "
        f"{report.duplicates} repeats ignored, {report.violations} violations",
    )
    table.add_row("balance", f"{report.lost} contributions lost, {report.counted_twice} counted twice")
    return table


def _moment(at_s: float) -> float | None:
    return None if at_s < 0 else round(at_s, 3)
