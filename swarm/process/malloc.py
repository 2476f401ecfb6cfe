"""How the C library keeps this process's memory."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_MIB = 1 << 20


def tune_malloc() -> bool:
    """Keep freed tensor buffers in the process; returns whether the C library agreed.

    glibc maps each large buffer anew and gives it back when freed, so every tensor received or encoded faults in all
    its pages: 10-60 % of the data plane's speed. The price is that freed memory stays with the process until
    `trim_malloc` is called. To be called once, early, by `__main__`. Only glibc on Linux; elsewhere it does nothing.
    """
    libc = _glibc()
    if libc is None:
        return False
    mallopt = libc.mallopt
    # Older glibc refuses a threshold over 32 MiB: take that then.
    threshold = mallopt(_M_MMAP_THRESHOLD, 1024 * _MIB) or mallopt(_M_MMAP_THRESHOLD, 32 * _MIB)
    return bool(threshold and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_TOP_PAD, 64 * _MIB))


def trim_malloc() -> bool:
    """Give freed memory back to the system; gives whether there was any. Only glibc on Linux."""
    libc = _glibc()
    return libc is not None and bool(libc.malloc_trim(0))


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
