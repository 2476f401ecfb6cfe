"""`swarm top`: shows the swarm live."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated

import typer
from rich.live import Live

from client.board import CURVE_COLUMNS, Board, board_values, board_view
from client.connection import Scheduler, dial
from client.flags import offers
from client.records import Explanation, Job, record
from client.shell import Shell
from swarm.errors import SchedulerUnreachable, SwarmError, UsageError
from swarm.limits import JOBS_LISTED_MAX
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb


def top(
    context: typer.Context,
    job: Annotated[
        str,
        typer.Argument(
            metavar="[JOB]",
            help="The job whose stages are shown; by default the newest one at work.",
            show_default=False,
            autocompletion=offers("jobs"),
        ),
    ] = "",
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once; without a terminal this is the default.")] = False,
) -> None:
    """Show jobs, the stages and replicas of one of them, its loss, and why it is as it is. Ctrl-C ends it."""
    shell: Shell = context.obj
    with dial(shell) as scheduler:
        if once or shell.json or not shell.out.is_terminal:
            board = look(scheduler, job)
            if shell.json:
                shell.data(board_values(board))
            else:
                shell.out.print(board_view(board))
            return
        _live(shell, scheduler, job, interval)


def look(scheduler: Scheduler, name: str) -> Board:
    """The swarm now."""
    jobs, troubles = scheduler.jobs(all=False, limit=JOBS_LISTED_MAX)
    focus = scheduler.get(name) if name else _newest_at_work(jobs)
    board = Board(scheduler.address, time.time(), jobs, troubles, scheduler.peers())
    if focus is None:
        return board
    every = max(1, focus.step // CURVE_COLUMNS)
    steps = list(scheduler.history(focus.id, every))
    why = record(Explanation, scheduler.call("Explain", pb.ExplainRequest(about=focus.id)))
    return replace(board, focus=focus, steps=steps, why=why)


def _newest_at_work(jobs: list[Job]) -> Job | None:
    running = [job for job in jobs if job.state == JobState.RUNNING]
    return next(iter(running or jobs), None)


def _live(shell: Shell, scheduler: Scheduler, job: str, interval_s: float) -> None:
    """Redraw until Ctrl-C; SchedulerUnreachable once it has not answered for a call's deadline."""
    board = look(scheduler, job)  # errors about the job are said before the screen is taken
    seen_s = time.monotonic()
    with Live(board_view(board), console=shell.out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    board = look(scheduler, job)
                    seen_s = time.monotonic()
                except UsageError:
                    raise
                except SwarmError as error:
                    silent_s = time.monotonic() - seen_s
                    if silent_s > shell.timeout_s or not isinstance(error, SchedulerUnreachable):
                        raise
                    words = (f"it has not answered for {silent_s:.0f} s", *board.troubles)
                    live.update(board_view(replace(board, troubles=words)), refresh=True)
                    continue
                live.update(board_view(board), refresh=True)
        except KeyboardInterrupt:
            return
