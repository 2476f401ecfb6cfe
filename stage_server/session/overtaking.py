"""The commands of a session in order, but for those that must not wait.

    session ──▶ at_once? ──no──▶ waiting ──▶ carried out one after the other
                   └─yes─▶ carried out now

A commit waits for the device, and for a donor if the replica was no member of its rounds: seconds, or a minute. Whoever
was revoked would stay connected for as long. Decision: docs/decisions/053.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeAlias

from swarm.errors import SchedulerUnreachable
from swarm.rpc.session import Pipe
from swarm.wire.messages import Command

WAITING_MAX = 8192  # commands; then the session is read no further

_Commands: TypeAlias = AsyncGenerator[tuple[int, Command], None]


async def overtaking(commands: _Commands, at_once: Callable[[int, Command], bool]) -> _Commands:
    """The commands in order, without those that `at_once` carries out, as soon as they come, by giving True."""
    waiting: Pipe[tuple[int, Command]] = Pipe(WAITING_MAX)

    async def read() -> None:
        try:
            async with aclosing(commands):
                async for epoch, command in commands:
                    if not at_once(epoch, command):
                        await waiting.put((epoch, command))
            waiting.end()
        except Exception as error:
            waiting.fail(error)
        finally:
            waiting.fail(SchedulerUnreachable("the session was broken off"))  # without effect after an end

    reading = asyncio.create_task(read(), name="commands")
    try:
        async for one in waiting:
            yield one
    finally:
        reading.cancel()
        await asyncio.wait({reading})
