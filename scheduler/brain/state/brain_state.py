"""The state that all parts of one job's brain read and write."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import assert_never

from scheduler.brain.inputs import Resumed
from scheduler.brain.outputs import Fail, Finish, Outbox, Stopped
from scheduler.brain.settings import BrainSettings
from scheduler.brain.state.ledger import Ledger
from scheduler.brain.state.links import Links
from scheduler.brain.state.pool import Joiners, Pool
from scheduler.brain.state.restart import RestartCensus
from scheduler.brain.state.step import Phase, StepRun
from swarm.job.course import Course
from swarm.types import PeerId


class Mode(StrEnum):
    """Where a job stands, as far as its brain is concerned.

    WAITING ──started──▶ LOADING ──all loaded, digests equal──▶ RUNNING ──all steps agreed──▶ SAVING ──saved──▶ ENDED
       └─────resumed───▶ GATHERING ──all that can be expected are back──▲                                         ▲
                                       from anywhere: failed, stopped, stalled or cancelled ──────────────────────┘
    """

    WAITING = "waiting"
    GATHERING = "gathering"
    LOADING = "loading"
    RUNNING = "running"
    SAVING = "saving"
    ENDED = "ended"

    @property
    def is_at_work(self) -> bool:
        """Steps are being trained, or the last ones saved."""
        return self in (Mode.RUNNING, Mode.SAVING)


class ModeEvent(StrEnum):
    """The events that change the mode."""

    STARTED = "started"
    RESUMED = "resumed"
    LOADED = "all loaded"
    BACK = "all back"
    TRAINED = "all steps agreed"
    OVER = "over"


TRANSITIONS: dict[tuple[Mode, ModeEvent], Mode] = {
    (Mode.WAITING, ModeEvent.STARTED): Mode.LOADING,
    (Mode.WAITING, ModeEvent.RESUMED): Mode.GATHERING,
    (Mode.LOADING, ModeEvent.LOADED): Mode.RUNNING,
    (Mode.GATHERING, ModeEvent.BACK): Mode.RUNNING,
    (Mode.RUNNING, ModeEvent.TRAINED): Mode.SAVING,
    **{(mode, ModeEvent.OVER): Mode.ENDED for mode in Mode if mode is not Mode.ENDED},
}


class BrainState:
    """The course, replicas, steps, contributions, peers that join, failing links, and outputs not handed out yet."""

    def __init__(self, settings: BrainSettings, course: Course) -> None:
        self.settings, self.course = settings, course
        stages, usual = len(settings.split), settings.microbatches
        self.pool = Pool(stages)
        self.progress = Progress(settings.first_step)
        self.ledger = Ledger(settings.timeline, stages, usual, lambda step: course.microbatches(step, usual))
        self.joiners, self.links = Joiners(), Links()
        self.outbox = Outbox(settings.job, self.pool)
        self.mode = Mode.WAITING
        self.resumed: Resumed | None = None  # what an earlier scheduler start left
        self.census: RestartCensus | None = None  # while gathering
        self.relays_here = True  # any relay of the swarm
        self.unreached: tuple[PeerId, ...] = ()  # by the scheduler

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


class Progress:
    """The progress of a job: the steps at work, and the version that all replicas hold.

    steps   0 ....... agreed ....... committed ....... next ....... last
            all hold it │ row durable,  │ fed, averaged,  │ not begun
                        │ being applied │ decided         │

    The steps of one job; `runs` has those from `agreed` to before `next`.
    """

    def __init__(self, first_step: int) -> None:
        self.next = first_step
        self.committed = first_step  # steps whose row is durable
        self.agreed = first_step  # steps on whose commit all replicas agree
        self.runs: dict[int, StepRun] = {}
        self._digests: Mapping[int, str] = {}  # of each stage's state at version `agreed`, if known

    def resume(self, resumed: Resumed) -> None:
        """Go on where an earlier scheduler start stopped: whether its newest commits were made is not known."""
        self.committed = self.next = resumed.committed
        self.agreed = resumed.committed - len(resumed.rows)
        for row in resumed.rows:
            self.runs[row.step] = StepRun(row.step, Phase.COMMITTING, row.skip, row=row)

    def begin(self, step: int) -> StepRun:
        assert step == self.next
        self.next = step + 1
        run = self.runs[step] = StepRun(step)
        return run

    def redoable(self) -> list[StepRun]:
        """Steps whose contributions may still be void, oldest first."""
        return [run for _, run in sorted(self.runs.items()) if run.can_be_redone]

    def undecided(self) -> list[StepRun]:
        """Steps without a row: all of their contributions may still be void, oldest first."""
        return [run for _, run in sorted(self.runs.items()) if run.can_be_redone or run.phase is Phase.DECIDED]

    def loaded(self, digests: Mapping[int, str]) -> None:
        """All replicas loaded the first version; the digest of each stage."""
        self._digests = digests

    def agree(self, run: StepRun) -> None:
        """All replicas made the commit of the oldest step."""
        assert run.step == self.agreed
        self.agreed = run.step + 1
        self._digests = {report.stage: report.digest for report in run.commits.values()}
        del self.runs[run.step]

    def agreed_digest(self, stage: int) -> str:
        """The digest of the stage's state at version `agreed`; empty if not known."""
        return self._digests.get(stage, "")

    def digest_at(self, stage: int, version: int) -> str:
        """The digest of the stage's state at a version, as its replicas say; empty if none did yet, or they differ."""
        if version == self.agreed and self._digests:
            return self.agreed_digest(stage)
        run = self.runs.get(version - 1)
        said = {report.digest for report in run.commits.values() if report.stage == stage} if run is not None else set()
        return said.pop() if len(said) == 1 else ""
