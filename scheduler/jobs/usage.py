"""Counts what each project uses, and has it stored once a minute.

Every two seconds a stage server counts for the job that it was given, from then until it is taken back: a shorter hold
may be missed or counted in full. Tokens are counted by the runner with each commit, bytes by relays.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.job import now_s
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from swarm.errors import DatabaseRejected, DatabaseUnavailable, Fenced
from swarm.types import JobId

LOOK_S = 2.0
WRITE_S = 60.0


class UsageMeter:
    """Counts stage-server seconds and bytes of relays for the projects of their jobs."""

    def __init__(self, registry: JobRegistry, membership: Membership, ports: SchedulerPorts) -> None:
        self._registry, self._membership = registry, membership
        self._usage, self._wall_s, self._log = ports.stores.usage, ports.wall_s, ports.log
        self._looked_s = now_s()

    async def run(self) -> None:
        """Count and store, for ever. Raises Fenced."""
        written_s = now_s()
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()
            if now_s() - written_s >= WRITE_S:
                written_s = now_s()
                await self._write()

    async def close(self) -> None:
        """Store what was counted since, as the scheduler stops."""
        self._look()
        with suppress(Fenced):  # whoever took the database over counts on
            await self._write()

    def carried(self, job: JobId, size_bytes: int) -> None:
        """A relay carried bytes for the job."""
        if (known := self._registry.get(job)) is not None:
            self._usage.add(self._wall_s(), known.record.project, known.record.owner, relay_bytes=size_bytes)

    def _look(self) -> None:
        passed_s, self._looked_s = now_s() - self._looked_s, now_s()
        for peer in self._membership.peers():
            if (job := self._registry.get(peer.job)) is not None:
                self._usage.add(self._wall_s(), job.record.project, job.record.owner, peer_s=passed_s)

    async def _write(self) -> None:
        try:
            await self._usage.write(self._wall_s())
        except (DatabaseUnavailable, DatabaseRejected) as error:
            self._log.warning("usage not stored", reason=error.message)
