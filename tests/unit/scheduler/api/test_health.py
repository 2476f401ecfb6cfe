"""What /readyz and a list of jobs say of the database and the broker."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from scheduler.api.health import NO_BROKER, NO_DATABASE, NO_WRITES, Health
from scheduler.storage.database import DatabaseWatch
from swarm.errors import DatabaseUnavailable
from tests.support.sim import loop as sim


class FakeDatabase:
    """Answers, refuses, or says nothing."""

    def __init__(self) -> None:
        self.does = "answer"

    async def check_epoch(self) -> None:
        if self.does == "refuse":
            raise DatabaseUnavailable("connection to db.example.org refused")
        if self.does == "nothing":
            await asyncio.sleep(1e9)


def test_a_database_that_refuses_or_is_silent_and_a_broker_that_is_away() -> None:
    async def main() -> None:
        database, bus, links = FakeDatabase(), SimpleNamespace(connected=True), list[bool]()
        given: Any = (database, bus)
        watch = DatabaseWatch(given[0], links.append)
        waits: list[str] = []
        health = Health(watch, given[1], lambda: bool(waits))
        watching = asyncio.create_task(watch.run())
        await asyncio.sleep(1)
        assert [health.not_ready(), health.remarks(), health.troubles(), links] == [[], [], [], [True]]
        bus.connected = False
        assert [health.not_ready(), health.remarks(), health.troubles()] == [[], [NO_BROKER], [NO_BROKER]]
        waits.append("step 7")
        assert [health.not_ready(), health.troubles()] == [[NO_WRITES], [NO_WRITES, NO_BROKER]]
        database.does = "refuse"
        await asyncio.sleep(6)
        assert health.not_ready() == ["connection to db.example.org refused"]
        assert health.troubles() == [NO_DATABASE, NO_BROKER], "whoever lists jobs need not know where it is"
        database.does = "nothing"
        await asyncio.sleep(20)
        assert "has not answered for" in health.not_ready()[0]
        assert links[-1] is False
        watching.cancel()
        assert Health(watch, None, bool).remarks() == []

    sim.run(main(), seed=1, limit_s=1e6)
