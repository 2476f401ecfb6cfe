"""Ports of the scheduler: the program, the simulation and the tests each give it their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from scheduler.jobs.job import Announcer
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.stores import Stores
from swarm.process.logs import Logger

SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class SchedulerPorts:
    """Storage, clock, chance, and the listeners of jobs."""

    stores: Stores
    announcer: Announcer
    metrics: SchedulerMetrics
    rng: Random
    wall_s: Callable[[], float]
    log: Logger
    product: str = ""
    settle_s: float = SETTLE_S  # a job takes the peers that are there when it starts: wait this long for the next one
