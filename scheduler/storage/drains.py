"""Stage servers that are to hand their work over (`swarm peers drain`).

A drain outlives the scheduler and every session. It ends when the stage server itself is started again, so a person
takes it back by a restart. A stage server that is ended by a signal says so in every session, and is not kept here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from scheduler.storage.database import Database, Drain
from scheduler.storage.patience import PATIENCE_S, or_say
from swarm.process.logs import Logger
from swarm.types import PeerId
from swarm.wire.messages import Hello


@dataclass(eq=False)
class Drains:
    """The drained stage servers, in memory and in the database."""

    _store: Database
    _log: Logger
    _patience_s: float = PATIENCE_S
    _drains: dict[PeerId, Drain] = field(default_factory=dict)

    async def load(self) -> None:
        """Read the drains that were asked of an earlier scheduler start."""
        self._drains = await self._store.drains()

    def reason(self, hello: Hello) -> str:
        """Why this process is drained; empty if it is not."""
        drain = self._drains.get(hello.peer)
        return drain.reason if drain is not None and hello.incarnation <= drain.incarnation else ""

    def is_over(self, hello: Hello) -> bool:
        """Whether an earlier process of this peer was drained."""
        drain = self._drains.get(hello.peer)
        return drain is not None and drain.incarnation < hello.incarnation

    async def keep(self, hello: Hello, reason: str) -> None:
        """This process is drained. If the database refuses the row, it is known until the scheduler ends."""
        drain = Drain(hello.incarnation, reason)
        if self._drains.get(hello.peer, Drain(-1, "")).incarnation >= hello.incarnation:
            return
        self._drains[hello.peer] = drain

        async def put() -> None:
            if self._drains.get(hello.peer) is drain:  # else the drain is over, or a newer one has replaced it
                await self._store.put_drain(hello.peer, drain)

        await or_say(put, self._patience_s, partial(self._log.error, "drain not stored", peer=hello.peer))

    async def forget(self, peer: PeerId) -> None:
        """The drain is over: the stage server was started again, or is to have stages again.

        A row that stays in the database changes nothing for a later incarnation; this one is drained again when the
        scheduler starts anew.
        """
        drain = self._drains.pop(peer, None)
        if drain is None:
            return

        async def delete() -> None:
            if peer not in self._drains:  # else it is drained again, and the row is that of the new drain
                await self._store.delete_drain(peer, drain.incarnation)

        told = partial(self._log.warning, "drain that is over not removed", peer=peer)
        await or_say(delete, self._patience_s, told)
