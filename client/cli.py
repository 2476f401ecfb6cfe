"""The `swarm` command: its verbs and flags. What a verb does is in the module named for it."""

from __future__ import annotations

import asyncio
import errno
import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import platformdirs
import typer
from typer.exceptions import TyperException

from client.connection import Scheduler
from client.shell import DEFAULT_SCHEDULER, DEFAULT_TIMEOUT_S, Shell
from client.up.fleet import UpOptions, up_and_wait
from client.verbs.chaos import chaos
from client.verbs.checkpoints import pause, resume, show_checkpoints
from client.verbs.example import example_job
from client.verbs.explain import explain
from client.verbs.follow import follow, raise_unless_succeeded
from client.verbs.logs import show_logs, since_unix_s
from client.verbs.peers import drain
from client.verbs.pull import pull
from client.verbs.submit import dry_run, submit
from client.views import job_table, job_values, jobs_table, peer_values, peers_table
from swarm.errors import INTERRUPTED, InvalidConfig, SwarmError, UsageError
from swarm.messages import PROTOCOL_VERSION
from swarm.process.lifecycle import print_error
from swarm.process.logs import LOG_LEVELS
from swarm.types import JobState
from swarm.wire import jobs_pb2 as pb

# Verbs that are programs of their own: the client neither imports them nor reads their flags.
PROGRAMS = {"scheduler": "scheduler", "stage-server": "stage_server", "train-local": "swarm.reference"}

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="swarm",
    help="Train one large model through pools of stage servers on unreliable, unequal machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
    rich_markup_mode=None,
)


def run(arguments: list[str]) -> int:
    """Run one command line and give its exit code; errors are lines on stderr, tracebacks only with -vv."""
    arguments = arguments or ["--help"]
    if arguments[0] in PROGRAMS:
        _become(arguments[0], arguments[1:])
    shell = Shell(verbosity=_count_v(arguments), output="json" if _wants_json(arguments) else "table")
    try:
        return int(app(args=arguments, prog_name="swarm", standalone_mode=False, obj=shell) or 0)
    except TyperException as error:
        return _failed(shell, _usage(error, arguments))
    except typer.Abort:
        return INTERRUPTED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SwarmError as error:
        return _failed(shell, error)
    except BrokenPipeError:  # the reader has what it wanted
        _give_stdout_up()
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            return _failed(shell, InvalidConfig("the disk is full", hint="free some space, or write elsewhere"))
        text = str(error) or type(error).__name__
        hint = "" if shell.verbosity > 1 else "see where it happened with: -vv"
        return _failed(shell, SwarmError(f"unexpected error: {text}", hint=hint))


def _failed(shell: Shell, error: SwarmError) -> int:
    if shell.verbosity > 1:
        sys.excepthook(type(error), error, error.__traceback__)
    try:
        shell.error(error)
        sys.stdout.flush()
    except OSError:  # a full disk takes no JSON either
        _give_stdout_up()
        print_error(error)
    return error.exit_code


def _give_stdout_up() -> None:
    """Python would complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: TyperException, arguments: list[str]) -> UsageError:
    verb = next((word for word in arguments if word in COMMANDS), "")
    message = " ".join(error.format_message().split()).replace("Value error, ", "")
    return UsageError(message[:1].lower() + message[1:], hint=f"see: swarm {verb} --help".replace("  ", " "))


def _count_v(arguments: list[str]) -> int:
    """How often -v was given, known before flags are read: for faults in flags."""
    return sum(
        1 if word == "--verbose" else len(word) - 1
        for word in arguments
        if word == "--verbose" or (word.startswith("-v") and set(word[1:]) == {"v"})
    )


def _wants_json(arguments: list[str]) -> bool:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return any(
        word in ("-ojson", "-o=json", "--output=json") or (word in ("-o", "--output") and value == "json")
        for word, value in pairs
    )


def _become(verb: str, arguments: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", PROGRAMS[verb], *arguments])


# Global flags: accepted before the verb and after it -----------------------------------------------------------------

_SchedulerFlag = Annotated[
    str | None,
    typer.Option(
        "--scheduler", metavar="HOST:PORT", help=f"Scheduler to use (default {DEFAULT_SCHEDULER}).", show_default=False
    ),
]
_OutputFlag = Annotated[
    Literal["table", "json"] | None,
    typer.Option("--output", "-o", help="How to print data (default table).", show_default=False),
]
_TimeoutFlag = Annotated[
    float | None,
    typer.Option("--timeout", help=f"Seconds per call (default {DEFAULT_TIMEOUT_S:g}).", show_default=False),
]
_VerboseFlag = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Say more; -vv: tracebacks.")
]
_QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="No messages, only data and errors.")]
_YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]
_NoColorFlag = Annotated[bool, typer.Option("--no-color", help="No colours.")]


def _global_flags(
    scheduler: _SchedulerFlag = None,
    output: _OutputFlag = None,
    timeout: _TimeoutFlag = None,
    verbose: _VerboseFlag = 0,
    quiet: _QuietFlag = False,
    yes: _YesFlag = False,
    no_color: _NoColorFlag = False,
) -> None:
    """Only its signature is used: the flags that every verb has."""


def _take(shell: Shell, flags: dict[str, Any]) -> None:
    if flags["scheduler"] is not None:
        shell.scheduler = flags["scheduler"]
    if flags["output"] is not None:
        shell.output = flags["output"]
    if flags["timeout"] is not None:
        shell.timeout_s = flags["timeout"]
    shell.verbosity = max(shell.verbosity, flags["verbose"])
    shell.quiet |= flags["quiet"]
    shell.yes |= flags["yes"]
    shell.no_color |= flags["no_color"]


def _verb(name: str, *, hidden: bool = False) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a verb; its function takes the shell first, then its own flags."""

    def register(function: Callable[..., int | None]) -> Callable[..., int | None]:
        hints = get_type_hints(function, include_extras=True)
        shared = get_type_hints(_global_flags, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]
        extra = list(inspect.signature(_global_flags).parameters.values())
        parameters = [
            inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context),
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own),
            *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=shared[p.name]) for p in extra),
        ]

        def call(**values: Any) -> int | None:
            shell: Shell = values.pop("context").obj
            _take(shell, {p.name: values.pop(p.name) for p in extra})
            shell.settle()
            return function(shell, **values)

        functools.update_wrapper(call, function)
        del call.__wrapped__  # type: ignore[attr-defined]  # typer must see the signature made here
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, hidden=hidden, context_settings=_HELP)(call)
        return function

    return register


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"swarm {_product()}")
        raise typer.Exit


@app.callback()
def _root(
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
    verbose: _VerboseFlag = 0,
    quiet: _QuietFlag = False,
    yes: _YesFlag = False,
    no_color: _NoColorFlag = False,
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
) -> None:
    # Called before the verb, whose own flags then win.
    flags = locals() | {}
    _take(context.obj, flags)


# Verbs ---------------------------------------------------------------------------------------------------------------


@_verb("up")
def _up(
    shell: Shell,
    stages: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            envvar="SWARM_STAGES",
            help="Start STAGES x REPLICAS stage servers; a job decides how they are used.",
        ),
    ] = 2,
    replicas: Annotated[int, typer.Option(min=1, max=64, envvar="SWARM_REPLICAS", help="Stage servers per stage.")] = 2,
    device: Annotated[str, typer.Option(envvar="SWARM_DEVICE", help="auto, cpu, cuda:N or mps.")] = "auto",
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Submit this job, follow it, then stop everything.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Train a tiny built-in model, offline, and sample.")] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(envvar="SWARM_DATA_DIR", help="Where everything is kept.", show_default="user data folder"),
    ] = None,
    allow_chaos: Annotated[bool, typer.Option("--allow-chaos", help="Let swarm chaos harm the stage servers.")] = False,
) -> int:
    """Run a whole swarm on this machine: broker, scheduler and stage servers on loopback. Ctrl-C stops it."""
    if demo and job is not None:
        raise UsageError("--demo and --job exclude each other", hint="swarm up --demo, or swarm up --job FILE")
    folder = data_dir
    if folder is None and not demo:
        folder = platformdirs.user_data_path("swarm") / "up"
    return asyncio.run(up_and_wait(shell, UpOptions(stages, replicas, device, job, demo, folder, allow_chaos)))


@_verb("submit")
def _submit(
    shell: Shell,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Job file (TOML).")] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the job.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job file.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the job, instead of the file's.", show_default=False)] = "",
    resume_from: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|JOB:STEP",
            help="Start from a checkpoint, at its step: a folder on this machine, or that of a job of the scheduler "
            "(JOB:500, JOB:latest). To train on from weights alone, set model.id to a model folder instead.",
            show_default=False,
        ),
    ] = "",
    dry_run_: Annotated[
        bool, typer.Option("--dry-run", help="Show the values and where each came from; send nothing.")
    ] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a complete job file.")] = False,
    managed: Annotated[bool, typer.Option("--managed", hidden=True, help="Started by swarm up.")] = False,
) -> int:
    """Check a job file, tokenise and upload its data, start the job and follow it; Ctrl-C detaches."""
    if example:
        print(example_job(), end="")
        return 0
    if file is None:
        raise UsageError("missing argument FILE", hint="write one with: swarm submit --example > job.toml")
    overrides = [*(set_ or ()), *([f'name="{name}"'] if name else [])]
    if resume_from:
        overrides.append(f"checkpoint.resume_from={json.dumps(resume_from)}")
    if dry_run_:
        dry_run(shell, file, overrides)
        return 0
    return submit(shell, file, overrides, detach=detach, managed=managed)


@_verb("ls")
def _ls(
    shell: Shell,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    state: Annotated[str, typer.Option(help="Only jobs in this state.", show_default=False)] = "",
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
) -> None:
    """List jobs, newest first."""
    if state and state not in list(JobState):
        raise UsageError(f'there is no job state "{state}"', hint=f"one of: {', '.join(JobState)}")
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        views = scheduler.jobs(all=all_, state=state, limit=limit)
    if shell.json:
        shell.data([job_values(view) for view in views])
    elif views:
        shell.out.print(jobs_table(views))
    else:
        shell.say("no jobs" if all_ or state else "no jobs are open; all jobs: swarm ls -a")


@_verb("status")
def _status(
    shell: Shell,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id.")],
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Follow the job until it ends.")] = False,
) -> None:
    """Show one job: state, reason, step, loss, speed, peers per stage."""
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        view = scheduler.get(job)
        if watch:
            view = follow(shell, scheduler, view.id)
    if shell.json:
        if not watch:
            shell.data(job_values(view, spec=True))
    else:
        shell.out.print(job_table(view), soft_wrap=True)
    if watch:
        raise_unless_succeeded(view)


@_verb("logs")
def _logs(
    shell: Shell,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id.")],
    follow_: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, help="Only the last so many lines; 0 = all.")] = 100,
    peer: Annotated[str, typer.Option(help="Only this peer.", show_default=False)] = "",
    stage: Annotated[int, typer.Option(min=-1, help="Only this stage.", show_default="all")] = -1,
    level: Annotated[str, typer.Option(help="This level and above: debug, info, warning or error.")] = "info",
    since: Annotated[str, typer.Option(help="Only since then: 10m, 2h, or an ISO-8601 time.", show_default=False)] = "",
) -> None:
    """Show what the processes of a job logged."""
    if level not in LOG_LEVELS:
        raise UsageError(f'there is no level "{level}"', hint=f"one of: {', '.join(LOG_LEVELS)}")
    since_s = since_unix_s(since, time.time()) if since else 0.0
    request = pb.LogsRequest(
        job=job, follow=follow_, tail=tail, peer=peer, stage=stage, level=level, since_unix_s=since_s
    )
    show_logs(shell, request)


def _cancel(
    shell: Shell,
    jobs: Annotated[list[str], typer.Argument(metavar="JOB...", help="Names, ids or beginnings of ids.")],
    no_checkpoint: Annotated[
        bool, typer.Option("--no-checkpoint", help="Stop at once; what was trained since the last checkpoint is lost.")
    ] = False,
) -> None:
    """Save what was trained, then stop jobs; `swarm resume` goes on. A second cancel stops at once, without saving."""
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        views = [scheduler.get(job) for job in jobs]
        if not shell.yes and sys.stdin.isatty() and sys.stderr.isatty():
            names = ", ".join(view.id for view in views)
            lost = ", losing what was trained since the last checkpoint" if no_checkpoint else ""
            typer.confirm(f"cancel {names}{lost}?", abort=True, err=True)
        views = [scheduler.cancel(view.id, "cancelled by its user", no_checkpoint=no_checkpoint) for view in views]
    if shell.json:
        shell.data([job_values(view) for view in views])
    for view in views:
        shell.say(f"job {view.id}: {view.state}")


_verb("cancel")(_cancel)
_verb("stop", hidden=True)(_cancel)


@_verb("chaos")
def _chaos(
    shell: Shell,
    fault: Annotated[
        Literal["kill", "freeze", "slow", "partition", "corrupt"], typer.Argument(metavar="FAULT", help="See above.")
    ],
    peer: Annotated[
        str, typer.Argument(metavar="PEER", help="Id of a stage server, or its beginning; swarm peers lists them.")
    ],
    for_: Annotated[float, typer.Option("--for", help="How long, seconds; a kill is for ever.")] = 10.0,
    factor: Annotated[float, typer.Option(help="slow: so many times; corrupt: one frame in so many.")] = 4.0,
    seed: Annotated[int, typer.Option(min=0, help="corrupt: which frames.")] = 0,
    against: Annotated[
        str, typer.Option(metavar="PEER", help="partition: only from this neighbour.", show_default="all")
    ] = "",
) -> int:
    """Harm a stage server on purpose and show how its job recovers.

    kill: SIGKILL, no farewell. freeze: SIGSTOP, then SIGCONT. slow: computing takes --factor times as long. partition:
    no tensor passes between it and its neighbours, while the scheduler still hears it. corrupt: a byte of one in
    --factor frames that it sends is flipped.

    Only a swarm that was started for it obeys: swarm up --allow-chaos, or swarm scheduler --allow-chaos and swarm
    stage-server --allow-chaos. Say --yes where nobody can be asked.

    When the job has committed two more steps and the fault is over, this prints when the stage server was suspect, its
    work given to others, itself gone and the job well again, in seconds from the order; and the ledger: microbatches
    fed, committed and open, contributions done again, and the balance, which must be 0 lost and 0 counted twice. The
    exit code is 1 if it is not, or if the job did not recover within a minute after the fault.

    Example: swarm chaos freeze vm-1a2b3c --for 3 --yes
    """
    return chaos(shell, fault, peer, for_s=for_, factor=factor, seed=seed, against=against)


@_verb("pause")
def _pause(
    shell: Shell,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id.")],
) -> int:
    """Commit what runs, write a checkpoint, free the stage servers for other jobs; `swarm resume` goes on."""
    return pause(shell, job)


@_verb("resume")
def _resume(
    shell: Shell,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id.")],
    from_: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="latest|STEP",
            help="The newest checkpoint that verifies, or that of a step (swarm checkpoints JOB); 0 begins anew.",
        ),
    ] = "latest",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a value, such as training.steps, training.learning_rate or pipeline.stages; what is trained "
            "(model, data, seed, batch, optimizer) stays.",
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for the job.")] = False,
) -> int:
    """Let a paused, failed or cancelled job go on from a checkpoint, at any number of stages, and follow it."""
    return resume(shell, job, from_, set_ or (), detach=detach)


@_verb("checkpoints")
def _checkpoints(
    shell: Shell,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and compare its hash; exit code 1 if a fault is found.")
    ] = False,
) -> int:
    """List the checkpoints of a job: step, time, size, loss, whether a resume from it is exact, faults."""
    return show_checkpoints(shell, job, verify=verify)


@_verb("peers")
def _peers(
    shell: Shell,
    action: Annotated[Literal["ls", "drain"], typer.Argument(help="ls: list them; drain PEER: take one out.")] = "ls",
    peer: Annotated[
        str, typer.Argument(metavar="[PEER]", help="drain: id of a stage server, or its beginning.", show_default=False)
    ] = "",
    stage: Annotated[int, typer.Option(min=-1, help="ls: only this stage.", show_default="all")] = -1,
    state: Annotated[str, typer.Option(help="ls: only peers in this state.", show_default=False)] = "",
    drain_timeout: Annotated[
        float, typer.Option(help="drain: wait so many seconds, then exit 8; the hand-over goes on.")
    ] = 60.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="drain: only ask, do not wait.")] = False,
) -> int:
    """List stage servers, or drain one: it finishes what it has, hands its work over without any being done again, and
    gets none until it is started again. The last of a stage stays until another one has joined."""
    if action == "drain":
        if not peer:
            raise UsageError("missing argument PEER", hint="list them with: swarm peers")
        return drain(shell, peer, timeout_s=drain_timeout, wait=not no_wait)
    if peer:
        raise UsageError(f'peers ls takes no "{peer}"', hint=f"about one stage server: swarm explain {peer}")
    with Scheduler(shell.scheduler, shell.timeout_s) as scheduler:
        views = scheduler.peers(state=state, stage=stage)
    if shell.json:
        shell.data([peer_values(view) for view in views])
    elif views:
        shell.out.print(peers_table(views))
    else:
        shell.say(f"no stage servers; start one with: swarm stage-server --scheduler {shell.scheduler}")
    return 0


@_verb("explain")
def _explain(
    shell: Shell,
    about: Annotated[
        str, typer.Argument(metavar="JOB|PEER", help="Name, id or beginning of an id: of a job or a stage server.")
    ],
    microbatch: Annotated[
        str,
        typer.Option(
            metavar="STEP:INDEX",
            help="The story of one microbatch of a job: who got it, when and why; of the steps under way and the "
            "newest that were committed.",
            show_default=False,
        ),
    ] = "",
) -> None:
    """Say in numbers why a job waits, which stage limits it, who joins, leaves or moves and why; or why a stage server
    gets little work or none."""
    explain(shell, about, microbatch)


@_verb("pull")
def _pull(
    shell: Shell,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Name, id or beginning of an id.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the model folder goes.")],
    step: Annotated[str, typer.Option(metavar="latest|STEP", help="Which checkpoint.")] = "latest",
    dtype: Annotated[
        Literal["keep", "float32", "bfloat16", "float16"],
        typer.Option(help="Precision of the weights; rounded to nearest even, after all hashes were checked."),
    ] = "keep",
    force: Annotated[bool, typer.Option("--force", help="Replace DIR if it exists.")] = False,
) -> None:
    """Fetch the model of a checkpoint, the newest if none is named, as a Hugging Face folder; every hash is checked."""
    pull(shell, job, folder, step=step, dtype=dtype, force=force)


@_verb("version")
def _version(shell: Shell) -> None:
    """Show the version of this command and of the scheduler."""
    answer = None
    try:
        with Scheduler(shell.scheduler, min(shell.timeout_s, 5.0)) as scheduler:
            answer = scheduler.version()
    except SwarmError as error:
        shell.say(f"{error.message}")
    if shell.json:
        theirs = answer and {"product": answer.product, "protocol": answer.protocol, "epoch": answer.epoch}
        shell.data({"product": _product(), "protocol": PROTOCOL_VERSION, "scheduler": theirs})
        return
    print(f"swarm {_product()}, protocol {PROTOCOL_VERSION}")
    if answer is not None:
        print(f"scheduler {answer.product}, protocol {answer.protocol}, at {shell.scheduler}")


def _program(verb: str, text: str) -> None:
    def become(context: typer.Context) -> None:
        _become(verb, context.args)

    become.__doc__ = text
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command(verb, context_settings=settings)(become)


_program("scheduler", "Run the scheduler in this process; see: swarm scheduler --help")
_program("stage-server", "Serve a stage with one device; see: swarm stage-server --help")
_program("train-local", "Train a job in this one process; see: swarm train-local --help")

COMMANDS = frozenset(command.name for command in app.registered_commands)


def _product() -> str:
    return metadata.version("swarm-stages")
