"""`swarm ca`: shows the authority that signs the swarm's certificates, or begins a new one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from client.connection import dial
from client.shell import Shell
from client.verbs.members.login import check_proved
from swarm.errors import InvalidConfig
from swarm.home import known_data_folder
from swarm.pki.authority import CERTIFICATE_FILE
from swarm.process.lifecycle import lock_folder
from swarm.text import duration
from swarm.wire.members_pb2 import AuthorityRequest


def ca(
    context: typer.Context,
    action: Annotated[
        Literal["show", "new"], typer.Argument(help="show: which there is; new: begin a new one.")
    ] = "show",
    data_dir: Annotated[
        Path | None,
        typer.Option(help="With new: the scheduler's --data-dir on this machine.", show_default="the scheduler's own"),
    ] = None,
) -> int:
    """Show the authority that signs certificates, or begin a new one, such as before it ends after ten years.

    For a new one stop the scheduler first. Its keys are put aside, its next start makes others, and everybody joins
    again with a new token. Jobs and their checkpoints stay."""
    shell: Shell = context.obj
    if action == "new":
        _begin(shell, data_dir or known_data_folder() / "scheduler")
    else:
        _show(shell)
    return 0


def _show(shell: Shell) -> None:
    check_proved(shell)
    with dial(shell) as scheduler:
        view = scheduler.call("ShowAuthority", AuthorityRequest())
    if shell.json:
        values = {"swarm": view.swarm, "pins": list(view.pins), "ca_pem": view.ca_pem.decode()}
        shell.data(values | {"ends_unix_s": view.ends_unix_s})
        return
    shell.out.print(f"swarm {view.swarm}", markup=False, highlight=False)
    left = duration(view.ends_unix_s - time.time())
    shell.out.print(f"authority {' '.join(view.pins)} ends in {left}", markup=False, highlight=False)


def _begin(shell: Shell, folder: Path) -> None:
    """Put the authority aside; NotAllowed while the scheduler runs, InvalidConfig if there is none."""
    pki = folder / "pki"
    if not (pki / CERTIFICATE_FILE).exists():
        raise InvalidConfig(f"{pki} holds no authority", hint="name the scheduler's folder: --data-dir DIR")
    shell.confirm(f"put the keys in {pki} aside, so that everybody has to join again")
    with lock_folder(folder):
        aside = folder / f"pki-until-{time.time():.0f}"
        try:
            pki.rename(aside)
        except OSError as error:
            raise InvalidConfig(f"{pki} cannot be put aside: {error.strerror or error}") from None
    if shell.json:
        shell.data({"aside": str(aside)})
    else:
        shell.say(f"the keys of the swarm lie in {aside} now; start the scheduler, then let everybody join again")
