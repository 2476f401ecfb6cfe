"""Jobs at work: each has a driver and a checkpoint sink, from its placement to its end or stall."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import assert_never

from scheduler.brain import outputs
from scheduler.brain.explain.facts import LOADED, RESUMED
from scheduler.brain.fleet.membership import Membership
from scheduler.brain.inputs import EachIsland, RelaysHere, ReplicaRecord, Resumed, Start, Stop, Stored, Unreached
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.job import JobBrain
from scheduler.brain.stall import Watchdog, as_asked, resume_hint, seeking, stalled_hint, steps_lost
from scheduler.jobs.brain_settings import brain_settings
from scheduler.jobs.driver import Begin, JobDriver, Outcome
from scheduler.jobs.islands import Life, at_work, by_island, islands_brain, lives_of
from scheduler.jobs.job import Job, JobRun, again, now_s, success_text
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.starts import Timelines
from scheduler.storage.checkpoints.sink import CheckpointSink, Subject
from scheduler.storage.patience import patiently
from scheduler.storage.transcripts import record as record_brain
from swarm.checkpoint.reader import Checkpoint
from swarm.checkpoint.writer import Facts
from swarm.data.batches import Batches
from swarm.errors import CheckpointFailed, DatabaseUnavailable, Fenced, SwarmError
from swarm.job.islands import course_of, island_of, island_timeline, leases_of
from swarm.job.schedule import perplexity
from swarm.text import size, spoken_duration
from swarm.types import JobState, PeerId, PeerState
from swarm.wire.messages import Command, Route, StoreHeader

RESTARTED = "the scheduler was restarted: waits for the job's peers"


@dataclass(eq=False)
class JobRunner:
    """Starts jobs, takes them up again after a restart, and carries them to their end."""

    ports: SchedulerPorts
    registry: JobRegistry
    peers: Peers
    membership: Membership
    timelines: Timelines
    tasks: asyncio.TaskGroup

    def begin(self, job: Job, batches: Batches, islands: Sequence[tuple[ReplicaRecord, ...]]) -> None:
        """Let the placed job load, with the replicas of each island; an island without any begins later."""
        placed = [replicas for replicas in islands if replicas]
        whole = sum(map(len, placed)) * len(islands) // len(placed)  # as many in each of those that begin later
        job.run = self._make_run(job, batches, whole)
        trained = job.record.state is JobState.STALLED
        begin: Begin = Start(placed[0])
        if job.spec.has_outer_steps:
            starts = tuple(Start(replicas) if replicas else None for replicas in islands)
            begin = EachIsland(starts, absent="no stage servers were there for it when the job went on")
        self.tasks.create_task(self._drive(job, job.run, begin, trained=trained))

    async def reattach(self, job: Job, batches: Batches) -> None:
        """Go on with a job that an earlier scheduler start left at work, once its peers are back."""
        record = job.record
        lives = await lives_of(self.ports.stores.database, record, job.spec)
        resumed = [
            await self._resumed(job, life, peers)
            for life, peers in zip(lives, by_island(job.spec, record.peers), strict=True)
        ]
        job.run = self._make_run(job, batches, len(record.peers), lives)
        if record.state is not JobState.RUNNING:  # it is to stop
            asked = JobState.PAUSED if record.state is JobState.PAUSING else JobState.CANCELLED
            job.run.driver.tell(Stop(asked, record.reason))
        begin: Begin = resumed[0]
        if job.spec.has_outer_steps:
            assert job.progress.islands is not None, "the job has outer steps"
            exchanges, timelines = tuple(job.progress.islands.newest), [life.timeline for life in lives]
            begins = at_work(job.spec, resumed, record.first_steps[-1], exchanges, timelines)
            begin = EachIsland(begins, exchanges=exchanges)
        self.tasks.create_task(self._drive(job, job.run, begin))
        await self.registry.enter(job, record.state, RESTARTED)

    async def _resumed(self, job: Job, life: Life, peers: Mapping[PeerId, int]) -> Resumed:
        """The state of an island that an earlier scheduler start left."""
        record, course, database = job.record, course_of(job.spec, life.timeline), self.ports.stores.database
        rows = await database.last_rows(record.id, life.timeline, count=2)
        found = await database.evaluations(record.id)
        evaluated = {row.version for row in found if row.timeline == record.timeline}
        committed = rows[-1].step + 1 if rows else life.first_version
        if job.spec.has_outer_steps:  # people read inner steps
            newest = range(max(0, committed - 2), committed + 1)
            evaluated = {version for version in newest if course.inner_steps(version) in evaluated}
        return Resumed(peers, committed, rows, evaluated, self.membership.grace_s)

    def _make_run(self, job: Job, batches: Batches, replicas: int, lives: Sequence[Life] = ()) -> JobRun:
        record, limits, stores = job.record, job.spec.limits, self.ports.stores
        files = stores.files.state(record, job.start).listed
        seed, watchdog = self.ports.rng.getrandbits(64), Watchdog(limits.no_progress_s, limits.max_runtime_s)
        if (leases := leases_of(job.spec)) is not None:
            for cut in job.progress.cuts():
                leases.cut(cut)
            batches = batches.leased(leases)
        known = (record, job.spec, stores.database.epoch, batches, files, job.progress.skipped_in_a_row)
        all_read = job.spec.model.narrow.by_token
        if job.spec.has_outer_steps:
            if stores.transcripts is not None:
                self.registry.say(job, "warning", "no transcript is recorded of a job with islands")
            islands = islands_brain(*known, Random(seed), lives, leases)
            return JobRun(
                islands, JobDriver(islands, batches, _Effects(self, job), watchdog, all_read=all_read), replicas
            )
        settings = brain_settings(*known)
        recorder = record_brain(stores.transcripts, settings, seed) if stores.transcripts is not None else None
        brain = recorder.brain if recorder is not None else JobBrain(settings, Random(seed))
        driver = JobDriver(brain, batches, _Effects(self, job), watchdog, recorder, all_read=all_read)
        return JobRun(brain, driver, replicas)

    async def _drive(self, job: Job, run: JobRun, begin: Begin, *, trained: bool = False) -> None:
        sha256 = ""
        begins = begin.begins if isinstance(begin, EachIsland) else (begin,)
        at_start = not trained and not any(isinstance(start, Resumed) for start in begins)
        try:
            run.sink = await self._make_sink(job, run.driver, at_start=at_start)
            if not self.registry.relays_here:
                run.driver.tell(RelaysHere(False))
            if self.registry.unreached:
                run.driver.tell(Unreached(self.registry.unreached))
            outcome = await run.driver.run(begin)
            if outcome.state is JobState.SUCCEEDED:
                outcome = replace(outcome, reason=success_text(job))
                sha256 = job.newest.weights_sha256 if job.newest is not None else ""
        except Fenced:
            raise
        except SwarmError as error:
            outcome = Outcome(JobState.FAILED, error.message, error.code, error.hint)
        except Exception as error:  # a fault of ours ends this job, not all others
            self.ports.log.error("job ended by an internal error", job_id=job.record.id, exc_info=error)
            outcome = Outcome(
                JobState.FAILED, f"internal error: {error!r}", SwarmError.code, "see the scheduler's log; report this"
            )
        if outcome.state is JobState.STALLED and (asked := as_asked(job.record.state)) is not None:
            outcome = replace(outcome, state=asked, reason=f"{job.record.reason}; {outcome.reason}")
        if outcome.state is JobState.STALLED:
            committed, stood_still = run.brain.counts().committed_steps, bool(outcome.error_code)
            job.stalls = job.stalls.after(committed, job.record.first_steps[-1], stood_still=stood_still)
            if not job.stalls.are_too_many:
                await self._stall(job, run, outcome)
                return
            times = f"{job.stalls.standstills} times in a row"
            outcome = replace(outcome, state=JobState.FAILED, reason=f"{outcome.reason}; {times}")
        if run.sink is not None:
            await run.sink.close()
        self.registry.end_run(job)
        self.peers.release_all(job, outcome.reason)
        reached, (step, saved) = job.progress.steps_done, job.goes_back
        repeats = job.record.repeats
        # What was not saved is gone with the replicas, but steps that were skipped changed no weight.
        if outcome.state is not JobState.SUCCEEDED and reached - step > job.progress.skipped_in_a_row:
            cost = steps_lost(reached, step, saved=saved)
            repeats = repeats.lost(reached, step, cost)
            outcome = replace(outcome, reason=f"{outcome.reason}; {cost}")
        ended = {"error_code": outcome.error_code, "hint": _hint(job, outcome), "weights_sha256": sha256}
        await self.registry.enter(job, outcome.state, outcome.reason, repeats=repeats, **ended)
        self.peers.wake.set()

    async def _stall(self, job: Job, run: JobRun, outcome: Outcome) -> None:
        """The job lost a stage, or stands still: free its peers, and take it back to where it can go on."""
        self.registry.end_run(job)
        self.peers.release_all(job, outcome.reason)
        hint = stalled_hint(job.record.id, job.stalls)
        await self.registry.enter(job, JobState.STALLED, seeking(outcome.reason), error_code="", hint=hint, peers={})
        if run.sink is not None:
            with job.used():
                await run.sink.close()  # a checkpoint that was handed over whole is one to go on from
        await self.timelines.go_back(job)

    async def _make_sink(self, job: Job, driver: JobDriver, *, at_start: bool) -> CheckpointSink:
        record, spec, stores = job.record, job.spec, self.ports.stores
        storage = await stores.checkpoints.open(spec, record.id)
        sink = CheckpointSink(
            storage,
            Subject(record.id, spec, record.timeline, await stores.files.tokenizer(record.id)),
            lambda version: self._facts(job, version),
            _CheckpointNews(self, job, driver),
            self.tasks,
            stores.checkpoints.executor,
            lambda: {other.record.start_name for other in self.registry.all() if _needs_start(other, storage.where)},
        )
        await sink.prepare(at_start=at_start)
        return sink

    def _facts(self, job: Job, version: int) -> Facts:
        return Facts(
            job=job.record.id,
            timeline=job.record.timeline,
            step=version,
            created_unix_s=self.ports.wall_s(),
            product=self.ports.product,
            loss=job.progress.loss,
            tokens=job.progress.tokens,
            optimizer=job.spec.checkpoint.optimizer,
            outer_log=tuple(job.progress.outer_log()),
        )

    async def note_if_running(self, job: Job) -> None:
        """One of the job's replicas has loaded; if all have, it runs."""
        peers = [self.membership.get(peer) for pool in job.stages.values() for peer in pool]
        all_serve = all(peer is not None and peer.state is PeerState.SERVING for peer in peers)
        if all_serve and job.record.state is JobState.LOADING:
            await self.registry.enter(job, JobState.RUNNING, LOADED)


@dataclass(slots=True)
class _Effects:
    """Carries the outputs of one job's brain out (JobEffects)."""

    _runner: JobRunner
    _job: Job
    _committed_s: float = field(default_factory=now_s)  # when the newest row was durable

    def send(self, peer: PeerId, command: Command) -> None:
        ports = self._runner.ports
        if isinstance(command, Route):
            command = ports.stores.stamps.stamped(self._job.record.id, command, peer)
            for stage, hop in enumerate(command.hops):
                if hop.peer == peer:
                    ports.metrics.route_decided(stage, peer)
        self._runner.peers.send(peer, command)

    def carry_out(self, output: outputs.Effect) -> None:
        job, peers, metrics = self._job, self._runner.peers, self._runner.ports.metrics
        match output:
            case outputs.Note(level=level, message=message):
                self._say(level, message)
            case outputs.Released(peer=peer, reason=reason):
                peers.release(job, peer, reason)
            case outputs.Admitted(peer=peer, stage=stage):
                peers.has(job, peer, stage)
            case outputs.Independent(peer=peer, incarnation=incarnation):
                known = self._runner.membership.get(peer)  # the output may have waited for a row
                if known is not None and (known.job, known.hello.incarnation) == (job.record.id, incarnation):
                    peers.serving(peer)
            case outputs.Unfit(peer=peer, incarnation=incarnation, reason=reason):
                job.unfit.add(peer, incarnation, reason)
            case outputs.Struck(peer=peer, evidence=evidence):
                self._say("error", f"stage server {peer} computed wrong numbers: {evidence}", peer=peer)
                peers.struck(job, output)
            case outputs.Left(peer=peer, target=target, duration_s=duration_s):
                if target is not None:
                    peers.reservations.reserve(peer, job.record.id, target, now_s())
                    metrics.rebalanced(job.record.id, duration_s)
            case outputs.EnterState(state=state, reason=reason):
                self._runner.tasks.create_task(self._enter(state, reason))
            case outputs.BeginCheckpoint(version=version):
                self._sink.begin(version)
            case outputs.PublishCheckpoint():
                self._sink.publish(output)
            case outputs.Vouch():
                self._sink.vouch(output)
            case outputs.DropCheckpoint(version=version, reason=reason, fault=fault):
                self._sink.drop(is_false=reason == "peer")
                job.unsaved = f"the checkpoint at step {version} could not be written: {fault}"
                metrics.checkpoint_failed(job.record.id, reason)
            case _:
                assert_never(output)

    async def write_row(self, row: outputs.CommitRow) -> None:
        ports = self._runner.ports
        write = partial(ports.stores.database.put_commit, self._job.record.id, row, ports.wall_s())
        await self._until_written(f"step {row.step}", write)
        self._committed(row)

    async def write_rows(self, write: outputs.WriteRows) -> None:
        job, islands, brain, ports = self._job, self._job.progress.islands, self._job.brain, self._runner.ports
        assert islands is not None, "the job has outer steps"
        assert isinstance(brain, IslandsBrain)
        database = ports.stores.database
        for cut in write.shares:
            timeline = island_timeline(job.spec, islands.timeline, 0)
            put = partial(database.put_leases, job.record.id, timeline, len(islands.cuts), cut)
            await self._until_written("what islands train", put)
            islands.lease(cut)
        if not write.rows and write.exchange is None:
            return
        exchanges = {} if write.exchange is None else {islands.timeline: write.exchange}
        put = partial(database.put_commits, job.record.id, write.rows, ports.wall_s(), write.forks, exchanges)
        step = write.rows[0].step if write.exchange is None else write.exchange.step
        await self._until_written(f"step {step} of an island", put)
        told = islands.take(write.rows, write.forks, brain.present, write.exchange)
        job.progress.tokens -= told.dropped_tokens
        if write.exchange_s is not None:
            begun = [island_of(job.spec, fork.timeline) for fork in write.forks]
            ports.metrics.exchanged(job.record.id, write.exchange_s, begun, told.left_out)
        for row in told.rows:
            self._committed(row)

    def _committed(self, row: outputs.CommitRow) -> None:
        """A step of the job is durable: show that."""
        job, training, ports, at_s = self._job, self._job.spec.training, self._runner.ports, now_s()
        step_s, self._committed_s = at_s - self._committed_s, at_s
        job.progress.committed(row, step_s, training.steps)
        ports.metrics.step_committed(
            job.record.id,
            step=row.step + 1,
            time_unix_s=ports.wall_s(),
            loss=row.loss,
            learning_rate=row.learning_rate,
            grad_norm=row.norm,
            tokens=row.tokens,
            microbatches=training.microbatches,
            skipped=row.skip,
        )
        if job.record.reason == RESTARTED or job.record.state is JobState.LOADING:
            self._runner.tasks.create_task(self._goes_on())
        if row.step == training.steps - 1:
            self._say("info", f"step {row.step + 1} of {training.steps} committed, loss {row.loss:.4f}", step=row.step)
        self._runner.registry.changed(job)

    async def write_evaluation(self, row: outputs.EvaluationRow) -> None:
        job, ports = self._job, self._runner.ports
        write = partial(ports.stores.database.put_evaluation, job.record.id, row, ports.wall_s())
        await self._until_written(f"the evaluation after step {row.version}", write)
        job.progress.evaluation_loss, job.progress.evaluation_step = row.loss, row.version
        ports.metrics.evaluated(job.record.id, step=row.version, loss=row.loss)
        found = f"loss {row.loss:.4f}, perplexity {perplexity(row.loss):.4g}"
        self._say("info", f"evaluation after step {row.version}: {found}", step=row.version)
        self._runner.registry.changed(job)

    def _say(self, level: str, text: str, **facts: object) -> None:
        self._runner.registry.say(self._job, level, text, **facts)

    async def _until_written(self, what: str, write: Callable[[], Awaitable[None]]) -> None:
        """However long that takes: the replicas keep what they have meanwhile."""

        def refused(error: DatabaseUnavailable) -> None:
            self._job.awaits_database = True
            self._runner.registry.changed(self._job)
            again = "tries again, and nothing is lost meanwhile"
            self._say("error", f"{what} waits for its row: {error.message}; {again}")

        try:
            await patiently(write, patience_s=math.inf, refused=refused)
        finally:
            self._job.awaits_database = False

    async def _goes_on(self) -> None:
        """A step was committed; a person's order in the meantime stands."""
        job = self._job
        if job.record.reason == RESTARTED:
            await self._runner.registry.enter(job, job.record.state, RESUMED)
        elif job.record.state is JobState.LOADING:  # one that is to leave was never seen serving
            await self._runner.registry.enter(job, JobState.RUNNING, LOADED)

    async def _enter(self, state: JobState, reason: str) -> None:
        if self._job.run is not None and self._job.record.state in (JobState.RUNNING, JobState.PAUSING):
            await self._runner.registry.enter(self._job, state, reason)

    @property
    def _sink(self) -> CheckpointSink:
        run = self._job.run
        assert run is not None
        assert run.sink is not None, "it is there before the driver runs"
        return run.sink


@dataclass(frozen=True, slots=True)
class _CheckpointNews:
    """Passes on news of a job's checkpoints: to the brain, to metrics, to people."""

    runner: JobRunner
    job: Job
    driver: JobDriver

    def stored(self, header: StoreHeader, sha256: str) -> None:
        if self.job.spec.trust.second_hash:
            self.driver.tell(Stored(header.peer, header.version, header.stage, header.path, sha256))

    def kept(self, checkpoint: Checkpoint, duration_s: float) -> None:
        self.job.newest, self.job.unsaved = checkpoint, ""
        size_bytes, ports = checkpoint.size_bytes, self.runner.ports
        ports.metrics.checkpoint_kept(
            self.job.record.id, duration_s=duration_s, time_unix_s=ports.wall_s(), size_bytes=size_bytes
        )
        self.note(
            "info",
            f"checkpoint {checkpoint.name} is kept: {size(size_bytes)}, read back, {spoken_duration(duration_s)}",
        )
        self.driver.checkpoint_written(checkpoint.step)
        self.runner.registry.changed(self.job)

    def failed(self, version: int, error: CheckpointFailed) -> None:
        self.driver.checkpoint_written(version, error.reason, str(error))

    def note(self, level: str, text: str) -> None:
        self.runner.registry.say(self.job, level, text)

    def at_work(self) -> None:
        self.driver.made_progress()


def _needs_start(job: Job, where: str) -> bool:
    return job.record.start_where == where and bool(job.record.start_name) and not job.record.state.is_final


def _hint(job: Job, outcome: Outcome) -> str:
    if outcome.state is not JobState.FAILED and outcome.hint:  # it lost a stage
        newest_step = job.newest.step if job.newest is not None else None
        return f"{outcome.hint}; {resume_hint(job.record.id, newest_step)}"
    if outcome.state is not JobState.FAILED or "swarm resume" in outcome.hint:
        return outcome.hint
    return "; ".join(filter(None, (outcome.hint, again(job))))
