"""The session between a stage server and the scheduler: the ports, and their gRPC side.

The stage server dials. Events flow up and commands flow down one stream, each direction in order. A broken stream loses
what was under way in both directions; the stage server attaches again and reports what it holds (`Hello.cells`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from swarm.messages import Command, Event, StoreHeader


class SchedulerLink(Protocol):
    """The stage server's side."""

    def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        """Open a session: sends `events` as they come, gives (epoch, command) as they arrive.

        Ends when the scheduler ends the session. Raises SchedulerUnreachable if it does not answer or the connection
        breaks, or what the scheduler raised (StaleMessage, IncompatibleVersion, Refused, ...). When `events` ends, the
        scheduler is told that the peer hung up, and the iterator goes on until the scheduler is done. Whatever ends the
        session cancels the wait for the next event; close the iterator (`aclosing`) when leaving it early.
        """
        ...

    async def store(self, header: StoreHeader, payload: bytes | memoryview) -> str:
        """Hand one stage's weights to the scheduler; gives the sha256 of what it stored."""
        ...

    async def close(self) -> None:
        """Break the connection."""
        ...


class SessionHandler(Protocol):
    """The scheduler's side."""

    def attach(self, events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Command]]:
        """Serve one session: `events` as they arrive, (epoch, command) to send.

        `events` ends when the peer hangs up and raises PeerUnavailable when the connection breaks. After a break the
        generator is run on for `DRAIN_S` so that it can end by itself, what it yields is dropped, then it is cancelled.
        A SwarmError that it raises ends the session and reaches the stage server.
        """
        ...

    async def store(self, header: StoreHeader, chunks: AsyncIterator[bytes]) -> str:
        """Take one stage's weights; gives their sha256.

        `chunks` adds up to exactly `header.total_bytes`, else it raises CorruptFrame, or PeerUnavailable if the
        connection breaks; what arrived until then must be dropped.
        """
        ...
