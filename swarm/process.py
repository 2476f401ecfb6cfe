"""How a long-running process of ours begins and ends: flags, readiness, signals, exit codes, errors for a person."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, cast

import typer

from swarm.errors import InvalidConfig, SwarmError, UsageError
from swarm.logs import LogFormat


def run_cli(app: typer.Typer, name: str) -> NoReturn:
    """Run a command; wrong flags and our errors are one line and a hint, never a traceback."""
    try:
        app(auto_envvar_prefix="SWARM", prog_name=name, standalone_mode=False)
    except typer.TyperException as error:
        message = " ".join(error.format_message().split())
        print_error(UsageError(message[:1].lower() + message[1:], hint=f"see: {name} --help"))
        sys.exit(UsageError.exit_code)
    except typer.Abort:
        sys.exit(130)
    except SwarmError as error:
        print_error(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def say_ready(role: str, **facts: str) -> None:
    """One JSON line on stdout, for whoever started this process."""
    print(json.dumps({"schema": "swarm.ready/1", "role": role, **facts}), flush=True)


def check_loopback(listen: str, insecure: bool) -> None:
    """InvalidConfig for an address that others can reach without TLS, unless --insecure says that this is meant."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidConfig(f"--listen {listen} is not HOST:PORT", hint="for example --listen 127.0.0.1:7950")
    host = host.strip("[]")
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback and not insecure:
        raise InvalidConfig(
            f"--listen {listen} would take plaintext connections from other machines",
            hint="listen on 127.0.0.1, or add --insecure if the network is private",
        )


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
    """The value of --log-format."""
    if text not in ("auto", "json", "text"):
        raise UsageError(f'--log-format is auto, json or text, not "{text}"', hint="--log-format auto")
    return cast(LogFormat, text)


def run_process(main: Coroutine[Any, Any, None]) -> NoReturn:
    """Run `main` until it ends or a signal comes, and exit.

    SIGINT and SIGTERM cancel `main`, which cleans up (exit 130, 143); the same signal again ends the process at once.
    A SwarmError becomes two lines on stderr and its exit code. Anything else leaves with its traceback.
    """
    received: list[signal.Signals] = []

    async def supervised() -> None:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            received.append(number)
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
    except BaseExceptionGroup as group:
        error = first_of_ours(group)
        if error is None:
            raise
        print_error(error)
        sys.exit(error.exit_code)
    except SwarmError as error:
        print_error(error)
        sys.exit(error.exit_code)
    sys.exit(0)


def print_error(error: SwarmError) -> None:
    """The two lines that a person sees of an error."""
    print(f"error[{error.code}]: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)


def first_of_ours(group: BaseExceptionGroup[BaseException]) -> SwarmError | None:
    """The error of a group that is all SwarmErrors; None if there is anything else in it."""
    _, rest = group.split(SwarmError)
    if rest is not None:
        return None
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, SwarmError)
    return error
