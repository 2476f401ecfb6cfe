"""One round: the members of a unit turn their sums into one averaged gradient that all of them hold, bit for bit.

    member a    [ part a0 | part a1 ]        owner of slice 0 = a, of slice 1 = b
    member b    [ part b0 | part b1 ]

    a -> b: part a1     b -> a: part b0                      reduce-scatter
    a: mean 0 = (a0 + b0) / tokens    b: mean 1 = (a1 + b1) / tokens
    a -> b: mean 0      b -> a: mean 1                       all-gather

A slice travels in chunks (`stage_server/brain/slices.py`), and the mean of each leaves when its own parts have
arrived: so the all-gather begins while the reduce-scatter still goes on, and both directions of a link work. Where
parts are clipped (`Reduction`), a slice is reduced as a whole. In a round by site a chunk goes by way of a carrier in
each site (`stage_server/brain/ways.py`), which sends one sum and passes the mean on.

The owner adds the parts in order of peer id, or clips them, and sends out the resulting bytes. So the result does not
depend on the order of arrival, and all members hold the same bytes. Nothing here decides: members and slices come with
the command, and the scheduler aborts a round that a member reports as failed.

Only reading the sums needs the compute thread, where sums are forgotten too. The rest happens beside it, on the CPU: a
round that overlaps with the next step would otherwise wait for one of its microbatches each time.

Decision: docs/decisions/040.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import xxhash
from torch import Tensor

from stage_server.brain.slices import RoundMeter, SliceChunk, has_room
from stage_server.brain.ways import ChunkWay, ways_of
from stage_server.device import Device
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.error_feedback import Coded, ErrorFeedback, coded, together
from stage_server.replica.averaging.mailbox import ArrivedSlice, Mailbox, SliceKey
from stage_server.replica.packing import Letter, deliver, round_slice
from swarm.errors import NoWay, Refused, RoundBroken, SwarmError
from swarm.model.exact_sums import mean_of_parts, sum_of_parts
from swarm.model.robust import Share, clipped_mean
from swarm.model.runtime import to_host
from swarm.model.stage import Stage
from swarm.rpc.links.peers import PeerLinks
from swarm.types import PeerId, UnitName
from swarm.wire.messages import Average, Envoy, Member, ParameterNorm, Slice


@dataclass(frozen=True, slots=True)
class Mean:
    """The averaged gradient of a unit as one round produced it."""

    gradient: Tensor  # float32, 1-D, the unit's flat layout
    digest: str
    norms: tuple[ParameterNorm, ...]
    left: Tensor | None = None  # what this replica's slices left out, in the unit of the sums; None: nothing
    rates: tuple[float, float] = (0.0, 0.0)  # bytes per second up and down, as Averaged tells them
    all_began_s: float = 0.0  # when the last of the members that sent anything had begun
    travelled: tuple[int, int] = (0, 0)  # the bytes that an envoy sent and received


async def run_round(
    command: Average,
    me: ReplicaId,
    stage: Stage,
    reduction: Reduction,
    device: Device,
    links: PeerLinks,
    mailbox: Mailbox,
    leftovers: ErrorFeedback,
    deadline: Deadline,
) -> Mean:
    """Carry out one round as a member; gives the averaged gradient of the unit.

    RoundBroken if a member does not deliver before the deadline, Refused if the sizes contradict the unit's
    layout; both may come in a group.
    """
    meter = mailbox.meter(command)
    left, codec_name = leftovers.lend(command.unit, command.step), leftovers.codec_name
    part = await _part(stage, command, device)
    own = _own(command.members, me.peer)
    if command.members[-1].stop != part.numel():
        covered = command.members[-1].stop
        raise Refused(f"the round covers {covered} elements, unit {command.unit} has {part.numel()}")
    ways = ways_of(me.peer, command.members)
    lost = None
    unused = reduction.clips and own.microbatches == 0  # owners leave such a part out, and leftovers with it
    fed, kept = ((), left) if unused else (left, ())
    if codec_name != "none":
        part, lost = await device.aside(lambda: (together(part, fed), torch.zeros_like(part)))
    meter.begin(asyncio.get_running_loop().time())
    if not command.ahead:
        deadline.begin()
    async with asyncio.TaskGroup() as tasks:
        outbox = partial(_ChunkSender, links, deadline, tasks, meter)
        outboxes = {(to.peer, averaged): outbox(to) for to in command.members for averaged in (False, True)}
        own_part = _OwnPart(command, me, own, part, lost, codec_name, device, mailbox, deadline, outboxes)
        for way in ways:
            if way.above is not None and way.below:
                tasks.create_task(own_part.carry(way, way.above))
            elif way.above is not None:
                await own_part.send_up(way, way.above, part[way.chunk.span])
        await own_part.reduce([way for way in ways if way.above is None], reduction)
        for way in sorted(ways, key=lambda way: way.chunk.start):
            if way.above is not None and not way.below:
                await own_part.take(way, way.above)
    in_order = [mean for _, mean in sorted(own_part.means.items())]
    facts = ((meter.up_bytes_per_s, meter.down_bytes_per_s), meter.all_began_s or 0.0)
    return await device.aside(lambda: _assemble(stage, command.unit, in_order, lost, kept, *facts))


@dataclass(slots=True)
class _OwnPart:
    """A member's part of the unit's sums in one round, what comes to it from others, and the means that come of it."""

    command: Average
    me: ReplicaId
    own: Member
    part: Tensor
    lost: Tensor | None  # what encoding leaves out, in the unit of the sums; None: nothing is compressed
    codec_name: str
    device: Device
    mailbox: Mailbox
    deadline: Deadline
    outboxes: Mapping[tuple[PeerId, bool], _ChunkSender]  # of parts, and of means
    means: dict[int, Tensor] = field(default_factory=dict)  # by the starts of their chunks

    async def send_up(self, way: ChunkWay, above: Member, values: Tensor) -> None:
        self._send(above, way, await self._encoded(values, way.chunk, 1), averaged=False)

    async def carry(self, way: ChunkWay, owner: Member) -> None:
        """Send the sum of this group, and pass the mean on in the bytes in which it comes."""
        parts = await self._gathered([way])
        summed = await self.device.aside(lambda: sum_of_parts([joined(chunks) for chunks in parts]))
        await self.send_up(way, owner, summed)
        came = await self.take(way, owner)
        for member in way.below:
            self._send(member, way, Coded(came.sent.data, came.dtype, self.means[way.chunk.start]), averaged=True)

    async def reduce(self, ways: Sequence[ChunkWay], reduction: Reduction) -> None:
        """Make the means of the chunks of the own slice, and send them."""

        async def reduced(some: Sequence[ChunkWay]) -> Tensor:
            came = await self._gathered(some)
            return await self.device.aside(lambda: reduction.reduce([joined(chunks) for chunks in came], self.command))

        whole = await reduced(ways) if reduction.clips and ways else None
        for way in ways:
            mean = await reduced([way]) if whole is None else whole[way.chunk.within(ways[0].chunk)]
            if way.below:  # nobody else would get what is left out
                made = await self._encoded(mean, way.chunk, self.command.tokens)
                mean = made.received
                for member in way.below:
                    self._send(member, way, made, averaged=True)
            self.means[way.chunk.start] = mean

    async def take(self, way: ChunkWay, above: Member) -> ArrivedSlice:
        """The mean as it came."""
        came = await self._arrived(above, way, averaged=True)
        self.means[way.chunk.start] = await self._decoded(came)
        return came

    async def _gathered(self, ways: Sequence[ChunkWay]) -> list[list[Tensor]]:
        """The chunks of each part, in the order of the round's members; what is below is the same for all `ways`."""
        found = []
        for member in self.command.members:
            if member is self.own:
                found.append([self.part[ways[0].chunk.start : ways[-1].chunk.stop]])
            elif member in ways[0].below:
                found.append([await self._decoded(await self._arrived(member, way, averaged=False)) for way in ways])
        return found

    async def _arrived(self, sender: Member, way: ChunkWay, *, averaged: bool) -> ArrivedSlice:
        try:
            async with self.deadline.limit():
                return await self.mailbox.get(_key(self.command, sender, way.chunk, averaged=averaged))
        except TimeoutError:
            message = f"{sender.peer} sent no {_word(averaged=averaged)} within {self.command.timeout_s:g} s"
            raise RoundBroken(message, accused=sender.peer) from None

    async def _decoded(self, came: ArrivedSlice) -> Tensor:
        return came.values() if self.lost is None else await self.device.aside(came.values)

    async def _encoded(self, values: Tensor, chunk: SliceChunk, tokens: int) -> Coded:
        """The coded values to send; `tokens` turns an error of a mean into one of a sum."""
        lost = self.lost
        if lost is None:
            return coded(values, self.codec_name)

        def encode() -> Coded:
            made = coded(values, self.codec_name)
            torch.sub(values, made.received, out=lost[chunk.span]).mul_(tokens)
            return made

        return await self.device.aside(encode)

    def _send(self, to: Member, way: ChunkWay, made: Coded, *, averaged: bool) -> None:
        self.outboxes[to.peer, averaged].send(round_slice(self.me, self.command, way.chunk, made, averaged=averaged))


async def _part(stage: Stage, command: Average, device: Device) -> Tensor:
    """This replica's sums; a GPU goes on computing while they are copied."""
    part = await device.run(lambda: stage.part(command.step, command.unit))  # behind any Void that came before
    return part if isinstance(part, Tensor) else (await device.aside(lambda: to_host(part)))[0]


def _assemble(
    stage: Stage,
    unit: UnitName,
    means: Sequence[Tensor],
    lost: Tensor | None,
    kept: tuple[Tensor, ...],
    rates: tuple[float, float],
    all_began_s: float,
) -> Mean:
    left = together(lost, kept) if lost is not None and kept else lost
    gradient = stage.expect(unit, joined(means))
    digest = xxhash.xxh3_128_hexdigest(gradient.cpu().numpy().data)
    return Mean(gradient, digest, stage.places.squared_norms(unit, gradient), left, rates, all_began_s)


def joined(chunks: Sequence[Tensor]) -> Tensor:
    """All chunks as one tensor, without a copy of one alone."""
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks))


def _own(members: Sequence[Member], peer: PeerId) -> Member:
    for member in members:
        if member.peer == peer:
            return member
    raise Refused(f"{peer} is no member of this round")


def _word(*, averaged: bool) -> str:
    return "mean" if averaged else "part"


def _key(command: Average, sender: Member, chunk: SliceChunk, *, averaged: bool) -> SliceKey:
    return SliceKey(
        command.timeline,
        command.step,
        command.unit,
        command.round,
        averaged,
        sender.peer,
        sender.incarnation,
        chunk.start,
    )


class _ChunkSender:
    """The chunks that one member sends another, of parts or of means: in order, a few at a time."""

    def __init__(
        self, links: PeerLinks, deadline: Deadline, tasks: asyncio.TaskGroup, meter: RoundMeter, to: Member
    ) -> None:
        self._links, self._deadline, self._tasks, self._meter, self._to = links, deadline, tasks, meter, to
        self._waiting = deque[tuple[Letter, Slice]]()
        self._under_way_bytes: list[int] = []  # of each chunk: a carrier sends chunks of several owners, of many sizes

    def send(self, letter: Letter) -> None:
        assert isinstance(letter.header, Slice)
        self._waiting.append((letter, letter.header))
        self._fill()

    def _fill(self) -> None:
        while self._waiting and has_room(self._under_way_bytes, self._waiting[0][1].total_bytes):
            letter, header = self._waiting.popleft()
            self._under_way_bytes.append(header.total_bytes)
            self._tasks.create_task(self._deliver(letter, header))

    async def _deliver(self, letter: Letter, header: Slice) -> None:
        await send_slice(self._links, self._to, letter, self._deadline, _word(averaged=header.averaged))
        self._under_way_bytes.remove(header.total_bytes)
        self._fill()
        self._meter.sent(self._to.peer, header.total_bytes, asyncio.get_running_loop().time())


async def send_slice(links: PeerLinks, to: Member | Envoy, letter: Letter, deadline: Deadline, what: str) -> None:
    """Send a slice until the deadline; raises RoundBroken, naming the receiver."""
    try:
        async with deadline.limit():
            await deliver(links, to, letter, deadline.moved)
    except TimeoutError:
        raise RoundBroken(f"{to.peer} took no {what} in time", accused=to.peer) from None
    except SwarmError as error:
        told = f"{to.peer} took no {what}: {error.message}"
        raise RoundBroken(told, accused=to.peer, lacks_relay=isinstance(error, NoWay)) from error


@dataclass(frozen=True, slots=True)
class Reduction:
    """How an owner makes one mean of all parts of its slice.

    `bits` is the fixed-point grid of the sums, None in ordinary mode, in which alone false parts can be clipped.
    """

    bits: int | None
    clips: bool = False

    def reduce(self, parts: Sequence[Tensor], average: Average) -> Tensor:
        """The mean of the parts, which are in the order of the round's members."""
        if not self.clips:
            return mean_of_parts(parts, average.tokens, self.bits)
        return clipped_mean(
            parts, [Share(member.stage, member.microbatches) for member in average.members], average.tokens
        )


STRETCH_MAX = 10  # times as long may a round take that makes progress
_MOVED_S = 1.0  # progress within less than that changes nothing


class Deadline:
    """When a member gives a round up: some seconds after the step is full, or after the round last made progress.

    A member may be at work on a round before that, and then waits for others as long as they need to compute. On a slow
    line a slice takes longer than a round may stand still, so whatever has come of one counts as progress.
    """

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._at_s: float | None = None
        self._last_s = 0.0
        self._waits: set[asyncio.Timeout] = set()

    def begin(self) -> None:
        """The seconds count from now; only the first call counts."""
        if self._at_s is None:
            now_s = asyncio.get_running_loop().time()
            self._last_s = now_s + STRETCH_MAX * self._after_s
            self._set(now_s + self._after_s)

    def moved(self) -> None:
        """The round makes progress: the seconds count from now, but not for ever."""
        if self._at_s is None:
            return
        at_s = min(asyncio.get_running_loop().time() + self._after_s, self._last_s)
        if at_s > self._at_s + _MOVED_S:
            self._set(at_s)

    def _set(self, at_s: float) -> None:
        self._at_s = at_s
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(at_s)

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """TimeoutError if what is done within takes until the deadline."""
        async with asyncio.timeout_at(self._at_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)
