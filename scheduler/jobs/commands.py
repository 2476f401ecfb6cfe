"""All jobs of one scheduler: submitted, placed when peers allow, driven, ended, shown.

    submit ─▶ queued ─▶ placing ─▶ loading ─▶ running ─▶ succeeded | failed | cancelled
                ▲               ▲                │ ╲
                │               └──── stalled ◀──┘  (a stage lost, or nothing moves: back to a checkpoint)
                └──resume── failed | cancelled | paused ◀─ pausing

`Jobs` is what people and stage servers talk to. Behind it: `JobRegistry` (the jobs, and every change of their state),
`Peers` (the peers), `Allocator` (who gets idle peers), `JobRunner` (jobs at work), `Timelines` and `Rollback` (where a
job begins or goes on), `JobFiles`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random

from scheduler.brain.explain.facts import IdlePeer, JobStanding
from scheduler.brain.fleet.membership import Membership, Transition
from scheduler.brain.fleet.memory_split import check_possible, fit, needs, stage_counts
from scheduler.brain.fleet.placement import stages_for
from scheduler.brain.stall import Stalls
from scheduler.jobs.allocator import SETTLE_S, Allocator
from scheduler.jobs.job import Announcer, Job, JobProgress, again, now_s, split_of
from scheduler.jobs.peers import Peers
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.rollback import Rollback
from scheduler.jobs.runner import JobRunner
from scheduler.jobs.settings import model_costs
from scheduler.jobs.timelines import Timelines, starting_at
from scheduler.storage.checkpoint_catalog import LATEST, CheckpointCatalog, uploaded_checkpoint
from scheduler.storage.database import Database, JobRecord, JobTokens
from scheduler.storage.drains import Drains
from scheduler.storage.job_files import JobFiles
from scheduler.storage.job_log import LogLine
from scheduler.storage.state_files import check_uploaded
from swarm.checkpoint.writer import Found
from swarm.errors import CheckpointFailed, NotAllowed, Refused, SwarmError
from swarm.job.changes import check_changes, check_state, check_steps
from swarm.job.partition import resolve
from swarm.job.spec import JobSpec, spec_from_json
from swarm.messages import (
    Command,
    Event,
    FetchRequest,
    Hello,
    Leaving,
    Loaded,
    Logged,
    Release,
    StateFile,
    StoreHeader,
)
from swarm.process.logs import Logger
from swarm.process.metrics import SchedulerMetrics
from swarm.types import JobId, JobState, PeerId, PeerState

_RESUMABLE = (JobState.PAUSED, JobState.FAILED, JobState.CANCELLED)


class Jobs:
    """The scheduler's jobs; told by `Sessions` what stage servers do."""

    def __init__(
        self,
        store: Database,
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
        keeping: CheckpointCatalog | None = None,
        product: str = "",
    ) -> None:
        self._store = store
        self._membership = membership
        self._send = send
        self._metrics = metrics
        self._tasks = tasks
        self._rng = rng
        self._wall_s = wall_s
        self.keeping = keeping or CheckpointCatalog(root, files_executor)
        self._drained = Drains(store, log)
        self._files = JobFiles(root, executor)
        self._book = JobRegistry(store, root / "jobs", announcer, metrics, wall_s, log)
        self.logs = self._book.logs
        self._peers = Peers(self._book, membership, send, metrics, tasks, log)
        self._timelines = Timelines(store, self._book, self.keeping, metrics)
        self._back = Rollback(self._book, self._peers, self._timelines, self.keeping, log)
        self._runs = JobRunner(
            store,
            self._book,
            self._peers,
            membership,
            self._files,
            self.keeping,
            self._back,
            metrics,
            tasks,
            rng,
            wall_s,
            log,
            product,
        )
        self._assigning = Allocator(self._book, self._peers, membership, self._files, self._runs, settle_s)

    async def load(self) -> None:
        """Read what an earlier start left; jobs that were running go on once their peers are back."""
        await self._files.remove_unfinished()
        await self._drained.load()
        for record in await self._store.jobs():
            job = Job(record, spec_from_json(record.spec_json), waits_since_s=now_s())
            self._book.add(job)
            job.progress = await self._timelines.progress_of(record)
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
                await self._book.enter(
                    job, JobState.PLACING, "the scheduler was restarted before the job ran", peers={}
                )
                await self._find_start(job)
            elif record.state is JobState.LOADING:  # it ran, and that was not stored any more
                await self._book.enter(job, JobState.RUNNING, "all replicas are loaded")
                await self._take_up(job)
            elif record.state is JobState.STALLED:
                self._tasks.create_task(self._back.go_back(job))
            elif not record.state.is_final and record.state is not JobState.PAUSED:
                await self._take_up(job)

    async def _has_rows(self, record: JobRecord) -> bool:
        """Whether the job has trained on its present timeline."""
        return bool(await self._store.last_rows(record.id, record.timeline, count=1))

    async def _find_start(self, job: Job) -> bool:
        """Look up the checkpoint that the job starts from, if any; without it the job fails."""
        try:
            job.start = await self.keeping.start_of(job.record)
        except SwarmError as error:
            await self._book.enter(
                job, JobState.FAILED, error.message, error_code=error.code, hint=again(job) or error.hint
            )
            return False
        self._peers.wake.set()
        return True

    async def _take_up(self, job: Job) -> None:
        """Go on with a job that an earlier scheduler start left at work, once its peers are back."""
        record = job.record
        if not await self._find_start(job):
            return
        try:
            batches = self._files.batches(job.spec, record.tokens)
        except SwarmError as error:
            await self._book.enter(
                job, JobState.FAILED, error.message, error_code=error.code, hint=again(job) or error.hint
            )
            return
        await self._runs.reattach(job, batches)

    # What clients ask --------------------------------------------------------------------------------------------

    def all(self) -> list[Job]:
        """All jobs, newest first."""
        return self._book.all()

    def find(self, reference: str) -> Job:
        """The job with this id, else the newest with this name, else the only one whose id begins so; NotFound."""
        return self._book.find(reference)

    def waiting(self) -> list[Job]:
        """Jobs that want peers, the oldest first."""
        return self._book.waiting()

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
        self._files.batches(resolved, tokens)
        check_uploaded(files, [self.shard_path(file.sha256) for file in files])
        self.keeping.storage(resolved, JobId(spec.name))  # for its checks
        sent = uploaded_checkpoint(files, self.shard_path)
        chosen = (
            await self._timelines.start_from(resolved)
            if resolved.checkpoint.resume_from and sent is None
            else Found(None, ())
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
            **(starting_at(start) if sent is None else {"first_steps": (sent.step,)}),
        )
        await self._files.put_tokenizer(job_id, tokenizer_files)
        await self._store.put_job(record)
        job = Job(record, resolved, JobProgress(record.first_steps[-1]), start=start, waits_since_s=now_s())
        self._book.add(job)
        self.logs.open(job_id)
        self._metrics.job_opened(job_id, resolved.model.family)
        shape = f"{len(split_of(resolved))} stages, split {split_of(resolved)}"
        self._book.say(job, "info", f"job {job_id} accepted: {shape}{begins}")
        if skipped := chosen.skipped_text():
            self._book.say(job, "warning", skipped)
        self._book.changed(job)
        self._peers.wake.set()
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
        costs, stages, min_replicas = model_costs(resolved), len(split_of(resolved)), spec.limits.min_replicas
        counts = [stages] if fixed else stage_counts(resolved.layers, stages, len(idle) // min_replicas)
        cut = fit(costs, idle, counts, min_replicas)
        if cut.plan is None:
            present = [peer.hello.memory_bytes for peer in self._membership.peers() if peer.state is not PeerState.GONE]
            check_possible(costs, present, counts if fixed else range(1, resolved.layers + 1))
            return resolved
        pipeline = resolved.pipeline.model_copy(update={"split": cut.plan, "stages": len(cut.plan)})
        return decide(resolved.model_copy(update={"pipeline": pipeline}))

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
            await self._book.enter(job, JobState.CANCELLED, reason, hint=again(job))
        elif checkpoint and state is not JobState.CANCELLING:
            job.driver.stop(JobState.CANCELLED, reason)
            await self._book.enter(job, JobState.CANCELLING, f"{reason}; what runs is committed and saved first")
        else:
            job.driver.cancel(reason)
            await self._book.enter(job, JobState.CANCELLING, reason)

    async def pause(self, job: Job, reason: str) -> None:
        """Commit what runs, save, and let the peers go; idempotent. NotAllowed if the job ends or has ended."""
        state = job.record.state
        if state in (JobState.PAUSED, JobState.PAUSING):
            return
        if state.is_final or state is JobState.CANCELLING:
            raise NotAllowed(f"job {job.record.id} is {state.value}: it cannot be paused")
        if job.driver is None:
            await self._book.enter(job, JobState.PAUSED, reason, hint=again(job))
        else:
            job.driver.stop(JobState.PAUSED, reason)
            await self._book.enter(job, JobState.PAUSING, f"{reason}; what runs is committed and saved first")

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
        beginning = await self._timelines.beginning(job, found, anew=anew)
        check_steps(changed, beginning.step)
        await self._timelines.switch_to(job, record, beginning, changed)
        self.logs.open(record.id)
        if beginning.skipped:
            self._book.say(job, "warning", beginning.skipped)
        job.stalls = Stalls()
        told = f"goes on at step {beginning.step} {beginning.source}"
        await self._book.enter(job, JobState.QUEUED, told, error_code="", hint="")
        self._peers.wake.set()

    async def drain(self, peer: PeerId, reason: str) -> None:
        """Let the peer hand its work over, and give it none until it starts anew; twice is the same as once."""
        self._peers.leave(peer, reason)
        known = self._membership.get(peer)
        if known is not None:
            await self._drained.keep(known.hello, reason)

    def idle(self) -> list[IdlePeer]:
        """Peers without work, and why no job at work uses them."""
        return self._assigning.idle()

    def standing(self, job: Job) -> JobStanding:
        """What is known of a job beside its brain, to be explained."""
        record, spec, split = job.record, job.spec, split_of(job.spec)
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
            needs(model_costs(spec), split, peers),
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

    def shard_path(self, sha256: str) -> Path:
        """Where the token shard with this hash is, or would be."""
        return self._files.shard(sha256)

    async def dispatch(self) -> None:
        """Hand out idle peers whenever there are some; for ever."""
        await self._assigning.run()

    # What stage servers do ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """The scheduler ends: from here on, what sessions do means nothing for jobs."""
        self._peers.stop()

    def on_event(self, peer: PeerId, event: Event) -> None:
        if self._peers.is_stopping:
            return
        known = self._membership.get(peer)
        if known is None:
            return
        self._metrics.peer_heard(peer, self._wall_s())
        job = self._book.get(known.job)
        match event:
            case Hello():
                self._metrics.peer_attached(peer, event.product, event.device, self._wall_s())
                self._on_hello(peer, known.job, event)
                if reason := self._drained.reason(event):
                    self._peers.leave(peer, reason)
                elif self._drained.is_over(event):
                    self._tasks.create_task(self._drained.forget(peer))
            case Logged():
                if self._book.get(event.job) is not None:
                    line = LogLine(event.time_unix_s, event.level, peer, known.stage, event.message)
                    self.logs.append(event.job, line)
                if job is not None and job.driver is not None and job.record.state is JobState.LOADING:
                    job.driver.made_progress()  # such as a long download
            case Leaving():
                self._peers.leave(peer, event.reason)
            case _:
                if job is None or job.driver is None:
                    return
                if isinstance(event, Loaded) and event.job == known.job and not job.driver.brain.is_joining(peer):
                    self._peers.serving(peer)
                    self._tasks.create_task(self._runs.note_if_running(job))
                job.driver.on_event(peer, event)

    def on_transition(self, transition: Transition) -> None:
        """A peer changed state."""
        self._peers.on_transition(transition)

    def _on_hello(self, peer: PeerId, present: JobId, hello: Hello) -> None:
        """A session begins: its job is told, or takes the peer back, or the peer gives the job up."""
        job = self._book.get(present or hello.job)
        driver = job.driver if job is not None else None
        if job is not None and driver is not None and (present or driver.brain.admits(hello)):
            if not present:
                self._peers.adopt(job, peer, hello.stage)
            driver.on_event(peer, hello)
        elif hello.job:
            self._send(peer, Release(hello.job, "the job has ended, or went on without this peer"))

    async def store_stage(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take a file of a stage's state for the job's checkpoint."""
        job = self._book.get(header.job)
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
        job = self._book.get(request.job)
        driver = job.driver if job is not None else None
        if job is None or driver is None or job.record.timeline != request.timeline:
            raise Refused(f"job {request.job} does not load anything on timeline {request.timeline}")
        async for chunk in self._files.state(job.record.files, job.start).read(request, self.keeping.executor):
            driver.made_progress()
            yield chunk
