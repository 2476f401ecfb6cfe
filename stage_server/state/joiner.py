"""Becoming a replica of a running job: fetch the stage's state from its replicas while they go on training.

    LoadStage(join) ─▶ build ─▶ pull, replay (rejoin.py decides) ─▶ Loaded(version, digest) ─▶ kept as it is ─▶ Admit
                                         ▲                                                        │
                                         └──────────── Follow: answered, there is a newer version ┘

The reported state is kept unchanged until the scheduler answers, since the scheduler may already count on it.

Decision: docs/decisions/028.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from torch import Tensor

from stage_server.brain import rejoin
from stage_server.brain.rejoin import Chunk
from stage_server.ports import Assignment, ReplicaPorts
from stage_server.state.donor import Record, chunks_of, names_of, records_bytes, sizes_in, unpack_records
from stage_server.state.loading import build_and_probe, unit_sizes
from swarm.errors import CorruptFrame, JobFailed, PeerUnavailable, SwarmError
from swarm.model.islands.exchange import merge_of_deltas
from swarm.model.stage import Stage
from swarm.rpc.links.peers import PeerLinks
from swarm.types import Hop, PeerId
from swarm.wire.messages import Failed, Follow, Loaded, StateReply, StateRequest

PULL_S = 60.0  # of one chunk or its records, and longer for what is large
BYTES_PER_S_MIN = 2e4  # a line that carries less is of no use; that anything comes at all, links watch
FOLLOW_S_MAX = 10.0  # until some donor gives a chunk of one commit's averaged gradient
PAUSE_S = (0.02, 0.5)


class JoinClient:
    """One attempt to join; it goes on until the job ends or a replica takes its `stage` over."""

    def __init__(self, assignment: Assignment, ports: ReplicaPorts) -> None:
        self.stage: Stage | None = None
        self.assignment = assignment
        self._command, self._me = assignment.command, assignment.me
        self._ports = ports
        self._device, self._log = ports.device, ports.log
        self._rejoin: rejoin.Rejoin | None = None
        self._chunks: tuple[Chunk, ...] = ()
        self._probe = self._digest_made = ""
        self._donors: dict[PeerId, Hop] = {}
        self._follow: Follow | None = None  # the newest
        self._reports = 0
        self.loaded: Loaded | None = None  # the newest report
        self._failed: Failed | None = None
        self._began_s: float | None = None  # when it first asked a donor; None: not yet, or already reported
        self._news = asyncio.Event()
        ports.work.start(self._run())

    def follow(self, command: Follow) -> None:
        """Newer versions, other donors, or the answer to a report."""
        if command.join == self._command.join:
            self._follow = command
            self._news.set()

    def attach(self) -> tuple[Loaded | Failed, ...]:
        """A new session begins; gives the reports that were not answered."""
        waits = self._follow is None or self._follow.answered < self._reports
        return tuple(event for event in (self.loaded if waits else None, self._failed) if event is not None)

    # What is done ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._prepare()
            while True:
                await self._take_news()
        except SwarmError as error:
            self._fail(error)

    async def _prepare(self) -> None:
        self.stage, self._probe = await build_and_probe(self.assignment, self._ports, None)
        stage = self.stage
        self._chunks = chunks_of(stage)
        settings = rejoin.RejoinSettings(staleness=self.assignment.spec.pipeline.staleness)
        self._rejoin = rejoin.Rejoin(self._me.peer, self._chunks, settings)

    async def _take_news(self) -> None:
        """Wait for news or for the end of a pause, and carry out what follows."""
        assert self._rejoin is not None
        now_s = _now_s()
        due_s = self._rejoin.due_s(now_s)
        try:
            async with asyncio.timeout_at(due_s):
                await self._news.wait()
        except TimeoutError:
            self._carry_out(self._rejoin.tick(_now_s()))
            return
        self._news.clear()
        follow = self._follow
        if follow is None or follow.answered < self._reports:
            return
        now_s = _now_s()
        self._donors = {donor.peer: donor for donor in follow.donors}
        self._carry_out(self._rejoin.donors(self._donors, now_s))
        if follow.digest:
            self._carry_out(self._rejoin.agreed(follow.agreed, follow.digest, now_s))
        if follow.answered >= self._reports:
            self._carry_out(self._rejoin.committed(follow.version, now_s))

    def _carry_out(
        self, orders: Sequence[rejoin.Order], payload: memoryview | None = None, records: Sequence[Record] = ()
    ) -> None:
        stage, device = self.stage, self._device
        assert stage is not None
        replayed = iter(records)
        for order in orders:
            match order:
                case rejoin.AskChunk() | rejoin.AskRecords():
                    self._began_s = _now_s() if self._began_s is None and not self._reports else self._began_s
                    self._ports.work.start(self._ask(order))
                case rejoin.StoreChunk(chunk=chunk, version=version):
                    assert payload is not None, "a chunk that came"
                    names, raw = names_of(self._chunks[chunk]), payload
                    self._do(lambda names=names, version=version, raw=raw: stage.absorb(names, version, raw))  # type: ignore[misc]
                case rejoin.Replay(chunk=chunk, step=step):
                    names, record = names_of(self._chunks[chunk]), next(replayed)
                    self._do(lambda names=names, step=step, record=record: self._replay(stage, step, names, record))  # type: ignore[misc]
                case rejoin.Digest(ticket=ticket, version=version):
                    settling = device.run(lambda version=version: stage.settle(version))  # type: ignore[misc]
                    self._ports.work.start(self._done(self._digest(ticket, settling)))
                case rejoin.ReadyToJoin(version=version):
                    self._report(version)
                case rejoin.Drop():
                    self._log.warning("the state that was put together is not that of the replicas: fetched again")
                case rejoin.GiveUp(reason=reason):
                    self._fail(JobFailed(f"cannot join: {reason}"))
                case _:
                    assert_never(order)

    def _replay(self, stage: Stage, step: int, names: Sequence[str], record: Record) -> None:
        if self.assignment.course.is_outer(step):
            deltas = None if record.skip else record.gradients
            spec, rebases = self.assignment.spec, record.rebases
            stage.replay_merge(step, names, merge_of_deltas(stage, spec, step, names, deltas, rebases=rebases))
            return
        rate, scale, skip = record.learning_rate, record.scale, record.skip
        stage.replay(step, names, record.gradients, learning_rate=rate, scale=scale, skip=skip)

    def _do(self, work: Callable[[], None]) -> None:
        self._ports.work.start(self._done(self._device.run(work)))

    async def _done(self, working: Awaitable[None]) -> None:
        """Await work that has begun; if it fails, so does joining."""
        try:
            await working
        except SwarmError as error:
            self._fail(error)

    async def _digest(self, ticket: int, digesting: Awaitable[str]) -> None:
        assert self._rejoin is not None
        self._digest_made = await digesting
        self._carry_out(self._rejoin.digested(ticket, self._digest_made, _now_s()))

    def _fail(self, error: SwarmError) -> None:
        self._log.error("cannot join", error_code=error.code, reason=error.message)
        self._fetched("failed")
        self._failed = Failed(self._command.job, error.code, error.message, error.hint)
        self._ports.emit(self._failed)

    def _report(self, version: int) -> None:
        stage, command = self.stage, self._command
        assert stage is not None
        self._reports += 1
        self._fetched("complete")
        units = unit_sizes(stage)
        self._log.info("state is complete", stage=command.stage, version=version)
        digest, probe = self._digest_made, self._probe
        self.loaded = Loaded(command.job, command.timeline, command.stage, version, digest, units, probe, command.join)
        self._ports.emit(self.loaded)

    def _fetched(self, outcome: str) -> None:
        if self._began_s is not None:
            self._ports.metrics.state_fetched(outcome, _now_s() - self._began_s)
            self._began_s = None

    async def _ask(self, ask: rejoin.Ask) -> None:
        """Ask one donor, and carry out the orders that follow from its answer."""
        assert self._rejoin is not None
        records = isinstance(ask, rejoin.AskRecords)
        start, stop = (ask.start, ask.stop) if isinstance(ask, rejoin.AskRecords) else (0, 0)
        request = state_request(self.assignment, "records" if records else "state", ask.chunk, start, stop)
        try:
            reply, payload = await self._pull(ask, request)
            found = self._check(ask, reply, payload)
        except SwarmError as error:
            self._log.debug("no state from donor", donor=ask.donor, reason=error.message)
            self._carry_out(self._rejoin.failed(ask.ticket, _now_s()))
            self._news.set()  # a pause has begun, whose end is to be waited for
            return
        now_s, reach = _now_s(), reply.reach
        if not records:
            orders = self._rejoin.pulled(ask.ticket, reply.version, previous=True, reach=reach, now_s=now_s)
        elif reach > start:
            orders = self._rejoin.out_of_reach(ask.ticket, reach=reach, now_s=now_s)
        else:
            orders = self._rejoin.recorded(ask.ticket, reply.version, reach=reach, now_s=now_s)
        self._carry_out(orders, payload, found)
        self._news.set()  # the donor may have nothing newer, and pauses

    def _check(self, ask: rejoin.Ask, reply: StateReply, payload: memoryview) -> list[Record]:
        """The records of an answer, if it is about some; CorruptFrame if the answer is not what was asked for."""
        chunk, stage = self._chunks[ask.chunk], self.stage
        assert stage is not None
        names = names_of(chunk)
        if isinstance(ask, rejoin.AskRecords):
            if reply.reach > ask.start:
                return []
            if not ask.start <= reply.version <= ask.stop:
                raise CorruptFrame(f"records {ask.start} to {ask.stop} were asked for, not to {reply.version}")
            steps = range(ask.start, reply.version)
            return unpack_records(payload, (sizes_in(stage, step, chunk) for step in steps))
        if len(payload) != stage.state_bytes(names, reply.version):
            raise CorruptFrame(f"chunk {ask.chunk} has {len(payload)} bytes, expected others")
        return []

    async def _pull(self, ask: rejoin.Ask, request: StateRequest) -> tuple[StateReply, memoryview]:
        hop = self._donors.get(ask.donor)
        if hop is None:
            raise PeerUnavailable(f"{ask.donor} is no donor any more")
        assert self.stage is not None
        chunk = self._chunks[ask.chunk]
        if isinstance(ask, rejoin.AskRecords):
            limit_bytes = records_bytes(ask.stop - ask.start, chunk)
        else:
            limit_bytes = self.stage.state_bytes(names_of(chunk))
        timeout_s = pull_s_max(limit_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ports.links.pull(hop.address, request, limit_bytes, to=hop.peer)
        except TimeoutError:
            raise PeerUnavailable(f"{ask.donor} did not give its state within {timeout_s:g} s") from None


def state_request(assignment: Assignment, part: str, chunk: int, start: int, stop: int) -> StateRequest:
    """Asks a replica of the assigned stage for a part of its state."""
    command, me = assignment.command, assignment.me
    return StateRequest(me.job, command.timeline, me.stage, part, chunk, start, stop, me.peer, me.incarnation)


def pull_s_max(size_bytes: int) -> float:
    return PULL_S + size_bytes / BYTES_PER_S_MIN


async def missed_record(
    commit_step: int, assignment: Assignment, donors: Sequence[Hop], stage: Stage, links: PeerLinks
) -> Record:
    """The record of a step's commit, from the logs of donors, for a replica that was no member of its rounds.

    Donors that have not committed it yet are asked again. PeerUnavailable if none has begun to give a chunk after
    FOLLOW_S_MAX; how long the transfer takes depends on the link and has a limit of its own.
    """
    gradients: dict[str, Tensor] = {}
    record: Record | None = Record(0.0, 1.0, skip=False, gradients={})  # if the step changes nothing of this stage
    reason = "no donor is known"
    for chunk in chunks_of(stage):
        sizes, pause_s, tried = sizes_in(stage, commit_step, chunk), PAUSE_S[0], 0
        if not sizes:
            continue
        record, deadline_s = None, _now_s() + FOLLOW_S_MAX
        while record is None:
            if not donors or _now_s() >= deadline_s:
                raise PeerUnavailable(f"the averaged gradient of step {commit_step} was not found: {reason}")
            donor = donors[tried % len(donors)]
            tried += 1
            try:
                limit_bytes = records_bytes(1, chunk)
                request = state_request(assignment, "records", chunk.index, commit_step, commit_step + 1)
                async with asyncio.timeout(pull_s_max(limit_bytes)):
                    reply, payload = await links.pull(donor.address, request, limit_bytes, to=donor.peer)
                if reply.reach > commit_step or reply.version <= commit_step:
                    raise PeerUnavailable(f"{donor.peer} has no record of step {commit_step}")
                (made,) = unpack_records(payload, [sizes])
                if made.skip:
                    raise CorruptFrame(
                        f"{donor.peer} says that step {commit_step} changed nothing, the commit does not"
                    )
                record = made
            except (SwarmError, TimeoutError) as error:
                reason = error.message if isinstance(error, SwarmError) else f"{donor.peer} takes too long"
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])
        gradients.update(record.gradients)
    assert record is not None
    return Record(record.learning_rate, record.scale, record.skip, gradients)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
