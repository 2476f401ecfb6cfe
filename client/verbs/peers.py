"""`swarm peers`: list the stage servers, drain one and wait until it serves no job, or give it stages again; or write
what is known of them as a pool for `swarm plan`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import typer

from client.connection import dial
from client.flags import offers
from client.records import Peer, record
from client.shell import Shell
from client.views import links_table, peer_values, peers_table
from swarm.errors import INTERRUPTED, DeadlinePassed, SchedulerUnreachable, UsageError
from swarm.limits import STAGES_MAX
from swarm.types import PeerState
from swarm.wire import jobs_pb2 as pb

RELAY = "relay"  # the state of those that are none, but carry their bytes
NOT_IN_POOL = (PeerState.GONE, PeerState.DRAINING, PeerState.QUARANTINED, RELAY)  # they get no stage
SPEED_MIN = 1e6  # a pool takes no lower speed
LINE_S = 1.0  # between two lines of progress
LINE_MBIT_MIN = 0.001  # a slower line is left out of a pool: nothing trains over it


def peers(
    context: typer.Context,
    action: Annotated[
        Literal["ls", "drain", "undrain", "pool"],
        typer.Argument(
            help="ls: list them; drain PEER: take one out; undrain PEER: give it stages again; pool: print what is "
            "known of them as a file for swarm plan."
        ),
    ] = "ls",
    peer: Annotated[
        str,
        typer.Argument(
            metavar="[PEER]",
            help="drain, undrain: id of a stage server, or its beginning.",
            show_default=False,
            autocompletion=offers("peers"),
        ),
    ] = "",
    stage: Annotated[int, typer.Option(min=-1, max=STAGES_MAX, help="ls: only this stage.", show_default="all")] = -1,
    state: Annotated[str, typer.Option(help="ls: only peers in this state.", show_default=False)] = "",
    drain_timeout: Annotated[
        float, typer.Option(help="drain: wait this many seconds, then exit 8; the hand-over goes on.")
    ] = 60.0,
    links: Annotated[
        bool,
        typer.Option("--links", help="ls: how fast tensors lately went from one to another, the slowest first."),
    ] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="drain: only ask, do not wait.")] = False,
) -> int:
    """List stage servers, or drain one. A drained stage server finishes its work, hands its stage over so that no work
    is repeated, and gets none until it is undrained or restarted. The last one of a stage stays until another has
    joined."""
    shell: Shell = context.obj
    if action in ("drain", "undrain") and not peer:
        raise UsageError("missing argument PEER", hint="list them with: swarm peers")
    if action == "undrain":
        undrain(shell, peer)
        return 0
    if action == "drain":
        return drain(shell, peer, timeout_s=drain_timeout, wait=not no_wait)
    if peer:
        raise UsageError(f'peers {action} takes no "{peer}"', hint=f"about one stage server: swarm explain {peer}")
    if action == "pool":
        with dial(shell) as scheduler:
            views = [view for view in scheduler.peers() if view.state not in NOT_IN_POOL]
        print("\n".join(pool_lines(views)))
        return 0
    states = [*PeerState, RELAY]
    if state and state not in states:
        raise UsageError(f'there is no state "{state}" of stage servers', hint=f"one of: {', '.join(states)}")
    show_peers(shell, stage, state, links=links)
    return 0


def show_peers(shell: Shell, stage: int, state: str, *, links: bool) -> None:
    with dial(shell) as scheduler:
        views = scheduler.peers(state=state, stage=stage)
    if shell.json:
        shell.data([peer_values(view) for view in views])
    elif links and not any(view.links for view in views):
        shell.say("no link was measured yet: stage servers tell every ten seconds, while a job of two stages trains")
    elif links:
        shell.out.print(links_table(views))
    elif views:
        shell.out.print(peers_table(views))
    elif state or stage >= 0:
        shell.say("no such stage servers; all: swarm peers")
    else:
        shell.say(f"no stage servers; start one with: swarm stage-server --scheduler {shell.scheduler}")


def pool_lines(peers: Sequence[Peer]) -> Iterator[str]:
    """A pool file (scheduler/planning/pool.py) of these stage servers; what is not known is commented out.

    A rate that was seen on a link is no limit of the line.
    """
    yield 'schema = "swarm.pool/1"'
    for peer in sorted(peers, key=lambda peer: (peer.site, peer.id)):
        yield "\n[[peer]]"
        yield f'name = "{peer.id}"'
        yield f'device = "{peer.device.partition(":")[0] or "cpu"}"'
        yield f'memory = "{peer.memory_bytes}B"' if peer.memory_bytes else '# memory = "24GiB"'
        yield f'host_memory = "{peer.host_bytes}B"' if peer.host_bytes else '# host_memory = "64GiB"'
        yield f'site = "{peer.site}"' if peer.site else '# site = "oregon"'
        speed = peer.multiply_adds_per_s
        yield (
            f"speed = {speed:.4g}"
            if speed >= SPEED_MIN
            else "# speed = 2.1e12  # multiply-adds of a forward per second"
        )
        seen = max((8e-6 * link.bytes_per_s for link in peer.links), default=0.0)
        up, down = 8e-6 * peer.up_bytes_per_s, 8e-6 * peer.down_bytes_per_s
        if up >= LINE_MBIT_MIN:
            yield f'up = "{max(up, seen):.3f}Mbit"'
        else:
            yield f'# up = "{seen:.1f}Mbit"  # at least: this was seen' if seen else '# up = "200Mbit"'
        yield f'down = "{down:.3f}Mbit"' if down >= LINE_MBIT_MIN else '# down = "200Mbit"'
        yield "# price_per_hour = 0.35"
    yield '\n# [links]\n# delay_ms = "delay.csv"\n# bandwidth_gbps = "bandwidth.csv"\n# measured = "YYYY-MM-DD"'


def drain(shell: Shell, peer: str, *, timeout_s: float, wait: bool) -> int:
    """Let a stage server hand its work over; returns 1 if it was lost before that.

    DeadlinePassed after `timeout_s`: the hand-over goes on.
    """
    if not (math.isfinite(timeout_s) and timeout_s > 0):
        raise UsageError(f"--drain-timeout is a number of seconds above 0, not {timeout_s:g}")
    if not shell.yes and sys.stdin.isatty() and sys.stderr.isatty():
        typer.confirm(f"drain {peer}: it gets no work until it is undrained or started again?", abort=True, err=True)
    seen: pb.DrainView | None = None
    said_s = -LINE_S
    with dial(shell) as scheduler:
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
    drained = record(Peer, seen.peer)
    if shell.json:
        shell.data(peer_values(drained))
    if not seen.waits_for:
        shell.say(drained_text(drained))
    return 1 if drained.state == PeerState.GONE else 0


def undrain(shell: Shell, peer: str) -> None:
    """Give a drained stage server stages again; NotAllowed while it hands its work over."""
    with dial(shell) as scheduler:
        view = record(Peer, scheduler.call("Undrain", pb.UndrainRequest(peer=peer)))
    if shell.json:
        shell.data(peer_values(view))
    shell.say(f"stage server {view.id} is given stages again")


def drained_text(view: Peer) -> str:
    if view.state == PeerState.GONE:
        return f"stage server {view.id} is gone: {view.reason}; others do its uncommitted work again"
    return (
        f"stage server {view.id} serves no job and gets none until it is undrained or started again; it can be stopped"
    )
