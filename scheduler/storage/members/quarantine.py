"""Stage servers that computed wrong numbers, by name: in memory and in the database, until an admin releases them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

import sqlalchemy as sa

from scheduler.brain.fleet.quarantine import Strike, TrustRecord
from scheduler.storage.database import Database
from scheduler.storage.patience import patiently
from swarm.errors import DatabaseRejected, DatabaseUnavailable, NotAllowed
from swarm.process.logs import Logger
from swarm.types import PeerId

PATIENCE_S = 10.0  # how long a strike waits for a database that takes no writes

_TABLE = sa.Table(
    "quarantine",
    sa.MetaData(),
    sa.Column("peer", sa.Text, primary_key=True),
    sa.Column("since_unix_s", sa.Float),
    sa.Column("strikes_json", sa.Text),
)


class Quarantine:
    """The records of stage servers with strikes."""

    def __init__(
        self, store: Database, log: Logger, wall_s: Callable[[], float], *, patience_s: float = PATIENCE_S
    ) -> None:
        self._store = store
        self._log = log
        self._wall_s = wall_s
        self._patience_s = patience_s
        self._records: dict[PeerId, TrustRecord] = {}

    async def load(self) -> None:
        """Read what earlier scheduler starts have found."""
        for row in await self._store.select(sa.select(_TABLE)):
            strikes = tuple(Strike(**one) for one in json.loads(row["strikes_json"]))
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

        async def put() -> None:
            record = self._records.get(peer)

            def write(connection: sa.Connection) -> None:
                connection.execute(sa.delete(_TABLE).where(_TABLE.c.peer == peer))
                if record is not None:
                    strikes = json.dumps([asdict(one) for one in record.strikes])
                    values = {"peer": peer, "since_unix_s": record.since_unix_s, "strikes_json": strikes}
                    connection.execute(sa.insert(_TABLE).values(values))

            await self._store.write(write)

        try:
            await patiently(put, patience_s=self._patience_s)
        except (DatabaseUnavailable, DatabaseRejected) as error:
            self._log.error("strikes not stored", peer=peer, reason=error.message)

    async def release(self, peer: PeerId) -> None:
        """Hold nothing against it any more; NotAllowed if nothing is."""
        if self._records.pop(peer, None) is None:
            raise NotAllowed(f"nothing is held against {peer}", hint="list the stage servers with: swarm peers")
        await self.keep(peer)
