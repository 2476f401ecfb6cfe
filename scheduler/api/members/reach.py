"""Whether stage servers can be dialled: the scheduler tries the address of each when it attaches.

A stage server that cannot be dialled gets no stage beside others, unless all of them name one site: the scheduler may
stand where stage servers do not (scheduler/brain/fleet/allocation.py). A person who forgot `--announce` or
`--via-relay` reads it in `swarm peers` and `swarm explain PEER`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from urllib.parse import unquote

from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership
from swarm.errors import SwarmError
from swarm.events import Hello
from swarm.pki.identity import Wallet
from swarm.process.lifecycle import own_addresses
from swarm.process.logs import Logger
from swarm.rpc.channel import connect_to_peer
from swarm.rpc.links.dialling import Connection, standing
from swarm.text import is_loopback
from swarm.types import PeerId, PeerState

LOOK_S = 1.0
DIAL_S_MAX = 3.0
AGAIN_S = 60.0  # then an address that did not answer is tried again
AT_A_TIME = 8


@dataclass(slots=True)
class _Tried:
    incarnation: int
    address: str
    again_s: float = inf


class Reach:
    """Tells `membership` which addresses do not answer."""

    def __init__(
        self,
        membership: Membership,
        connections: Connections,
        wallet: Wallet,
        log: Logger,
        on_change: Callable[[tuple[PeerId, ...]], None] = lambda unreached: None,
    ) -> None:
        """`on_change` hears of all that cannot be dialled, whenever these change."""
        self._on_change = on_change
        self._unreached: tuple[PeerId, ...] = ()
        self._membership = membership
        self._connections = connections
        self._wallet = wallet
        self._log = log
        self._tried: dict[PeerId, _Tried] = {}

    async def run(self) -> None:
        """Try each address once, and again while it does not answer; for ever."""
        loop, places = asyncio.get_running_loop(), asyncio.Semaphore(AT_A_TIME)
        async with asyncio.TaskGroup() as tasks:
            while True:
                present = [one for one in self._membership.peers() if one.state is not PeerState.GONE]
                hellos = [one.hello for one in present]
                unreached = tuple(sorted(one.hello.peer for one in present if one.unreached))
                if unreached != self._unreached:
                    self._unreached = unreached
                    self._on_change(unreached)
                here = {hello.peer for hello in hellos}
                self._tried = {peer: tried for peer, tried in self._tried.items() if peer in here}
                for hello in hellos:
                    tried = self._tried.get(hello.peer)
                    is_new = tried is None or (tried.incarnation, tried.address) != (hello.incarnation, hello.address)
                    if hello.via_relay or not (is_new or (tried is not None and tried.again_s <= loop.time())):
                        continue
                    self._tried[hello.peer] = _Tried(hello.incarnation, hello.address)
                    tasks.create_task(self._try(hello, places))
                await asyncio.sleep(LOOK_S)

    async def _try(self, hello: Hello, places: asyncio.Semaphore) -> None:
        async with places:
            fault = await self._fault_of(hello)
        if (tried := self._tried.get(hello.peer)) is not None and fault:
            tried.again_s = asyncio.get_running_loop().time() + AGAIN_S
        if self._membership.reached(hello.peer, hello.incarnation, fault):
            self._log.warning("stage server cannot be dialled", peer=hello.peer, address=hello.address, reason=fault)

    async def _fault_of(self, hello: Hello) -> str:
        """Why others cannot dial the peer; "" if they can, as seen from here. Not everybody may learn the address."""
        if is_loopback(hello.address.rpartition(":")[0]):
            session = self._connections.get(hello.peer)
            origin = unquote(session.connection).partition(":")[2].rpartition(":")[0] if session is not None else ""
            host = origin.strip("[]").removeprefix("::ffff:")
            if not host or is_loopback(host) or host in own_addresses():
                return ""  # on this machine, also where it dials the scheduler by the machine's other addresses
            return "it listens on loopback, where no other machine reaches it"
        try:
            made = Connection(connect_to_peer(hello.address, hello.peer, self._wallet))
            await (await standing(made, DIAL_S_MAX, "its address")).close()
        except SwarmError as error:
            return f"the scheduler cannot dial it: {error.message}"
        return ""
