"""Tensors for neighbours: encoded, with a header that names them, and sent with bounded retries."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass

import torch
from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential
from torch import Tensor

from stage_server.brain.slices import SliceChunk
from stage_server.ports import ReplicaId
from stage_server.replica.averaging.error_feedback import Coded
from swarm.errors import RetryElsewhere
from swarm.model import codec
from swarm.model.runtime import to_host
from swarm.rpc.links.peers import Moved, PeerLinks
from swarm.types import Direction, EvaluationBatch, Microbatch
from swarm.wire.messages import (
    Average,
    Boundary,
    Envoy,
    EvaluationBoundary,
    Exchange,
    Member,
    Need,
    Slice,
    TensorHeader,
)

# How long a neighbour may be out of reach before it is reported. A dead neighbour is known to the scheduler sooner.
DELIVERY_S_MAX = 5.0
PAUSE_S = 0.05  # at most, before the second try; then twice as long each time


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as it travels; immutable, so it can be sent again any number of times."""

    payload: bytes | memoryview
    dtype: str
    shape: tuple[int, ...]
    codec: str
    overflows: bool = False  # the codec made values infinite

    @property
    def size_bytes(self) -> int:
        return memoryview(self.payload).nbytes

    @property
    def description(self) -> tuple[str, tuple[int, ...], str, int]:
        """Its description in a header: dtype, shape, codec, total_bytes."""
        return self.dtype, self.shape, self.codec, self.size_bytes


@dataclass(frozen=True, slots=True)
class Letter:
    """A message to a neighbour: the header and the bytes that it describes."""

    header: TensorHeader
    payload: bytes | memoryview


def pack(tensor: Tensor, codec_name: str) -> Packed:
    """Encode a tensor for the wire; call it on the compute thread. The host waits once."""
    (encoded,) = to_host(encode(tensor, codec_name))
    return pack_encoded(encoded, tuple(tensor.shape), codec_name)


def encode(tensor: Tensor, codec_name: str) -> Tensor:
    """The payload where the tensor lies, for `pack_encoded`. If the codec can make values infinite, one byte more says
    whether it did, so that the host need not wait for that alone."""
    payload, overflows = codec.encode_there(tensor, codec_name), codec.overflows(tensor, codec_name)
    return payload if overflows is None else torch.cat([payload, overflows.view(1).to(torch.uint8)])


def pack_encoded(encoded: Tensor, shape: tuple[int, ...], codec_name: str) -> Packed:
    """A tensor of `shape` that `encode` made, on the CPU now."""
    dtype = codec.dtype_of(codec_name)
    payload = encoded[: codec.encoded_bytes(dtype, shape, codec_name)]
    is_beyond = payload.numel() < encoded.numel() and bool(encoded[-1])
    return Packed(codec.readable(payload), dtype, shape, codec_name, is_beyond)


def boundary(me: ReplicaId, microbatch: Microbatch, direction: Direction, attempt: int, packed: Packed) -> Letter:
    """An activation for the next stage, or a gradient for the one before."""
    stage = _beyond(me, direction)
    header = Boundary(me.job, microbatch, direction, stage, attempt, me.peer, me.incarnation, *packed.description)
    return Letter(header, packed.payload)


def evaluation_boundary(me: ReplicaId, batch: EvaluationBatch, attempt: int, packed: Packed) -> Letter:
    """An activation of an evaluation for the next stage."""
    header = EvaluationBoundary(me.job, batch, me.stage + 1, attempt, me.peer, me.incarnation, *packed.description)
    return Letter(header, packed.payload)


def question(me: ReplicaId, microbatch: Microbatch, direction: Direction, attempt: int) -> Letter:
    """Asks for an input: an activation of the stage before, or a gradient of the next."""
    asked = _beyond(me, Direction.BACKWARD if direction is Direction.FORWARD else Direction.FORWARD)
    return Letter(Need(me.job, microbatch, direction, asked, attempt, me.peer, me.incarnation), b"")


def round_slice(me: ReplicaId, command: Average, chunk: SliceChunk, coded: Coded, *, averaged: bool) -> Letter:
    """A part of a chunk for the owner of its slice, or the mean of a chunk of our own slice."""
    of_round = (command.timeline, command.step, command.unit, command.round)
    content = (coded.dtype, chunk.elements, coded.payload.nbytes)
    header = Slice(me.job, *of_round, averaged, chunk.start, me.peer, me.incarnation, *content)
    return Letter(header, coded.payload)


def proposal(me: ReplicaId, command: Exchange, to: Envoy, sent: Tensor) -> Letter:
    """An island's proposal for a unit, to the envoy of another island."""
    of_round = (to.timeline, command.step, command.unit, command.round)
    content = (codec.PROPOSAL_DTYPE, sent.numel(), sent.numel())
    return Letter(Slice(me.job, *of_round, False, 0, me.peer, me.incarnation, *content), codec.readable(sent))


def _beyond(me: ReplicaId, direction: Direction) -> int:
    return me.stage + (1 if direction is Direction.FORWARD else -1)


async def deliver(links: PeerLinks, to: Member | Envoy, letter: Letter, moved: Moved | None = None) -> None:
    """Send until the neighbour has it; PeerUnavailable or RetryElsewhere after DELIVERY_S_MAX, Refused at once.

    `moved` is called whenever a part of what is on its way there has arrived.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + DELIVERY_S_MAX
    with suppress(RetryElsewhere):  # seldom raised: the usual delivery does without the retrying
        await links.send(to.address, letter.header, letter.payload, to=to.peer, moved=moved)
        return
    await asyncio.sleep(PAUSE_S * random.random())
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(RetryElsewhere),
        wait=wait_random_exponential(multiplier=PAUSE_S, max=1.0),
        stop=lambda _state: loop.time() >= deadline_s,  # the loop's clock: simulated time counts
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            await links.send(to.address, letter.header, letter.payload, to=to.peer, moved=moved)
