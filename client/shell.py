"""The shared flags of a call of `swarm`, and its output: data on stdout, messages on stderr.

With `-o json` data is one JSON object per call, or one per line of a stream: {"schema": "swarm.cli/1", "data": …}, or
"error" in the place of "data". Keys are only ever added.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from swarm.errors import CorruptFrame, InvalidConfig, NoHome, NotAllowed, SwarmError, UsageError
from swarm.home import known_config_folder
from swarm.listening import LOOPBACK
from swarm.text import as_date, is_address, printable, size
from swarm.text_file import read_small

SCHEMA = "swarm.cli/1"
PROGRESS_LINE_S = 5.0
DEFAULT_SCHEDULER = f"{LOOPBACK}:7950"
DEFAULT_TIMEOUT_S = 30.0

Advance: TypeAlias = Callable[[int, int | None], None]  # bytes done, of
OutputFormat: TypeAlias = Literal["table", "json"]


@dataclass(slots=True)
class Shell:
    """The global flags and the two streams."""

    scheduler: str = DEFAULT_SCHEDULER
    scheduler_is_flag: bool = False  # it was named on the command line, not by the environment
    profile_is_flag: bool = False
    output: OutputFormat = "table"
    timeout_s: float = DEFAULT_TIMEOUT_S
    verbosity: int = 0
    quiet: bool = False
    yes: bool = False
    no_color: bool = False
    insecure: bool = False  # plaintext, to a scheduler that takes it
    profile: str = ""  # the one that was named
    config: str = ""  # the file that was named
    _given: set[str] = field(default_factory=set, repr=False)  # what no profile changes any more
    _out: Console | None = field(default=None, repr=False)
    _err: Console | None = field(default=None, repr=False)

    def take(self, **values: Any) -> None:
        """Take flags or environment variables; None or False is one that was not given. Later ones win."""
        for name, value in values.items():
            if value is not None and value is not False:
                setattr(self, name, value)
                self._given.add(name)

    def settle(self) -> None:
        """Fill in the profile and check the flags, once all are known.

        UsageError names the wrong flag, InvalidConfig the wrong value of the profile.
        """
        found = find_profile(self.config, self.profile or DEFAULT, is_named=bool(self.profile))
        for key, value in found.items():
            name = "timeout_s" if key == "timeout" else key
            if name not in self._given:
                setattr(self, name, value)
        if "scheduler" not in self._given | found.keys() and not self.insecure:
            # The only membership of whoever has one is meant.
            joined = import_module("swarm.pki.profiles").memberships()
            self.scheduler = joined[0] if len(joined) == 1 else self.scheduler
        if not is_address(self.scheduler):
            raise UsageError(
                f'--scheduler is HOST:PORT, not "{self.scheduler}"',
                hint=f"for example: --scheduler {DEFAULT_SCHEDULER}",
            )
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise UsageError(f"--timeout is a number of seconds above 0, not {self.timeout_s:g}", hint="--timeout 30")

    def log(self) -> None:
        """Let what is logged go to stderr, as much of it as -v asks for."""
        level = ("error", "info", "debug")[min(self.verbosity, 2)]
        import_module("swarm.process.logs").configure(level)  # takes a while, and --help logs nothing

    @property
    def scheduler_flag(self) -> str:
        """The flag that suggested commands need to reach the same scheduler, if it is not the default or the
        environment's."""
        if self.scheduler_is_flag:
            return f" --scheduler {self.scheduler}" if self.scheduler != DEFAULT_SCHEDULER else ""
        return f" --profile {self.profile}" if self.profile_is_flag else ""

    @property
    def json(self) -> bool:
        return self.output == "json"

    @property
    def out(self) -> Console:
        """For data."""
        if self._out is None:
            self._out = self._console(stderr=False)
        return self._out

    @property
    def err(self) -> Console:
        """For messages and progress."""
        if self._err is None:
            self._err = self._console(stderr=True)
        return self._err

    @property
    def live(self) -> bool:
        """Whether progress may redraw lines."""
        return self.err.is_terminal and not self.quiet and not self.json

    def say(self, text: str) -> None:
        """A message for a person."""
        if not self.quiet:
            self.err.print(text, markup=False, highlight=False, soft_wrap=True)

    def confirm(self, deed: str) -> None:
        """Ask whether the person means it, unless --yes says so; Abort if not, NotAllowed without a terminal."""
        if self.yes:
            return
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise NotAllowed(f"this would {deed}", hint="say that it is meant: --yes")
        typer.confirm(f"{deed}?", abort=True, err=True)

    def data(self, data: Any) -> None:
        """The answer as JSON; CorruptFrame if a scheduler sent what has no words there."""
        try:
            text = json.dumps({"schema": SCHEMA, "data": data}, allow_nan=False)
        except (ValueError, RecursionError):
            raise CorruptFrame("the scheduler sent what JSON has no words for: no number, or endless lists") from None
        print(text, flush=True)

    def error(self, error: SwarmError) -> None:
        code = getattr(error, "job_code", "") or error.code
        if self.json:
            fault = {"code": code, "message": error.message, "hint": error.hint}
            print(json.dumps({"schema": SCHEMA, "error": fault}), flush=True)
        style = "bold red" if self.err.is_terminal else None
        self.err.print(f"error[{code}]:", style=style, markup=False, highlight=False, end=" ")
        told = [error.message, *([f"hint: {error.hint}"] if error.hint else [])]
        for text in told:  # which may name what others sent, such as a path
            lines = "\n".join(map(printable, text.split("\n")))
            self.err.print(lines, markup=False, highlight=False, soft_wrap=True)

    def _console(self, *, stderr: bool) -> Console:
        stream = sys.stderr if stderr else sys.stdout
        # Without a terminal rich would wrap tables at 80 columns.
        width = None if stream.isatty() else 240
        no_color = self.no_color or bool(os.environ.get("NO_COLOR"))
        return Console(stderr=stderr, no_color=no_color or None, width=width, highlight=False)


def product() -> str:
    """The version of this program."""
    return metadata.version("swarm-stages")


@contextmanager
def bytes_bar(shell: Shell, what: str) -> Iterator[Advance]:
    """A progress bar in bytes; where lines cannot be redrawn a line now and then."""
    if not shell.live:
        yield _Lines(shell, what)
        return
    columns = (TextColumn(what), BarColumn(bar_width=30), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=shell.err, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


class _Lines:
    """Says every PROGRESS_LINE_S how far the work is; says nothing about short work."""

    def __init__(self, shell: Shell, what: str) -> None:
        self._shell = shell
        self._what = what
        self._said_s = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= PROGRESS_LINE_S:
            self._said_s = now_s
            self._shell.say(f"{self._what}: {size(done)}{f' of {size(total)}' if total else ''}")


def utc(unix_s: float) -> str | None:
    """ISO-8601 in UTC; None for 0 and for what is no time."""
    if not as_date(unix_s):
        return None
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s % 1 * 1000):03d}Z"


def local(unix_s: float) -> str:
    """A moment by this machine's clock, for tables: 2026-11-26 23:35:02; a dash for 0 and for what is no time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_s)) if as_date(unix_s) else "-"


def finite(value: float) -> float | None:
    """The value, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None


DEFAULT = "default"
KEYS: Mapping[str, tuple[type, ...]] = {
    "scheduler": (str,),
    "output": (str,),
    "timeout": (int, float),
    "insecure": (bool,),
}


def config_file(named: str = "") -> Path:
    """The file that --config or SWARM_CONFIG names, or the usual one; NoHome."""
    named = named or os.environ.get("SWARM_CONFIG", "")
    return Path(named) if named else known_config_folder() / "config.toml"


def find_profile(config: str, name: str, *, is_named: bool) -> dict[str, Any]:
    """Connections by name, in a file of the user's, for `--profile NAME`.

        # ~/.config/swarm/config.toml; SWARM_CONFIG or --config names another one
        [profile.default]                     # used without --profile
        scheduler = "127.0.0.1:7950"

        [profile.lab]
        scheduler = "lab.example.org:7950"
        timeout = 60
        output = "json"

    A flag or an environment variable wins over it.

    The values of a profile in the file that `config_file` gives.

    A user without a home folder has no file, nor has one whose HOME is another user's, or no folder: sudo keeps it.
    """
    try:
        path = config_file(config)
    except NoHome:
        if is_named:
            raise
        return {}
    is_usual = not (config or os.environ.get("SWARM_CONFIG"))
    if is_usual and not is_named and not os.access(path.parent, os.X_OK):
        return {}
    return read_profile(path, name, is_named=is_named)


def read_profile(path: Path, name: str, *, is_named: bool) -> dict[str, Any]:
    """The values of a profile: some of KEYS.

    InvalidConfig if the file or a value is wrong, or if somebody named a profile (`is_named`) that is not there.
    """
    try:
        values = tomllib.loads(read_small(path))
    except FileNotFoundError:
        if is_named:
            raise InvalidConfig(
                f'there is no profile "{name}": {path} does not exist',
                hint=f'write [profile.{name}] and scheduler = "HOST:PORT" into it',
            ) from None
        return {}
    except OSError as error:
        hint = "check who owns it; HOME may be another user's"
        raise InvalidConfig(f"{path} cannot be read: {error.strerror or error}", hint=hint) from None
    except ValueError as error:
        raise InvalidConfig(f"{path} cannot be read: {error}", hint="it is a TOML file with [profile.NAME]") from None
    _known(values, ("profile",), str(path))
    profiles = values.get("profile", {})
    if not isinstance(profiles, dict) or not all(isinstance(profile, dict) for profile in profiles.values()):
        raise InvalidConfig(f"{path}: profile is no table of tables", hint="write [profile.NAME] above the values")
    if name not in profiles:
        if is_named:
            there = ", ".join(profiles) or "none"
            raise InvalidConfig(f'there is no profile "{name}" in {path}; there are: {there}')
        return {}
    where = f"{path}: profile.{name}"
    found = dict(profiles[name])
    _known(found, KEYS, where)
    for key, value in found.items():
        if not isinstance(value, KEYS[key]) or (isinstance(value, bool) and bool not in KEYS[key]):
            raise InvalidConfig(f"{where}.{key} is {value!r}", hint=f"it is {_example(key)}")
    if found.get("output", "table") not in ("table", "json"):
        raise InvalidConfig(f'{where}.output is "{found["output"]}"', hint=f"it is {_example('output')}")
    return found


def _known(values: Mapping[str, Any], keys: Any, where: str) -> None:
    for key in values:
        if key not in keys:
            near = difflib.get_close_matches(key, list(keys), n=1)
            hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(keys)}"
            raise InvalidConfig(f'{where} has no key "{key}"', hint=hint)


def _example(key: str) -> str:
    return {
        "scheduler": 'an address, such as "127.0.0.1:7950"',
        "output": '"table" or "json"',
        "timeout": "a number of seconds, such as 30",
        "insecure": "true or false",
    }[key]
