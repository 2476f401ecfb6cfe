"""Stage servers whose process has ended: nobody listens any more where it listened.

A session that broke may come back, so its peer has the grace period. A process that was killed does not: its machine
refuses connections at once at the port that the process had. So the scheduler dials there when a session breaks. It
does so only if the session came from the host of that address, as nobody else's word of a port counts, and if that
address could be dialled before (reach.py), as far as that is known.

A refusal proves nothing for certain (a firewall can refuse as well), and nothing depends on that: whoever is declared
gone too early comes back with nothing, as after any grace period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership, Transition
from swarm.process.logs import Logger
from swarm.types import PeerId, PeerState

LOOK_S = 0.1
DIAL_S_MAX = 1.0
REFUSALS = 2  # so many in a row, with a pause between them
PAUSE_S = 0.2


@dataclass(slots=True)
class _Origin:
    """Whence a peer's newest session came."""

    incarnation: int
    connection: str  # as gRPC names it: ipv4:203.0.113.7:40312
    dialled: bool = False  # since it broke

    @property
    def host(self) -> str:
        return unquote(self.connection).partition(":")[2].rpartition(":")[0]


class Endings:
    """Tells membership, and through `heard` the jobs, of processes that have ended."""

    def __init__(
        self, membership: Membership, connections: Connections, heard: Callable[[Transition], None], log: Logger
    ) -> None:
        self._membership = membership
        self._connections = connections
        self._heard = heard
        self._log = log
        self._origins: dict[PeerId, _Origin] = {}

    async def run(self) -> None:
        """Dial whoever lost its session, once for each; for ever."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                known = {one.hello.peer: one for one in self._membership.peers() if one.state is not PeerState.GONE}
                self._origins = {peer: origin for peer, origin in self._origins.items() if peer in known}
                for peer, one in known.items():
                    session, origin = self._connections.get(peer), self._origins.get(peer)
                    if session is not None:
                        self._origins[peer] = _Origin(session.incarnation, session.connection)
                    elif origin is not None and one.state is PeerState.SUSPECT and not origin.dialled:
                        origin.dialled = True
                        if one.hello.address.rpartition(":")[0] == origin.host and not one.unreached:
                            tasks.create_task(self._look(peer, origin.incarnation, one.hello.address))
                await asyncio.sleep(LOOK_S)

    async def _look(self, peer: PeerId, incarnation: int, address: str) -> None:
        if not await refuses(address):
            return
        now_s = asyncio.get_running_loop().time()
        for transition in self._membership.ended(peer, incarnation, now_s, f"nobody listens at {address} any more"):
            self._log.info("stage server has ended", peer=peer, address=address)
            self._heard(transition)


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
