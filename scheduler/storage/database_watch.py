"""Notices that the database is away, or that another scheduler took it over, also while nothing is written."""

from __future__ import annotations

import asyncio

from scheduler.storage.database import Database
from swarm.errors import DatabaseUnavailable

LOOK_S = 5.0


class DatabaseWatch:
    """Looks at the database every few seconds."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._fault = ""

    def not_ready(self) -> list[str]:
        """Why the scheduler is not ready."""
        return [self._fault] if self._fault else []

    async def run(self) -> None:
        """Look, for ever. Fenced, which ends the scheduler, once another one has taken the database over."""
        while True:
            try:
                await self._database.check_epoch()
                self._fault = ""
            except DatabaseUnavailable as error:
                self._fault = error.message
            await asyncio.sleep(LOOK_S)
