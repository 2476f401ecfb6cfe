"""Following a job: one line that redraws on a terminal, plain lines elsewhere, JSON Lines for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn

from client.connection import Scheduler
from client.records import Job, raise_unless_succeeded
from client.shell import Shell
from client.views import evaluation_text, job_values, number
from swarm.errors import INTERRUPTED
from swarm.text import counted, duration
from swarm.types import JobState

# Without a terminal: a line per state, and one per this many seconds.
PLAIN_LINE_S = 5.0
ISLANDS_SHOWN = 8


def follow(shell: Shell, scheduler: Scheduler, job: str) -> Job:
    """Show the job until it ends; SchedulerUnreachable after --timeout seconds without an answer."""
    view = Job()
    with _display(shell) as show:
        for view in scheduler.follow(job, shell.say):
            show(view)
    return view


def follow_to_success(shell: Shell, scheduler: Scheduler, job: str, *, commands: str) -> int:
    """Follow a job that was just started; Ctrl-C detaches and shows `commands`. Returns the exit code."""
    try:
        ended = follow(shell, scheduler, job)
    except KeyboardInterrupt:
        shell.say(f"\ndetached: job {job} goes on.   {commands}")
        return INTERRUPTED
    raise_unless_succeeded(ended)
    shell.say(f"job {ended.id} succeeded: weights sha256 {ended.weights_sha256}")
    return 0


def progress_line(view: Job) -> str:
    if view.state != JobState.RUNNING and not view.has_ended:
        hint = f" ({view.hint})" if view.state == JobState.STALLED and view.hint else ""
        return f"{view.state}: {view.reason}{hint}" if view.reason else view.state
    text = f"step {view.step}/{view.steps}"
    if view.step:
        text += f"  loss {number(view.loss)}"
        if view.evaluation_step:
            text += f"  validation {evaluation_text(view)}"
        text += f"  {view.tokens_per_s:.0f} tokens/s"
    if view.step and not view.has_ended:
        text += f"  ETA {duration(view.eta_s)}"
    return text + (f"  {_islands(view)}" if view.islands and not view.has_ended else "")


def _islands(view: Job) -> str:
    """How far the islands at work are, and how often all of them have exchanged; and which are lost."""
    at_work = [island for island in view.islands if not island.is_lost]
    told = [f"island {island.island} lost" for island in view.islands if island.is_lost][:ISLANDS_SHOWN]
    if at_work:
        steps = " ".join(str(island.step) for island in at_work[:ISLANDS_SHOWN])
        more = " ..." if len(at_work) > ISLANDS_SHOWN else ""
        exchanges = counted(min(island.exchanges for island in at_work), "exchange")
        told.insert(0, f"islands at {steps}{more}, {exchanges}")
    return "; ".join(told)


def news(view: Job, reason_before: str) -> str:
    """What has changed about a running job, as one line; empty if nothing.

    Of other states the reason stands in the progress line.
    """
    return f"{view.state}: {view.reason}" if view.state == JobState.RUNNING and view.reason != reason_before else ""


@contextmanager
def _display(shell: Shell) -> Iterator[Callable[[Job], None]]:
    if shell.json:
        yield lambda view: shell.data(job_values(view))
    elif shell.live:
        columns = (TextColumn("{task.fields[name]}"), BarColumn(bar_width=30), TextColumn("{task.description}"))
        with Progress(*columns, console=shell.err, transient=False) as progress:
            task = progress.add_task("", total=None, name="")

            reason = ""

            def redraw(view: Job) -> None:
                nonlocal reason
                if line := news(view, reason):
                    progress.console.print(line, markup=False, highlight=False)
                reason = view.reason
                progress.update(
                    task, total=view.steps, completed=view.step, name=view.id, description=progress_line(view)
                )

            yield redraw
    else:
        yield _plain(shell)


def _plain(shell: Shell) -> Callable[[Job], None]:
    said, said_s, reason = "", -PLAIN_LINE_S, ""

    def show(view: Job) -> None:
        nonlocal said, said_s, reason
        if news_line := news(view, reason):
            shell.say(news_line)
        reason = view.reason
        line, now_s = progress_line(view), time.monotonic()
        stepping = view.state == JobState.RUNNING and said.startswith("step ")
        if line == said or (stepping and now_s - said_s < PLAIN_LINE_S):
            return
        said, said_s = line, now_s
        shell.say(line)

    return show
