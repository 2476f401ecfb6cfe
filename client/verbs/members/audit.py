"""`swarm audit`: shows the audit log of a scheduler on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from client.shell import Shell, local
from client.views import FittedTable
from swarm.errors import InvalidConfig
from swarm.home import known_data_folder
from swarm.process.audit import lines_of, logs
from swarm.text import printable

_COLUMNS = ("TIME", "ACTOR", "ACTION", "TARGET", "RESULT")


def audit(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="audit.jsonl of a scheduler's --data-dir; with it admin.jsonl.",
            show_default=False,
        ),
    ] = None,
    actor: Annotated[str, typer.Option(help="Only lines whose actor contains this.")] = "",
    last: Annotated[int, typer.Option(min=1, help="How many lines, the newest.")] = 50,
) -> int:
    """Show the calls of people and machines to a scheduler on this machine, and the refusals."""
    shell: Shell = context.obj
    file = file or known_data_folder() / "scheduler" / "audit.jsonl"
    try:
        return _show(shell, file, actor, last)
    except OSError as error:
        raise InvalidConfig(
            f"{file} cannot be read: {error.strerror or error}",
            hint="name the audit.jsonl in the scheduler's --data-dir",
        ) from error


def _show(shell: Shell, file: Path, actor: str, last: int) -> int:
    lines = _newest(file, actor, last)
    beside = file.with_name("admin.jsonl")
    if file.name == "audit.jsonl" and beside.exists():
        lines = sorted([*lines, *_newest(beside, actor, last)], key=_at_s)
    lines = lines[-last:]
    if shell.json:
        shell.data(lines)
    elif not lines:
        shell.say("nothing was asked yet")
    else:
        shell.out.print(FittedTable(_COLUMNS, list(map(_cells, lines)), dropped_first=("TARGET",)))
    return 0


def _newest(file: Path, actor: str, last: int) -> list[dict[str, Any]]:
    """The newest lines of a log, in order."""
    lines: list[dict[str, Any]] = []
    for log in reversed(logs(file)):  # the newest first: older files are read only if they are needed
        parsed = [line for line in map(_parsed, lines_of(log)) if line]
        lines = [line for line in parsed if actor in str(line.get("actor", ""))] + lines
        if len(lines) >= last:
            break
    return lines[-last:]


def _at_s(line: dict[str, Any]) -> float:
    at_s = line.get("time_unix_s")
    return at_s if isinstance(at_s, int | float) else 0.0


def _parsed(text: str) -> dict[str, Any]:
    """The line as values; empty if it is not JSON."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return line if isinstance(line, dict) else {}


def _cells(line: dict[str, Any]) -> tuple[Text, ...]:
    at_s = line.get("time_unix_s")
    shown = local(at_s) if isinstance(at_s, int | float) else "-"
    return (
        Text(shown),
        *(Text(printable(str(line.get(key) or "-"))) for key in ("actor", "action", "target", "result")),
    )
