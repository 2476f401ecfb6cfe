"""Stage servers that computed wrong numbers, by name: in memory and in the database, until an admin releases them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import sqlalchemy as sa

from scheduler.brain.fleet.quarantine import Strike, TrustRecord
from scheduler.storage.database import Database, put, table
from scheduler.storage.patience import PATIENCE_S, or_say
from swarm.errors import NotAllowed
from swarm.process.logs import Logger
from swarm.types import PeerId

_TABLE = table("quarantine", {"peer": sa.Text}, since_unix_s=sa.Float, strikes_json=sa.Text)


@dataclass(eq=False)
class Quarantine:
    """The records of stage servers with strikes."""

    _store: Database
    _log: Logger
    _wall_s: Callable[[], float]
    _patience_s: float = PATIENCE_S
    _records: dict[PeerId, TrustRecord] = field(default_factory=dict)

    async def load(self) -> None:
        """Read what earlier scheduler starts have found."""
        for row in await self._store.select(sa.select(_TABLE)):
            strikes = tuple(Strike(**strike) for strike in json.loads(row["strikes_json"]))
            self._records[PeerId(row["peer"])] = TrustRecord(strikes, row["since_unix_s"])

    def record(self, peer: PeerId) -> TrustRecord:
        return self._records.get(peer, TrustRecord())

    def names(self) -> list[PeerId]:
        """All that are quarantined."""
        return sorted(peer for peer, record in self._records.items() if record.is_quarantined)

    def strike(self, peer: PeerId, evidence: str, *, is_proven: bool, checked: int) -> TrustRecord:
        """Hold one more thing against a stage server; `keep` must follow."""
        strike = Strike(self._wall_s(), evidence, is_proven, checked)
        record = self._records[peer] = self.record(peer).struck(strike)
        self._log.warning("wrong numbers", peer=peer, evidence=evidence, quarantined=record.is_quarantined)
        return record

    async def keep(self, peer: PeerId) -> None:
        """Store the record of a stage server; in memory until the scheduler ends if the database refuses it."""

        async def write() -> None:
            record = self._records.get(peer)
            if record is None:
                row = sa.delete(_TABLE).where(_TABLE.c.peer == peer)
                await self._store.write(lambda connection: connection.execute(row))
            else:
                strikes = json.dumps([asdict(strike) for strike in record.strikes])
                values = {"peer": peer, "since_unix_s": record.since_unix_s, "strikes_json": strikes}
                await self._store.write(lambda connection: put(connection, _TABLE, values))

        await or_say(write, self._patience_s, partial(self._log.error, "strikes not stored", peer=peer))

    async def release(self, peer: PeerId) -> None:
        """Hold nothing against it any more; NotAllowed if nothing is."""
        if self._records.pop(peer, None) is None:
            raise NotAllowed(f"nothing is held against {peer}", hint="list the stage servers with: swarm peers")
        await self.keep(peer)
