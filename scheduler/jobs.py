"""All jobs of one scheduler: submitted, placed when peers allow, driven, ended, shown.

    submit ─▶ queued ─▶ placing ─▶ loading ─▶ running ─▶ succeeded | failed | cancelled
                ▲               ▲                │ ╲
                │               └──── stalled ◀──┘  (a stage lost its last replica: back to a checkpoint)
                └──resume── failed | cancelled | paused ◀─ pausing

Every change of state is written to the database first, then shown to watchers, metrics and the broker.
"""

from __future__ import annotations

import asyncio
import math
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any, Protocol

from scheduler.blocking import run_blocking
from scheduler.brain import Admitted, BrainSettings, CommitRow, JobBrain, Left, Replica
from scheduler.checkpoints import CheckpointFiles, JobCheckpoints
from scheduler.deadlines import DeadlineSettings
from scheduler.drained import Drained
from scheduler.driver import SAVED, JobDriver, Outcome
from scheduler.evaluation import EvaluationRow
from scheduler.explaining import WAITING_STATES, IdlePeer, JobStanding
from scheduler.fitting import check_possible, fit, needs, stage_counts
from scheduler.handing import Reservations, Running, Waiting, hand_out, start_with
from scheduler.joblog import JobLogs, LogLine
from scheduler.keeping import LATEST, Beginning, Keeping, job_and_step, same_model, uploaded_checkpoint
from scheduler.lineage import checkpoint_counts, resumed, row_counts
from scheduler.membership import Membership, Peer, Transition
from scheduler.placement import Candidate, stages_for
from scheduler.rebalancing import RebalanceSettings
from scheduler.recovery import Resumed
from scheduler.saving import DropCheckpoint, SavingRules, Turned
from scheduler.stalling import (
    Way,
    going_on,
    lost_in,
    pause_s,
    pausing,
    resume_hint,
    seeking,
    stalled_hint,
    waiting,
    way_on,
)
from scheduler.state_files import StateFiles, check_uploaded
from scheduler.store import Fenced, JobRecord, JobTokens, Store, StoreRejected, StoreUnavailable, patiently
from swarm.checkpoint import Checkpoint, CheckpointFailed, Facts, Found
from swarm.config import JobSpec, spec_from_json
from swarm.data.batches import Batches, TokenData
from swarm.errors import InvalidData, NotAllowed, NotFound, Refused, SwarmError
from swarm.footprint import Footprint, stage_footprint
from swarm.logs import Logger
from swarm.messages import (
    Command,
    Event,
    FetchRequest,
    Hello,
    Leaving,
    Loaded,
    Logged,
    Release,
    Route,
    StateFile,
    StoreHeader,
)
from swarm.metrics import SchedulerMetrics
from swarm.partition import flops_per_token, resolve, unit_names
from swarm.resume import check_changes, check_state, check_steps
from swarm.schedule import learning_rate, perplexity
from swarm.storage import MANIFEST, StorageError
from swarm.types import Decision, JobId, JobState, PeerId, PeerState

# A job takes the peers that are there when it starts: wait until nobody new has come for this long.
SETTLE_S = 2.0
SETTLE_S_MAX = 10.0  # where peers come and go all the time
LOOK_AGAIN_S = 5.0  # for a place for idle peers: one that failed to join may try again
RESUMED = "goes on after a restart of the scheduler"
RESTARTED = "the scheduler was restarted: waits for the job's peers"
# Speed is shown over about this many steps.
SPEED_STEPS = 8
REASON_CHARACTERS_MAX = 4000
# How long a change of state waits for a database that takes no writes.
STATE_PATIENCE_S = 10.0
# How often a stalled job looks for checkpoints whose storage does not answer.
CHECKPOINTS_RETRY_S = 10.0


class Announcer(Protocol):
    """Tells followers on the broker; a hint that may get lost."""

    def job_changed(self, record: JobRecord, progress: Progress) -> None: ...


@dataclass(slots=True)
class Progress:
    """How far a job is, from its commit rows."""

    steps_done: int = 0
    tokens: int = 0
    loss: float = math.nan
    norm: float = 0.0
    learning_rate: float = 0.0
    step_s: float = math.nan  # smoothed
    tokens_per_s: float = 0.0
    eta_s: float = math.nan
    evaluation_loss: float = math.nan
    evaluation_step: int = 0  # steps after which it was measured; 0 = never

    def take(self, row: Mapping[str, Any]) -> None:
        """Take in a row of the database."""
        self.steps_done = row["step"] + 1
        self.tokens += row["tokens"]
        self.loss = math.nan if row["loss"] is None else row["loss"]
        self.norm, self.learning_rate = row["norm"], row["learning_rate"]

    def committed(self, row: CommitRow, step_s: float, steps: int) -> None:
        """Take in a commit that came `step_s` after the one before."""
        first = math.isnan(self.step_s)
        self.step_s = step_s if first else self.step_s + (step_s - self.step_s) / SPEED_STEPS
        self.steps_done = row.step + 1
        self.tokens += row.tokens
        self.loss, self.norm, self.learning_rate = row.loss, row.norm, row.learning_rate
        self.tokens_per_s = row.tokens / self.step_s if self.step_s else 0.0
        self.eta_s = (steps - self.steps_done) * self.step_s


@dataclass(slots=True)
class Job:
    """A job and what is known of it now."""

    record: JobRecord
    spec: JobSpec
    progress: Progress = field(default_factory=Progress)
    driver: JobDriver | None = None
    keeper: JobCheckpoints | None = None
    start: Checkpoint | None = None  # what the present timeline starts from
    newest: Checkpoint | None = None
    gone_back: str = ""  # what a stalled job lost and where it goes on, once it is ready to be placed
    stages: dict[int, list[PeerId]] = field(default_factory=dict)
    failures: int = 0  # stages lost in a row without a step committed in between
    tries_again_s: float = 0.0  # a stalled job
    at_start: int = 0  # replicas with which it began to work
    waits_since_s: float = 0.0  # for peers
    changed: asyncio.Event = field(default_factory=asyncio.Event)


_RESUMABLE = (JobState.PAUSED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True, slots=True)
class _CheckpointNews:
    """Passes on what became of a job's checkpoints: to the brain, to metrics, to people."""

    job: Job
    driver: JobDriver
    metrics: SchedulerMetrics
    wall_s: Callable[[], float]
    say: Callable[[str, str], None]
    changed: Callable[[Job], None]

    def kept(self, checkpoint: Checkpoint, duration_s: float) -> None:
        self.job.newest = checkpoint
        size_bytes = checkpoint.size_bytes
        self.metrics.checkpoint_kept(
            self.job.record.id, duration_s=duration_s, time_unix_s=self.wall_s(), size_bytes=size_bytes
        )
        self.say("info", f"checkpoint {checkpoint.name} is kept: {size_bytes} bytes, read back, {duration_s:.1f} s")
        self.driver.checkpoint_written(checkpoint.step)
        self.changed(self.job)

    def failed(self, version: int, error: CheckpointFailed) -> None:
        self.driver.checkpoint_written(version, error.reason, str(error))

    def note(self, level: str, text: str) -> None:
        self.say(level, text)

    def at_work(self) -> None:
        self.driver.made_progress()


class Jobs:
    """The scheduler's jobs; told by `Sessions` what stage servers do."""

    def __init__(
        self,
        store: Store,
        membership: Membership,
        root: Path,
        executor: ThreadPoolExecutor | None,
        send: Callable[[PeerId, Command], None],
        announcer: Announcer,
        metrics: SchedulerMetrics,
        tasks: asyncio.TaskGroup,
        rng: Random,
        wall_s: Callable[[], float],
        log: Logger,
        *,
        settle_s: float = SETTLE_S,
        files_executor: ThreadPoolExecutor | None = None,
        product: str = "",
    ) -> None:
        self._store = store
        self._membership = membership
        self._root = root
        self._executor = executor
        self._send = send
        self._announcer = announcer
        self._metrics = metrics
        self._tasks = tasks
        self._rng = rng
        self._wall_s = wall_s
        self._log = log
        self._settle_s = settle_s
        self._product = product
        self.keeping = Keeping(root, files_executor)
        self._jobs: dict[JobId, Job] = {}
        self._wake = asyncio.Event()
        self._pool_changed_s = -math.inf
        self._stopping = False
        self._drained = Drained(store, log)
        self._reservations = Reservations()
        self._unused: Mapping[
            PeerId, Mapping[JobId, str]
        ] = {}  # why no job at work takes an idle peer, as last decided
        self.logs = JobLogs(root / "jobs")

    async def load(self) -> None:
        """Read what an earlier start left; jobs that were running go on once their peers are back."""
        await run_blocking(self._executor, lambda: _remove_unfinished(self._root))
        await self._drained.load()
        for record in await self._store.jobs():
            job = Job(record, spec_from_json(record.spec_json), waits_since_s=_now_s())
            self._jobs[record.id] = job
            job.progress = await self._progress_of(record)
            if not (record.state.is_final and job.spec.checkpoint.dir):  # a bucket per old job would take long
                job.newest = await self.keeping.newest(record, job.spec)
            self._metrics.job_opened(record.id, job.spec.model.family, job.progress.steps_done)
            self._metrics.job_state(record.id, record.state)
            if not record.state.is_final:
                self.logs.open(record.id)
            if job.progress.evaluation_step:
                self._metrics.evaluated(record.id, step=job.progress.evaluation_step, loss=job.progress.evaluation_loss)
            if record.state in (JobState.QUEUED, JobState.PLACING):
                await self._find_start(job)
            elif record.state is JobState.LOADING and not await self._has_rows(record):
                await self._enter(job, JobState.PLACING, "the scheduler was restarted before the job ran", peers={})
                await self._find_start(job)
            elif record.state is JobState.LOADING:  # it ran, and that was not stored any more
                await self._enter(job, JobState.RUNNING, "all replicas are loaded")
                await self._resume(job)
            elif record.state is JobState.STALLED:
                self._tasks.create_task(self._go_back(job))
            elif not record.state.is_final and record.state is not JobState.PAUSED:
                await self._resume(job)

    async def _has_rows(self, record: JobRecord) -> bool:
        """Whether the job has trained on its present timeline."""
        return bool(await self._store.last_rows(record.id, record.timeline, count=1))

    async def _find_start(self, job: Job) -> bool:
        """Look up the checkpoint that the job starts from, if any; without it the job fails."""
        try:
            job.start = await self.keeping.start_of(job.record)
        except SwarmError as error:
            await self._enter(
                job, JobState.FAILED, error.message, error_code=error.code, hint=_again(job) or error.hint
            )
            return False
        self._wake.set()
        return True

    async def _resume(self, job: Job) -> None:
        """Go on with a job that an earlier scheduler start left at work, once its peers are back."""
        record = job.record
        if not await self._find_start(job):
            return
        try:
            batches = self._open_batches(job.spec, record.tokens)
        except SwarmError as error:
            await self._enter(
                job, JobState.FAILED, error.message, error_code=error.code, hint=_again(job) or error.hint
            )
            return
        rows = await self._store.last_rows(record.id, record.timeline, count=2)
        evaluated = {one.version for one in await self._store.evaluations(record.id) if one.timeline == record.timeline}
        committed = rows[-1].step + 1 if rows else record.first_steps[-1]
        for peer, stage in sorted(record.peers.items()):
            job.stages.setdefault(stage, []).append(peer)
        job.driver, job.at_start = self._make_driver(job, batches), len(record.peers)
        if record.state is not JobState.RUNNING:  # it was told to stop
            job.driver.stop(JobState.PAUSED if record.state is JobState.PAUSING else JobState.CANCELLED, record.reason)
        resumed = Resumed(record.peers, committed, rows, evaluated, self._membership.grace_s)
        self._tasks.create_task(self._drive(job, job.driver, resumed))
        await self._enter(job, record.state, RESTARTED)

    async def _progress_of(self, record: JobRecord) -> Progress:
        """How far the job is by the rows that count: those of timelines that were left behind do not."""
        progress = Progress(steps_done=record.first_steps[-1])
        for row in await self._store.commits(record.id):
            if row_counts(row["timeline"], row["step"], record.first_steps):
                progress.take(row)
        for evaluation in await self._store.evaluations(record.id):
            if checkpoint_counts(evaluation.timeline, evaluation.version, record.first_steps):
                progress.evaluation_loss, progress.evaluation_step = evaluation.loss, evaluation.version
        return progress

    # What clients ask --------------------------------------------------------------------------------------------

    def all(self) -> list[Job]:
        """All jobs, newest first."""
        return sorted(self._jobs.values(), key=lambda job: job.record.created_unix_s, reverse=True)

    def find(self, reference: str) -> Job:
        """The job with this id, else the newest with this name, else the only one whose id begins so; NotFound."""
        if (exact := self._jobs.get(JobId(reference))) is not None:
            return exact
        jobs = self.all()
        named = [job for job in jobs if job.record.name == reference]
        if named:
            return named[0]
        begins = [job for job in jobs if job.record.id.startswith(reference)] if reference else []
        if len(begins) == 1:
            return begins[0]
        if begins:
            ids = ", ".join(job.record.id for job in begins[:5])
            raise NotFound(f'"{reference}" fits several jobs: {ids}', hint="give more of the id")
        raise NotFound(f'there is no job "{reference}"', hint="list them with: swarm ls -a")

    async def submit(
        self,
        spec: JobSpec,
        tokens: JobTokens,
        tokenizer_files: dict[str, bytes],
        files: tuple[StateFile, ...] = (),
    ) -> Job:
        """Accept a job: resolve what is still "auto", check its data and `files`, store it.

        InvalidConfig, InvalidData, InvalidModel, OutOfMemory.
        """
        resolved = self._resolve(spec, tokens)
        self._open_batches(resolved, tokens)
        check_uploaded(files, [self.shard_path(file.sha256) for file in files])
        self.keeping.storage(resolved, JobId(spec.name))  # for its checks
        sent = uploaded_checkpoint(files, self.shard_path)
        chosen = (
            await self._start_from(resolved) if resolved.checkpoint.resume_from and sent is None else Found(None, ())
        )
        start, begins = chosen.checkpoint, ""
        if sent is not None:
            check_state(sent.trainer_state(), resolved)
            check_steps(resolved, sent.step)
        if (first := start or sent) is not None:
            of = f"{first.name} of {resolved.checkpoint.resume_from.partition(':')[0]}" if start else "what was sent"
            begins = f"; starts at step {first.step} from {of}"
        job_id = JobId(f"{spec.name}-{self._rng.randbytes(3).hex()}")
        now_unix_s = self._wall_s()
        record = JobRecord(
            id=job_id,
            name=spec.name,
            state=JobState.QUEUED,
            reason=f"waits for peers{begins}",
            since_unix_s=now_unix_s,
            created_unix_s=now_unix_s,
            spec_json=resolved.model_dump_json(),
            tokens=tokens,
            files=files,
            **(_starting_at(start) if sent is None else {"first_steps": (sent.step,)}),
        )
        await run_blocking(self._executor, lambda: _write_files(self._tokenizer_folder(job_id), tokenizer_files))
        await self._store.put_job(record)
        job = self._jobs[job_id] = Job(
            record, resolved, Progress(record.first_steps[-1]), start=start, waits_since_s=_now_s()
        )
        self.logs.open(job_id)
        self._metrics.job_opened(job_id, resolved.model.family)
        shape = f"{len(_split(resolved))} stages, split {_split(resolved)}"
        self._say(job, "info", f"job {job_id} accepted: {shape}{begins}")
        if skipped := chosen.skipped_text():
            self._say(job, "warning", skipped)
        self._changed(job)
        self._wake.set()
        return job

    def _resolve(self, spec: JobSpec, tokens: JobTokens) -> JobSpec:
        """The spec with every "auto" decided, the cut by the memory of the idle peers; OutOfMemory if it cannot fit."""
        idle = [peer.hello.memory_bytes for peer in self._membership.idle_peers()]
        decide = partial(
            resolve,
            vocabulary_size=tokens.vocabulary_size,
            stages_if_auto=stages_for(len(idle)),
            end_of_text=tokens.end_of_text,
        )
        resolved = decide(spec)
        if spec.pipeline.split != "auto":
            return resolved
        fixed = spec.pipeline.stages != "auto"
        counts = stage_counts(resolved, len(_split(resolved)), len(idle), fixed=fixed)
        cut = fit(resolved, idle, counts)
        if cut.plan is None:
            present = [peer.hello.memory_bytes for peer in self._membership.peers() if peer.state is not PeerState.GONE]
            check_possible(resolved, present, counts if fixed else range(1, resolved.layers + 1))
            return resolved
        pipeline = resolved.pipeline.model_copy(update={"split": cut.plan, "stages": len(cut.plan)})
        return decide(resolved.model_copy(update={"pipeline": pipeline}))

    async def _start_from(self, spec: JobSpec, at: int | None = None) -> Found:
        """The checkpoint of another job that a new one starts from; InvalidConfig, NotFound, CheckpointDamaged.

        `at`: the step at which it did start from it.
        """
        name, step = job_and_step(spec.checkpoint.resume_from)
        step = step if at is None else f"{at}"
        other = self.find(name)
        same_model(other.spec, spec, f"job {other.record.id}")
        found = await self.keeping.choose(other.record, other.spec, step)
        if found.checkpoint is None:
            raise NotFound(f"job {other.record.id} has no checkpoint to start from", hint=found.skipped_text())
        check_state(found.checkpoint.trainer_state(), spec)
        check_steps(spec, found.checkpoint.step)
        return found

    async def cancel(self, job: Job, reason: str, *, checkpoint: bool = True) -> None:
        """Save what was trained and end the job; a second call, or one without `checkpoint`, ends it at once.

        Idempotent. NotAllowed if it has ended otherwise.
        """
        state = job.record.state
        if state is JobState.CANCELLED:
            return
        if state.is_final:
            raise NotAllowed(f"job {job.record.id} has {state.value} already", hint="there is nothing to cancel")
        if job.driver is None:
            await self._enter(job, JobState.CANCELLED, reason, hint=_again(job))
        elif checkpoint and state is not JobState.CANCELLING:
            job.driver.stop(JobState.CANCELLED, reason)
            await self._enter(job, JobState.CANCELLING, f"{reason}; what runs is committed and saved first")
        else:
            job.driver.cancel(reason)
            await self._enter(job, JobState.CANCELLING, reason)

    async def pause(self, job: Job, reason: str) -> None:
        """Commit what runs, save, and let the peers go; idempotent. NotAllowed if the job ends or has ended."""
        state = job.record.state
        if state in (JobState.PAUSED, JobState.PAUSING):
            return
        if state.is_final or state is JobState.CANCELLING:
            raise NotAllowed(f"job {job.record.id} is {state.value}: it cannot be paused")
        if job.driver is None:
            await self._enter(job, JobState.PAUSED, reason, hint=_again(job))
        else:
            job.driver.stop(JobState.PAUSED, reason)
            await self._enter(job, JobState.PAUSING, f"{reason}; what runs is committed and saved first")

    async def resume(self, job: Job, which: str, spec: JobSpec | None) -> None:
        """Go on from a checkpoint ("latest" that verifies, or a step) on a new timeline, perhaps with changed values.

        From "0", or if nothing was ever committed, the job starts anew. NotAllowed unless it is paused, failed or
        cancelled; InvalidConfig, NotFound, CheckpointDamaged.
        """
        record = job.record
        if record.state not in _RESUMABLE or job.driver is not None:
            hint = f"start another job from it: swarm submit FILE --resume-from {record.id}:latest"
            state = "is being stopped" if job.driver is not None else f"is {record.state.value}"
            raise NotAllowed(
                f"job {record.id} {state}; only a paused, failed or cancelled one can be resumed",
                hint=hint if record.state is JobState.SUCCEEDED else f"see: swarm status {record.id}",
            )
        changed = job.spec
        if spec is not None:
            changed = self._resolve(spec, record.tokens)
            check_changes(job.spec, changed)
        untrained = job.newest is None and job.progress.steps_done == record.first_steps[0]
        anew = which == "0" or (untrained and which in ("", "latest"))
        found = await self.keeping.choose(record, job.spec, LATEST if anew else which)
        beginning = await self._beginning(job, found, anew=anew)
        check_steps(changed, beginning.step)
        await self._turn_to(job, record, beginning, changed)
        self.logs.open(record.id)
        if beginning.skipped:
            self._say(job, "warning", beginning.skipped)
        job.failures = 0
        told = f"goes on at step {beginning.step} {beginning.source}"
        await self._enter(job, JobState.QUEUED, told, error_code="", hint="")
        self._wake.set()

    async def _beginning(self, job: Job, found: Found, *, anew: bool) -> Beginning:
        """Where the job goes on, with what was found or (`anew`) as it started; NotFound, CheckpointDamaged."""
        record = job.record
        start, skipped = (None, "") if anew else (found.checkpoint, found.skipped_text())
        if start is None and not anew:
            raise NotFound(
                f"job {record.id} has no checkpoint that can be used{': ' if skipped else ''}{skipped}",
                hint=f"begin again at step 0 with: swarm resume {record.id} --from 0",
            )
        if start is None and job.spec.checkpoint.resume_from and not _has_checkpoint(record.files):
            start = (await self._start_from(job.spec, record.first_steps[0])).checkpoint
        return Beginning(start.step if start is not None else record.first_steps[0], start, skipped)

    async def _turn_to(self, job: Job, record: JobRecord, beginning: Beginning, spec: JobSpec) -> None:
        """Begin a new timeline; what came after `beginning` counts no more. The caller enters a state next.

        NotAllowed, and nothing changes, if the job is no longer as in `record`.
        """
        start, step = beginning.start, beginning.step
        ours = start is not None and start.job == record.id
        first_steps = resumed(record.first_steps, start.timeline if start and ours else record.timeline, step)
        turned = replace(
            record,
            timeline=record.timeline + 1,
            spec_json=spec.model_dump_json(),
            weights_sha256="",
            peers={},
            **(_starting_at(start) | {"first_steps": first_steps}),
        )
        progress = await self._progress_of(turned)
        newest = await self.keeping.newest(turned, spec)
        if job.record is not record:
            raise NotAllowed(f"job {record.id} changed meanwhile: it is {job.record.state.value}")
        job.record, job.spec, job.start, job.stages = turned, spec, start, {}
        job.progress, job.newest = progress, newest
        self._metrics.job_opened(record.id, spec.model.family, step)
        self._metrics.job_went_back(
            record.id, progress.loss, progress.learning_rate, progress.norm, progress.evaluation_step
        )
        if progress.evaluation_step:
            self._metrics.evaluated(record.id, step=progress.evaluation_step, loss=progress.evaluation_loss)

    async def _stall(self, job: Job, outcome: Outcome) -> None:
        """The job lost a stage: free its peers, and take it back to where it can go on."""
        assert job.driver is not None
        trained = job.driver.brain.committed_steps > job.record.first_steps[-1]
        job.failures = 0 if trained else job.failures + 1
        keeper, job.driver, job.keeper, job.stages = job.keeper, None, None, {}
        self._release_all(job, outcome.reason)
        hint = stalled_hint(job.record.id)
        await self._enter(job, JobState.STALLED, seeking(outcome.reason), error_code="", hint=hint, peers={})
        if keeper is not None:
            await keeper.close()  # a checkpoint that was handed over whole is one to go on from
        await self._go_back(job)

    async def _go_back(self, job: Job) -> None:
        """Take a stalled job to a new timeline that begins at its newest checkpoint that verifies; then it is placed.

        Whoever cancels, pauses or resumes it meanwhile wins.
        """
        lost, timeline = lost_in(job.record.reason), job.record.timeline
        while (record := job.record).state is JobState.STALLED and record.timeline == timeline:
            try:
                await self._try_to_go_back(job, record, lost)
            except (StorageError, StoreUnavailable) as error:
                reason = seeking(lost, str(error))
                if job.record is record and reason != record.reason:
                    await self._enter(job, JobState.STALLED, reason)
                await asyncio.sleep(CHECKPOINTS_RETRY_S)
            except Fenced:
                raise
            except Exception as error:  # such as a start that is gone, or a fault of ours: not the end of other jobs
                if job.record is not record:
                    continue
                self._log.error("stalled job cannot go back", job_id=record.id, exc_info=error)
                told = error if isinstance(error, SwarmError) else SwarmError(f"internal error: {error!r}")
                reason, hint = f"{lost}; it cannot go back: {told.message}", told.hint or stalled_hint(record.id)
                await self._enter(job, JobState.PAUSED, reason, error_code=told.code, hint=hint)

    async def _try_to_go_back(self, job: Job, record: JobRecord, lost: str) -> None:
        """NotAllowed if the job is no longer as in `record`; StorageError, StoreUnavailable: try again."""
        found = await self.keeping.choose(record, job.spec, LATEST)
        found_of = found.checkpoint.job if found.checkpoint is not None else None
        way = way_on(record.id, found_of, skipped=bool(found.skipped))
        if way is Way.BY_HAND:
            if job.record is record:
                reason = f"{lost}; no checkpoint of the job verifies: {found.skipped_text()}"
                await self._enter(job, JobState.PAUSED, reason, hint=resume_hint(record.id, None))
            return
        beginning = await self._beginning(job, found, anew=way is Way.ANEW)
        if beginning.start is not None and beginning.step >= job.spec.training.steps:
            if job.record is record:
                sha256 = beginning.start.weights_sha256
                await self._enter(job, JobState.SUCCEEDED, SAVED, hint="", weights_sha256=sha256)
            return
        await self._turn_to(job, record, beginning, job.spec)
        if beginning.skipped:
            self._say(job, "warning", beginning.skipped)
        job.gone_back = going_on(lost, beginning.step, beginning.source, beginning.skipped)
        job.tries_again_s = _now_s() + pause_s(job.failures)
        told, hint = pausing(job.gone_back, job.failures), stalled_hint(record.id, job.failures)
        await self._enter(job, JobState.STALLED, told, hint=hint)
        self._wake.set()

    async def drain(self, peer: PeerId, reason: str) -> None:
        """Let the peer hand its work over, and give it none until it starts anew; twice is the same as once."""
        self._leave(peer, reason)
        known = self._membership.get(peer)
        if known is not None:
            await self._drained.keep(known.hello, reason)

    def _leave(self, peer: PeerId, reason: str) -> None:
        for transition in self._membership.leaving(peer, _now_s(), reason):
            self.on_transition(transition)

    def idle(self) -> list[IdlePeer]:
        """Peers without work, and why no job at work uses them."""
        return [
            IdlePeer(known.hello.peer, known.hello.memory_bytes, self._unused.get(known.hello.peer, {}))
            for known in self._membership.idle_peers()
        ]

    def standing(self, job: Job) -> JobStanding:
        """What is known of a job beside its brain, to be explained."""
        record, spec, split = job.record, job.spec, _split(job.spec)
        peers = sum(map(len, job.stages.values())) or len(split) * spec.limits.min_replicas
        return JobStanding(
            record.id,
            record.state,
            record.reason,
            max(0.0, self._wall_s() - record.since_unix_s),
            record.hint,
            job.progress.steps_done,
            spec.training.steps,
            spec.training.microbatches,
            job.progress.step_s,
            tuple(needs(spec, split, peers)),
            spec.limits.min_replicas,
        )

    async def watch(self, job: Job) -> AsyncIterator[Job]:
        """The job now and after every change, until it has ended."""
        while True:
            changed, ended = job.changed, job.record.state.is_final
            yield job
            if ended:
                return
            await changed.wait()

    def peers_of(self, job: Job) -> dict[int, list[PeerId]]:
        return job.stages

    def shard_path(self, sha256: str) -> Path:
        """Where the token shard with this hash is, or would be."""
        return self._root / "shards" / f"{sha256}.bin"

    # What stage servers do ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The scheduler ends: from here on, what sessions do means nothing for jobs."""
        self._stopping = True

    def on_event(self, peer: PeerId, event: Event) -> None:
        if self._stopping:
            return
        known = self._membership.get(peer)
        if known is None:
            return
        self._metrics.peer_heard(peer, self._wall_s())
        job = self._jobs.get(known.job)
        match event:
            case Hello():
                self._metrics.peer_attached(peer, event.product, event.device, self._wall_s())
                self._on_hello(peer, known.job, event)
                if reason := self._drained.reason(event):
                    self._leave(peer, reason)
                elif self._drained.is_over(event):
                    self._tasks.create_task(self._drained.forget(peer))
            case Logged():
                if event.job in self._jobs:
                    line = LogLine(event.time_unix_s, event.level, peer, known.stage, event.message)
                    self.logs.append(event.job, line)
                if job is not None and job.driver is not None and job.record.state is JobState.LOADING:
                    job.driver.made_progress()  # such as a long download
            case Leaving():
                self._leave(peer, event.reason)
            case _:
                if job is None or job.driver is None:
                    return
                if isinstance(event, Loaded) and event.job == known.job and not job.driver.brain.is_joining(peer):
                    for transition in self._membership.serving(peer, _now_s()):
                        self.on_transition(transition)
                    self._tasks.create_task(self._perhaps_running(job))
                job.driver.on_event(peer, event)

    def _on_hello(self, peer: PeerId, present: JobId, hello: Hello) -> None:
        """A session begins: its job is told, or takes the peer back, or the peer gives the job up."""
        job = self._jobs.get(present or hello.job)
        driver = job.driver if job is not None else None
        if job is not None and driver is not None and (present or driver.brain.admits(hello)):
            if not present:
                for transition in self._membership.adopt(peer, job.record.id, hello.stage, _now_s()):
                    self.on_transition(transition)
                self._has(job, peer, hello.stage)
            driver.on_event(peer, hello)
        elif hello.job:
            self._send(peer, Release(hello.job, "the job has ended, or went on without this peer"))

    def _has(self, job: Job, peer: PeerId, stage: int | None) -> None:
        """The job has the peer at a stage, or (None) no longer: a restarted scheduler must know."""
        for pool in job.stages.values():
            if peer in pool:
                pool.remove(peer)
        if stage is not None:
            job.stages.setdefault(stage, []).append(peer)
        peers = {peer: stage for stage, pool in job.stages.items() for peer in pool}
        if peers != job.record.peers:
            job.record = replace(job.record, peers=peers)
            self._tasks.create_task(self._put(job))

    def on_transition(self, transition: Transition) -> None:
        if self._stopping:
            return
        self._pool_changed_s = _now_s()
        self._wake.set()
        self._log.info(
            "peer changed state", peer=transition.peer, state=transition.after.value, reason=transition.reason
        )
        self._count_peers()
        job = self._jobs.get(transition.job)
        if job is not None and job.driver is not None:
            job.driver.on_transition(transition)
            if transition.after is PeerState.GONE:
                self._has(job, transition.peer, None)
        if transition.after in (PeerState.GONE, PeerState.DRAINING):
            self._reservations.end(transition.peer)

    async def store_stage(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take a file of a stage's state for the job's checkpoint."""
        job = self._jobs.get(header.job)
        driver, keeper = (job.driver, job.keeper) if job is not None else (None, None)
        if driver is None or keeper is None:
            raise Refused(f"job {header.job} collects nothing")

        async def counted() -> AsyncIterator[bytes]:
            async for chunk in chunks:
                driver.made_progress()
                yield chunk

        try:
            return await keeper.put(header, counted())
        except CheckpointFailed as error:
            driver.checkpoint_written(header.version, error.reason, str(error))
            raise

    async def fetch(self, request: FetchRequest) -> AsyncGenerator[bytes, None]:
        """Bytes of a file that a job at work starts from; NotFound or Refused."""
        job = self._jobs.get(request.job)
        driver = job.driver if job is not None else None
        if job is None or driver is None or job.record.timeline != request.timeline:
            raise Refused(f"job {request.job} does not load anything on timeline {request.timeline}")
        async for chunk in self._state_files(job).read(request, self.keeping.executor):
            driver.made_progress()
            yield chunk

    # Placing and driving -----------------------------------------------------------------------------------------

    async def dispatch(self) -> None:
        """Start queued jobs, oldest first, whenever there are peers for one; for ever."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_again_s()):
                    await self._wake.wait()
            self._wake.clear()
            if self.waiting():
                # Peers that come meanwhile make it longer; a moment without news has no event to wait for.
                until_s = _now_s() + SETTLE_S_MAX
                while (wait_s := min(self._pool_changed_s + self._settle_s, until_s) - _now_s()) > 0:  # noqa: ASYNC110
                    await asyncio.sleep(wait_s)
                for job in self.waiting():
                    await self._try_to_start(job)
            self._hand_out_idle()

    def _look_again_s(self) -> float | None:
        """How long nothing can become possible without news; None: for ever."""
        pauses_s = [job.tries_again_s - _now_s() for job in self.waiting()]
        idle_s = [LOOK_AGAIN_S] if self._membership.idle_peers() else []
        return min((one for one in pauses_s + idle_s if one > 0.0), default=None)

    def waiting(self) -> list[Job]:
        """Jobs that want peers, the oldest first."""
        return [job for job in reversed(self.all()) if job.record.state in WAITING_STATES]

    def _waiting(self, job: Job, peers: int) -> Waiting:
        """The job as `handing` sees it, where so many peers are there for it."""
        return Waiting(
            job.record.id,
            needs(job.spec, _split(job.spec), peers),
            job.spec.limits.min_replicas,
            _now_s() - job.waits_since_s,
            looks=job.record.state is JobState.STALLED and not job.gone_back,
        )

    def _running(self, job: Job, driver: JobDriver) -> Running:
        here = [peer for peer in self._membership.peers() if peer.job == job.record.id]
        staying = Counter(peer.stage for peer in here if not peer.leaving)
        # Its brain hears of them one after the other, and not before the hand-out is over.
        loading = {peer.hello.peer: peer.stage for peer in here if peer.state is PeerState.LOADING}

        def where(peer: Candidate, stages: Collection[int], coming: Mapping[PeerId, int]) -> Decision[int]:
            pin, now_s = peer.pinned_stage, _now_s()
            return driver.brain.where_to_join(peer.peer, pin, stages, now_s, {**loading, **coming})

        split = _split(job.spec)
        return Running(
            job.record.id,
            needs(job.spec, split, 1 + sum(map(len, job.stages.values()))),
            job.spec.limits.min_replicas,
            tuple(staying[stage] for stage in range(len(split))),
            job.at_start,
            where,
        )

    def _hand_out_idle(self) -> None:
        """Let idle peers join jobs at work."""
        known = self._membership.peers()
        idle = _candidates(self._membership.idle_peers())
        present = _candidates(one for one in known if one.state is not PeerState.GONE and not one.leaving)
        working = [job for job in reversed(self.all()) if job.record.state is JobState.RUNNING]
        handed = hand_out(
            idle,
            present,
            [self._waiting(job, len(present)) for job in self.waiting()],
            [self._running(job, job.driver) for job in working if job.driver is not None],
            self._reservations.now(_now_s()),
        )
        self._unused = handed.unused
        for join in handed.joins:
            job, peer = self._jobs[join.job], self._membership.get(join.peer)
            assert peer is not None
            assert job.driver is not None
            hello = peer.hello
            self._reservations.end(join.peer)
            for transition in self._membership.assign(join.peer, join.job, join.stage, _now_s()):
                self.on_transition(transition)
            self._say(job, "info", f"{join.peer} is to join: {join.reason}")
            job.driver.join(_replica(hello, join.stage))

    async def _try_to_start(self, job: Job) -> None:
        stalled = job.record.state is JobState.STALLED
        if stalled and (not job.gone_back or _now_s() < job.tries_again_s):
            return  # it is not known yet where it goes on, or it has failed too often to try again at once
        idle = {peer.hello.peer: peer for peer in self._membership.idle_peers()}
        older = takewhile(lambda one: one is not job, self.waiting())
        decision = start_with(
            self._waiting(job, len(idle)),
            [self._waiting(one, len(idle)) for one in older],
            _candidates(idle.values()),
            self._reservations.now(_now_s()),
        )
        if decision.plan is None:
            state = JobState.STALLED if stalled else JobState.PLACING
            reason = waiting(job.gone_back, decision.reason) if stalled else decision.reason
            if (job.record.state, job.record.reason) != (state, reason):
                await self._enter(job, state, reason)
            return
        try:
            batches = self._open_batches(job.spec, job.record.tokens)
        except SwarmError as error:
            await self._enter(job, JobState.FAILED, error.message, error_code=error.code, hint=error.hint)
            return
        replicas = [_replica(idle[peer].hello, stage) for peer, stage in decision.plan.items()]
        # No await until the driver is there: whoever cancels or leaves from now on reaches it.
        for replica in replicas:
            for transition in self._membership.assign(replica.peer, job.record.id, replica.stage, _now_s()):
                self.on_transition(transition)
            job.stages.setdefault(replica.stage, []).append(replica.peer)
        job.driver = self._make_driver(job, batches)
        job.gone_back, job.at_start = "", len(replicas)
        self._say(job, "info", f"placed: {_describe(job.stages)}")
        self._tasks.create_task(self._drive(job, job.driver, replicas, trained=stalled))
        peers = {replica.peer: replica.stage for replica in replicas}
        told = f"{_count(replicas, 'peer')} for {_count(job.stages, 'stage')}"
        await self._enter(job, JobState.LOADING, told, peers=peers, hint="")

    def _make_driver(self, job: Job, batches: Batches) -> JobDriver:
        spec, record = job.spec, job.record
        training, pipeline = spec.training, spec.pipeline
        settings = BrainSettings(
            job=record.id,
            epoch=self._store.epoch,
            timeline=record.timeline,
            steps=training.steps,
            microbatches=training.microbatches,
            split=_split(spec),
            spec_json=record.spec_json,
            staleness=pipeline.staleness,
            max_in_flight=None if pipeline.max_in_flight == "auto" else pipeline.max_in_flight,
            units=unit_names(len(_split(spec)), spec.tied),
            grad_clip_norm=training.grad_clip_norm,
            averaging_timeout_s=spec.averaging.timeout_s,
            fail_on_nonfinite=spec.limits.on_nonfinite == "fail",
            learning_rate=lambda step: learning_rate(training, step),
            tokens_of=batches.tokens_of,
            routing=pipeline.routing,
            eval_every_steps=training.eval_every_steps,
            evaluation_microbatches=batches.evaluation_microbatches,
            evaluation_tokens=batches.evaluation_tokens,
            pause_on_nonfinite=spec.limits.on_nonfinite == "pause",
            first_step=record.first_steps[-1],
            files=self._state_files(job).listed,
            saving=SavingRules(spec.checkpoint.every_steps, spec.checkpoint.every_s, spec.checkpoint.optimizer),
            recover=True,
            work=_work(spec),
            state_bytes=tuple(
                _state_bytes(stage_footprint(spec, layers, stage, len(_split(spec))))
                for stage, layers in enumerate(_split(spec))
            ),
            on_stall=spec.limits.on_stall,
            deadlines=DeadlineSettings(pipeline.deadline_k, pipeline.deadline_min_s, pipeline.deadline_max_s),
            rebalance=RebalanceSettings(
                rebalance=pipeline.rebalance,
                interval_s=pipeline.rebalance_interval_s,
                min_gain=pipeline.rebalance_min_gain,
                cooldown_s=pipeline.rebalance_cooldown_s,
                min_replicas=spec.limits.min_replicas,
            ),
        )
        last_s = [_now_s()]

        async def write_commit(row: CommitRow) -> None:
            write = partial(self._store.put_commit, record.id, row, self._wall_s())
            await patiently(write, patience_s=spec.limits.no_progress_s)

        def on_commit(row: CommitRow) -> None:
            now_s = _now_s()
            step_s, last_s[0] = now_s - last_s[0], now_s
            job.progress.committed(row, step_s, training.steps)
            self._metrics.step_committed(
                record.id,
                step=row.step + 1,
                time_unix_s=self._wall_s(),
                loss=row.loss,
                learning_rate=row.learning_rate,
                grad_norm=row.norm,
                tokens=row.tokens,
                microbatches=training.microbatches,
                skipped=row.skip,
            )
            if job.record.reason == RESTARTED:
                self._tasks.create_task(self._enter(job, job.record.state, RESUMED))
            elif job.record.state is JobState.LOADING:  # one that is to leave was never seen serving
                self._tasks.create_task(self._enter(job, JobState.RUNNING, "all replicas are loaded"))
            if row.step == training.steps - 1:
                self._say(job, "info", f"step {row.step + 1} of {training.steps} committed, loss {row.loss:.4f}")
            self._changed(job)

        async def write_evaluation(row: EvaluationRow) -> None:
            write = partial(self._store.put_evaluation, record.id, row, self._wall_s())
            await patiently(write, patience_s=spec.limits.no_progress_s)
            job.progress.evaluation_loss, job.progress.evaluation_step = row.loss, row.version
            self._metrics.evaluated(record.id, step=row.version, loss=row.loss)
            found = f"loss {row.loss:.4f}, perplexity {perplexity(row.loss):.4g}"
            self._say(job, "info", f"evaluation after step {row.version}: {found}")
            self._changed(job)

        brain = JobBrain(settings, Random(self._rng.getrandbits(64)))

        def send(peer: PeerId, command: Command) -> None:
            self._send_counted(peer, command)
            if isinstance(command, Release):
                self._released(job, peer, command.reason)

        return JobDriver(
            brain,
            batches,
            send,
            write_commit,
            on_commit,
            lambda level, text: self._say(job, level, text),
            lambda output: self._turned(job, output),
            write_evaluation=write_evaluation,
            no_progress_s=spec.limits.no_progress_s,
            runtime_s_max=spec.limits.max_runtime_s,
        )

    async def _drive(
        self, job: Job, driver: JobDriver, begin: list[Replica] | Resumed, *, trained: bool = False
    ) -> None:
        sha256 = ""
        at_start = not trained and not isinstance(begin, Resumed)
        try:
            job.keeper = driver.keeper = await self._make_keeper(job, driver, at_start=at_start)
            outcome = await driver.run(begin)
            if outcome.state is JobState.SUCCEEDED and job.newest is not None:
                sha256 = job.newest.weights_sha256
        except Fenced:
            raise
        except SwarmError as error:
            outcome = Outcome(JobState.FAILED, error.message, error.code, error.hint)
        except Exception as error:  # a fault of ours ends this job, not all others
            self._log.error("job ended by an internal error", job_id=job.record.id, exc_info=error)
            outcome = Outcome(
                JobState.FAILED, f"internal error: {error!r}", SwarmError.code, "see the scheduler's log; report this"
            )
        if outcome.state is JobState.STALLED:
            await self._stall(job, outcome)
            return
        if job.keeper is not None:
            await job.keeper.close()
        job.driver = job.keeper = None
        self._release_all(job, outcome.reason)
        await self._enter(
            job,
            outcome.state,
            outcome.reason,
            error_code=outcome.error_code,
            hint=_hint(job, outcome),
            weights_sha256=sha256,
        )
        self._wake.set()

    def _release_all(self, job: Job, reason: str) -> None:
        self._reservations.end_of(job.record.id)
        for known in self._membership.peers():
            if known.job == job.record.id:
                self._send(known.hello.peer, Release(job.record.id, reason))
                self._released(job, known.hello.peer, reason)

    def _released(self, job: Job, peer: PeerId, reason: str) -> None:
        """The peer was told that it is free; one that serves another job by now is not concerned."""
        known = self._membership.get(peer)
        if known is None or known.job != job.record.id:
            return
        for transition in self._membership.release(peer, _now_s(), reason):
            self.on_transition(transition)
        if job.driver is not None and not job.driver.brain.is_over:
            self._has(job, peer, None)

    async def _make_keeper(self, job: Job, driver: JobDriver, *, at_start: bool) -> JobCheckpoints:
        record, spec = job.record, job.spec
        folder = self._tokenizer_folder(record.id)
        storage = self.keeping.storage(spec, record.id)
        keeper = JobCheckpoints(
            storage,
            record.id,
            spec,
            record.timeline,
            await run_blocking(self._executor, lambda: _read_files(folder)),
            lambda version: self._facts(job, version),
            _CheckpointNews(job, driver, self._metrics, self._wall_s, partial(self._say, job), self._changed),
            self._tasks,
            self.keeping.executor,
            protected=lambda: {
                one.record.start_name for one in self._jobs.values() if _needs_start(one, storage.where)
            },
        )
        await keeper.prepare(at_start=at_start)
        return keeper

    def _facts(self, job: Job, version: int) -> Facts:
        return Facts(
            job=job.record.id,
            timeline=job.record.timeline,
            step=version,
            created_unix_s=self._wall_s(),
            product=self._product,
            loss=job.progress.loss,
            tokens=job.progress.tokens,
            optimizer=job.spec.checkpoint.optimizer,
        )

    def _turned(self, job: Job, output: Turned | DropCheckpoint | Admitted | Left) -> None:
        """The brain gave a checkpoint up, decided to pause, gave a pause up, took a peer in or let one go."""
        if isinstance(output, Left):
            if output.target is not None:
                self._reservations.reserve(output.peer, job.record.id, output.target, _now_s())
                self._metrics.rebalanced(job.record.id, output.duration_s)
            return
        if isinstance(output, Admitted):
            for transition in self._membership.serving(output.peer, _now_s()):
                self.on_transition(transition)
            self._has(job, output.peer, output.stage)
        elif isinstance(output, DropCheckpoint):
            self._metrics.checkpoint_failed(job.record.id, output.reason)
        else:
            self._tasks.create_task(self._turn(job, output))

    async def _turn(self, job: Job, output: Turned) -> None:
        if job.driver is not None and job.record.state in (JobState.RUNNING, JobState.PAUSING):
            await self._enter(job, output.state, output.reason)

    async def _perhaps_running(self, job: Job) -> None:
        peers = [self._membership.get(peer) for pool in job.stages.values() for peer in pool]
        all_serve = all(peer is not None and peer.state is PeerState.SERVING for peer in peers)
        if all_serve and job.record.state is JobState.LOADING:
            await self._enter(job, JobState.RUNNING, f"all {len(peers)} replicas are loaded")

    async def _enter(self, job: Job, state: JobState, reason: str, **changes: Any) -> None:
        record = job.record.entered(state, reason[:REASON_CHARACTERS_MAX], self._wall_s(), **changes)
        if state in WAITING_STATES and job.record.state not in WAITING_STATES:
            job.waits_since_s = _now_s()
        job.record = record  # shown at once: nobody may act on the old state while the row is written
        await self._put(job)
        self._say(job, "error" if state is JobState.FAILED else "info", f"job is {state.value}: {reason}")
        self._changed(job)
        if state.is_final:
            self.logs.close(record.id)

    async def _put(self, job: Job) -> None:
        async def put() -> None:
            await self._store.put_job(job.record)  # the newest: writes may be late

        try:
            await patiently(put, patience_s=STATE_PATIENCE_S)
        except (StoreUnavailable, StoreRejected) as error:
            # Commits are what must be durable; a state that is only in memory is better than a scheduler that ends.
            record = job.record
            self._log.error("state of job not stored", job_id=record.id, state=record.state.value, reason=error.message)

    def _changed(self, job: Job) -> None:
        job.changed.set()
        job.changed = asyncio.Event()
        self._metrics.job_state(job.record.id, job.record.state)
        if job.driver is not None:
            brain = job.driver.brain
            self._metrics.in_flight(job.record.id, brain.in_flight)
            self._metrics.ledger_violations(job.record.id, brain.violations)
            self._metrics.recovery(job.record.id, brain.replayed_by_stage, brain.reroutes, brain.duplicates)
        self._announcer.job_changed(job.record, job.progress)

    def _count_peers(self) -> None:
        counts: dict[tuple[str, int | None, str], int] = {}
        for peer in self._membership.peers():
            key = (peer.job, peer.stage if peer.job else None, peer.state.value)
            counts[key] = counts.get(key, 0) + 1
        stages: dict[str, int] = {
            job.record.id: len(_split(job.spec)) for job in self._jobs.values() if job.driver is not None
        }
        self._metrics.peers(counts, stages)

    def _send_counted(self, peer: PeerId, command: Command) -> None:
        if isinstance(command, Route):
            for stage, hop in enumerate(command.hops):
                if hop.peer == peer:
                    self._metrics.route_decided(stage, peer)
        self._send(peer, command)

    def _say(self, job: Job, level: str, text: str) -> None:
        getattr(self._log, level)(text, job_id=job.record.id)
        self.logs.append(job.record.id, LogLine(self._wall_s(), level, "", -1, text))

    def _tokenizer_folder(self, job: JobId) -> Path:
        return self._root / "jobs" / job / "tokenizer"

    def _state_files(self, job: Job) -> StateFiles | CheckpointFiles:
        if job.start is not None:
            return CheckpointFiles(job.start)
        return StateFiles({file: self.shard_path(file.sha256) for file in job.record.files})

    def _open_batches(self, spec: JobSpec, tokens: JobTokens) -> Batches:
        missing = [sha256 for sha256 in tokens.shards if not self.shard_path(sha256).exists()]
        if missing:
            raise InvalidData(
                f"{len(missing)} of {len(tokens.shards)} token shards are not here", hint="submit again to upload them"
            )
        paths = [self.shard_path(sha256) for sha256 in tokens.shards]
        data = TokenData.open(paths, tokens.token_dtype, spec.model.config["vocab_size"])
        return Batches.of_job(spec, data, tokens.end_of_text)


def _remove_unfinished(root: Path) -> None:
    """Delete what a scheduler that was killed left half written."""
    for folder in root.glob("jobs/*/checkpoints/*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for part in root.glob("shards/*.part"):
        part.unlink(missing_ok=True)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _candidates(peers: Iterable[Peer]) -> list[Candidate]:
    return [
        Candidate(one.hello.peer, one.hello.pinned_stage, memory_bytes=one.hello.memory_bytes)
        for one in sorted(peers, key=lambda one: one.hello.peer)
    ]


def _replica(hello: Hello, stage: int) -> Replica:
    return Replica(hello.peer, hello.incarnation, hello.address, stage, hello.device, hello.pinned_stage >= 0)


def _split(spec: JobSpec) -> tuple[int, ...]:
    assert spec.pipeline.split != "auto", "resolved at submit"
    return spec.pipeline.split


def _state_bytes(footprint: Footprint) -> int:
    """What a peer fetches when it joins a stage."""
    return footprint.weights + footprint.optimizer


def _work(spec: JobSpec) -> tuple[float, ...]:
    """What a microbatch costs at each stage, relative to the others."""
    layer, head = flops_per_token(spec)
    split = _split(spec)
    return tuple(float(layers * layer + (head if stage == len(split) - 1 else 0)) for stage, layers in enumerate(split))


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}" + ("" if len(things) == 1 else "s")


def _starting_at(start: Checkpoint | None) -> dict[str, Any]:
    """The fields of a record that say what its present timeline starts from."""
    if start is None:
        return {"start_where": "", "start_name": ""}
    return {"first_steps": (start.step,), "start_where": start.storage.where, "start_name": start.name}


def _has_checkpoint(files: Iterable[StateFile]) -> bool:
    return any(file.path == MANIFEST for file in files)


def _needs_start(job: Job, where: str) -> bool:
    return job.record.start_where == where and bool(job.record.start_name) and not job.record.state.is_final


def _again(job: Job) -> str:
    """How to go on after a failure, if there is a checkpoint."""
    if job.newest is None:
        return ""
    return f"go on from step {job.newest.step} with: swarm resume {job.record.id}"


def _hint(job: Job, outcome: Outcome) -> str:
    if outcome.state is not JobState.FAILED and outcome.hint:  # it lost a stage
        newest_step = job.newest.step if job.newest is not None else None
        return f"{outcome.hint}; {resume_hint(job.record.id, newest_step)}"
    if outcome.state is not JobState.FAILED or "swarm resume" in outcome.hint:
        return outcome.hint
    return "; ".join(filter(None, (outcome.hint, _again(job))))


def _describe(stages: dict[int, list[PeerId]]) -> str:
    return "; ".join(f"stage {stage}: {', '.join(peers)}" for stage, peers in sorted(stages.items()))


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def _read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
