"""Answers the `swarm` command: the Jobs service, a thin translation between the wire and `Jobs`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import asdict
from functools import partial
from typing import Any

import grpc.aio

from scheduler.api import probe
from scheduler.api.holding import Holding, Reads, sending
from scheduler.api.members.relays import STATE, RelayDesk
from scheduler.api.uploads import MODEL, Uploads, read_request
from scheduler.api.views import Overview, checkpoint_view, explanation, fitting, log_filter, named, step_trace
from scheduler.brain.explain.facts import Fact, explain_peer, explain_trust, why_it_stays
from scheduler.brain.fleet.membership import Membership, Peer, check_reference
from scheduler.brain.members.persons import ANYBODY, Changes, Person, check_owner
from scheduler.brain.members.places import CallSlot, CallSlots
from scheduler.jobs.commands import Jobs
from scheduler.jobs.history import history
from scheduler.jobs.job import Job, now_s
from scheduler.storage.executor import run_blocking
from swarm.checkpoint.reader import Checkpoint
from swarm.errors import InvalidConfig, NotAllowed, NotFound, Refused
from swarm.job.spec import JobSpec, spec_from_caller
from swarm.limits import (
    DIALLED_MAX,
    DIALLED_OF_ONE_MAX,
    FOLLOWED_BY_ONE_MAX,
    FOLLOWERS_MAX,
    JOBS_LISTED_MAX,
    SPEC_BYTES_MAX,
)
from swarm.rpc import channel
from swarm.rpc.bulk import within_window
from swarm.rpc.window import Window
from swarm.text import counted
from swarm.types import PROTOCOL_VERSION, JobState, PeerId, PeerState
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

# Followers see at most this many views a second.
WATCH_S_MIN = 0.2
REASON_CHARACTERS_MAX = 1000


@channel.answers
class JobService(jobs_pb2_grpc.JobsServicer):
    """Answers clients; every SwarmError travels with its code and hint."""

    def __init__(
        self,
        jobs: Jobs,
        membership: Membership,
        product: str,
        wall_s: Callable[[], float],
        asks: Callable[[], Person] = lambda: ANYBODY,
        relays: RelayDesk | None = None,
        troubles: Callable[[], list[str]] = list,
    ) -> None:
        """`asks` says who calls. `troubles` gives the scheduler's faults."""
        self._jobs, self._membership, self._relays = jobs, membership, relays
        self._asks, self._troubles, self._wall_s, self._product = asks, troubles, wall_s, product
        self._overview = Overview(jobs, membership, asks, wall_s, relays)
        self._uploads = Uploads(jobs.stores)
        self._followers = Holding(CallSlots(FOLLOWERS_MAX, FOLLOWED_BY_ONE_MAX, "calls follow jobs or pull weights"))
        self._reads = Reads()
        self._changes = Changes()
        self._dialled = CallSlots(DIALLED_MAX, DIALLED_OF_ONE_MAX, "calls have the scheduler dial")

    async def Version(self, request: pb.VersionRequest, context: Context) -> pb.VersionReply:
        return pb.VersionReply(product=self._product, protocol=PROTOCOL_VERSION, epoch=self._jobs.stores.database.epoch)

    # Submitting --------------------------------------------------------------------------------------------------

    async def MissingShards(self, request: pb.ShardList, context: Context) -> pb.ShardList:
        return pb.ShardList(shards=await self._uploads.missing(self._asks(), request.shards))

    async def PutShard(self, request_iterator: AsyncIterator[pb.ShardChunk], context: Context) -> None:
        async def arrived(held_bytes: int) -> None:
            await channel.reply_with(context, pb.PutShardReply(held_bytes=held_bytes))

        sha256 = await self._uploads.put(request_iterator, self._asks(), arrived)
        await context.write(pb.PutShardReply(sha256=sha256))

    async def Check(self, request: pb.SubmitRequest, context: Context) -> pb.CheckReply:
        tokens, _ = await self._jobs.aside(lambda: read_request(request))
        spec = await self._spec(request.spec_json)
        resolved = await self._jobs.check(spec, tokens, self._asks())
        return pb.CheckReply(spec_json=resolved.model_dump_json())

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.JobView:
        person = self._asks()
        tokens, files = await self._jobs.aside(lambda: read_request(request))
        spec = await self._spec(request.spec_json)
        tokenizer_files = await self._uploads.tokenizer(person, request)
        return self._overview.job(await self._jobs.submit(spec, tokens, tokenizer_files, files, person))

    # Looking -----------------------------------------------------------------------------------------------------

    async def List(self, request: pb.ListRequest, context: Context) -> pb.JobList:
        def is_wanted(state: JobState) -> bool:
            return state.value == request.state if request.state else request.all or not state.is_final

        async with self._reading():
            jobs = [job for job in self._jobs.registry.all() if is_wanted(job.record.state)]
            queue = self._overview.queue()
            views = (
                self._overview.job(job, spec=False, queue=queue)
                for job in jobs[: min(request.limit or JOBS_LISTED_MAX, JOBS_LISTED_MAX)]
            )
            return pb.JobList(jobs=fitting(views), troubles=self._troubles())

    async def Get(self, request: pb.JobRequest, context: Context) -> pb.JobView:
        async with self._reading():
            return self._overview.job(self._job("Get", request.job))

    async def Watch(self, request: pb.JobRequest, context: Context) -> AsyncIterator[pb.JobView]:
        async with self._following() as place:
            async for job in self._jobs.watch(self._job("Watch", request.job)):
                with sending(place):
                    yield self._overview.job(job)
                    await asyncio.sleep(WATCH_S_MIN)

    async def Peers(self, request: pb.PeersRequest, context: Context) -> pb.PeerList:
        async with self._reading():
            views = map(self._overview.peer, self._membership.peers())
            wanted = (
                view
                for view in views
                if (not request.state or view.state == request.state)
                and (request.stage < 0 or view.stage == request.stage)
            )
            with_relays = request.state in ("", STATE) and request.stage < 0
            relays = self._overview.relay_views() if with_relays else []
            return pb.PeerList(peers=fitting([*relays, *wanted]))

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Explanation:
        async with self._reading():
            about = self._find(request.about)
            if isinstance(about, Peer):
                if request.HasField("microbatch"):
                    raise InvalidConfig(f"{about.hello.peer} is a stage server; only a job has microbatches")
                return self._explain_peer(about)
            if request.HasField("microbatch"):
                return self._explain_microbatch(about, request.microbatch.step, request.microbatch.index)
            return explanation("job", about.record.id, self._overview.job_facts(about))

    def _job(self, method: str, reference: str) -> Job:
        """The job that the caller means, for a method that names one; NotFound, NotOwner."""
        job = self._jobs.registry.find(reference)
        check_owner(self._asks(), method, job.record.id, job.record.owner)
        return job

    def _job_to_change(self, method: str, reference: str) -> Job:
        """The same, for a method that writes a row; QuotaReached."""
        job = self._job(method, reference)
        self._changes.take(self._asks().owner, now_s())
        return job

    def _find(self, reference: str) -> Job | Peer:
        """The thing that a person named: a stage server by its id, a job, or a peer by the beginning of its id."""
        check_reference(reference)
        if (exact := self._membership.get(PeerId(reference))) is not None:
            return exact
        try:
            return self._job("Explain", reference)
        except NotFound as no_job:
            try:
                return self._membership.find(reference)
            except NotFound as no_peer:
                told, hint = f"{no_job.message}; {no_peer.message}", "list them with: swarm ls -a; swarm peers"
                raise NotFound(told, hint=hint) from None

    def _explain_peer(self, known: Peer) -> pb.Explanation:
        job = self._jobs.registry.get(known.job)
        idle = next((idle for idle in self._jobs.idle() if idle.peer == known.hello.peer), None)
        waiting = {waits.record.id: waits.record.reason for waits in self._jobs.registry.waiting()}
        now_s = asyncio.get_running_loop().time()
        facts = [*explain_peer(known, job.situation() if job is not None else None, idle, waiting, now_s)]
        if self._relays is not None:
            facts += self._relays.facts(known.hello.peer)
        facts += explain_trust(self._jobs.trust(known.hello.peer), self._wall_s())
        return explanation("peer", known.hello.peer, facts)

    def _explain_microbatch(self, job: Job, step: int, index: int) -> pb.Explanation:
        microbatches, brain = job.spec.training.microbatches, job.brain
        if index >= microbatches:
            raise NotFound(f"a step of {job.record.id} has microbatches 0 to {microbatches - 1}, there is no {index}")
        if brain is None:
            raise NotFound(f"job {job.record.id} {job.record.state.phrase}: stories are kept while it is at work")
        story = brain.story(step, index)
        if not story:
            raise NotFound(
                f"nothing is known of microbatch {index} of step {step}: kept are the newest steps",
                hint=f"committed so far: {counted(brain.counts().committed_steps, 'step')}",
            )
        return explanation("microbatch", job.record.id, (Fact("story", line) for line in story))

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeReply:
        dialling = partial(self._dialled.taken, self._asks(), now_s())
        return await probe.answer(request, context.peer(), self._wall_s(), dialling)

    async def Logs(self, request: pb.LogsRequest, context: Context) -> AsyncIterator[pb.LogEntry]:
        async with self._reading() as place:
            job = self._job("Logs", request.job)
            wanted = log_filter(request)
            follow = request.follow and not job.record.state.is_final
            tail = 0 if request.after else request.tail
            log = await self._jobs.stores.logs.read(job.record.id)
            lines, position = log.kept()
            kept = [line for line in lines if wanted(line)]
            for line in kept[-tail:] if tail else kept:
                with sending(place):
                    yield named(pb.LogEntry, line)
        if follow:
            async with self._following() as place:
                async for line in log.after(position):
                    if wanted(line):
                        with sending(place):
                            yield named(pb.LogEntry, line)

    # Acting ------------------------------------------------------------------------------------------------------

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.JobView:
        job = self._job_to_change("Cancel", request.job)
        reason = request.reason[:REASON_CHARACTERS_MAX] or "cancelled by its user"
        await self._jobs.cancel(job, reason, checkpoint=not request.no_checkpoint)
        return self._overview.job(job)

    async def Pause(self, request: pb.JobRequest, context: Context) -> pb.JobView:
        job = self._job_to_change("Pause", request.job)
        await self._jobs.pause(job, "paused by its user")
        return self._overview.job(job)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.JobView:
        job = self._job_to_change("Resume", request.job)
        spec = await self._spec(request.spec_json, job.spec) if request.spec_json else None
        await self._jobs.resume(job, getattr(request, "from"), spec)
        return self._overview.job(job)

    async def Remove(self, request: pb.JobRequest, context: Context) -> pb.RemovedView:
        removed = await self._jobs.removal.remove(self._job("Remove", request.job))
        return pb.RemovedView(**asdict(removed))

    async def Collect(self, request: pb.CollectRequest, context: Context) -> pb.CollectReply:
        waste = await self._jobs.removal.collect(dry_run=request.dry_run)
        return pb.CollectReply(waste=fitting(pb.Waste(**asdict(wasted)) for wasted in waste))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[pb.DrainView]:
        reason = request.reason[:REASON_CHARACTERS_MAX] or "drained by its user"
        async with self._following() as place:
            async for known, waits_for in drain(self._jobs, self._membership, request.peer, reason):
                with sending(place):
                    yield pb.DrainView(peer=self._overview.peer(known), waits_for=waits_for)

    async def Undrain(self, request: pb.UndrainRequest, context: Context) -> pb.PeerView:
        known = self._membership.find(request.peer)
        await self._jobs.undrain(known.hello.peer)
        return self._overview.peer(known)

    async def FreePeer(self, request: pb.FreePeerRequest, context: Context) -> pb.FreePeerReply:
        return pb.FreePeerReply(peer=await self._jobs.free(request.peer))

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Context) -> pb.CheckpointList:
        async with self._reading():
            job = self._job("Verify" if request.verify else "Checkpoints", request.job)
            shown = await self._jobs.stores.checkpoints.shown(job.record, job.spec, verify=request.verify)
            return pb.CheckpointList(checkpoints=[checkpoint_view(*checkpoint) for checkpoint in shown])

    async def History(self, request: pb.HistoryRequest, context: Context) -> AsyncIterator[pb.StepList]:
        job = self._job("History", request.job)
        async with self._following() as place:
            database, newest = self._jobs.stores.database, job.progress.steps_done
            every, after = (min(number, job.spec.training.steps) for number in (request.every, request.after))
            async for steps in history(database, job.record, job.spec, every, newest, after):
                with sending(place):
                    yield pb.StepList(steps=[pb.StepView(**asdict(step)) for step in steps])

    async def Trace(self, request: pb.TraceRequest, context: Context) -> pb.StepTrace:
        async with self._reading():
            return step_trace(self._job("Trace", request.job), request.step, self._wall_s())

    async def Pull(self, requests: AsyncIterator[pb.PullRequest], context: Context) -> AsyncIterator[pb.FileChunk]:
        first = await anext(requests, None)
        if first is None:
            raise Refused("a pull begins with the name of a job")
        job = self._job("Pull", first.job)
        async with self._following() as place:  # each has a file open
            checkpoint = await self._jobs.stores.checkpoints.to_pull(job.record, job.spec, first.step)
            window = Window(asyncio.get_running_loop().time())
            chunks, arrived = self._files(checkpoint, first.start), (request.arrived async for request in requests)
            async with aclosing(within_window(chunks, arrived, window)) as pieces:
                async for piece in pieces:
                    chunk = pb.FileChunk(payload=piece) if isinstance(piece, bytes) else pb.FileChunk(header=piece)
                    with sending(place):
                        yield chunk
                    place.moved_bytes += len(chunk.payload)

    async def _files(self, checkpoint: Checkpoint, start: int) -> AsyncIterator[pb.FileHeader | bytes]:
        """The files of the model folder, each after its header, without the first bytes of the whole."""
        for file in checkpoint.files:
            if not file.path.startswith(MODEL):
                continue
            if start and start >= file.size_bytes:
                start -= file.size_bytes
                continue
            name = file.path.removeprefix(MODEL)
            yield pb.FileHeader(path=name, size_bytes=file.size_bytes, sha256=file.sha256, step=checkpoint.step)
            chunks = checkpoint.chunks(file.path, start)
            start = 0
            while (chunk := await self._next(chunks)) is not None:
                yield chunk

    async def _next(self, chunks: Iterator[bytes]) -> bytes | None:
        try:
            return await run_blocking(self._jobs.stores.threads, lambda: next(chunks, None))
        except OSError as error:
            raise NotFound(
                f"the checkpoint cannot be read: {error}", hint="it may have been removed: pull again"
            ) from error

    def _reading(self) -> AbstractAsyncContextManager[CallSlot]:
        """The caller's turn to read, and a place meanwhile; Crowded as in `_following`."""
        return self._reads.turn(self._asks())

    def _following(self) -> AbstractAsyncContextManager[CallSlot]:
        """A place for the caller as long as it follows; Crowded if there is none, or once others need it."""
        return self._followers.held(self._asks())

    async def _spec(self, text: str, stored: JobSpec | None = None) -> JobSpec:
        """The spec that a client sent, perhaps for a job that has one, read on a thread; InvalidConfig."""
        if len(text) > SPEC_BYTES_MAX:
            raise InvalidConfig(f"the job's spec has {len(text)} characters, at most {SPEC_BYTES_MAX}")
        return await self._jobs.aside(lambda: spec_from_caller(text, stored))


LOOK_S = 0.1


async def drain(jobs: Jobs, membership: Membership, reference: str, reason: str) -> AsyncIterator[tuple[Peer, str]]:
    """The peer and the reason why it is still here: now, after every change, and when it serves no job or is gone.

    NotFound; NotAllowed if it is gone already.
    """
    known = membership.find(reference)
    peer = known.hello.peer
    if known.state is PeerState.GONE:
        raise NotAllowed(f"stage server {peer} is gone: {known.reason}", hint="it has nothing left to hand over")
    await jobs.drain(peer, reason)
    told: tuple[PeerState, str] | None = None
    if known.job:
        await asyncio.sleep(LOOK_S)  # until the job has heard of it
    while known.job:  # this incarnation; when a newer one dials, this one is gone
        job = jobs.registry.get(known.job)
        situation = job.situation() if job is not None else None
        waits_for = why_it_stays(situation, peer) if situation is not None else ""
        if told != (known.state, waits_for):
            told = (known.state, waits_for)
            yield known, waits_for or "it is about to be released"
        await asyncio.sleep(LOOK_S)
    yield known, ""
