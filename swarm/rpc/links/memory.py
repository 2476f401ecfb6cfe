"""Payloads by memory: a file in the sender's memory (memfd) that a receiver on the same host reads.

    sender ──write──▶ | word | extent | extent | ... | ──read──▶ receiver
       └──────────── offer, extents ─── stream ─── receipts ────────┘

The stream says everything: the offer, where each payload lies, and by the receipt that its extent is free again. A file
belongs to one stream and ends with it, so no extent of an older stream is ever read in a newer one. Whatever finds no
room, and everything where the offer is refused, travels in the stream's messages.

The sender can change what it has written at any time, and can cut the file. So the receiver copies first and checks its
copy, and reads by system calls: a mapping of a file that was cut would kill it.

Not chosen: a switch, because there is no reason to turn it; a handshake, because the offer is a frame that an older
receiver refuses. Namespaces count as hosts. Price: up to 8 files of 16 MiB for each stage server, at most 1/32 of the
machine's memory, which no estimate counts.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from bisect import insort
from hashlib import blake2b
from pathlib import Path
from typing import Final

import psutil

from swarm.errors import CorruptFrame, Refused
from swarm.rpc.mapping import parse
from swarm.text import counted
from swarm.wire import frame_pb2

FILE_BYTES: Final = 16 << 20
LEAST_BYTES: Final = 128 << 10  # of a payload; a smaller one costs less in a message
LENT_MAX: Final = 8  # files of this process
LENT_PART: Final = 32  # all of them together have at most this part of the machine's memory
TAKEN_MAX: Final = 64  # files of others that this process has open
HEAD_BYTES: Final = 4096  # in front of the extents
WORD_BYTES: Final = 16

_NAME = "swarm-link"
_TARGET = f"/memfd:{_NAME} (deleted)"  # of the link in /proc


class Extents:
    """Which parts of a file are free, and which tensor has which others. Pure."""

    def __init__(self, start: int, stop: int) -> None:
        self._free = [(start, stop)]  # in order, none touches the next
        self._taken: dict[int, list[tuple[int, int]]] = {}  # by the tensor's sequence number

    def take(self, sequence: int, size: int) -> int | None:
        """Where the tensor has `size` bytes until it is `released`: the first that are free; None if there are none."""
        for index, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                self._free[index : index + 1] = [(start + size, stop)] if stop - start > size else []
                self._taken.setdefault(sequence, []).append((start, start + size))
                return start
        return None

    def release(self, sequence: int) -> None:
        """All extents of the tensor are free; it may have none."""
        taken = self._taken.pop(sequence, None)
        if taken is None:
            return
        for extent in taken:
            insort(self._free, extent)
        merged: list[tuple[int, int]] = []
        for start, stop in self._free:
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self._free = merged


class FileCount:
    """How many files of a kind this process has, and may have."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.count = 0

    def enter(self) -> bool:
        """Whether there may be one more; it then counts."""
        if self.count >= self._most:
            return False
        self.count += 1
        return True

    def leave(self) -> None:
        self.count -= 1


def lent_files() -> FileCount:
    """The files that this process may lend."""
    return FileCount(min(LENT_MAX, psutil.virtual_memory().total // (LENT_PART * FILE_BYTES)))


# The sending side -----------------------------------------------------------------------------------------------------


class LentMemory:
    """One link's file: made for the first large payload, offered once, used once it was taken."""

    def __init__(self, files: FileCount) -> None:
        self._files = files
        self._extents = Extents(HEAD_BYTES, FILE_BYTES)
        self._descriptor = -1
        self._offer: bytes | None = None
        self._is_taken = False
        self._is_over = True
        self.written_bytes = 0

    def begin(self) -> None:
        """Nothing that delays or changes tensors on purpose lies between the two ends, so it may be tried."""
        self._is_over = False

    def write(self, sequence: int, payload: memoryview) -> int | None:
        """Where the payload lies now, until its tensor is `released`; None if it has to travel in a message."""
        if self._is_over or len(payload) < LEAST_BYTES:
            return None
        if self._descriptor < 0:
            self._make()
        if not self._is_taken:
            return None
        start = self._extents.take(sequence, len(payload))
        if start is None:
            return None
        try:
            is_whole = os.pwrite(self._descriptor, payload, start) == len(payload)
        except OSError:  # the machine, or the container, has no more memory
            is_whole = False
        if not is_whole:
            self._is_over = True
            return None
        self.written_bytes += len(payload)
        return start

    def release(self, sequence: int) -> None:
        """Free the extents of a tensor that was answered."""
        self._extents.release(sequence)

    def offer(self) -> bytes | None:
        """The offer for the receiver, once."""
        offer, self._offer = self._offer, None
        return offer

    def answered(self, *, is_taken: bool) -> None:
        """The receiver took the offer or refused it."""
        self._is_taken = is_taken
        if not is_taken:
            self.close()

    def close(self) -> None:
        """Nothing more is written. The file is gone when the receiver has closed it too."""
        self._is_over = True
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._files.leave()

    def _make(self) -> None:
        """Make the file, if one may be had now."""
        if sys.platform != "linux":
            self._is_over = True
            return
        if not self._files.enter():
            return  # another link may end
        try:
            self._descriptor = os.memfd_create(_NAME)
            os.ftruncate(self._descriptor, FILE_BYTES)
            word = secrets.token_bytes(WORD_BYTES)
            os.pwrite(self._descriptor, word, 0)
            host = _host(word)
        except OSError:
            self._is_over = True
            if self._descriptor < 0:
                self._files.leave()
            self.close()
            return
        offer = frame_pb2.Memory(process=os.getpid(), descriptor=self._descriptor, word=word, host=host)
        self._offer = offer.SerializeToString()


# The receiving side ---------------------------------------------------------------------------------------------------


class TakenMemory:
    """The file of one stream's sender, if it offered one that this process can read."""

    def __init__(self, files: FileCount) -> None:
        self._files = files
        self._descriptor = -1
        self._was_offered = False

    def take(self, offer: bytes) -> None:
        """Open what is offered; Refused if that cannot be, CorruptFrame if it is no offer or the second one."""
        if self._was_offered:
            raise CorruptFrame("a stream offers memory twice")
        self._was_offered = True
        memory = parse(frame_pb2.Memory, offer)
        if not self._files.enter():
            raise Refused(f"{counted(self._files.count, 'file')} of others are open, the limit")
        try:
            self._descriptor = _opened(memory)
        except OSError as error:  # another process's, another container's, or /proc hides it
            raise Refused(f"the memory that was offered is not to be had here: {error.strerror}") from None
        finally:
            if self._descriptor < 0:
                self._files.leave()

    def read(self, start: int, size: int) -> memoryview:
        """A copy of an extent, which the sender cannot change; CorruptFrame if there is no such extent."""
        if self._descriptor < 0:
            raise CorruptFrame("a frame has its payload in a memory that was not taken")
        if start < HEAD_BYTES or start + size > FILE_BYTES:
            raise CorruptFrame(f"a frame has {size} bytes at byte {start} of a memory of {FILE_BYTES}")
        payload = os.pread(self._descriptor, size, start)
        if len(payload) != size:
            raise CorruptFrame(f"the sender's memory ends at byte {start + len(payload)}: it was cut")
        return memoryview(payload)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._files.leave()


def _opened(memory: frame_pb2.Memory) -> int:
    """The file that was offered; Refused or OSError.

    Others name the process and the descriptor, so nothing but such a file is opened, and only the one that begins with
    the word is read: only the receiver that the file is for hears the word.
    """
    if len(memory.word) != WORD_BYTES or memory.host != _host(memory.word):
        raise Refused("the memory that was offered is another host's")
    path = f"/proc/{memory.process}/fd/{memory.descriptor}"
    if os.readlink(path) != _TARGET:
        raise Refused("what was offered is no memory of a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size != FILE_BYTES:
            raise Refused("the memory that was offered is another user's, or has another size")
        if os.pread(descriptor, WORD_BYTES, 0) != memory.word:
            raise Refused("the memory that was offered does not begin with the sender's word")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _host(word: bytes) -> bytes:
    """This host and its network namespace, keyed by the word. OSError where there is no /proc.

    Namespaces count as hosts: a link between them may be slowed down or cut on purpose.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    network = os.readlink("/proc/self/ns/net").encode()
    return blake2b(boot + network, key=word, digest_size=16).digest()
