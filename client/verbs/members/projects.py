"""`swarm project`: manages projects, whose people see each other's jobs and share a quota."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.text import Text

from client.connection import dial
from client.shell import Shell
from client.views import FittedTable
from swarm.errors import UsageError
from swarm.pki.names import check_name
from swarm.text import parse_size, size
from swarm.wire import members_pb2 as pb


def project(
    context: typer.Context,
    action: Annotated[
        Literal["ls", "create", "set", "rm"],
        typer.Argument(help="ls: those that you see; create NAME; set NAME; rm NAME: one that nothing is of."),
    ] = "ls",
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="create, set, rm: which one.", show_default=False)] = "",
    quota_jobs: Annotated[
        int | None,
        typer.Option(min=0, max=2**31 - 1, help="Jobs that may be open at a time; 0: any number.", show_default=False),
    ] = None,
    quota_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Uploads that the scheduler holds, such as 200GiB; 0: any number.", show_default=False
        ),
    ] = None,
    quota_peers: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**31 - 1, help="Stage servers that serve its jobs at a time; 0: any number.", show_default=False
        ),
    ] = None,
) -> int:
    """List projects, make one, change its quota, or remove it.

    People see the jobs of their project only; admins see all."""
    shell: Shell = context.obj
    if action == "ls":
        return _show(shell)
    if not name:
        raise UsageError("missing argument NAME", hint="list them with: swarm project ls")
    if action == "rm":
        return _remove(shell, check_name(name))
    request = pb.ProjectRequest(
        name=check_name(name),
        quota_jobs=quota_jobs,
        quota_peers=quota_peers,
        quota_bytes=None if quota_bytes is None else _bytes(quota_bytes),
    )
    with dial(shell) as scheduler:
        made = scheduler.create_project(request) if action == "create" else scheduler.set_project(request)
    if shell.json:
        shell.data(_values(made))
    else:
        shell.out.print(_table([made]))
    if action == "create":
        shell.say(f"let somebody in with: swarm token create --role submitter --project {made.name}")
    return 0


def _remove(shell: Shell, name: str) -> int:
    with dial(shell) as scheduler:
        removed = scheduler.remove_project(name)
    if shell.json:
        shell.data(_values(removed))
    shell.say(f"project {removed.name} is gone; uploads that no job names go within a day")
    return 0


def _show(shell: Shell) -> int:
    with dial(shell) as scheduler:
        projects = scheduler.projects()
    if shell.json:
        shell.data([_values(one) for one in projects])
    else:
        shell.out.print(_table(projects))
    return 0


def _bytes(text: str) -> int:
    """The bytes of --quota-bytes; UsageError if it is no size."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--quota-bytes {error}") from None


def _values(one: pb.ProjectView) -> dict[str, object]:
    return {
        "name": one.name,
        "open_jobs": one.open_jobs,
        "quota_jobs": one.quota_jobs or None,
        "upload_bytes": one.upload_bytes,
        "quota_bytes": one.quota_bytes or None,
        "stage_servers": one.peers,
        "quota_stage_servers": one.quota_peers or None,
    }


def _table(projects: list[pb.ProjectView]) -> FittedTable:
    rows = []
    for one in projects:
        jobs = f"{one.open_jobs} of {one.quota_jobs}" if one.quota_jobs else f"{one.open_jobs}"
        held = size(one.upload_bytes)
        peers = f"{one.peers} of {one.quota_peers}" if one.quota_peers else f"{one.peers}"
        rows.append((one.name, jobs, peers, f"{held} of {size(one.quota_bytes)}" if one.quota_bytes else held))
    columns = ("PROJECT", "OPEN JOBS", "STAGE SERVERS", "UPLOADS")
    return FittedTable(columns, [tuple(map(Text, row)) for row in rows], dropped_first=())
