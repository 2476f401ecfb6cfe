"""Children end when they are asked to, at the latest when they are killed, and with all that they started."""

from __future__ import annotations

import asyncio
import signal
import sys

import psutil

from swarm.process.children import dying_with_parent, end, kill

OBEDIENT = "print('up', flush=True); input()"
# Hears no SIGTERM, and has a child of its own that does not either.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "input()"])
print(child.pid, flush=True)
input()
"""


async def start(program: str) -> tuple[asyncio.subprocess.Process, str]:
    child = await asyncio.create_subprocess_exec(
        *dying_with_parent([sys.executable, "-c", program]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    return child, (await child.stdout.readline()).decode().strip()


async def test_a_child_that_is_asked_to_end_ends_by_the_signal() -> None:
    child, said = await start(OBEDIENT)
    assert said == "up"
    await end(child)
    assert child.returncode == -signal.SIGTERM
    await end(child)  # asking again is no error


async def test_a_child_that_does_not_hear_is_killed_with_its_own_child() -> None:
    child, grandchild = await start(STUBBORN)
    known = psutil.Process(int(grandchild))
    await end(child, within_s=0.1)
    assert child.returncode == -signal.SIGKILL
    assert not psutil.wait_procs([known], timeout=10)[1]


async def test_kill_waits_for_nothing() -> None:
    child, _ = await start(STUBBORN)
    kill(child)
    assert await child.wait() == -signal.SIGKILL
    kill(child)
