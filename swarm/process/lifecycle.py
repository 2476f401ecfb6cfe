"""How a long-running process of ours begins and ends: flags, readiness, signals, exit codes, errors for a person."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import ipaddress
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias, cast

import psutil
import typer

from swarm.errors import INTERRUPTED, InvalidConfig, NotAllowed, SwarmError, UsageError
from swarm.process.faults import show
from swarm.process.startup import files_max
from swarm.text import is_address, is_wildcard, printable

if TYPE_CHECKING:  # it loads structlog, which --help can do without
    from swarm.process.logs import LogFormat

# The flags that earlier versions had, and what to do instead.
GONE_FLAGS = {
    "--project": "every member may see every job now; teams that need walls run one scheduler each",
    "--verify": "the log has no hash chain now: copy its files to a place that this machine cannot write",
    "--allow-chaos": "swarm up prints each process id: kill -9 PID, or kill -STOP PID and kill -CONT PID",
}
# The flags that the scheduler, stage servers and relays share, spelled once.
HttpHost: TypeAlias = Annotated[str, typer.Option(help="Address of /metrics and /healthz; HTTPS off loopback.")]
HttpPort: TypeAlias = Annotated[
    str, typer.Option(help="Port of /metrics and /healthz, or the next free one; 0 = any, none = off.")
]
HttpUsers: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--http-user",
        help='Login of this machine that may also look at the HTTP port on loopback, or "*" for all; may be given more '
        "than once.",
        show_default="root and your own",
    ),
]
Insecure: TypeAlias = Annotated[
    bool, typer.Option("--insecure", help="Speak plaintext with anybody; for tests and private networks.")
]
JoinLine: TypeAlias = Annotated[
    str, typer.Option(metavar="LINE", help="Join a swarm with the line that swarm token create printed; once.")
]
JoinFile: TypeAlias = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The same, from a file.", show_default=False)
]
JobFile: TypeAlias = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (TOML).")]
JobChanges: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", envvar="SWARM_SET", metavar="KEY=VALUE", help="Change a value of the job file."),
]
LogLevel: TypeAlias = Annotated[str, typer.Option(help="debug, info, warning or error.")]
# Their values may hold a password, so they may be in a file: flags are shown to every user of the machine, and
# variables to every child.
SECRET_FLAGS = ("db", "broker")
SECRET_CHARACTERS_MAX = 4096
FILES_LEAST = 32  # with fewer gRPC aborts the process
LogFormatName: TypeAlias = Annotated[str, typer.Option(help="auto, json or text.")]

HELP = {"help_option_names": ["-h", "--help"]}


def program() -> typer.Typer:
    """A command of its own, with help in plain text; `run_cli` prints its errors."""
    return typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=HELP
    )


def run_cli(app: typer.Typer, name: str, *, variables: bool = True) -> NoReturn:
    """Run a command; wrong flags, our errors and the machine's are one line and a hint, a bug has its traceback too.

    With `variables` a flag that is not given is taken from the environment, such as SWARM_LISTEN.
    """
    try:
        flags = {str(parameter.name) for parameter in typer.main.get_command(app).params}
        code = app(  # of typer.Exit; 130 after Ctrl-C
            auto_envvar_prefix="SWARM" if variables else None,
            prog_name=name,
            standalone_mode=False,
            default_map=secrets_in_files(os.environ, flags - flags_given(sys.argv[1:])),
        )
    except typer.TyperException as error:
        print_error(usage_error(error, name))
        sys.exit(UsageError.exit_code)
    except typer.Abort:
        sys.exit(INTERRUPTED)
    except Exception as error:
        fail(error)
    sys.exit(code or 0)


def fail(error: BaseException) -> NoReturn:
    """Tell a person of the error that ends the program, and exit."""
    shown = show(error)
    print_error(shown)
    sys.exit(shown.exit_code)


def flags_given(words: Sequence[str]) -> set[str]:
    """The names of the flags among the words of a command line, without dashes: db of --db URL and of --db=URL."""
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


def secrets_in_files(environment: Mapping[str, str], flags: Collection[str]) -> dict[str, str]:
    """The values of those `flags` that may hold a password, from the files that SWARM_<FLAG>_FILE name.

    Leave out the flags of the command line, which win over them. InvalidConfig if a file cannot be read or SWARM_<FLAG>
    is set as well.
    """
    found = {}
    for flag in SECRET_FLAGS:
        name = f"SWARM_{flag.upper()}"
        path = environment.get(f"{name}_FILE", "")
        if not path or flag not in flags:
            continue
        if environment.get(name):
            raise InvalidConfig(f"{name} and {name}_FILE are both set", hint="unset one of them")
        try:
            with open(path, encoding="utf-8") as file:
                value = file.read(SECRET_CHARACTERS_MAX + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            told = error.strerror if isinstance(error, OSError) else "it is no text"
            raise InvalidConfig(f"{name}_FILE = {path} cannot be read: {told}", hint="correct the path") from None
        if not value or len(value) > SECRET_CHARACTERS_MAX or "\n" in value:
            raise InvalidConfig(f"{name}_FILE = {path} is not one line of text", hint=f"write what --{flag} takes")
        found[flag] = value
    return found


def usage_error(error: typer.TyperException, command: str) -> UsageError:
    """The library's complaint about the flags of `command` as one of our errors."""
    message = " ".join(error.format_message().split()).replace("Value error, ", "")
    hint = GONE_FLAGS.get(getattr(error, "option_name", ""), f"see: {command} --help")
    return UsageError(message[:1].lower() + message[1:], hint=hint)


def given_as_flag(context: typer.Context, name: str) -> bool:
    """Whether a value stood on the command line: it is neither a default nor from the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def say_ready(role: str, **facts: str) -> None:
    """Print one JSON line on stdout for the program that started this process, if it still reads."""
    try:
        print(json.dumps({"schema": "swarm.ready/1", "role": role, **facts}), flush=True)
    except BrokenPipeError:
        give_stdout_up()


def give_stdout_up() -> None:
    """Close it quietly: its reader is gone, and Python would complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_listen(listen: str, flag: str = "--listen") -> None:
    """InvalidConfig unless it is HOST:PORT, where port 0 is any."""
    _, colon, port = listen.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidConfig(f"{flag} {listen} is not HOST:PORT", hint=f"for example {flag} 127.0.0.1:7950")
    check_host(listen.rpartition(":")[0], flag)


def check_host(host: str, flag: str = "--http-host") -> str:
    """The host, in brackets if it is an IPv6 address; InvalidConfig if it can be no host's name."""
    try:
        host.strip("[]").encode("idna")
    except UnicodeError:
        raise InvalidConfig(
            f"{flag} {printable(host[:80])} names no host", hint=f"for example {flag} 127.0.0.1"
        ) from None
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_announce(listen: str, announce: str) -> None:
    """UsageError unless others can dial `announce`, or, if that is empty, the address that is listened at."""
    if announce:
        if not is_address(announce) or is_wildcard(announce.rpartition(":")[0]):
            raise UsageError(
                f'--announce is HOST:PORT of this machine, as others dial it, not "{announce}"', hint=_addresses_hint()
            )
    elif is_wildcard(listen.rpartition(":")[0]):
        raise UsageError(f"others cannot dial {listen}: say at which address they reach it", hint=_addresses_hint())


def own_addresses() -> set[str]:
    """The IP addresses of this machine."""
    return {
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
    }


def _addresses_hint() -> str:
    """The addresses of this machine, for --announce."""
    shown = sorted(address for address in own_addresses() if not ipaddress.ip_address(address).is_loopback)
    return f"add --announce HOST:PORT; this machine has {', '.join(shown[:8]) or 'no address but loopback'}"


def lock_folder(folder: Path) -> IO[str]:
    """Make the folder and keep our other processes out of it until this process ends or closes the lock.

    NotAllowed if another process holds it, InvalidConfig if it cannot be written. The lock is the kernel's, on a file
    that stays: a process that is killed leaves nothing to clean up. Children do not inherit it.
    """
    hint = "choose another --data-dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _keep_to_owner(folder)
        lock = (folder / "lock").open("a+")
    except OSError as error:
        told = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or error
        raise InvalidConfig(f"{folder} cannot be used: {told}", hint=hint) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"{os.getpid()}\n".encode())  # not buffered: on a full disk it would fail once more
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read(32).strip()
        lock.close()
        raise NotAllowed(
            f"another process{f' (pid {holder})' if holder.isdecimal() else ''} is using {folder}",
            hint=f"stop it, or {hint}",
        ) from None
    except OSError as error:
        lock.close()
        raise InvalidConfig(f"{folder} cannot be locked: {error.strerror or error}", hint=hint) from None
    return lock


def _keep_to_owner(folder: Path) -> None:
    """A data folder of an earlier version was open to every user of the machine."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077 and folder.stat().st_uid == os.geteuid():
        folder.chmod(mode & ~0o077)


def lock_first(folders: Sequence[Path]) -> tuple[Path, IO[str]]:
    """The first of the folders that no other process uses, locked; errors as `lock_folder`."""
    for folder in folders[:-1]:
        try:
            return folder, lock_folder(folder)
        except NotAllowed:
            continue
    return folders[-1], lock_folder(folders[-1])


def auto_int(flag: str, text: str, *, auto: int, least: int) -> int:
    """The number of a flag that also takes "auto"."""
    if text == "auto":
        return auto
    if not text.isdigit() or int(text) < least:
        raise UsageError(f'{flag} is auto or a whole number from {least} on, not "{text}"', hint=f"{flag} auto")
    return int(text)


def http_port_of(text: str) -> int | None:
    """The port of --http-port; None for "none"."""
    if text == "none":
        return None
    if not text.isdigit() or int(text) > 65535:
        raise UsageError(f'--http-port is none or a port up to 65535, not "{text}"', hint="--http-port 0 takes any")
    return int(text)


def log_format_of(text: str) -> LogFormat:
    if text not in ("auto", "json", "text"):
        raise UsageError(f'--log-format is auto, json or text, not "{text}"', hint="--log-format auto")
    return cast("LogFormat", text)


@dataclass(slots=True)
class Farewell:
    """Work at the first signal, before the process ends: `begin` is given the function that ends it, and returns
    whether there is such work."""

    begin: Callable[[Callable[[], object]], bool] = lambda end: False


def run_process(main: Coroutine[Any, Any, None], farewell: Farewell | None = None) -> NoReturn:
    """Run `main` until it ends or a signal comes, and exit.

    SIGINT and SIGTERM cancel `main`, at once or after the `farewell`, and `main` cleans up (exit 130, 143). The same
    signal again cuts the farewell short; a third ends the process. A SwarmError or an error of the machine becomes two
    lines on stderr and an exit code; any other exception has its traceback before them.
    """
    received: list[signal.Signals] = []
    if files_max() < FILES_LEAST:
        main.close()
        fail(InvalidConfig(f"this process may have only {files_max()} files open", hint="raise that: ulimit -n 1024"))

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            received.append(number)
            if farewell is not None and len(received) == 1 and farewell.begin(task.cancel):
                return
            loop.remove_signal_handler(number)  # again: the default action
            signal.signal(number, signal.SIG_DFL)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await task

    try:
        asyncio.run(supervised())
    except asyncio.CancelledError:
        sys.exit(128 + received[0] if received else 1)
    except (Exception, BaseExceptionGroup) as failure:
        fail(failure)
    finally:
        gc.freeze()  # or the interpreter walks all of torch several times before it ends: seconds
    sys.exit(0)


def print_error(error: SwarmError) -> None:
    """Print an error as the two lines that a person sees."""
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
