"""One round: the members of a unit turn their sums into one averaged gradient that all of them hold, bit for bit.

    member a    [ part a0 | part a1 ]        owner of slice 0 = a, of slice 1 = b
    member b    [ part b0 | part b1 ]

    a -> b: part a1     b -> a: part b0                      reduce-scatter
    a: mean 0 = (a0 + b0) / tokens    b: mean 1 = (a1 + b1) / tokens
    a -> b: mean 0      b -> a: mean 1                       all-gather

A slice travels in chunks (`stage_server/brain/slices.py`), and the mean of each leaves when its own parts have
arrived: so the all-gather begins while the reduce-scatter still goes on, and both directions of a link work. Where
parts are clipped (`Reduction`), a slice is reduced as a whole.

The owner adds the parts in order of peer id, or clips them, and sends out the resulting bytes. So the result does not
depend on the order of arrival, and all members hold the same bytes. Nothing here decides: members and slices come with
the command, and the scheduler aborts a round that a member reports as failed.

Only reading the sums needs the compute thread, where sums are forgotten too. The rest happens beside it, on the CPU: a
round that overlaps with the next step would otherwise wait for one of its microbatches each time.

Decision: docs/decisions/040.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
import xxhash
from torch import Tensor

from stage_server.brain.slices import RoundMeter, SliceChunk, chunks_of, under_way_max
from stage_server.device import Device
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.error_feedback import Coded, ErrorFeedback, coded, together
from stage_server.replica.averaging.mailbox import Mailbox, SliceKey
from stage_server.replica.packing import Letter, deliver, round_slice
from swarm.errors import NoWay, Refused, RoundBroken, SwarmError
from swarm.model.exact_sums import mean_of_parts
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
    chunks = _chunks(command, me.peer, part.numel())
    lossy, lost = codec_name != "none", None
    unused = reduction.clips and own.microbatches == 0  # owners leave such a part out, and leftovers with it
    fed, kept = ((), left) if unused else (left, ())
    if lossy:
        part, lost = await device.aside(lambda: (together(part, fed), torch.zeros_like(part)))
    others = [member for member in command.members if member.peer != me.peer]

    async def arrived(sender: Member, chunk: SliceChunk, *, averaged: bool) -> Tensor:
        try:
            async with deadline.limit():
                came = await mailbox.get(_key(command, sender, chunk, averaged=averaged))
        except TimeoutError:
            message = f"{sender.peer} sent no {_word(averaged=averaged)} within {command.timeout_s:g} s"
            raise RoundBroken(message, accused=sender.peer) from None
        return await device.aside(came.values) if lossy else came.values()

    async def encoded(values: Tensor, chunk: SliceChunk, tokens: int) -> Coded:
        """The coded values to send; `tokens` turns an error of a mean into one of a sum."""

        def encode() -> Coded:
            made = coded(values, codec_name)
            if lost is not None:
                torch.sub(values, made.received, out=lost[chunk.span]).mul_(tokens)
            return made

        return await device.aside(encode) if lossy else encode()

    async def reduced(some: Sequence[SliceChunk]) -> Tensor:
        mine = [part[some[0].start : some[-1].stop]]
        came = [
            mine if member is own else [await arrived(member, chunk, averaged=False) for chunk in some]
            for member in command.members
        ]
        return await device.aside(lambda: reduction.reduce([joined(parts) for parts in came], command))

    meter.begin(asyncio.get_running_loop().time())
    if not command.ahead:
        deadline.begin()
    async with asyncio.TaskGroup() as tasks:
        outbox = partial(_ChunkSender, links, deadline, tasks, meter)
        parts_to, means_to = ({member.peer: outbox(member) for member in others} for _ in range(2))
        for owner, chunk in _in_turn(others, chunks):
            made = await encoded(part[chunk.span], chunk, 1)
            parts_to[owner.peer].send(round_slice(me, command, chunk, made, averaged=False))
        means: dict[SliceChunk, Tensor] = {}
        whole = await reduced(chunks[me.peer]) if reduction.clips and chunks[me.peer] else None
        for chunk in chunks[me.peer]:
            mean = await reduced([chunk]) if whole is None else whole[chunk.within(chunks[me.peer][0])]
            if others:  # nobody else would get what is left out
                made = await encoded(mean, chunk, command.tokens)
                mean = made.received
                for member in others:
                    means_to[member.peer].send(round_slice(me, command, chunk, made, averaged=True))
            means[chunk] = mean
        for owner in others:
            for chunk in chunks[owner.peer]:
                means[chunk] = await arrived(owner, chunk, averaged=True)
    in_order = [means[chunk] for member in command.members for chunk in chunks[member.peer]]
    facts = ((meter.up_bytes_per_s, meter.down_bytes_per_s), meter.all_began_s or 0.0)
    return await device.aside(lambda: _assemble(stage, command.unit, in_order, lost, kept, *facts))


async def _part(stage: Stage, command: Average, device: Device) -> Tensor:
    """This replica's sums; a GPU goes on computing while they are copied."""
    part = await device.run(lambda: stage.part(command.step, command.unit))  # behind any Void that came before
    return part if isinstance(part, Tensor) else (await device.aside(lambda: to_host(part)))[0]


def _chunks(command: Average, me: PeerId, elements: int) -> dict[PeerId, tuple[SliceChunk, ...]]:
    """The chunks of each member's slice; one that does not travel if there is one member alone."""
    members = command.members
    if members[-1].stop != elements:
        raise Refused(f"the round covers {members[-1].stop} elements, unit {command.unit} has {elements}")
    if len(members) == 1:
        return {me: (SliceChunk(0, elements),)}
    return {member.peer: chunks_of(member, members) for member in members}


def _in_turn(
    owners: Sequence[Member], chunks: Mapping[PeerId, Sequence[SliceChunk]]
) -> Iterator[tuple[Member, SliceChunk]]:
    """The first chunks of all owners first."""
    for in_turn in zip_longest(*(chunks[owner.peer] for owner in owners)):
        yield from ((owner, chunk) for owner, chunk in zip(owners, in_turn, strict=True) if chunk is not None)


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
        self._room: asyncio.Semaphore | None = None

    def send(self, letter: Letter) -> None:
        header = letter.header
        assert isinstance(header, Slice)
        if self._room is None:  # chunks of a slice are alike, and the last one is no larger
            self._room = asyncio.Semaphore(under_way_max(header.total_bytes))
        self._tasks.create_task(self._deliver(letter, header, self._room))

    async def _deliver(self, letter: Letter, header: Slice, room: asyncio.Semaphore) -> None:
        async with room:
            await send_slice(self._links, self._to, letter, self._deadline, _word(averaged=header.averaged))
        self._meter.sent(header.total_bytes, asyncio.get_running_loop().time())


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
