"""`swarm peers drain`: take a stage server out of work in order, and wait until it serves no job."""

from __future__ import annotations

import math
import sys
import time

import typer

from client.connection import Scheduler
from client.shell import Shell
from client.views import peer_values
from swarm.errors import INTERRUPTED, DeadlinePassed, SchedulerUnreachable, UsageError
from swarm.types import PeerState
from swarm.wire import jobs_pb2 as pb

LINE_S = 1.0  # between two lines of progress


def drain(shell: Shell, peer: str, *, timeout_s: float, wait: bool) -> int:
    """Let a stage server hand its work over; gives 1 if it was lost before it had.

    DeadlinePassed after `timeout_s`: the hand-over goes on.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"--drain-timeout is a number of seconds above 0, not {timeout_s:g}")
    if not shell.yes and sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm(f"drain {peer}: it gets no work until its stage server is started again?", abort=True, err=True)
    seen: pb.DrainView | None = None
    said_s = -LINE_S
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        try:
            for seen in scheduler.drain(peer, "drained by its user", timeout_s if wait else shell.timeout_s):
                if seen.waits_for and time.monotonic() - said_s >= LINE_S:
                    said_s = time.monotonic()
                    shell.say(f"stage server {seen.peer.id}: {seen.waits_for}")
                if not wait:
                    break
        except DeadlinePassed:
            stays = f"stage server {seen.peer.id}: {seen.waits_for}" if seen is not None else "nothing was heard"
            raise DeadlinePassed(
                f"not drained within {timeout_s:g} s; {stays}",
                hint=f"it goes on; look with: swarm explain {peer}{shell.scheduler_flag}",
            ) from None
        except KeyboardInterrupt:
            shell.say(f"\nthe drain goes on; look with: swarm explain {peer}{shell.scheduler_flag}")
            return INTERRUPTED
    if seen is None:
        raise SchedulerUnreachable(f"the scheduler at {shell.scheduler} ended the stream", hint="drain it again")
    if shell.json:
        shell.data(peer_values(seen.peer))
    if not seen.waits_for:
        shell.say(drained_text(seen.peer))
    return 1 if seen.peer.state == PeerState.GONE else 0


def drained_text(view: pb.PeerView) -> str:
    """What became of a stage server that was to hand its work over."""
    if view.state == PeerState.GONE:
        return f"stage server {view.id} is gone: {view.reason}; others do its uncommitted work again"
    return f"stage server {view.id} serves no job and gets none until it is started again; it can be stopped"
