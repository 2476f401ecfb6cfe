"""A file on its way to the scheduler: few bytes at a time are sent and have not arrived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from swarm.errors import CorruptFrame
from swarm.rpc.window import Window
from swarm.wire import jobs_pb2 as pb


class Sending:
    """One try to send a file. A thread of gRPC's takes `chunks`; the reader of replies reports what `arrived`."""

    def __init__(self, shard: pb.Shard, payload: Callable[[int], Iterable[bytes]]) -> None:
        self._shard, self._payload = shard, payload
        self._window = Window(time.monotonic())
        self._changed = threading.Condition()
        self._start: int | None = None  # from where to send
        self._held = 0
        self._is_over = False

    @property
    def has_progressed(self) -> bool:
        """Whether bytes have arrived in this try."""
        return self._start is not None and self._held > self._start

    def arrived(self, held_bytes: int) -> None:
        """So many first bytes of the file are there; CorruptFrame if they were not sent."""
        with self._changed:
            if self._start is None:
                if held_bytes > self._shard.size_bytes:
                    raise CorruptFrame(f"{held_bytes} bytes are acknowledged of {self._shard.size_bytes}")
                self._start = held_bytes
            else:
                self._window.acknowledged(held_bytes - self._held, time.monotonic())
            self._held = held_bytes
            self._changed.notify_all()

    def end(self) -> None:
        """End the try: its caller waits for nothing more."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def chunks(self) -> Iterator[pb.ShardChunk]:
        """What to send; it waits until there is room."""
        yield pb.ShardChunk(shard=self._shard, resumes=True)
        with self._changed:
            self._changed.wait_for(lambda: self._start is not None or self._is_over)
            if self._start is None:
                return
        for content in self._payload(self._start):
            at_bytes = 0
            while at_bytes < len(content):
                with self._changed:
                    self._changed.wait_for(self._may_send)
                    if self._is_over:
                        return
                    piece = content[at_bytes : at_bytes + self._window.piece_bytes]
                    self._window.sent(len(piece), time.monotonic())
                yield pb.ShardChunk(payload=piece)
                at_bytes += len(piece)

    def _may_send(self) -> bool:
        window = self._window
        return self._is_over or not window.unacknowledged_bytes or window.room_bytes >= window.piece_bytes
