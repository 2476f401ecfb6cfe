"""What leaves this stage server for its neighbours: tensors with the header that names them, retried within bounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from tenacity import AsyncRetrying, retry_if_exception_type, wait_random_exponential
from torch import Tensor

from stage_server.ports import ReplicaId
from swarm.errors import PeerUnavailable
from swarm.messages import TensorHeader
from swarm.model import codec
from swarm.rpc.peers import PeerLinks
from swarm.types import Microbatch

# Slices are never compressed: their bits are what the members agree on.
SLICE_CODEC = "slice"
# How long a neighbour may be out of reach before it is reported. A dead neighbour is known to the scheduler sooner.
DELIVERY_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor as it travels; immutable, so it can be sent again any number of times."""

    payload: bytes | memoryview
    dtype: str
    shape: tuple[int, ...]
    codec: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the payload."""
        return memoryview(self.payload).nbytes


NOTHING = Packed(b"", "", (), "none")
"""What a question carries."""


def pack(tensor: Tensor, codec_name: str) -> Packed:
    """Encode a tensor for the wire; to be called where computing is allowed."""
    payload, dtype, shape = codec.encode(tensor, codec_name)
    return Packed(payload, dtype, shape, codec_name)


def pack_slice(values: Tensor) -> Packed:
    """A 1-D slice of a unit as it is, float32 or float64; it shares the tensor's memory."""
    payload, dtype = codec.encode_slice(values)
    return Packed(payload, dtype, tuple(values.shape), SLICE_CODEC)


def boundary_header(
    me: ReplicaId, kind: str, microbatch: Microbatch, stage: int, attempt: int, *, wanted: str = ""
) -> TensorHeader:
    return TensorHeader(
        job=me.job,
        kind=kind,
        timeline=microbatch.timeline,
        step=microbatch.step,
        microbatch=microbatch.index,
        stage=stage,
        attempt=attempt,
        sender=me.peer,
        incarnation=me.incarnation,
        dtype="",
        shape=(),
        codec="none",
        total_bytes=0,
        wanted=wanted,
    )


def describe(header: TensorHeader, packed: Packed) -> TensorHeader:
    """The header completed with what the packed tensor is."""
    return replace(
        header,
        dtype=packed.dtype,
        shape=packed.shape,
        codec=packed.codec,
        total_bytes=packed.size_bytes,
    )


async def deliver(links: PeerLinks, address: str, header: TensorHeader, packed: Packed) -> None:
    """Send until the neighbour has it; PeerUnavailable after DELIVERY_S_MAX, Refused at once."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + DELIVERY_S_MAX
    retrying = AsyncRetrying(
        retry=retry_if_exception_type(PeerUnavailable),
        wait=wait_random_exponential(multiplier=0.05, max=1.0),
        stop=lambda _state: loop.time() >= deadline_s,  # the loop's clock: simulated time counts
        reraise=True,
    )
    async for attempt in retrying:
        with attempt:
            await links.send(address, describe(header, packed), packed.payload)
