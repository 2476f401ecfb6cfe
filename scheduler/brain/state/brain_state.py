"""The state that all parts of one job's brain read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from scheduler.brain.inputs import Resumed
from scheduler.brain.outputs import Fail, Finish, Outbox, Stopped
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.joiners import Joiners
from scheduler.brain.state.ledger import Ledger
from scheduler.brain.state.links import Links
from scheduler.brain.state.mode import TRANSITIONS, Mode, ModeEvent
from scheduler.brain.state.pool import Pool
from scheduler.brain.state.progress import Progress
from scheduler.brain.state.restart import RestartCensus
from swarm.job.course import Course
from swarm.types import PeerId


@dataclass(slots=True)
class BrainState:
    """The course, replicas, steps, contributions, peers that join, failing links, and outputs not handed out yet."""

    settings: BrainSettings
    course: Course
    pool: Pool
    progress: Progress
    ledger: Ledger
    joiners: Joiners
    links: Links
    outbox: Outbox
    mode: Mode = Mode.WAITING
    resumed: Resumed | None = None  # what an earlier scheduler start left
    census: RestartCensus | None = None  # while gathering
    relays_here: bool = True  # any relay of the swarm
    unreached: tuple[PeerId, ...] = ()  # by the scheduler

    @classmethod
    def of(cls, settings: BrainSettings, course: Course) -> BrainState:
        """The state of a job that has not begun."""
        stages = len(settings.split)
        pool = Pool(stages)
        usual = settings.microbatches
        ledger = Ledger(settings.timeline, stages, usual, lambda step: course.microbatches(step, usual))
        outbox = Outbox(settings.job, pool)
        return cls(settings, course, pool, Progress(settings.first_step), ledger, Joiners(), Links(), outbox)

    def version_of(self, step: int, index: int) -> int:
        """The weights that a microbatch is computed with."""
        settings = self.settings
        return self.course.version_of(step, index, overlap=settings.overlap, sync_steps=settings.sync_steps)

    def turn(self, event: ModeEvent) -> None:
        """Change the mode; an illegal change is a programming error."""
        after = TRANSITIONS.get((self.mode, event))
        assert after is not None, f"a job that is {self.mode} cannot turn on '{event}'"
        self.mode = after

    def conclude(self, end: Fail | Stopped | Finish | None) -> None:
        """End the job and release everybody, unless `end` is None. The first end stands."""
        if end is None or self.mode is Mode.ENDED:
            return
        match end:
            case Finish():
                reason = "finished"
            case Fail(message=reason) | Stopped(reason=reason):
                pass
            case _:
                assert_never(end)
        self.turn(ModeEvent.OVER)
        for peer in [*self.pool, *(joiner.replica.peer for joiner in self.joiners)]:
            self.outbox.release(peer, reason)
        self.outbox.put(end)
