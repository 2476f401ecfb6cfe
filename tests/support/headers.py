"""Headers of tensors for tests of transports."""

from __future__ import annotations

from swarm.messages import TensorHeader
from swarm.types import JobId, PeerId


def header_of(size_bytes: int, index: int = 0) -> TensorHeader:
    """A header of an uncompressed tensor of bytes, for microbatch `index`."""
    return TensorHeader(
        job=JobId("j"),
        kind="activation",
        timeline=0,
        step=0,
        microbatch=index,
        stage=1,
        attempt=0,
        sender=PeerId("a"),
        incarnation=1,
        dtype="uint8",
        shape=(size_bytes,),
        codec="none",
        total_bytes=size_bytes,
    )
