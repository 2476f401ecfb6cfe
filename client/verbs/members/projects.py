"""`swarm project`: manages projects, whose people see each other's jobs and share a quota."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.text import Text

from client.connection import dial
from client.records import DAY_S, Usage
from client.shell import Shell
from client.views import FittedTable
from swarm.errors import UsageError
from swarm.limits import USAGE_DAYS_MAX
from swarm.pki.names import check_name
from swarm.text import parse_size, size, utc
from swarm.wire import members_pb2 as pb


def project(
    context: typer.Context,
    action: Annotated[
        Literal["ls", "create", "set", "rm", "usage"],
        typer.Argument(
            help="ls: those that you see; create NAME; set NAME; rm NAME: one that nothing is of; "
            "usage [NAME]: what each used, or one by day and owner."
        ),
    ] = "ls",
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="create, set, rm, usage: which one.", show_default=False)
    ] = "",
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
    days: Annotated[int, typer.Option(min=1, max=USAGE_DAYS_MAX, help="usage: of how many days, with today.")] = 30,
) -> int:
    """List projects, make one, change its quota, remove it, or show what they used.

    People see the jobs of their project only; admins see all."""
    shell: Shell = context.obj
    if action == "ls":
        return _show(shell)
    if action == "usage":
        return _usage(shell, name and check_name(name), days)
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


def _usage(shell: Shell, name: str, days: int) -> int:
    with dial(shell) as scheduler:
        rows = scheduler.project_usage(name, days)
    if shell.json:
        shell.data([_used(row) for row in rows])
        return 0
    used = [(f"{row.peer_s / 3600:.1f}", f"{row.tokens:,.0f}", size(row.relay_bytes)) for row in rows]
    about = [(_day(row), row.owner) if name else (row.project,) for row in rows]
    columns = (*(("DAY", "OWNER") if name else ("PROJECT",)), "STAGE SERVER HOURS", "TOKENS", "THROUGH RELAYS")
    cells = [tuple(map(Text, (*left, *right))) for left, right in zip(about, used, strict=True)]
    shell.out.print(FittedTable(columns, cells, dropped_first=()))
    return 0


def _used(row: Usage) -> dict[str, object]:
    about = {"day": _day(row), "owner": row.owner} if row.day else {}
    counts = {"tokens": int(row.tokens), "relay_bytes": int(row.relay_bytes)}
    return {"project": row.project, **about, "stage_server_seconds": round(row.peer_s, 1), **counts}


def _day(row: Usage) -> str:
    return utc(row.day * DAY_S)[: len("2026-01-31")]


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
