"""`swarm explain`: tells why a job waits, why a stage server gets little work, and the story of a microbatch."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from client.connection import dial
from client.flags import offers
from client.shell import Shell, finite
from client.views import facts_table
from swarm.errors import UsageError
from swarm.wire import jobs_pb2 as pb

_MICROBATCH = re.compile(r"(\d{1,18}):(\d{1,18})")


def explain(
    context: typer.Context,
    about: Annotated[
        str,
        typer.Argument(
            metavar="JOB|PEER",
            help="Name, id or beginning of an id: of a job or a stage server.",
            autocompletion=offers("jobs_and_peers"),
        ),
    ],
    microbatch: Annotated[
        str,
        typer.Option(
            metavar="STEP:INDEX",
            help="Tell the story of one microbatch: who got it, when and why. Known for the steps under way and the "
            "newest committed ones.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Explain in numbers why a job waits, which stage limits it and which stage servers join, leave or move; or why a
    stage server gets little work or none."""
    shell: Shell = context.obj
    request = pb.ExplainRequest(about=about)
    if microbatch:
        request.microbatch.CopyFrom(microbatch_name(microbatch))
    with dial(shell) as scheduler:
        found = scheduler.call("Explain", request)
    if shell.json:
        shell.data(explanation_values(found))
    else:
        shell.out.print(explanation_table(found), soft_wrap=not shell.out.is_terminal)


def explanation_values(found: pb.Explanation) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "id": found.id,
        "facts": [
            {
                "topic": fact.topic,
                "text": fact.text,
                "numbers": {name: finite(value) for name, value in sorted(fact.numbers.items())},
            }
            for fact in found.facts
        ],
    }


def explanation_table(found: pb.Explanation) -> RenderableType:
    return facts_table(found.facts, ("stage server" if found.kind == "peer" else "job", found.id))


def microbatch_name(text: str) -> pb.MicrobatchName:
    """The microbatch that STEP:INDEX names; UsageError for anything else."""
    found = _MICROBATCH.fullmatch(text)
    if found is None:
        raise UsageError(f'--microbatch is STEP:INDEX, not "{text[:80]}"', hint="for example: --microbatch 12:3")
    return pb.MicrobatchName(step=int(found[1]), index=int(found[2]))
