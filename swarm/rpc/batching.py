"""Messages of a session that travel together: a gRPC message costs more than a small one of ours.

    put() --> waiting --> write_all() --first ++ more ++ more--> parts()

What comes while a message is being written goes with the next one. What is in no hurry waits a moment for something
that is. Messages keep their order, and each counts as if it had come alone. Decision: docs/decisions/117.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeAlias

from swarm.errors import CorruptFrame
from swarm.rpc.fields import EVENT_FIELDS_MAX
from swarm.rpc.links.frames import encode_varint
from swarm.rpc.mapping import parse
from swarm.wire import session_pb2

TOGETHER_MAX: Final = 64  # messages
TOGETHER_BYTES_MAX: Final = 64 << 10  # nothing is added beyond it; a larger message travels alone
WAITING_BYTES_MAX: Final = 1 << 20  # with this many waiting, whoever puts waits too
UNHURRIED_S: Final = 0.005  # how long something may wait for company

_MORE = b"\x92\x03"  # the key of the field `more`, which both kinds have: 50 << 3 | 2, as a varint

Kind: TypeAlias = type[session_pb2.Event] | type[session_pb2.Command]


def parts(kind: Kind, data: bytes) -> Iterator[Any]:
    """The messages of a batch, in order; CorruptFrame if it is none, or has more than TOGETHER_MAX."""
    first = parse(kind, data, EVENT_FIELDS_MAX)
    if len(first.more) >= TOGETHER_MAX:
        raise CorruptFrame(f"a batch has {1 + len(first.more)} messages, the limit is {TOGETHER_MAX}")
    yield first
    for one in first.more:
        yield parse(kind, one, EVENT_FIELDS_MAX)


class Batches:
    """Writes encoded messages to a stream, as many at once as wait; `write_all` does it, in a task of its own."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._failure: Exception | None = None
        self._ended = False
        self._over = asyncio.Event()  # everything is written, or writing has failed
        self._due = asyncio.Event()
        self._room = asyncio.Event()
        self._moment: asyncio.TimerHandle | None = None

    async def put(self, message: bytes, *, hurry: bool = True) -> None:
        """Append a message once there is room; raises what `write` raised of an earlier one."""
        while self._is_full() and not self._over.is_set():
            self._due.set()
            self._room.clear()
            await self._room.wait()
        if self._failure is not None:
            raise self._failure
        self._waiting.append(message)
        self._waiting_bytes += len(message)
        if hurry:
            self._due.set()
        elif self._moment is None:
            self._moment = asyncio.get_running_loop().call_later(UNHURRIED_S, self._due.set)

    async def finish(self) -> None:
        """Return once everything is written; raises what `write` raised."""
        self._ended = True
        self._due.set()
        await self._over.wait()
        if self._failure is not None:
            raise self._failure

    async def write_all(self) -> None:
        """Write until `finish`, or until `write` fails."""
        try:
            while self._waiting or not self._ended:
                await self._due.wait()
                if not self._ended:
                    self._due.clear()
                self._forget_moment()
                while self._waiting:
                    batch = self._batch()
                    self._room.set()
                    await self._write(batch)
        except Exception as failure:
            self._failure = failure
        finally:
            self._over.set()
            self._room.set()
            self._forget_moment()

    def _batch(self) -> bytes:
        first = self._waiting.popleft()
        batch, size_bytes = [first], len(first)
        while self._waiting and len(batch) < 3 * TOGETHER_MAX - 2:
            if size_bytes + len(self._waiting[0]) >= TOGETHER_BYTES_MAX:
                break
            message = self._waiting.popleft()
            batch += (_MORE, encode_varint(len(message)), message)
            size_bytes += len(message)
        self._waiting_bytes -= size_bytes
        return b"".join(batch)

    def _is_full(self) -> bool:
        return len(self._waiting) >= TOGETHER_MAX or self._waiting_bytes >= WAITING_BYTES_MAX

    def _forget_moment(self) -> None:
        if self._moment is not None:
            self._moment.cancel()
            self._moment = None
