"""`swarm ca`: shows the authority that signs the swarm's certificates, or replaces it."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from client.connection import dial
from client.shell import Shell
from client.verbs.members.login import check_proved
from swarm.text import duration, utc
from swarm.wire import members_pb2 as pb


def ca(
    context: typer.Context,
    action: Annotated[
        Literal["show", "rotate", "retire"],
        typer.Argument(help="show: which there are; rotate: make the next one; retire: let the old one go early."),
    ] = "show",
) -> int:
    """Show the authority that signs certificates, or put another one in its place while jobs run.

    After rotate the rest happens by itself. Members learn of the next authority when they renew their certificates. It
    signs once all members know it, and the old one is dropped when its last certificate has ended. For a stolen key of
    the authority this is too slow: such a swarm must be set up anew."""
    shell: Shell = context.obj
    check_proved(shell)
    with dial(shell) as scheduler:
        if action == "rotate":
            view = scheduler.rotate_authority()
        else:
            view = scheduler.retire_authority() if action == "retire" else scheduler.authority()
    if shell.json:
        shell.data(_values(view))
        return 0
    for line in _lines(view, time.time()):
        shell.out.print(line, markup=False, highlight=False)
    return 0


def _lines(view: pb.AuthorityView, now_unix_s: float) -> list[str]:
    signs, *others = view.pins
    lines = [f"swarm {view.swarm}", f"authority {signs} signs; it ends in {duration(view.ends_unix_s - now_unix_s)}"]
    for other in others:
        told = "signs from" if view.phase == "shown" else "is trusted until"
        at_unix_s = view.signs_unix_s if view.phase == "shown" else view.leaves_unix_s
        lines.append(f"authority {other} {told} {utc(at_unix_s)} (in {duration(at_unix_s - now_unix_s)})")
    match view.phase:
        case "shown":
            lines.append("until then each member gets to know it by renewing; who stays away joins anew")
        case "signs":
            lines.append(f"nobody has a good certificate of the old one from {utc(view.ended_unix_s)}")
        case "ended":
            lines.append("nobody has a good certificate of the old one, but older tokens name it: swarm ca retire")
    return lines


def _values(view: pb.AuthorityView) -> dict[str, object]:
    return {
        "swarm": view.swarm,
        "phase": view.phase,
        "pins": list(view.pins),
        "ca_pem": view.ca_pem.decode(),
        "ends_unix_s": view.ends_unix_s,
        "signs_unix_s": view.signs_unix_s or None,
        "ended_unix_s": view.ended_unix_s or None,
        "leaves_unix_s": view.leaves_unix_s or None,
    }
