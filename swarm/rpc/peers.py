"""Tensors from stage server to stage server: the ports, and their gRPC side."""

from __future__ import annotations

from typing import Protocol

from swarm.messages import TensorHeader


class PeerLinks(Protocol):
    """The sending side: one process's links to its neighbours."""

    async def send(self, address: str, header: TensorHeader, payload: bytes | memoryview) -> None:
        """Deliver one tensor to the stage server at `address`; returns once its receiver accepted it.

        Tensors of concurrent calls may arrive in any order, and one may arrive twice. A receipt that names corruption
        is answered by one resend. `payload` must not change until `send` returns, or until the link is gone if it was
        cancelled. Raises PeerUnavailable (no answer, broken connection), or what the receiver raised: Refused,
        StaleMessage, CorruptFrame (twice in a row), RetryElsewhere, ...
        The deadline is the caller's (`asyncio.timeout`).
        """
        ...

    async def close(self) -> None:
        """Break all links; what is in flight fails with PeerUnavailable."""
        ...


class TensorReceiver(Protocol):
    """The receiving side: what a stage server does with tensors that arrive."""

    def admit(self, header: TensorHeader) -> None:
        """Check a header before its payload is accepted; raise a SwarmError to refuse the tensor.

        `header.total_bytes` is what will be delivered: compare it with what dtype, shape and codec need.
        """
        ...

    async def receive(self, header: TensorHeader, payload: memoryview) -> None:
        """Take a complete, checked tensor; returning is the receipt, a SwarmError is sent to the sender.

        May run for several tensors at once; not returning holds the sender back. `payload` is read-only and owned by
        the receiver from here on.
        """
        ...


class Traffic(Protocol):
    """Counts bytes: `wire_bytes` as framed, `tensor_bytes` as the same tensor uncompressed (float32 or float64)."""

    def sent(self, address: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None: ...

    def received(self, peer: str, kind: str, wire_bytes: int, tensor_bytes: int) -> None: ...
