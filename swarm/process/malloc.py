"""How the C library keeps this process's memory.

Not chosen: gRPC's own bound on pings (`max_ping_strikes`), because it takes more processor time than a flood of them.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil

LOOK_S = 1.0
GROWN_BYTES, AGAIN_S = 64 << 20, 5.0
GROWN_BUSY_BYTES, PAUSE_BUSY_S = 1 << 30, 60.0  # a step that faults its buffers in again takes longer

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h
_MIB = 1 << 20


def tune_malloc() -> bool:
    """Keep freed tensor buffers in the process, in one heap for all threads; returns whether the C library agreed.

    glibc maps each large buffer anew and gives it back when freed, so every tensor received or encoded faults in all
    its pages: 10-60 % of the data plane's speed. The price is that freed memory stays with the process until
    `trim_malloc` is called. With a heap for each thread, sums could not use what graphs have left. To be called once,
    before the first thread. Only glibc on Linux; elsewhere it does nothing.
    """
    libc = _glibc()
    if libc is None:
        return False
    mallopt = libc.mallopt
    # Older glibc refuses a threshold over 32 MiB: take that then.
    threshold = mallopt(_M_MMAP_THRESHOLD, 1024 * _MIB) or mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    return bool(
        threshold
        and mallopt(_M_ARENA_MAX, 1)
        and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        and mallopt(_M_TOP_PAD, 64 * _MIB)
    )


def trim_malloc() -> bool:
    """Give freed memory back to the system; gives whether there was any. Only glibc on Linux."""
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


@dataclass(slots=True)
class Growth:
    """When to trim a process that others can make hold more and more; pure.

    What a flood below gRPC makes it allocate is freed at once, in pieces between others, so glibc keeps it. A trim in
    the middle of the flood leaves what is in use, which is freed later without a sign: it is trimmed again after a
    while, and then more and more rarely.
    """

    _least_bytes: float = float("inf")  # that it held since it was trimmed
    _trimmed_s: float = float("-inf")
    _pause_s: float = AGAIN_S
    _again_s: float = float("inf")

    def is_due(self, held_bytes: int, now_s: float, *, busy: bool) -> bool:
        """Whether it holds so much more than it once did, or may have freed some since; it counts as trimmed then."""
        self._least_bytes = min(self._least_bytes, held_bytes)
        if busy and now_s - self._trimmed_s < PAUSE_BUSY_S:
            return False
        if held_bytes - self._least_bytes >= (GROWN_BUSY_BYTES if busy else GROWN_BYTES):
            self._pause_s = AGAIN_S
        elif not busy and now_s >= self._again_s:
            self._pause_s *= 2
        else:
            return False
        self._least_bytes, self._trimmed_s, self._again_s = float("inf"), now_s, now_s + self._pause_s
        return True


async def keep_trimmed(busy: Callable[[], bool] = bool) -> None:
    """Give back what nothing uses, for ever; `busy` while it would disturb."""
    process, growth, loop = psutil.Process(), Growth(), asyncio.get_running_loop()
    while True:
        while growth.is_due(process.memory_info().rss, loop.time(), busy=busy()):
            await asyncio.to_thread(trim_malloc)  # it grows from what it holds right behind this
        await asyncio.sleep(LOOK_S)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc: others have a mallopt that means something else."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version, libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        return None
    return libc
