"""Slices of averaging that arrived, and the rounds that wait for them.

    slice ──▶ of a round that was announced ──due from this member?──▶ kept for the round
         └──▶ of a round to come ──room?──▶ early: under the name that its sender claims, until the round is announced

A round (`Average`, or `Exchange` between islands) names its members by peer and incarnation, and the owner of each
slice. So it also fixes every chunk of a slice that is due, its sender and its size; nothing else enters the round. A
chunk that comes again is ignored. One that comes again with other contents is refused: one of the two is false, and its
sender reports that the round has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from stage_server.brain.neighbours import Claim, EarlyInputs
from stage_server.brain.slices import RoundMeter, SliceChunk, chunks_of
from stage_server.brain.ways import ways_of
from swarm.errors import Refused, RetryElsewhere, StaleMessage
from swarm.model import codec
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Average, Envoy, Exchange, Member, Slice


@dataclass(frozen=True, slots=True)
class SliceKey:
    """Names one chunk of a slice on its way: `start` is the first element within the unit."""

    timeline: int
    step: int
    unit: UnitName
    round: Round
    averaged: bool  # a mean, not a part of the sum
    sender: PeerId
    incarnation: int
    start: int

    @classmethod
    def of(cls, header: Slice) -> SliceKey:
        of_round = (header.timeline, header.step, header.unit, header.round)
        return cls(*of_round, header.averaged, header.sender, header.incarnation, header.start)


@dataclass(frozen=True, slots=True)
class ArrivedSlice:
    """A slice as it was sent: in memory of its own if uncompressed, else in the received buffer."""

    dtype: str
    elements: int
    sent: np.ndarray[tuple[int], np.dtype[np.uint8]]

    @classmethod
    def of(cls, header: Slice, payload: memoryview) -> ArrivedSlice:
        sent = np.frombuffer(codec.sized_slice(payload, header.dtype, header.elements), dtype=np.uint8)
        return cls(header.dtype, header.elements, sent if header.dtype in codec.SLICE_CODECS else sent.copy())

    def values(self) -> Tensor:
        """The slice, 1-D float32 or float64; not for the event loop if it must be decoded."""
        if self.dtype in codec.SLICE_CODECS:
            return codec.decode_slice(self.sent.data, self.dtype, self.elements)
        return torch.from_numpy(self.sent.view(self.dtype))


@dataclass(slots=True)
class _Announced:
    """The newest round of a unit in one step: the slices that are due, with the elements that each may have."""

    round: Round
    due: dict[SliceKey, range]
    moved: Callable[[], None]
    meter: RoundMeter


class Mailbox:
    """The slices of one replica at `version`; others may be `steps_ahead_max` steps further."""

    def __init__(self, me: PeerId, version: int, steps_ahead_max: int) -> None:
        self.early = EarlyInputs[SliceKey, tuple[Slice, memoryview]](lambda _: 0)
        self._me = me
        self._closed_step = version - 1
        self._steps_ahead_max = steps_ahead_max
        self._announced: dict[tuple[int, UnitName], _Announced] = {}
        self._members: set[tuple[PeerId, int]] = set()  # of any round so far
        self._slices: dict[SliceKey, ArrivedSlice] = {}
        self._waiting: dict[SliceKey, asyncio.Future[ArrivedSlice]] = {}

    def admit(self, header: Slice) -> Callable[[], None]:
        """Refuse a slice that is too old, too far ahead or not due, before any byte of it is read.

        What it gives is to be called whenever a part of the slice has come: that is progress of its round.
        """
        if header.step <= self._closed_step:
            raise StaleMessage(f"step {header.step} is committed; its slices are no longer needed")
        if header.step > self._closed_step + 1 + self._steps_ahead_max:
            raise Refused(f"step {header.step} is far ahead: the newest that was committed is {self._closed_step}")
        round_ = self._announced.get((header.step, header.unit))
        if round_ is None or header.round > round_.round:
            return partial(self._moved, SliceKey.of(header))
        if header.round < round_.round:
            raise StaleMessage(f"{header.round} of {header.unit} was given up")
        if header.elements not in round_.due.get(SliceKey.of(header), ()):
            raise Refused(f"no such slice is due from {header.sender} in {header.round} of {header.unit}")
        return partial(self._moved, SliceKey.of(header))

    def put(self, header: Slice, payload: memoryview) -> None:
        """Keep a slice; RetryElsewhere if it is early and there is no room, Refused if it is not due or differs."""
        try:
            self.admit(header)
        except StaleMessage:
            return
        key, round_ = SliceKey.of(header), self._announced.get((header.step, header.unit))
        if round_ is None or header.round > round_.round:
            self._keep_early(key, header, payload)
        elif key in self._slices:
            _compare(header, self._slices[key].sent, payload)
        else:
            arrived = self._slices[key] = ArrivedSlice.of(header, payload)
            round_.moved()
            round_.meter.taken(header.sender, header.total_bytes, asyncio.get_running_loop().time())
            waiting = self._waiting.pop(key, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(arrived)

    async def get(self, key: SliceKey) -> ArrivedSlice:
        if key in self._slices:
            return self._slices[key]
        return await self._waiting.setdefault(key, asyncio.get_running_loop().create_future())

    def begin(
        self, command: Average | Exchange, sizes: range = range(0), moved: Callable[[], None] = lambda: None
    ) -> None:
        """A round is announced: take in the slices that its members sent early, forget slices of older rounds.

        `sizes`: how many bytes of the unit each island may send in an outer round. `moved` is called whenever a part
        of it has come.
        """
        step, unit = command.step, command.unit
        members: tuple[Member | Envoy, ...]
        meter = RoundMeter()
        if isinstance(command, Exchange):
            members, due = command.envoys, self._proposals_due(command, sizes)
        else:
            members, due = command.members, self._due(command)
            group_of = {member.peer: member.group for member in command.members if member.group}
            meter = RoundMeter(group_of, group_of.get(self._me, ""))
        self._announced[step, unit] = _Announced(command.round, due, moved, meter)
        self._members |= {(member.peer, member.incarnation) for member in members}
        self._forget(lambda key: (key.step, key.unit) == (step, unit) and key.round < command.round)
        for key, elements in self._announced[step, unit].due.items():
            early = self.early.take(key, _claim(key))
            if early is not None and early[0].elements in elements:
                self.put(*early)
        self.early.drop(lambda key, _: (key.step, key.unit) == (step, unit) and key.round <= command.round)

    def _moved(self, key: SliceKey) -> None:
        round_ = self._announced.get((key.step, key.unit))
        if round_ is not None and key in round_.due:
            round_.moved()

    def meter(self, command: Average) -> RoundMeter:
        """The meter of an announced round, which has seen what arrived."""
        round_ = self._announced.get((command.step, command.unit))
        assert round_ is not None
        assert round_.round == command.round
        return round_.meter

    def expect(self, command: Average, owner: PeerId, moved: Callable[[], None] = lambda: None) -> None:
        """Others send us their parts of a slice that is another's: it is reduced once more here.

        `moved` is called from now on whenever some of what is due has come: the round itself is complete.
        """
        round_, members = self._announced.get((command.step, command.unit)), command.members
        if round_ is None or round_.round != command.round:
            return
        round_.moved = moved
        of_round = (command.timeline, command.step, command.unit, command.round)
        for chunk in [chunk for member in members if member.peer == owner for chunk in chunks_of(member, members)]:
            for member in members:
                if member.peer != self._me:
                    part = SliceKey(*of_round, False, member.peer, member.incarnation, chunk.start)
                    round_.due[part] = _just(chunk)

    def close(self, step: int) -> None:
        """Forget all slices up to and including `step`: it is committed."""
        self._closed_step = max(self._closed_step, step)
        self._announced = {key: round_ for key, round_ in self._announced.items() if key[0] > step}
        self._forget(lambda key: key.step <= step)
        self.early.drop(lambda key, _: key.step <= step)

    def _due(self, command: Average) -> dict[SliceKey, range]:
        """Of each chunk the parts of those below us, and the mean from the member above us."""
        of_round = (command.timeline, command.step, command.unit, command.round)
        due: dict[SliceKey, range] = {}
        for way in ways_of(self._me, command.members):
            for neighbour in (*way.below, *([way.above] if way.above else [])):
                key = SliceKey(
                    *of_round, neighbour is way.above, neighbour.peer, neighbour.incarnation, way.chunk.start
                )
                due[key] = _just(way.chunk)
        return due

    def _proposals_due(self, command: Exchange, sizes: range) -> dict[SliceKey, range]:
        """One proposal of each other island that contributes."""
        of_round = (command.timeline, command.step, command.unit, command.round)
        return {
            SliceKey(*of_round, False, envoy.peer, envoy.incarnation, 0): sizes
            for envoy in command.envoys
            if envoy.tokens and envoy.timeline != command.timeline
        }

    def _keep_early(self, key: SliceKey, header: Slice, payload: memoryview) -> None:
        held = self.early.get(key, _claim(key))
        if held is not None:
            _compare(header, np.frombuffer(held[1], dtype=np.uint8), payload)
            return
        known = (header.sender, header.incarnation) in self._members
        if not self.early.put(key, _claim(key), (header, payload), payload.nbytes, is_known=known):
            raise RetryElsewhere(f"{self.early.size_bytes} bytes of slices wait for their rounds already")

    def _forget(self, is_over: Callable[[SliceKey], bool]) -> None:
        for key in [key for key in self._slices if is_over(key)]:
            del self._slices[key]
        for key in [key for key in self._waiting if is_over(key)]:
            self._waiting.pop(key).cancel()


def _just(chunk: SliceChunk) -> range:
    return range(chunk.elements, chunk.elements + 1)


def _claim(key: SliceKey) -> Claim:
    return Claim(key.sender, key.incarnation, 0)


def _compare(header: Slice, held: np.ndarray[tuple[int], np.dtype[np.generic]], payload: memoryview) -> None:
    if not np.array_equal(held.view(np.uint8), np.frombuffer(payload, dtype=np.uint8)):
        raise Refused(f"two different slices of {header.round} of {header.unit} came in the name of {header.sender}")
