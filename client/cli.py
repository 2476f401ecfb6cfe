"""The `swarm` command: registers its verbs and prints their errors. Each verb's own flags stand in its module."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from client.flags import Root, Verb
from client.shell import OutputFormat, Shell, product
from swarm.errors import INTERRUPTED, SwarmError, UsageError
from swarm.process.faults import is_bug, told
from swarm.process.lifecycle import GONE_FLAGS, HELP, give_stdout_up, print_error, usage_error
from swarm.process.startup import take_any_text


@dataclass(frozen=True, slots=True)
class VerbEntry:
    """A verb as `swarm --help` lists it; `module` has a function of the verb's name, or is a program of its own."""

    module: str
    words: str
    program: bool = False


# A verb's module is imported when the verb is called: `swarm --help` needs none of them.
VERB_GROUPS = {
    "Start": {
        "up": VerbEntry("client.up.up", "Run a whole swarm on this machine."),
        "submit": VerbEntry("client.verbs.submit", "Send a job to the scheduler and follow it."),
        "plan": VerbEntry("scheduler.planning", "Say how a job is best cut and placed.", program=True),
        "simulate": VerbEntry(
            "scheduler.planning.simulate", "Predict how a job does while machines fail.", program=True
        ),
        "doctor": VerbEntry("client.verbs.doctor", "Find what keeps a swarm from working, and say what to do."),
        "version": VerbEntry("client.verbs.watching.overview", "Show the versions of this command and the scheduler."),
    },
    "Watch": {
        "ls": VerbEntry("client.verbs.watching.overview", "List jobs."),
        "status": VerbEntry("client.verbs.watching.overview", "Show one job."),
        "top": VerbEntry("client.verbs.watching.top", "Show jobs, stages and stage servers, live."),
        "wait": VerbEntry("client.verbs.watching.wait", "Wait until jobs have ended; a command can follow."),
        "explain": VerbEntry("client.verbs.watching.explain", "Say why a job waits or a stage server is idle."),
        "history": VerbEntry("client.verbs.watching.history", "Show the loss of each step, as a table, CSV or JSON."),
        "logs": VerbEntry("client.verbs.watching.logs", "Show what the processes of a job logged."),
        "trace": VerbEntry("client.verbs.watching.trace", "Write down where the time of a step goes."),
        "track": VerbEntry("client.verbs.watching.track", "Write the steps of a job for TensorBoard, MLflow or W&B."),
        "islands": VerbEntry("client.verbs.watching.islands", "Show what each island of a job does and waits for."),
    },
    "Change": {
        "pause": VerbEntry("client.verbs.control", "Save a job and free its stage servers."),
        "resume": VerbEntry("client.verbs.control", "Continue a job from a checkpoint."),
        "cancel": VerbEntry("client.verbs.control", "Save what was trained, then stop jobs."),
        "checkpoints": VerbEntry("client.verbs.checkpoints", "List the checkpoints of a job."),
        "pull": VerbEntry("client.verbs.pull", "Fetch the model of a job as a Hugging Face folder."),
        "rm": VerbEntry("client.verbs.removal", "Remove jobs that have ended, with all that they made."),
        "gc": VerbEntry("client.verbs.removal", "Free disk space from what no job needs."),
    },
    "Machines": {
        "peers": VerbEntry("client.verbs.peers", "List stage servers, or drain one."),
    },
    "People": {
        "login": VerbEntry("client.verbs.members.login", "Join a swarm as a person, with a token."),
        "token": VerbEntry("client.verbs.members.login", "Let others join: make, list or revoke tokens."),
        "identity": VerbEntry("client.verbs.members.login", "List members, show yourself, or take a member out."),
        "ca": VerbEntry("client.verbs.members.ca", "Show the swarm's authority, or begin a new one."),
        "audit": VerbEntry("client.verbs.members.audit", "Show what was asked of a scheduler here."),
    },
    "Programs": {
        "scheduler": VerbEntry("scheduler", "Run the scheduler in this process.", program=True),
        "stage-server": VerbEntry("stage_server", "Serve a stage with one device.", program=True),
        "relay": VerbEntry("swarm.relay", "Carry bytes to stage servers that can only dial out.", program=True),
        "train-local": VerbEntry("swarm.reference", "Train a job in this one process.", program=True),
    },
}
VERBS = {name: entry for verbs in VERB_GROUPS.values() for name, entry in verbs.items()}
ALIASES = {"stop": "cancel"}
_ONE_AUTHORITY = "stop the scheduler, begin a new authority with swarm ca new, and let everybody join again"
# What earlier versions had, and what to do instead.
GONE = {
    "project": GONE_FLAGS["--project"],
    "chaos": GONE_FLAGS["--allow-chaos"],
    "ca rotate": _ONE_AUTHORITY,
    "ca retire": _ONE_AUTHORITY,
}


class Swarm(Root):
    """The verbs by name. They are listed from `VERBS`, and loaded when they are called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (args[0], " ".join(args[:2])):
            if words in GONE:
                raise UsageError(f"there is no swarm {words} any more", hint=GONE[words])
        name, command, rest = super().resolve_command(ctx, [ALIASES.get(args[0], args[0]), *args[1:]])
        if name in VERBS and not VERBS[name].program:
            one = typer.Typer(add_completion=False, rich_markup_mode=None)
            one.command(name, cls=Verb, context_settings=HELP)(getattr(import_module(VERBS[name].module), name))
            command = typer.main.get_command(one)
        return name, command, rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the verbs in groups, and the flags behind them."""
        width = max(map(len, VERBS))
        for title, verbs in VERB_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), entry.words) for name, entry in verbs.items()])
        super().format_options(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Nothing: they are listed already."""


app = typer.Typer(
    name="swarm",
    cls=Swarm,
    help="New here? swarm up --demo\n\n"
    "Train one large model through pools of stage servers on unreliable, unequal machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
    rich_markup_mode=None,
)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Errors are lines on stderr, tracebacks only with -vv."""
    take_any_text()
    shell = _shell_for_errors(arguments)
    try:
        return int(app(args=arguments or ["--help"], prog_name="swarm", standalone_mode=False, obj=shell) or 0)
    except TyperException as error:
        context = getattr(error, "ctx", None)
        complaint = usage_error(error, "swarm" if context is None else context.command_path)
        return _failed(shell, complaint)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SwarmError as error:
        return _failed(shell, error)
    except BrokenPipeError:  # the reader has what it wanted
        give_stdout_up()
        return 1
    except Exception as error:
        one = told(error)
        if is_bug(one) and shell.verbosity <= 1:
            one.hint += "; see where it happened with: -vv"
        return _failed(shell, one, error)


def _shell_for_errors(arguments: list[str]) -> Shell:
    """A shell that knows -v and -o already: wrong flags are reported before the command line is understood."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    flags.add_argument("-v", "--verbose", action="count", default=0)
    flags.add_argument("-o", "--output", choices=("table", "json"), default="table")
    try:
        known, _ = flags.parse_known_args(arguments)
    except argparse.ArgumentError:
        return Shell()
    return Shell(verbosity=known.verbose, output=cast(OutputFormat, known.output))


def _failed(shell: Shell, error: SwarmError, cause: BaseException | None = None) -> int:
    if shell.verbosity > 1:
        cause = cause or error
        sys.excepthook(type(cause), cause, cause.__traceback__)
    try:
        shell.error(error)
        sys.stdout.flush()
    except OSError:  # a full disk takes no JSON either
        give_stdout_up()
        print_error(error)
    return error.exit_code


# What is registered ---------------------------------------------------------------------------------------------------


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"swarm {product()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None: ...


def _become(context: typer.Context) -> NoReturn:
    """Replace this process by the program, which reads its flags itself; UsageError if some stand before its name."""
    above: Any = context.parent
    if before := above.command.given(above):
        hint = f"swarm {context.info_name} --help lists its flags"
        raise UsageError(f"{before[0]} stands before {context.info_name}, which does not read it there", hint=hint)
    sys.stdout.flush()
    # -P: a file of the user's called scheduler.py or random.py must not run instead.
    command = [sys.executable, "-P", "-m", VERBS[str(context.info_name)].module, *context.args]
    os.execv(sys.executable, command)


class Program(TyperCommand):
    """A verb that is a program of its own: the client neither imports it nor reads its flags."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args


for _name, _entry in VERBS.items():
    app.command(_name, cls=Program, help=_entry.words)(_become)
