"""Commands of people: submit, cancel, pause, resume, drain, look; remove is in removal.py.

Events of stage servers arrive in listener.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TypeVar

from scheduler.brain.explain.facts import JobStanding
from scheduler.brain.fleet.membership import Membership
from scheduler.brain.fleet.quarantine import TrustRecord
from scheduler.brain.inputs import Stop
from scheduler.brain.members.persons import ANYBODY, Person, Submits, check_owner, check_share
from scheduler.brain.stall import Stalls
from scheduler.jobs.allocator import Allocator
from scheduler.jobs.cuts import basis_of, cut_for, pool_of, reached
from scheduler.jobs.job import Job, JobProgress, again, now_s
from scheduler.jobs.peers import Peers
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.removal import JobRemoval
from scheduler.jobs.starts import Timelines, starting_at
from scheduler.storage.checkpoints.catalog import Beginning, same_model, uploaded_checkpoint
from scheduler.storage.drains import Drains
from scheduler.storage.executor import run_blocking
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.state_files import check_uploaded
from swarm.checkpoint.reader import Checkpoint, Found
from swarm.checkpoint.storage import LATEST
from swarm.errors import InvalidConfig, NotAllowed, NotFound
from swarm.job.changes import JOB_AND_STEP, check_changes, check_leases, check_state, check_steps, with_places_of
from swarm.job.footprint import host_step_s, model_costs
from swarm.job.islands import check_for_swarm
from swarm.job.memory_split import needs
from swarm.job.partition import recut_text, shape_text
from swarm.job.spec import JobSpec
from swarm.limits import JOBS_OPEN_MAX, SHARDS_OPEN_MAX, SUBMITS_MAX
from swarm.types import JobId, JobState, PeerId
from swarm.wire.messages import StateFile

T = TypeVar("T")

_RESUMABLE = (JobState.PAUSED, JobState.FAILED, JobState.CANCELLED)


class Jobs:
    """Carries out people's commands on the jobs in `registry`."""

    def __init__(
        self,
        ports: SchedulerPorts,
        registry: JobRegistry,
        peers: Peers,
        membership: Membership,
        timelines: Timelines,
        allocator: Allocator,
        drains: Drains,
        removal: JobRemoval,
    ) -> None:
        self.stores = ports.stores
        self._metrics, self._rng, self._wall_s = ports.metrics, ports.rng, ports.wall_s
        self.registry = registry
        self._peers = peers
        self._membership = membership
        self._timelines = timelines
        self.idle = allocator.idle
        self._drains = drains
        self.removal = removal
        self._looking = asyncio.Semaphore(SUBMITS_MAX)
        self._submits = Submits()
        self._opening: list[tuple[str, int]] = []  # owner and shards of each job that is not open yet, but counts

    async def aside(self, work: Callable[[], T]) -> T:
        """Check a caller's files on a thread; few at a time, so that threads are left for other work."""
        async with self._looking:
            return await run_blocking(self.stores.threads, work)

    async def check(self, spec: JobSpec, tokens: JobTokens, by: Person = ANYBODY) -> JobSpec:
        """The spec as `submit` would resolve it now; raises what `submit` would raise before it looks at uploads."""
        self._check_room(by.owner, len(tokens.shards))
        self._submits.check(by.owner, now_s())
        resolved, links = await self._vetted(spec, tokens)
        if not JOB_AND_STEP.match(resolved.checkpoint.resume_from):  # a folder is looked at where it is
            return resolved
        return (await self._as_source(spec, resolved, links, tokens, by))[0]

    async def submit(
        self,
        spec: JobSpec,
        tokens: JobTokens,
        tokenizer_files: dict[str, bytes],
        files: tuple[StateFile, ...] = (),
        by: Person = ANYBODY,
    ) -> Job:
        """Accept a job: resolve what is still "auto", check its data and `files`, store it.

        InvalidConfig, InvalidData, InvalidModel, NotOwner, OutOfMemory, QuotaReached.
        """
        with self._room(by.owner, len(tokens.shards)):
            self._submits.take(by.owner, now_s())
            resolved, links = await self._vetted(spec, tokens)
            sent = await self.aside(lambda: self._look_at(resolved, tokens, files, by.owner))
            if not resolved.checkpoint.resume_from or sent is not None:
                chosen = Found(None, ())
                return await self._accept(resolved, spec, links, tokens, tokenizer_files, files, by, chosen, sent)
            with self._timelines.source(resolved).used():  # until the new job is listed
                resolved, links = await self._as_source(spec, resolved, links, tokens, by)
                resolved, chosen = await self._timelines.pinned(resolved)
                asked = spec.having("checkpoint", resume_from=resolved.checkpoint.resume_from)
                return await self._accept(resolved, asked, links, tokens, tokenizer_files, files, by, chosen, None)

    async def _as_source(
        self, spec: JobSpec, resolved: JobSpec, links: str, tokens: JobTokens, by: Person
    ) -> tuple[JobSpec, str]:
        """As `_vetted`, with the narrow places of the job that it starts from, whose model must be the same."""
        source = self._timelines.source(resolved)
        check_owner(by, "Start", source.record.id, source.record.owner)
        if (placed := with_places_of(source.spec.model.narrow, spec)) is not spec:
            resolved, links = await self._vetted(placed, tokens)
        same_model(source.spec, resolved, f"job {source.record.id}")
        return resolved, links

    async def _vetted(self, spec: JobSpec, tokens: JobTokens) -> tuple[JobSpec, str]:
        """The resolved spec and what links changed of it, after every check that needs no upload."""
        if spec.name.startswith("-"):
            raise InvalidConfig(f'name = "{spec.name}" would be taken for a flag', hint="let it begin with a letter")
        resolved, links = await self._resolved(spec, tokens)
        await self.stores.checkpoints.open(resolved, JobId(spec.name))  # for its checks
        return resolved, links

    async def _accept(
        self,
        resolved: JobSpec,
        asked: JobSpec,
        links: str,
        tokens: JobTokens,
        tokenizer_files: dict[str, bytes],
        files: tuple[StateFile, ...],
        by: Person,
        chosen: Found,
        sent: Checkpoint | None,
    ) -> Job:
        """Store the job, to start at the checkpoint that was `chosen` or `sent`, if any.

        `asked` is the spec with its "auto"s; `links` tells of links.
        """
        start, begins = chosen.checkpoint, links
        if (first := start or sent) is not None:
            of = f"{first.name} of {resolved.checkpoint.resume_from.partition(':')[0]}" if start else "what was sent"
            begins += f"; starts at step {first.step} from {of}"
            asked = asked.having("model", narrow=resolved.model.narrow)  # another cut must not move its places
        job_id = JobId(f"{resolved.name}-{self._rng.randbytes(3).hex()}")
        now_unix_s = self._wall_s()
        record = JobRecord(
            id=job_id,
            name=resolved.name,
            state=JobState.QUEUED,
            reason=f"waits for peers{begins}",
            since_unix_s=now_unix_s,
            created_unix_s=now_unix_s,
            spec_json=resolved.model_dump_json(),
            tokens=tokens,
            files=files,
            owner=by.owner,
            **(starting_at(start) if sent is None else {"first_steps": (sent.step,)}),
        )
        await self.stores.files.put_tokenizer(job_id, tokenizer_files)
        await self.stores.database.put_job(record)
        progress = JobProgress.at_start(resolved, record.timeline, record.first_steps[-1])
        job = Job(record, resolved, progress, start=start, asked=asked)
        self.registry.add(job)
        self.stores.logs.open(job_id)
        self._metrics.job_opened(job_id, resolved.model.family)
        self.registry.say(job, "info", f"job {job_id} accepted: {shape_text(resolved)}{begins}")
        if skipped := chosen.skipped_text():
            self.registry.say(job, "warning", skipped)
        self.registry.changed(job)
        self._peers.wake.set()
        return job

    @contextmanager
    def _room(self, owner: str, shards: int) -> Iterator[None]:
        """Count a job of this many shards as open while the block opens it; NotAllowed as in `_check_room`."""
        self._check_room(owner, shards)
        opening = owner, shards
        self._opening.append(opening)
        try:
            yield
        finally:
            self._opening.remove(opening)

    def _check_room(self, owner: str, shards: int) -> None:
        """NotAllowed if more jobs, or more shards, wait and run than the scheduler can hold, or one person may have."""
        records = [job.record for job in self.registry.all() if not job.record.state.is_final]
        living = [(record.owner, len(record.tokens.shards)) for record in records] + self._opening
        if len(living) >= JOBS_OPEN_MAX:
            raise NotAllowed(f"{JOBS_OPEN_MAX} jobs are open already", hint="cancel some: swarm ls")
        own = sum(whose == owner for whose, _ in living)
        check_share(owner, own, len(living) - own, JOBS_OPEN_MAX)
        shards += sum(count for _, count in living)
        if shards > SHARDS_OPEN_MAX:
            raise NotAllowed(
                f"the open jobs would have {shards} token shards together, at most {SHARDS_OPEN_MAX} can be open",
                hint="raise data.upload_shard_bytes, or wait until other jobs have ended",
            )

    def _look_at(self, spec: JobSpec, tokens: JobTokens, files: tuple[StateFile, ...], owner: str) -> Checkpoint | None:
        """Check what was uploaded for a job; gives the checkpoint in it. It reads files, so not on the event loop."""
        place = partial(self.stores.files.shard, owner)
        self.stores.files.counted(spec, tokens, owner)
        check_uploaded(files, [place(file.sha256) for file in files])
        sent = uploaded_checkpoint(files, place)
        if sent is not None:
            check_state(sent.trainer_state(), spec)
            check_steps(spec, sent.step)
        return sent

    async def _resolved(self, spec: JobSpec, tokens: JobTokens, stored: JobSpec | None = None) -> tuple[JobSpec, str]:
        """The spec with every "auto" resolved on a thread, as a cut of many layers takes a while; what changed it.

        `stored`: the spec of a job that goes on. OutOfMemory, InvalidConfig.
        """
        check_for_swarm(spec, stored)
        idle = self._membership.idle_peers()
        basis, pool = basis_of(self._membership, tokens, idle), pool_of(reached(idle))
        return await self.aside(lambda: cut_for(spec, basis, pool))

    async def cancel(self, job: Job, reason: str, *, checkpoint: bool = True) -> None:
        """Save what was trained and end the job; a second call, or one without `checkpoint`, ends it at once.

        Idempotent. NotAllowed if it has ended otherwise.
        """
        state = job.record.state
        if state is JobState.CANCELLED:
            return
        if state.is_final:
            raise NotAllowed(f"job {job.record.id} has {state.value} already", hint="there is nothing to cancel")
        if job.run is None:
            await self.registry.enter(job, JobState.CANCELLED, reason, hint=again(job))
        elif checkpoint and state is not JobState.CANCELLING:
            job.run.driver.tell(Stop(JobState.CANCELLED, reason))
            await self.registry.enter(job, JobState.CANCELLING, f"{reason}; {_first(job.spec)}")
        else:
            job.run.driver.cancel(reason)
            await self.registry.enter(job, JobState.CANCELLING, reason)

    async def pause(self, job: Job, reason: str) -> None:
        """Commit what runs, save it, and release the peers; idempotent. NotAllowed if the job ends or has ended."""
        state = job.record.state
        if state in (JobState.PAUSED, JobState.PAUSING):
            return
        if state.is_final or state is JobState.CANCELLING:
            raise NotAllowed(f"job {job.record.id} {state.phrase}, so it cannot be paused")
        if job.run is None:
            await self.registry.enter(job, JobState.PAUSED, reason, hint=again(job))
        else:
            job.run.driver.tell(Stop(JobState.PAUSED, reason))
            await self.registry.enter(job, JobState.PAUSING, f"{reason}; {_first(job.spec)}")

    async def resume(self, job: Job, which: str, spec: JobSpec | None) -> None:
        """Resume from a checkpoint (the "latest" valid one, or a step) on a new timeline, perhaps with other values.

        From "0", or if nothing was ever committed, the job starts from its beginning. NotAllowed unless it is paused,
        failed or cancelled; InvalidConfig, NotFound, CheckpointDamaged.
        """
        record = job.record
        if self.registry.get(record.id) is not job:
            raise NotFound(f"job {record.id} was removed meanwhile", hint="list the others with: swarm ls -a")
        if record.state not in _RESUMABLE or job.run is not None:
            hint = f"start another job from it: swarm submit FILE --resume-from {record.id}:latest"
            state = "is being stopped" if job.run is not None else record.state.phrase
            raise NotAllowed(
                f"job {record.id} {state}; only a paused, failed or cancelled one can be resumed",
                hint=hint if record.state is JobState.SUCCEEDED else f"see: swarm status {record.id}",
            )
        counted = self._room(record.owner, len(record.tokens.shards)) if record.state.is_final else nullcontext()
        with job.used(), counted:
            beginning, said = await self._turn(job, record, which, spec)
        # No await until the job has its state: it is counted by that from here on.
        if beginning.skipped:
            self.registry.say(job, "warning", beginning.skipped)
        job.stalls = Stalls()
        told = f"goes on at step {beginning.step} {beginning.source}{said}"
        await self.registry.enter(job, JobState.QUEUED, told, error_code="", hint="")
        self._peers.wake.set()

    async def _turn(self, job: Job, record: JobRecord, which: str, spec: JobSpec | None) -> tuple[Beginning, str]:
        """Begin the timeline on which the job resumes; what changes but the values that people gave."""
        changed, said = job.spec, ""
        if spec is not None:
            changed, links = await self._resolved(spec, record.tokens, job.spec)
            said = recut_text(job.spec, spec, changed) + links
            check_changes(job.spec, changed)
            await self.stores.checkpoints.open(changed, record.id)  # for its checks
        untrained = job.newest is None and job.progress.steps_done == record.first_steps[0]
        anew = which == "0" or (untrained and which in ("", LATEST))
        found = await self.stores.checkpoints.choose(record, job.spec, LATEST if anew else which)
        beginning = await self._timelines.beginning(job, found, anew=anew)
        check_steps(changed, beginning.step)
        if beginning.start is not None and beginning.start.job == record.id:
            check_leases(await self.stores.checkpoints.trainer_state(beginning.start), changed)
        await self._timelines.switch_to(job, record, beginning, changed)
        await self.stores.logs.reopen(record.id)
        return beginning, said

    async def drain(self, peer: PeerId, reason: str) -> None:
        """Let the peer hand its work over, and give it none until its process is started again; idempotent."""
        self._peers.leave(peer, reason)
        known = self._membership.get(peer)
        if known is not None:
            await self._drains.keep(known.hello, reason)

    async def undrain(self, peer: PeerId) -> None:
        """Give a drained peer that serves no job stages again. NotAllowed if no person drained it, or it serves one."""
        known = self._membership.get(peer)
        if known is None or not self._drains.reason(known.hello):
            raise NotAllowed(f"stage server {peer} is not drained", hint="how it stands: swarm peers")
        self._peers.stay(peer)
        await self._drains.forget(peer)

    async def free(self, reference: str) -> PeerId:
        """Let a quarantined stage server have stages again; gives its name. NotFound, NotAllowed."""
        return await self._peers.free(reference)

    def trust(self, peer: PeerId) -> TrustRecord:
        """The strikes and the quarantine of a stage server."""
        return self._peers.quarantine.record(peer)

    def standing(self, job: Job) -> JobStanding:
        """The facts about a job beside its brain, for an explanation."""
        record, spec, split = job.record, job.spec, job.spec.split
        peers = sum(map(len, job.stages.values())) or len(split) * spec.limits.min_replicas
        return JobStanding(
            record.id,
            record.state,
            job.reason,
            max(0.0, self._wall_s() - record.since_unix_s),
            record.hint,
            job.progress.steps_done,
            spec.training.steps,
            spec.training.microbatches,
            job.progress.step_s,
            needs(model_costs(spec), split, peers),
            spec.limits.min_replicas,
            spec.late_microbatches,
            job.goes_back[0],
            host_step_s(spec),
        )

    async def watch(self, job: Job) -> AsyncIterator[Job]:
        """The job now and after every change, until it has ended."""
        while True:
            changed, ended = job.changed, job.record.state.is_final
            yield job
            if ended:
                return
            await changed.wait()


def _first(spec: JobSpec) -> str:
    """The work that a stopping job does first, for a person."""
    if spec.has_outer_steps:
        return "trains up to the next exchange between islands, which is saved first"
    return "what runs is committed and saved first"
