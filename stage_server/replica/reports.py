"""A replica's reports of itself to the scheduler, repeated in each new session."""

from __future__ import annotations

from collections import deque

from stage_server.ports import ReplicaPorts
from swarm import events
from swarm.errors import OutOfMemory, SwarmError


class Reports:
    """The newest reports of one replica."""

    def __init__(self, loaded: events.Loaded, ports: ReplicaPorts) -> None:
        self._loaded = loaded
        self._ports = ports
        self._committed: deque[events.Committed] = deque(
            maxlen=2
        )  # a commit is written when that of two steps ago is agreed
        self._failed: events.Failed | None = None

    def committed(self, event: events.Committed) -> None:
        self._committed.append(event)
        self._ports.emit(event)

    def fail(self, error: SwarmError) -> None:
        if isinstance(error, OutOfMemory):
            self._ports.metrics.out_of_memory()
        self._ports.log.error("cannot go on", error_code=error.code, reason=error.message)
        self._failed = events.Failed(self._loaded.job, error.code, error.message, error.hint)
        self._ports.emit(self._failed)

    def again(self) -> tuple[events.Event, ...]:
        failed = () if self._failed is None else (self._failed,)
        return (self._loaded, *self._committed, *failed)
