"""What all parts of one job's brain read and write."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.brain.outputs import Outbox
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.joiners import Joiners
from scheduler.brain.state.ledger import Ledger
from scheduler.brain.state.links import Links
from scheduler.brain.state.pool import Pool
from scheduler.brain.state.progress import Progress


@dataclass(frozen=True, slots=True)
class BrainState:
    """The replicas, the steps, the contributions, peers that join, failing links, and outputs not handed out yet."""

    settings: BrainSettings
    pool: Pool
    progress: Progress
    ledger: Ledger
    joiners: Joiners
    links: Links
    outbox: Outbox

    @classmethod
    def of(cls, settings: BrainSettings) -> BrainState:
        """Those of a job that has not begun."""
        stages = len(settings.split)
        pool = Pool(stages)
        ledger = Ledger(settings.timeline, stages, settings.microbatches)
        return cls(settings, pool, Progress(settings.first_step), ledger, Joiners(), Links(), Outbox(pool))
