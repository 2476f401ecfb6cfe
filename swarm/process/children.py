"""Child processes that do not outlive their parent.

A child gets a session of its own, so a terminal's Ctrl-C reaches only the parent, which then ends its children in
order. If the parent dies without doing so (kill -9), the kernel kills the child: Linux only (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

END_S_MAX = 5.0

# Runs in the child, before the program. Not a preexec_fn: that runs Python between fork and exec, which can deadlock in
# a process with threads, and gRPC has threads. The setting survives execve. The parent may be gone already: then exit.
_LAUNCH = """
import os, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
except (AttributeError, ImportError, OSError):
    pass
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` such that it dies with this process.

    Start it from the main thread, with `start_new_session=True`: Linux ends the child when the *thread* that started it
    ends.
    """
    return [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *command]


async def end(*children: asyncio.subprocess.Process, within_s: float = END_S_MAX) -> None:
    """Ask the children to end (SIGTERM), wait, and kill what is left, with the whole session of each."""
    running = [child for child in children if child.returncode is None]
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
    try:
        async with asyncio.timeout(within_s):
            await asyncio.gather(*(child.wait() for child in running))
    except TimeoutError:
        pass
    finally:
        kill(*children)
        await asyncio.gather(*(child.wait() for child in running))


def kill(*children: asyncio.subprocess.Process) -> None:
    """Kill at once the children that still run, and everything they started."""
    for child in children:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
