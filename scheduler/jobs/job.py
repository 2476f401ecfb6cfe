"""A job, its progress, and questions about it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from scheduler.brain.explain.facts import Situation, machines_lost, reason_at_work
from scheduler.brain.fleet.allocation import Fewer, UnfitPeers
from scheduler.brain.fleet.membership import Peer
from scheduler.brain.islands.rows import Rows
from scheduler.brain.outputs import CommitRow
from scheduler.brain.stall import Stalls
from scheduler.jobs.driver import SAVED, Brain, JobDriver
from scheduler.storage.checkpoints.sink import CheckpointSink
from scheduler.storage.job_record import JobRecord
from swarm.checkpoint.reader import Checkpoint
from swarm.job.islands import outer_courses
from swarm.job.leases import Cut
from swarm.job.outer_log import Entry
from swarm.job.partition import microbatch_tokens, stage_flops
from swarm.job.spec import JobSpec
from swarm.text import counted
from swarm.types import JobId, JobState, PeerId

# Speed is shown over about this many steps.
SPEED_STEPS = 8
LOSS_SHOWN_S = 600.0  # of stage servers that a job does without, or has again


class Announcer:
    """Tells followers on the broker, where there is one; the hint may get lost."""

    def job_changed(self, record: JobRecord, progress: JobProgress) -> None:
        """Show the job as it is now."""

    def job_removed(self, job: JobId) -> None:
        """Drop the job's announcements: it ended long ago, or is gone."""


@dataclass(slots=True)
class JobProgress:
    """How far a job is, from its commit rows."""

    steps_done: int = 0
    tokens: int = 0
    loss: float = math.nan
    norm: float = 0.0
    learning_rate: float = 0.0
    skipped: int = 0  # steps whose gradients were not finite
    skipped_in_a_row: int = 0  # of the newest steps
    step_s: float = math.nan  # smoothed
    tokens_per_s: float = 0.0
    eta_s: float = math.nan
    evaluation_loss: float = math.nan
    evaluation_step: int = 0  # steps after which it was measured; 0 = never
    islands: Rows | None = None  # of a job with outer steps: steps that some islands have made
    logged: tuple[Entry, ...] = ()  # what its islands did on earlier timelines, as far as that counts

    @classmethod
    def at_start(cls, spec: JobSpec, timeline: int, step: int) -> JobProgress:
        """How far a job is at the beginning of a timeline, after `step` steps."""
        return cls(steps_done=step, islands=job_rows(spec, timeline) if spec.has_outer_steps else None)

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a commit row, as the database has it."""
        self.steps_done = row["step"] + 1
        self.tokens += row["tokens"]
        self.loss = math.nan if row["loss"] is None else row["loss"]
        self.norm, self.learning_rate = math.nan if row["skip"] else row["norm"], row["learning_rate"]
        self.skipped += row["skip"]
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if row["skip"] else 0

    def committed(self, row: CommitRow, step_s: float, steps: int) -> None:
        """Take in a commit that came `step_s` after the previous one."""
        first = math.isnan(self.step_s)
        self.step_s = step_s if first else self.step_s + (step_s - self.step_s) / SPEED_STEPS
        self.take(asdict(row))
        self.tokens_per_s = row.tokens / self.step_s if self.step_s else 0.0
        self.eta_s = (steps - self.steps_done) * self.step_s

    def outer_log(self) -> list[Entry]:
        """What chance had a say in between islands, so far."""
        return [*self.logged, *(() if self.islands is None else self.islands.log)]

    def cuts(self) -> list[Cut]:
        """How leases of islands were cut so far, as far as that counts."""
        before = [entry for entry in self.logged if isinstance(entry, Cut)]
        return [*before, *(() if self.islands is None else self.islands.cuts)]

    @property
    def skipped_text(self) -> str:
        """How many of the steps changed no weight, for a person; empty if all did."""
        return f"{self.skipped} of {counted(self.steps_done, 'step')} skipped" if self.skipped else ""


@dataclass(slots=True)
class JobRun:
    """A job at work. The runner alone makes it and drops it."""

    brain: Brain  # for questions; only the driver gives it inputs
    driver: JobDriver
    replicas_at_start: int
    sink: CheckpointSink | None = None  # once its storage is prepared
    lost_s: dict[PeerId, float] = field(default_factory=dict)  # stage servers that were lost, and when


@dataclass(slots=True)
class Waiting:
    """A job that waits for peers. The rollback of a stalled job says where it goes on, and when."""

    since_s: float
    goes_on: str = ""  # what was lost and where the job goes on, once it is ready to be placed
    tries_again_s: float = 0.0
    fewer: Fewer | None = None  # with how many islands or stages it could begin, if not as it is, and when it does so


@dataclass(slots=True)
class Job:
    """A job and its present state. The registry alone writes `record`, and `waiting` with it."""

    record: JobRecord
    spec: JobSpec
    progress: JobProgress = field(default_factory=JobProgress)
    start: Checkpoint | None = None  # what the present timeline starts from
    newest: Checkpoint | None = None
    stalls: Stalls = field(default_factory=Stalls)
    unfit: UnfitPeers = field(default_factory=UnfitPeers)  # expelled, and not to come back
    run: JobRun | None = None
    waiting: Waiting | None = None
    asked: JobSpec | None = None  # with its "auto"s, of a job that has not begun since it was submitted to this process
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    awaits_database: bool = False  # a row of it waits for a database that takes no writes
    unsaved: str = ""  # what is wrong with the newest checkpoint, if it could not be written
    done_again_before: int = 0  # microbatches, before its present run
    uses: int = 0  # what goes on with its row or its checkpoints: it cannot be removed meanwhile

    @contextmanager
    def used(self) -> Iterator[None]:
        """Marks the job as used while its row or files are written, or a job is about to begin at them."""
        self.uses += 1
        try:
            yield
        finally:
            self.uses -= 1

    @property
    def brain(self) -> Brain | None:
        """The brain of a job at work, for questions only."""
        return self.run.brain if self.run is not None else None

    @property
    def reason(self) -> str:
        """Why the job is in its state, as it is now."""
        record = self.record
        if self.waiting is not None and self.waiting.fewer is not None:
            return f"{record.reason}; {self.waiting.fewer.told(now_s())}"
        if record.state not in (JobState.LOADING, JobState.RUNNING) or self.brain is None:
            return record.reason
        told = record.reason
        if record.state is JobState.RUNNING:
            team = self.brain.team()
            told = reason_at_work(told, team, awaits_database=self.awaits_database, unsaved=self.unsaved)
        return "; ".join(filter(None, (told, self._machines_lost(), self.lost)))

    def _machines_lost(self) -> str:
        """What became of the stage servers that were lost lately, while the job runs without them, or with others."""
        run, serving = self.run, self.record.peers
        if run is None or self.record.state is not JobState.RUNNING:
            return ""
        lately = [peer for peer, at_s in run.lost_s.items() if now_s() - at_s < LOSS_SHOWN_S]
        back = sum(peer in serving for peer in lately)
        return machines_lost(len(lately), back, are_enough=len(serving) >= run.replicas_at_start)

    @property
    def lost(self) -> str:
        """What the newest loss of a stage cost, for a person, until the job has come as far again."""
        return self.record.repeats.told if self.progress.steps_done < self.record.repeats.reached else ""

    @property
    def done_again(self) -> int:
        """Microbatches that were computed again at a stage so far, on all timelines."""
        counts = self.brain.counts().replayed if self.brain is not None else 0
        return self.done_again_before + counts

    @property
    def goes_back(self) -> tuple[int, bool]:
        """The step to which the job would go back now, and whether that is saved; else it is its start."""
        saved = self.newest if self.newest is not None else self.start
        return (saved.step, True) if saved is not None else (self.record.first_steps[0], False)

    @property
    def left_s(self) -> float:
        """How long it will train on at its present speed; nan = not known."""
        return self.progress.eta_s if self.record.state is JobState.RUNNING and not self.awaits_database else math.nan

    @property
    def stages(self) -> dict[int, list[PeerId]]:
        """The peers of each stage, of all islands; empty if the job has none."""
        peers, stages = self.record.peers, len(self.spec.split)
        of = {stage: [peer for peer in peers if peers[peer] % stages == stage] for stage in range(stages)}
        return of if peers else {}

    def situation(self) -> Situation | None:
        """The situation of a job at work from its brain, for an explanation."""
        return self.brain.situation(self.clock_s()) if self.brain is not None else None

    def clock_s(self) -> float:
        """The time by the clock of a job's brain at work; by the event loop's clock for another job."""
        return self.run.driver.now_s() if self.run is not None else now_s()


def job_rows(spec: JobSpec, timeline: int) -> Rows:
    """Merges the rows of islands, on one timeline of a job with outer steps."""
    return Rows(timeline, outer_courses(spec))


def speed_of(job: Job | None, peer: Peer) -> float:
    """Multiply-adds a second that the peer computes in its job, of a forward; 0 = not measured."""
    pace_s = 0.0 if job is None or job.brain is None else job.brain.pace_s(peer.hello.peer)
    if job is None or pace_s <= 0.0:
        return 0.0
    flops = stage_flops(job.spec, split := job.spec.split)
    return microbatch_tokens(job.spec) * flops[peer.stage % len(split)] / pace_s


def success_text(job: Job) -> str:
    """The reason of a job that succeeded."""
    return "; ".join(filter(None, (SAVED, job.progress.skipped_text)))


def again(job: Job) -> str:
    """How to resume after a failure, if there is a checkpoint."""
    if job.newest is None:
        return ""
    return f"go on from step {job.newest.step} with: swarm resume {job.record.id}"


def now_s() -> float:
    """The event loop's clock."""
    return asyncio.get_running_loop().time()


def peers_max(job: Job, islands: int | None = None) -> int | None:
    """The most stage servers that the job takes, with a number of islands or (None) all of them; None: any number."""
    replicas_max, islands = job.spec.limits.max_replicas, islands or job.spec.island_count
    return replicas_max * len(job.spec.split) * islands if replicas_max else None
