"""What a replica tells the scheduler about itself, and tells a new session again."""

from __future__ import annotations

from collections import deque

from stage_server.ports import ReplicaPorts
from swarm.errors import OutOfMemory, SwarmError
from swarm.messages import Committed, Event, Failed, Loaded


class Reports:
    """The reports of one replica that the scheduler may have missed when a session broke."""

    def __init__(self, loaded: Loaded, ports: ReplicaPorts) -> None:
        self._loaded = loaded
        self._ports = ports
        self._committed: deque[Committed] = deque(maxlen=2)  # a commit is written when that of two steps ago is agreed
        self._failed: Failed | None = None

    def committed(self, event: Committed) -> None:
        self._committed.append(event)
        self._ports.emit(event)

    def fail(self, error: SwarmError) -> None:
        if isinstance(error, OutOfMemory):
            self._ports.metrics.out_of_memory()
        self._ports.log.error("cannot go on", error_code=error.code, reason=error.message)
        self._failed = Failed(self._loaded.job, error.code, error.message, error.hint)
        self._ports.emit(self._failed)

    def again(self) -> tuple[Event, ...]:
        """What a new session is told."""
        failed = () if self._failed is None else (self._failed,)
        return (self._loaded, *self._committed, *failed)
