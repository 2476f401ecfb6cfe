"""The flags that all verbs share, accepted before and after the verb, and the arguments that several verbs take."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from client.shell import DEFAULT_SCHEDULER, DEFAULT_TIMEOUT_S, Shell
from swarm.process.lifecycle import given_as_flag

HELP = {"help_option_names": ["-h", "--help"]}

JobName: TypeAlias = Annotated[
    str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id; for admins also PROJECT/NAME.")
]
JobNames: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="JOB...", help="Names, ids or beginnings of ids; for admins also PROJECT/NAME.")
]
Detach: TypeAlias = Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the job.")]


def _shared_flags(
    context: typer.Context,
    scheduler: Annotated[
        str | None,
        typer.Option(
            "--scheduler",
            metavar="HOST:PORT",
            envvar="SWARM_SCHEDULER",
            help=f"Scheduler to use (default {DEFAULT_SCHEDULER}).",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Literal["table", "json"] | None,
        typer.Option(
            "--output", "-o", envvar="SWARM_OUTPUT", help="How to print data (default table).", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            envvar="SWARM_TIMEOUT",
            help=f"Seconds per call (default {DEFAULT_TIMEOUT_S:g}).",
            show_default=False,
        ),
    ] = None,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; -vv: tracebacks.")
    ] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No messages, only data and errors.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", envvar="SWARM_INSECURE", help="Speak plaintext, as a scheduler with --insecure does."
        ),
    ] = False,
) -> None:
    shell: Shell = context.obj
    if scheduler is not None:
        shell.scheduler = scheduler
    shell.scheduler_is_flag |= given_as_flag(context, "scheduler")
    if output is not None:
        shell.output = output
    if timeout is not None:
        shell.timeout_s = timeout
    shell.verbosity = max(shell.verbosity, verbose)
    shell.quiet |= quiet
    shell.yes |= yes
    shell.no_color |= no_color
    shell.insecure |= insecure


def _shared_command() -> Any:
    one = typer.Typer(add_completion=False)
    one.command()(_shared_flags)
    return typer.main.get_command(one)


def _apply(context: Any, shared: Any) -> None:
    """Move the values of the shared flags from those of the verb into the shell."""
    values = {option.name: context.params.pop(option.name) for option in shared.params}
    context.invoke(shared.callback, **values)


class Root(TyperGroup):
    """`swarm` itself: takes the shared flags from the command line and from the environment."""

    def __init__(self, *, params: list[Any], **settings: Any) -> None:
        self._shared = _shared_command()
        super().__init__(params=[*self._shared.params, *params], **settings)

    def invoke(self, ctx: Any) -> Any:
        _apply(ctx, self._shared)
        return super().invoke(ctx)


class Verb(TyperCommand):
    """A verb: takes the shared flags beside its own. They win over those before the verb."""

    def __init__(self, name: str | None, *, params: list[Any], **settings: Any) -> None:
        self._shared = _shared_command()
        for option in self._shared.params:
            option.envvar = None  # read once, by the root: a flag before the verb must win over it
            option.hidden |= name == "up" and option.name == "scheduler"  # `up` refuses it: it starts its own
        super().__init__(name, params=[*params, *self._shared.params], **settings)

    def invoke(self, ctx: Any) -> Any:
        _apply(ctx, self._shared)
        ctx.obj.settle()
        return super().invoke(ctx)
