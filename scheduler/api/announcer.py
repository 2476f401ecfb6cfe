"""Hints for followers on the broker; nothing depends on them."""

from __future__ import annotations

import math

from scheduler.jobs.job import Announcer, JobProgress
from scheduler.storage.job_record import JobRecord
from swarm.mqtt import topics
from swarm.mqtt.bus import Bus
from swarm.types import JobId

REASON_CHARACTERS_MAX = 1000


class BusAnnouncer(Announcer):
    """Retains one message per job: its state and how far it is."""

    def __init__(self, bus: Bus, swarm: str) -> None:
        self._bus = bus
        self._swarm = swarm

    def job_changed(self, record: JobRecord, progress: JobProgress) -> None:
        self._bus.announce(
            topics.job(record.id, self._swarm),
            {
                "id": record.id,
                "name": record.name,
                "state": record.state.value,
                "reason": record.reason[:REASON_CHARACTERS_MAX],
                "since_unix_s": record.since_unix_s,
                "step": progress.steps_done,
                "loss": progress.loss if math.isfinite(progress.loss) else None,
            },
        )

    def job_removed(self, job: JobId) -> None:
        self._bus.announce(topics.job(job, self._swarm), {})
