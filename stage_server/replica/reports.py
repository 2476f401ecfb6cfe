"""A replica's reports of itself to the scheduler, repeated in each new session. Decision: docs/decisions/039."""

from __future__ import annotations

import asyncio
from collections import deque

from stage_server.ports import ReplicaPorts
from swarm.errors import OutOfMemory, SwarmError
from swarm.model.stage import Stage
from swarm.wire import messages
from swarm.wire.messages import Commit


class Reports:
    """The newest reports of one replica."""

    def __init__(self, loaded: messages.Loaded, ports: ReplicaPorts) -> None:
        self._loaded = loaded
        self._ports = ports
        self._committed: deque[messages.Committed] = deque(
            maxlen=2
        )  # a commit is written when that of two steps ago is agreed
        self._failed: messages.Failed | None = None
        self._telling: asyncio.Task[None] | None = None

    def tell(self, command: Commit, stage: Stage) -> None:
        """Report a commit with the digest of the state, which is made beside the microbatches that use it first."""
        self._telling = self._ports.work.start(self._tell(command, stage))

    async def told(self) -> None:
        """Until the newest digest is made, the state must stay as it is."""
        if self._telling is not None:
            await asyncio.wait([self._telling])

    async def _tell(self, command: Commit, stage: Stage) -> None:
        try:
            digest = await self._ports.device.aside(stage.digest)
        except SwarmError as error:
            self.fail(error)
            return
        self._committed.append(messages.Committed(command.timeline, command.step, command.version, stage.stage, digest))
        self._ports.emit(self._committed[-1])

    def fail(self, error: SwarmError) -> None:
        if isinstance(error, OutOfMemory):
            self._ports.metrics.out_of_memory()
        self._ports.log.error("cannot go on", error_code=error.code, reason=error.message)
        self._failed = messages.Failed(self._loaded.job, error.code, error.message, error.hint)
        self._ports.emit(self._failed)

    def again(self) -> tuple[messages.Event, ...]:
        failed = () if self._failed is None else (self._failed,)
        return (self._loaded, *self._committed, *failed)
