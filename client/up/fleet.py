"""The processes of one `swarm up`: started, watched, started again and ended.

Children get SIGTERM when this process ends, SIGKILL when they do not end within seconds, and die with it if it is
killed. Each says that it is ready with one JSON line on stdout ("swarm.ready/1").
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

from client.shell import Shell
from swarm.errors import DeadlinePassed, ProcessEnded
from swarm.process.children import dying_with_parent, end, kill

# Variables of flags that would take a child into another swarm, or to another database; `swarm up` gives no such flag.
OF_OTHER_SWARMS = frozenset(
    f"SWARM_{flag}"
    for flag in (
        *("SCHEDULER", "SWARM", "BROKER", "BROKER_FILE", "DB", "DB_FILE", "JOIN", "JOIN_FILE", "JOIN_LISTEN"),
        *("ANNOUNCE", "STAGE", "SITE", "PROXY", "VIA_RELAY"),
    )
)
START_S_MAX = 180.0  # importing torch four times on two busy cores takes a while
POLL_S = 0.1
END_S_MAX = 8.0  # stage servers at work take a few seconds to close their links
# After a process died, the scheduler has this long to say what that means for a running job.
VERDICT_S_MAX = 20.0
TAIL_LINES, TAIL_BYTES = 15, 64 << 10
# A stage server that ends is started again, unless it does so this often within this time.
ENDS_MAX = 3
ENDS_WITHIN_S = 60.0
READY_SCHEMA = "swarm.ready/1"

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Programs:
    """The command lines of the children, without their flags."""

    # -P: a file of the user's called scheduler.py must not run instead.
    scheduler: tuple[str, ...] = (sys.executable, "-P", "-m", "scheduler")
    stage_server: tuple[str, ...] = (sys.executable, "-P", "-m", "stage_server")
    client: tuple[str, ...] = (sys.executable, "-P", "-m", "client")
    sample: tuple[str, ...] = (sys.executable, "-P", "-m", "swarm.model.sample")


@dataclass(slots=True)
class Child:
    """A process, its log file, and its ready line."""

    name: str
    command: Sequence[str]
    process: asyncio.subprocess.Process
    log: Path
    out: Path
    ready: dict[str, str] = field(default_factory=dict)
    ended_s: list[float] = field(default_factory=list)  # when it ended lately


class Fleet:
    def __init__(self, shell: Shell) -> None:
        self.logs = Path()
        self.on_kill: Callable[[], None] = lambda: None  # ends others that belong to it
        self._shell = shell
        self._servers: list[Child] = []  # run until the fleet ends
        self._tools: list[asyncio.subprocess.Process] = []  # run until they are done

    async def start(self, name: str, command: Sequence[str]) -> Child:
        """A process that serves until it is stopped."""
        log, out = self.logs / f"{name}.log", self.logs / f"{name}.out"
        log.write_bytes(b"")
        child = Child(name, command, await self._serve(command, log, out), log, out)
        self._servers.append(child)
        return child

    async def _serve(self, command: Sequence[str], log: Path, out: Path) -> asyncio.subprocess.Process:
        with log.open("ab") as stderr, out.open("wb") as stdout:
            return await self._spawn(command, stdout=stdout, stderr=stderr)

    async def run(self, command: Sequence[str], *, capture: bool = False) -> tuple[int, str]:
        """Run a program to its end, its messages on our stderr. Returns its exit code and, if captured, its stdout."""
        process = await self._spawn(command, stdout=asyncio.subprocess.PIPE if capture else None, stderr=None)
        self._tools.append(process)
        out, _ = await process.communicate()
        assert process.returncode is not None
        code = process.returncode
        return code if code >= 0 else 128 - code, (out or b"").decode(errors="replace")

    async def ready(self, child: Child) -> None:
        """Wait until the child is ready; ProcessEnded or DeadlinePassed if it never is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S_MAX):
                while child.process.returncode is None:
                    if said := ready_line(child.out):
                        child.ready = said | {"pid": str(child.process.pid)}
                        return
                    await asyncio.sleep(POLL_S)
                raise _ended(child)
        raise DeadlinePassed(f"{child.name} is not ready after {START_S_MAX:.0f} s", hint=f"see why in {child.log}")

    async def guard(self, work: Coroutine[Any, Any, Result], shell: Shell | None = None) -> Result:
        """Do `work`, and restart stage servers that end meanwhile.

        ProcessEnded if the scheduler ends, or a stage server ends too often. With a `shell` the work is a job: the
        scheduler then has time to say what a lost stage server means for it, and the work's own result counts.
        """
        doing = asyncio.ensure_future(work)
        lost: ProcessEnded | None = None
        last: Child | None = None  # the one that is not started again
        try:
            while last is None and not doing.done():
                await self._until_an_end(doing)
                for child in self._servers:
                    if child.process.returncode is not None:
                        lost = _ended(child)
                        if not await self._start_again(child):
                            last = child
                            break
            if last is not None and last.name != "scheduler" and shell is not None:
                await asyncio.wait({doing}, timeout=VERDICT_S_MAX)
            if not doing.done():
                assert lost is not None
                raise lost
            if lost is not None and shell is not None and (doing.exception() is not None or doing.result()):
                shell.error(lost)
            return await doing
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _until_an_end(self, doing: asyncio.Future[Result]) -> None:
        """Wait until the work is done or a server has ended."""
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(child.process.wait()) for child in self._servers]
        try:
            await asyncio.wait({doing, *ends}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def _start_again(self, child: Child) -> bool:
        """Restart a child that has ended; False if it is the scheduler or has ended too often."""
        if child.name == "scheduler":
            return False
        now_s = asyncio.get_running_loop().time()
        child.ended_s = [end_s for end_s in child.ended_s if now_s - end_s < ENDS_WITHIN_S] + [now_s]
        if len(child.ended_s) >= ENDS_MAX:
            self._shell.say(f"{child.name} ended {ENDS_MAX} times within {ENDS_WITHIN_S:.0f} s")
            return False
        how = how_it_ended(child.process.returncode)
        child.process = await self._serve(child.command, child.log, child.out)
        self._shell.say(f"{child.name} {how}, see {child.log}; it is started again as process {child.process.pid}")
        return True

    async def end(self) -> None:
        """Tools first, then servers: SIGTERM, some seconds, SIGKILL."""
        await end(*self._all(), within_s=END_S_MAX)

    def kill(self) -> None:
        kill(*self._all())
        self.on_kill()

    def _all(self) -> list[asyncio.subprocess.Process]:
        return [*self._tools, *(child.process for child in self._servers)]

    async def _spawn(
        self, command: Sequence[str], *, stdout: IO[bytes] | int | None, stderr: IO[bytes] | None
    ) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *dying_with_parent(command),
            # The children belong to this swarm, and not to the swarm of the user's other processes.
            env={name: value for name, value in os.environ.items() if name not in OF_OTHER_SWARMS}
            | ({"SWARM_INSECURE": "1"} if self._shell.insecure else {}),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


def ready_line(out: Path) -> dict[str, str]:
    """The facts of a child's ready line; empty while there is none."""
    for line in out.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            said = json.loads(line) if line.endswith("\n") else None
            if isinstance(said, dict) and said.get("schema") == READY_SCHEMA and isinstance(said.get("address"), str):
                return {key: str(value) for key, value in said.items() if key != "schema"}
    return {}


def _ended(child: Child) -> ProcessEnded:
    lines = last_lines(child.log)
    tail = "".join(f"\n  | {line}" for line in lines)
    how = f"{child.name} {how_it_ended(child.process.returncode)}"
    return ProcessEnded(f"{how}; the end of its log:{tail}" if tail else f"{how}, silently")


def how_it_ended(code: int | None) -> str:
    assert code is not None
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def last_lines(log: Path) -> list[str]:
    """The end of a log, which may have grown for weeks."""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-TAIL_LINES:]
