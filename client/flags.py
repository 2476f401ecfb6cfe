"""The flags that all verbs share, accepted before and after the verb, and the arguments that several verbs take."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, Literal, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from client.shell import DEFAULT_SCHEDULER, DEFAULT_TIMEOUT_S, Shell
from swarm.process.lifecycle import given_as_flag


def offers(kind: str) -> Callable[[typer.Context, str], list[str]]:
    """A completion by one of the functions of client/completion.py. That module is loaded by TAB only."""

    def offer(context: typer.Context, incomplete: str) -> list[str]:
        above = context.parent.params if context.parent is not None else {}
        values = above | {name: value for name, value in context.params.items() if value}
        if "job" not in values and context.args:  # behind a flag whose value is still to come
            values["job"] = context.args[0]
        found: list[str] = getattr(import_module("client.completion"), kind)(values, incomplete)
        return found

    return offer


JobName: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="Name, id or beginning of an id; for admins also PROJECT/NAME.",
        autocompletion=offers("jobs"),
    ),
]
JobNames: TypeAlias = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB...",
        help="Names, ids or beginnings of ids; for admins also PROJECT/NAME.",
        autocompletion=offers("jobs"),
    ),
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
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            "-p",
            metavar="NAME",
            envvar="SWARM_PROFILE",
            help="Take these flags from [profile.NAME] of the user's config file.",
            show_default="default",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            envvar="SWARM_CONFIG",
            help="The config file.",
            show_default="config.toml in the user's config folder",
        ),
    ] = None,
) -> None:
    shell: Shell = context.obj
    shell.scheduler_is_flag |= given_as_flag(context, "scheduler")
    shell.profile_is_flag |= given_as_flag(context, "profile")
    shell.verbosity = max(shell.verbosity, verbose)
    shell.take(scheduler=scheduler, output=output, timeout_s=timeout, insecure=insecure)
    shell.take(profile=profile, config=config, quiet=quiet, yes=yes, no_color=no_color)


def _shared_command() -> Any:
    one = typer.Typer(add_completion=False)
    one.command()(_shared_flags)
    return typer.main.get_command(one)


def _apply(context: Any, shared: Any) -> None:
    """Move the values of the shared flags from the verb's into the shell."""
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

    def given(self, ctx: Any) -> list[str]:
        """The shared flags that stand before the verb."""
        return [option.opts[0] for option in self._shared.params if given_as_flag(ctx, option.name)]


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
        ctx.obj.log()
        return super().invoke(ctx)
