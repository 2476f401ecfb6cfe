"""Headers of tensors for tests of transports."""

from __future__ import annotations

from swarm.types import Direction, JobId, Microbatch, PeerId
from swarm.wire.messages import Boundary


def header_of(size_bytes: int, index: int = 0) -> Boundary:
    """A header of an uncompressed tensor of bytes, for microbatch `index`."""
    return Boundary(
        job=JobId("j"),
        microbatch=Microbatch(0, 0, index),
        direction=Direction.FORWARD,
        stage=1,
        attempt=0,
        sender=PeerId("a"),
        incarnation=1,
        dtype="uint8",
        shape=(size_bytes,),
        codec="none",
        total_bytes=size_bytes,
    )
