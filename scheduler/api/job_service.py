"""Answers the `swarm` command: the Jobs service, a thin translation between the wire and `Jobs`."""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from scheduler.api.chaos import ChaosDesk
from scheduler.api.drain import drain
from scheduler.brain.explain.facts import Fact, Situation, explain_job, explain_microbatch, explain_peer
from scheduler.brain.fleet.membership import Membership, Peer
from scheduler.jobs.commands import Jobs
from scheduler.jobs.job import Job
from scheduler.storage.database import JobTokens
from scheduler.storage.executor import run_blocking
from scheduler.storage.job_log import LogLine
from swarm.checkpoint.storage import Files
from swarm.data.batches import TOKEN_DTYPES
from swarm.data.tokenizer_files import (
    TOKENIZER_FILE_BYTES_MAX,
    TOKENIZER_MESSAGE_BYTES_MAX,
    tokenizer_file_name,
)
from swarm.errors import InvalidConfig, InvalidData, NotAllowed, NotFound, Refused
from swarm.job.spec import spec_from_json
from swarm.messages import PROTOCOL_VERSION, StateFile
from swarm.process.logs import LOG_LEVELS
from swarm.rpc.channel import answering
from swarm.types import PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire import jobs_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

# Followers see at most this many views a second.
WATCH_S_MIN = 0.2
BLOB_BYTES_MAX = 1 << 38  # one file of a model's weights
REASON_CHARACTERS_MAX = 1000
_MODEL = "model/"
_FILES = Files()

_SHA256 = re.compile(r"[0-9a-f]{64}")


class JobService(jobs_pb2_grpc.JobsServicer):
    """Answers clients; every SwarmError travels with its code and hint."""

    def __init__(
        self,
        jobs: Jobs,
        membership: Membership,
        epoch: int,
        product: str,
        wall_s: Callable[[], float],
        chaos: ChaosDesk | None = None,
    ) -> None:
        self._jobs = jobs
        self._membership = membership
        self._epoch = epoch
        self._product = product
        self._wall_s = wall_s
        self._chaos = chaos

    async def Version(self, request: pb.VersionRequest, context: Context) -> pb.VersionReply:
        return pb.VersionReply(product=self._product, protocol=PROTOCOL_VERSION, epoch=self._epoch)

    # Submitting --------------------------------------------------------------------------------------------------

    async def MissingShards(self, request: pb.ShardList, context: Context) -> pb.ShardList:
        async with answering(context):
            missing = [shard for shard in request.shards if not self._shard_path(shard.sha256).exists()]
            return pb.ShardList(shards=missing)

    async def PutShard(self, request_iterator: AsyncIterator[pb.ShardChunk], context: Context) -> pb.PutShardReply:
        async with answering(context):
            first = await anext(aiter(request_iterator), None)
            if first is None or not first.HasField("shard"):
                raise Refused("an upload begins with the shard's hash and size")
            path = self._shard_path(first.shard.sha256)
            if first.shard.size_bytes > BLOB_BYTES_MAX:
                raise Refused(f"a file has at most {BLOB_BYTES_MAX} bytes, not {first.shard.size_bytes}")
            await self._write_shard(path, first, request_iterator)
            return pb.PutShardReply(sha256=first.shard.sha256)
        raise AssertionError

    async def _write_shard(self, path: Path, first: pb.ShardChunk, rest: AsyncIterator[pb.ShardChunk]) -> None:
        """Write beside `path`, check size and hash, then move into place: a broken upload leaves nothing.

        A file that has its name counts as whole ever after, so it is synced to disk before it is renamed.
        """
        task = asyncio.current_task()
        part = path.with_suffix(f".{id(task):x}.part")
        digest, size_bytes = hashlib.sha256(first.payload), len(first.payload)
        executor = self._jobs.stores.threads  # not the database's, which commits wait for
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb", buffering=0) as file:

                def take(payload: bytes) -> None:
                    digest.update(payload)
                    _FILES.write(file, payload)

                _FILES.write(file, first.payload)
                async for chunk in rest:
                    size_bytes += len(chunk.payload)
                    if size_bytes > first.shard.size_bytes:
                        break
                    await run_blocking(executor, partial(take, chunk.payload))
                await run_blocking(executor, lambda: _FILES.sync(file))
            if (size_bytes, digest.hexdigest()) != (first.shard.size_bytes, first.shard.sha256):
                raise InvalidData(
                    f"the shard arrived as {size_bytes} bytes with sha256 {digest.hexdigest()[:12]}…, announced were "
                    f"{first.shard.size_bytes} bytes with {first.shard.sha256[:12]}…",
                    hint="submit again; if it happens again, the file changed while it was read",
                )
            _FILES.rename(part, path)
            await run_blocking(executor, lambda: _FILES.sync_folder(path.parent))
        except OSError as error:
            raise InvalidData(
                f"the scheduler could not store the shard: {error}", hint="free disk space in its --data-dir"
            ) from error
        finally:
            part.unlink(missing_ok=True)

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.JobView:
        async with answering(context):
            for shard in request.shards:
                self._shard_path(shard.sha256)
            if request.token_dtype not in TOKEN_DTYPES:
                raise InvalidConfig(f"token_dtype is one of {', '.join(TOKEN_DTYPES)}, not {request.token_dtype!r}")
            if not math.isfinite(request.unigram_entropy) or request.unigram_entropy < 0:
                raise InvalidConfig(f"unigram_entropy is a number of nats, not {request.unigram_entropy}")
            if not -1 <= request.end_of_text < request.vocabulary_size:
                raise InvalidConfig(
                    f"end_of_text is -1 or a token of the vocabulary of {request.vocabulary_size}, "
                    f"not {request.end_of_text}"
                )
            for name in request.tokenizer_files:
                if tokenizer_file_name(f"{_MODEL}{name}") is None:  # beside it lie config.json and the weights
                    raise InvalidConfig(f"{name[:100]!r} is no name of a tokenizer file")
            if sum(map(len, request.tokenizer_files.values())) > TOKENIZER_MESSAGE_BYTES_MAX:
                raise InvalidConfig(
                    f"tokenizer files in a message have at most {TOKENIZER_MESSAGE_BYTES_MAX} bytes together"
                )
            tokens = JobTokens(
                shards=tuple(shard.sha256 for shard in request.shards),
                token_dtype=request.token_dtype,
                vocabulary_size=request.vocabulary_size,
                unigram_entropy=request.unigram_entropy,
                end_of_text=request.end_of_text,
            )
            for file in request.files:
                self._shard_path(file.sha256)
            files = tuple(
                StateFile(file.path, file.size_bytes, file.sha256)
                for file in request.files
                if tokenizer_file_name(file.path) is None  # stage servers have no use for those
            )
            spec = spec_from_json(request.spec_json)
            tokenizer_files = dict(request.tokenizer_files) | await self._uploaded_tokenizer(request)
            return self._view(await self._jobs.submit(spec, tokens, tokenizer_files, files))
        raise AssertionError

    async def _uploaded_tokenizer(self, request: pb.SubmitRequest) -> dict[str, bytes]:
        """The tokenizer files among the uploaded files, by name; InvalidData if one is missing."""
        paths = {
            name: self._shard_path(file.sha256)
            for file in request.files
            if (name := tokenizer_file_name(file.path)) is not None
        }

        def read() -> dict[str, bytes]:
            files = {}
            for name, path in paths.items():
                if path.exists() and path.stat().st_size > TOKENIZER_FILE_BYTES_MAX:
                    raise InvalidConfig(f"{name} has more than {TOKENIZER_FILE_BYTES_MAX} bytes")
                files[name] = path.read_bytes()
            return files

        try:
            return await run_blocking(self._jobs.stores.threads, read)
        except OSError as error:
            raise InvalidData(
                f"a tokenizer file of the job is not here: {error.strerror or error}", hint="submit again to upload it"
            ) from error

    def _shard_path(self, sha256: str) -> Path:
        if not _SHA256.fullmatch(sha256):
            raise Refused(f"{sha256[:80]!r} is no sha256")
        return self._jobs.shard_path(sha256)

    # Looking -----------------------------------------------------------------------------------------------------

    async def List(self, request: pb.ListRequest, context: Context) -> pb.JobList:
        jobs = [
            job
            for job in self._jobs.all()
            if (
                job.record.state.value == request.state
                if request.state
                else request.all or not job.record.state.is_final
            )
        ]
        return pb.JobList(jobs=[self._view(job) for job in jobs[: request.limit or None]])

    async def Get(self, request: pb.JobRequest, context: Context) -> pb.JobView:
        async with answering(context):
            return self._view(self._jobs.find(request.job))
        raise AssertionError

    async def Watch(self, request: pb.JobRequest, context: Context) -> AsyncIterator[pb.JobView]:
        async with answering(context):
            async for job in self._jobs.watch(self._jobs.find(request.job)):
                yield self._view(job)
                if not job.record.state.is_final:
                    await asyncio.sleep(WATCH_S_MIN)

    async def Peers(self, request: pb.PeersRequest, context: Context) -> pb.PeerList:
        peers = [
            peer
            for peer in self._membership.peers()
            if (not request.state or peer.state.value == request.state)
            and (request.stage < 0 or peer.stage == request.stage)
        ]
        return pb.PeerList(peers=[self._peer_view(peer) for peer in peers])

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Explanation:
        async with answering(context):
            about = self._find(request.about)
            if isinstance(about, Peer):
                if request.HasField("microbatch"):
                    raise InvalidConfig(f"{about.hello.peer} is a stage server; only a job has microbatches")
                return self._explain_peer(about)
            if request.HasField("microbatch"):
                return self._explain_microbatch(about, request.microbatch.step, request.microbatch.index)
            now_s = asyncio.get_running_loop().time()
            facts = explain_job(self._jobs.standing(about), _situation(about), self._jobs.idle(), now_s)
            return _explanation("job", about.record.id, facts)
        raise AssertionError

    def _find(self, reference: str) -> Job | Peer:
        """What a person named: a stage server if it is its whole id, else a job, else the beginning of a peer's id."""
        if (exact := self._membership.get(PeerId(reference))) is not None:
            return exact
        try:
            return self._jobs.find(reference)
        except NotFound as no_job:
            try:
                return self._membership.find(reference)
            except NotFound as no_peer:
                told, hint = f"{no_job.message}; {no_peer.message}", "list them with: swarm ls -a; swarm peers"
                raise NotFound(told, hint=hint) from None

    def _explain_peer(self, known: Peer) -> pb.Explanation:
        job = self._jobs.get(known.job)
        idle = next((one for one in self._jobs.idle() if one.peer == known.hello.peer), None)
        waiting = {job.record.id: job.record.reason for job in self._jobs.waiting()}
        now_s = asyncio.get_running_loop().time()
        facts = explain_peer(known, _situation(job) if job is not None else None, idle, waiting, now_s)
        return _explanation("peer", known.hello.peer, facts)

    def _explain_microbatch(self, job: Job, step: int, index: int) -> pb.Explanation:
        microbatches, brain = job.spec.training.microbatches, job.driver.brain if job.driver is not None else None
        if index >= microbatches:
            raise NotFound(f"a step of {job.record.id} has microbatches 0 to {microbatches - 1}, there is no {index}")
        if brain is None:
            raise NotFound(f"job {job.record.id} is {job.record.state.value}: stories are kept while it is at work")
        story = brain.story(step, index)
        if not story:
            raise NotFound(
                f"nothing is known of microbatch {index} of step {step}: kept are the newest steps",
                hint=f"{brain.committed_steps} steps are committed",
            )
        return _explanation("microbatch", job.record.id, explain_microbatch(story))

    async def Logs(self, request: pb.LogsRequest, context: Context) -> AsyncIterator[pb.LogEntry]:
        async with answering(context):
            job = self._jobs.find(request.job)
            wanted = _log_filter(request)
            follow = request.follow and not job.record.state.is_final
            tail = request.tail
            log = await self._jobs.stores.logs.read(job.record.id)
            lines, position = log.kept()
            kept = [line for line in lines if wanted(line)]
            for line in kept[-tail:] if tail else kept:
                yield _entry(line)
            if follow:
                async for line in log.after(position):
                    if wanted(line):
                        yield _entry(line)

    # Acting ------------------------------------------------------------------------------------------------------

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.JobView:
        async with answering(context):
            job = self._jobs.find(request.job)
            reason = request.reason[:REASON_CHARACTERS_MAX] or "cancelled by its user"
            await self._jobs.cancel(job, reason, checkpoint=not request.no_checkpoint)
            return self._view(job)
        raise AssertionError

    async def Pause(self, request: pb.JobRequest, context: Context) -> pb.JobView:
        async with answering(context):
            job = self._jobs.find(request.job)
            await self._jobs.pause(job, "paused by its user")
            return self._view(job)
        raise AssertionError

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.JobView:
        async with answering(context):
            job = self._jobs.find(request.job)
            spec = spec_from_json(request.spec_json) if request.spec_json else None
            await self._jobs.resume(job, getattr(request, "from"), spec)
            return self._view(job)
        raise AssertionError

    async def Drain(self, request: pb.DrainRequest, context: Context) -> AsyncIterator[pb.DrainView]:
        async with answering(context):
            reason = request.reason[:REASON_CHARACTERS_MAX] or "drained by its user"
            async for known, waits_for in drain(self._jobs, self._membership, request.peer, reason):
                yield pb.DrainView(peer=self._peer_view(known), waits_for=waits_for)

    async def Checkpoints(self, request: pb.CheckpointsRequest, context: Context) -> pb.CheckpointList:
        async with answering(context):
            job = self._jobs.find(request.job)
            shown = await self._jobs.stores.checkpoints.shown(job.record, job.spec, verify=request.verify)
            return pb.CheckpointList(checkpoints=[pb.CheckpointView(**asdict(one)) for one in shown])
        raise AssertionError

    async def Chaos(self, request: pb.ChaosRequest, context: Context) -> pb.ChaosReport:
        async with answering(context):
            if self._chaos is None:
                raise NotAllowed(
                    "this scheduler does no harm to stage servers",
                    hint="start it with: swarm scheduler --allow-chaos, or swarm up --allow-chaos",
                )
            return await self._chaos.inflict(request)
        raise AssertionError

    async def Pull(self, request: pb.PullRequest, context: Context) -> AsyncIterator[pb.FileChunk]:
        async with answering(context):
            job = self._jobs.find(request.job)
            checkpoint = await self._jobs.stores.checkpoints.to_pull(job.record, job.spec, request.step)
            for file in checkpoint.files:
                if not file.path.startswith(_MODEL):
                    continue
                name = file.path.removeprefix(_MODEL)
                yield pb.FileChunk(header=pb.FileHeader(path=name, size_bytes=file.size_bytes, sha256=file.sha256))
                chunks = checkpoint.chunks(file.path)
                while (chunk := await self._next(chunks)) is not None:
                    yield pb.FileChunk(payload=chunk)

    async def _next(self, chunks: Iterator[bytes]) -> bytes | None:
        try:
            return await run_blocking(self._jobs.stores.threads, lambda: next(chunks, None))
        except OSError as error:
            raise NotFound(
                f"the checkpoint cannot be read: {error}", hint="it may have been removed: pull again"
            ) from error

    # Views -------------------------------------------------------------------------------------------------------

    def _view(self, job: Job) -> pb.JobView:
        record, progress = job.record, job.progress
        brain = job.driver.brain if job.driver is not None else None
        split = job.spec.pipeline.split
        assert split != "auto"
        per_stage = brain.stage_microbatches if brain is not None else (0,) * len(split)
        committed = progress.steps_done * job.spec.training.microbatches
        return pb.JobView(
            id=record.id,
            name=record.name,
            state=record.state.value,
            reason=record.reason,
            since_unix_s=record.since_unix_s,
            created_unix_s=record.created_unix_s,
            step=progress.steps_done,
            steps=job.spec.training.steps,
            loss=progress.loss,
            learning_rate=progress.learning_rate,
            grad_norm=progress.norm,
            tokens_per_s=progress.tokens_per_s,
            eta_s=progress.eta_s,
            tokens=progress.tokens,
            unigram_entropy=record.tokens.unigram_entropy,
            stages=[
                pb.StageView(
                    stage=stage,
                    layers=layers,
                    peers=job.stages.get(stage, []),
                    microbatches=per_stage[stage] if brain is not None else committed,
                )
                for stage, layers in enumerate(split)
            ],
            microbatches_committed=committed,
            microbatches_in_flight=brain.in_flight if brain is not None else 0,
            microbatches_replayed=brain.replayed if brain is not None else 0,
            weights_sha256=record.weights_sha256,
            evaluation_loss=progress.evaluation_loss,
            evaluation_step=progress.evaluation_step,
            spec_json=record.spec_json,
            error_code=record.error_code,
            hint=record.hint,
            checkpoint_step=job.newest.step if job.newest is not None else 0,
            skipped_steps=progress.skipped,
        )

    def _peer_view(self, peer: Peer) -> pb.PeerView:
        hello = peer.hello
        job = self._jobs.get(peer.job)
        brain = job.driver.brain if job is not None and job.driver is not None else None
        since_s = asyncio.get_running_loop().time() - peer.since_s
        return pb.PeerView(
            id=hello.peer,
            state=peer.state.value,
            reason=peer.reason,
            since_unix_s=self._wall_s() - since_s,
            address=hello.address,
            http_address=hello.http_address,
            device=hello.device,
            threads=hello.threads,
            memory_bytes=hello.memory_bytes,
            job=peer.job,
            stage=peer.stage,
            pace_s=brain.pace_s(hello.peer) if brain is not None else 0.0,
            outstanding=brain.outstanding(hello.peer) if brain is not None else 0,
            product=hello.product,
            incarnation=hello.incarnation,
        )


def _situation(job: Job) -> Situation | None:
    return job.driver.brain.situation(asyncio.get_running_loop().time()) if job.driver is not None else None


def _explanation(kind: str, name: str, facts: Iterable[Fact]) -> pb.Explanation:
    return pb.Explanation(
        kind=kind,
        id=name,
        facts=[pb.Fact(topic=one.topic, text=one.text, numbers=dict(one.numbers)) for one in facts],
    )


def _log_filter(request: pb.LogsRequest) -> Callable[[LogLine], bool]:
    level = request.level or "info"
    if level not in LOG_LEVELS:
        raise InvalidConfig(f"level is one of {', '.join(LOG_LEVELS)}, not {level!r}")
    levels = LOG_LEVELS[LOG_LEVELS.index(level) :]

    def wanted(line: LogLine) -> bool:
        return (
            line.level in levels
            and (not request.peer or line.peer.startswith(request.peer))
            and (request.stage < 0 or line.stage == request.stage)
            and line.time_unix_s >= request.since_unix_s
        )

    return wanted


def _entry(line: LogLine) -> pb.LogEntry:
    return pb.LogEntry(
        time_unix_s=line.time_unix_s, level=line.level, peer=line.peer, stage=line.stage, message=line.message
    )
