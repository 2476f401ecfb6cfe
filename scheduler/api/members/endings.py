"""Dials stage servers whose session broke, to find out whether their process has ended (brain/fleet/membership.py).

A refusal proves nothing for certain (a firewall can refuse as well), and nothing depends on that: a peer that is
declared gone too early comes back with nothing, as after any grace period. A peer with a new session is not declared
gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Endings, Membership, Transition
from swarm.process.logs import Logger
from swarm.wire.messages import Hello

LOOK_S = 0.1
DIAL_S_MAX = 1.0
AT_A_TIME = 64
REFUSALS = 2  # so many in a row, with a pause before each; a live process dials again meanwhile
PAUSE_S = 0.2


async def watch_endings(
    membership: Membership, connections: Connections, heard: Callable[[Transition], None], log: Logger
) -> None:
    """Tell membership, and through `heard` the jobs, of processes that have ended; for ever."""
    endings, places = Endings(), asyncio.Semaphore(AT_A_TIME)

    async def look(hello: Hello) -> None:
        async with places:
            has_ended = await refuses(hello.address)
        if not has_ended or connections.get(hello.peer) is not None:
            return
        now_s, reason = asyncio.get_running_loop().time(), f"nobody listens at {hello.address} any more"
        for transition in membership.ended(hello.peer, hello.incarnation, now_s, reason):
            log.info("stage server has ended", peer=hello.peer, address=hello.address)
            heard(transition)

    async with asyncio.TaskGroup() as tasks:
        while True:
            for hello in endings.look(membership.peers(), connections.get):
                tasks.create_task(look(hello))
            await asyncio.sleep(LOOK_S)


async def refuses(address: str) -> bool:
    """Whether connections to a port are refused, again and again. No answer is no refusal."""
    host, _, port = address.rpartition(":")
    for _ in range(REFUSALS):
        await asyncio.sleep(PAUSE_S)
        try:
            async with asyncio.timeout(DIAL_S_MAX):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            continue
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False
    return True
