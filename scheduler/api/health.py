"""Health of the scheduler: the state of its database and its broker."""

from __future__ import annotations

from collections.abc import Callable

from scheduler.storage.database import DatabaseWatch
from swarm.mqtt.bus import Bus

NO_DATABASE = "the database does not answer: no step is committed and no job accepted until it does"
NO_WRITES = "the database takes no writes: a step waits to be committed until it does"
NO_BROKER = "the broker is not connected: new stage servers do not find the scheduler by it; training goes on"


class Health:
    """Asked by /readyz and by people; `bus` None: there is no broker. `row_waits`: the database has refused a row."""

    def __init__(self, watch: DatabaseWatch, bus: Bus | None, row_waits: Callable[[], bool]) -> None:
        self._watch = watch
        self._bus = bus
        self._row_waits = row_waits

    def not_ready(self) -> list[str]:
        """Why the scheduler is not ready, for any caller of /readyz."""
        return self._watch.not_ready() or [NO_WRITES] * self._row_waits()

    def remarks(self) -> list[str]:
        """Faults that leave the scheduler ready."""
        return [NO_BROKER] if self._bus is not None and not self._bus.connected else []

    def troubles(self) -> list[str]:
        """Both, for people that list jobs: without the text of a database, as it names hosts."""
        database = [NO_DATABASE] if self._watch.not_ready() else self.not_ready()
        return database + self.remarks()
