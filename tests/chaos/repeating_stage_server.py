"""A stage server to and from which all comes again: `python -m tests.chaos.repeating_stage_server --late S --seed N`.

Each event, each tensor and each command of a microbatch, a round or a commit has one to four repetitions, up to S
seconds late: after a step or a round is over, events also after the scheduler's epoch. Commands are not repeated across
epochs (one of an older epoch ends the session), and loading, saving and releasing come once, as the session carries
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from stage_server.lean_imports import lean_imports

with lean_imports():
    from stage_server.__main__ import cli
    from stage_server.session.server import StageServer
from swarm.errors import SwarmError
from swarm.process.lifecycle import run_cli
from swarm.rpc.links.frames import kind_of
from swarm.rpc.links.peers import GrpcPeerLinks
from swarm.wire.messages import (
    AbortRound,
    Accumulated,
    Average,
    Averaged,
    Command,
    Commit,
    Committed,
    Evaluate,
    Event,
    RoundFailed,
    Route,
    Saved,
    Undelivered,
    Void,
)

COMMANDS = Route | Void | Average | AbortRound | Commit | Evaluate
EVENTS = Accumulated | Averaged | Committed | RoundFailed | Saved | Undelivered
COPIES_MAX = 4
TOLD_EVERY = 50
SAID = "repeated: "  # in the log of the process


class Repeater:
    """Does things again, later."""

    def __init__(self, late_s: float, seed: int) -> None:
        self._late_s = late_s
        self._rng = Random(seed)
        self._counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    def again(self, what: str, act: Callable[[], Awaitable[object] | None]) -> None:
        """`act` once to four times more, at moments that are drawn."""
        for _ in range(self._rng.randint(1, COPIES_MAX)):
            task = asyncio.get_running_loop().create_task(self._later(what, act))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _later(self, what: str, act: Callable[[], Awaitable[object] | None]) -> None:
        await asyncio.sleep(self._rng.random() ** 3 * self._late_s)  # most come soon
        with contextlib.suppress(SwarmError):  # refused, as it may be
            if (doing := act()) is not None:
                await doing
        self._counts[what] += 1
        if sum(self._counts.values()) % TOLD_EVERY == 0:
            sys.stderr.write(f"{SAID}{json.dumps(self._counts)}\n")
            sys.stderr.flush()


def repeat(repeater: Repeater) -> None:
    """Put the repeater between this process and the others."""
    emit, send, handle = StageServer.emit, GrpcPeerLinks.send, StageServer._handle

    def emit_again(self: StageServer, event: Event) -> None:
        emit(self, event)
        if isinstance(event, EVENTS):
            repeater.again(type(event).__name__, lambda: emit(self, event))

    async def send_again(
        self: GrpcPeerLinks, address: str, header: Any, payload: bytes | memoryview, **whom: Any
    ) -> None:
        kept = bytes(payload)
        await send(self, address, header, kept, **whom)
        repeater.again(kind_of(header), lambda: send(self, address, header, kept, **whom))

    async def handle_again(self: StageServer, command: Command) -> None:
        await handle(self, command)
        epoch = self._epoch

        async def act() -> None:
            if self._epoch == epoch:
                await handle(self, command)

        if isinstance(command, COMMANDS):
            repeater.again(type(command).__name__, act)

    StageServer.emit = emit_again  # type: ignore[method-assign]
    GrpcPeerLinks.send = send_again  # type: ignore[method-assign]
    StageServer._handle = handle_again  # type: ignore[method-assign]


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--late", late_s, "--seed", seed, *rest]:
            repeat(Repeater(float(late_s), int(seed)))
            sys.argv = ["stage_server", *rest]
            run_cli(cli, "swarm stage-server")
        case _:
            raise SystemExit("usage: --late SECONDS --seed N, then the program's own flags")
