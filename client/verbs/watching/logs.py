"""`swarm logs`: shows the log lines of a job's processes."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.text import Text

from client.connection import dial
from client.flags import JobName, offers
from client.shell import Shell, utc
from swarm.errors import NotFound, UsageError
from swarm.limits import STAGES_MAX
from swarm.process.logs import LOG_LEVELS
from swarm.text import as_date, seconds
from swarm.wire import jobs_pb2 as pb

_STYLE = {"debug": "dim", "info": "", "warning": "yellow", "error": "red", "critical": "bold red"}


def logs(
    context: typer.Context,
    job: JobName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[
        int, typer.Option("--tail", "-n", min=0, max=2**32 - 1, help="Only this many last lines; 0 = all.")
    ] = 100,
    peer: Annotated[str, typer.Option(help="Only this peer.", show_default=False, autocompletion=offers("peers"))] = "",
    stage: Annotated[int, typer.Option(min=-1, max=STAGES_MAX, help="Only this stage.", show_default="all")] = -1,
    level: Annotated[str, typer.Option(help="This level and above: debug, info, warning or error.")] = "info",
    since: Annotated[str, typer.Option(help="Only since then: 10m, 2h, or an ISO-8601 time.", show_default=False)] = "",
) -> None:
    """Show what the processes of a job logged."""
    shell: Shell = context.obj
    if level not in LOG_LEVELS:
        raise UsageError(f'there is no level "{level}"', hint=f"one of: {', '.join(LOG_LEVELS)}")
    since_s = since_unix_s(since, time.time()) if since else 0.0
    request = pb.LogsRequest(
        job=job, follow=follow, tail=tail, peer=peer, stage=stage, level=level, since_unix_s=since_s
    )
    with dial(shell) as scheduler:
        known = not request.peer or any(view.id.startswith(request.peer) for view in scheduler.peers())
        request.follow &= known
        for entry in scheduler.logs(request, shell.say):
            known = True
            if shell.json:
                shell.data(
                    {
                        "time": utc(entry.time_unix_s),
                        "level": entry.level,
                        "peer": entry.peer or None,
                        "stage": entry.stage if entry.peer and entry.stage >= 0 else None,
                        "message": entry.message,
                    }
                )
            else:
                shell.out.print(log_line(entry), soft_wrap=True)
    if not known:
        raise NotFound(
            f'there is no stage server "{request.peer}" now, and no line of one matches',
            hint="list them with: swarm peers",
        )


def log_line(entry: pb.LogEntry) -> Text:
    """One line for people, in local time."""
    moment = time.strftime("%H:%M:%S", time.localtime(as_date(entry.time_unix_s)))
    who = "scheduler" if not entry.peer else entry.peer + (f" stage {entry.stage}" if entry.stage >= 0 else "")
    # A peer's text must not move the cursor.
    message = "".join(character if character.isprintable() else " " for character in entry.message)
    return Text.assemble(
        (moment, "dim"), " ", (f"{entry.level:<7}", _STYLE.get(entry.level, "")), " ", (f"{who}: ", "cyan"), message
    )


def since_unix_s(text: str, now_unix_s: float) -> float:
    """The moment that --since means: 90s, 10m, 2h, 1d, or an ISO-8601 time (UTC unless it says otherwise)."""
    if (ago_s := seconds(text)) is not None:
        return now_unix_s - ago_s
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f'--since is a time span or an ISO-8601 time, not "{text}"', hint="for example: --since 10m"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
