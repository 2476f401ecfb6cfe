"""A command that must not wait is carried out as it comes; all others keep their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from stage_server.session import overtaking as module
from stage_server.session.overtaking import overtaking
from swarm.errors import SchedulerUnreachable
from swarm.types import JobId, PeerId
from swarm.wire.messages import Command, CutOff, Release
from tests.support.sim import loop as sim

FIRST, SECOND = Release(JobId("a"), ""), Release(JobId("b"), "")
URGENT = CutOff(PeerId("p"), 1.0)


class Session:
    """Gives commands with a second between, then ends in its way."""

    def __init__(self, *commands: Command, end: Exception | None = None) -> None:
        self._commands, self._end = commands, end
        self.closed = False

    async def attach(self) -> AsyncGenerator[tuple[int, Command], None]:
        try:
            for command in self._commands:
                yield 5, command
                await asyncio.sleep(1.0)
            if self._end is not None:
                raise self._end
        finally:
            self.closed = True


def play(session: Session, work_s: float, *, only: int = 99) -> tuple[list[tuple[float, Command]], list[float]]:
    """(when, which) of the commands in order when each takes so long, and when the urgent ones were carried out."""
    inside: list[tuple[float, Command]] = []
    urgent_s: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def at_once(epoch: int, command: Command) -> bool:
            if command is URGENT:
                urgent_s.append(loop.time())
            return command is URGENT

        commands = overtaking(session.attach(), at_once)
        try:
            async for epoch, command in commands:
                assert epoch == 5
                inside.append((loop.time(), command))
                await asyncio.sleep(work_s)
                if len(inside) == only:
                    break
        finally:
            await commands.aclose()

    sim.run(main(), seed=1, limit_s=1000.0)
    assert session.closed
    return inside, urgent_s


def test_a_command_that_must_not_wait_overtakes_those_that_wait() -> None:
    inside, urgent_s = play(Session(FIRST, SECOND, URGENT), 60.0)
    assert [command for _, command in inside] == [FIRST, SECOND]
    assert urgent_s == [2.0]
    assert inside[1][0] == 60.0


def test_how_a_session_ends_is_told_behind_its_commands() -> None:
    inside, _ = play(Session(FIRST, SECOND), 0.0)
    assert len(inside) == 2
    for end in (SchedulerUnreachable("broken"), ValueError("a fault of ours")):
        with pytest.raises(type(end)):
            play(Session(FIRST, end=end), 5.0)


def test_a_session_that_is_left_early_is_closed() -> None:
    assert len(play(Session(FIRST, SECOND, SECOND), 0.0, only=1)[0]) == 1


def test_a_session_is_read_no_further_than_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 1)
    inside, urgent_s = play(Session(FIRST, SECOND, FIRST, SECOND, URGENT), 60.0)
    assert [command for _, command in inside] == [FIRST, SECOND, FIRST, SECOND]
    assert urgent_s[0] > 60.0
