"""Whether stage servers can be dialled: the scheduler tries the address of each when it attaches.

A stage server that cannot be dialled gets no stage beside others, unless all of them name one site: the scheduler may
stand where stage servers do not (scheduler/brain/fleet/allocation.py). A person who forgot `--announce` or
`--via-relay` reads it in `swarm peers` and `swarm explain PEER`.

A stage server may name any address, and could so have the scheduler look where it cannot itself. So of an address that
is not its own it learns only whether its own process answers there, at one time whatever the cause. The log has that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from scheduler.api.sessions import Connections, host_of, is_here
from scheduler.brain.fleet.membership import BESIDE_OTHERS, Membership
from swarm.errors import SwarmError
from swarm.pki.identity import Wallet
from swarm.process.lifecycle import own_addresses
from swarm.process.logs import Logger
from swarm.rpc.channel import connect_to_peer
from swarm.rpc.links.dialling import Connection, standing
from swarm.text import is_loopback
from swarm.types import PeerId, PeerState
from swarm.wire.messages import Hello

LOOK_S = 1.0
DIAL_S_MAX = 3.0
AGAIN_S = 60.0  # then an address that did not answer is tried again
AT_A_TIME = 8
NOT_REACHED = "the scheduler cannot dial it"


@dataclass(slots=True)
class _Tried:
    incarnation: int
    address: str
    is_mixed: bool  # others were on other machines
    again_s: float = inf


@dataclass(eq=False)
class Reach:
    """Tells `membership` which addresses do not answer."""

    _membership: Membership
    _connections: Connections
    _wallet: Wallet
    _log: Logger
    _on_change: Callable[[tuple[PeerId, ...]], None] = lambda unreached: None  # hears of all that cannot be dialled
    _unreached: tuple[PeerId, ...] = ()
    _tried: dict[PeerId, _Tried] = field(default_factory=dict)

    async def run(self) -> None:
        """Try each address once, and again while it does not answer; for ever."""
        loop, places = asyncio.get_running_loop(), asyncio.Semaphore(AT_A_TIME)
        async with asyncio.TaskGroup() as tasks:
            while True:
                present = [peer for peer in self._membership.peers() if peer.state is not PeerState.GONE]
                hellos = [peer.hello for peer in present]
                unreached = tuple(sorted(peer.hello.peer for peer in present if peer.unreached))
                if unreached != self._unreached:
                    self._unreached = unreached
                    self._on_change(unreached)
                own = own_addresses()
                is_mixed = not all(is_here(self._origin(hello), own) for hello in hellos)
                here = {hello.peer for hello in hellos}
                self._tried = {peer: tried for peer, tried in self._tried.items() if peer in here}
                for hello in hellos:
                    tried = self._tried.get(hello.peer)
                    now = _Tried(hello.incarnation, hello.address, is_mixed and _is_on_loopback(hello))
                    is_new = tried is None or replace(tried, again_s=inf) != now
                    if hello.via_relay or not (is_new or (tried is not None and tried.again_s <= loop.time())):
                        continue
                    self._tried[hello.peer] = now
                    tasks.create_task(self._try(hello, places, is_mixed=is_mixed))
                await asyncio.sleep(LOOK_S)

    async def _try(self, hello: Hello, places: asyncio.Semaphore, *, is_mixed: bool) -> None:
        loop = asyncio.get_running_loop()
        async with places:
            began_s = loop.time()
            cause = await self._fault_of(hello, is_mixed=is_mixed)
        fault = cause
        if cause and not self._is_own(hello):
            await asyncio.sleep(began_s + DIAL_S_MAX - loop.time())  # a refusal would come sooner than silence
            fault = NOT_REACHED
        if (tried := self._tried.get(hello.peer)) is not None and fault:
            tried.again_s = loop.time() + AGAIN_S
        if self._membership.reached(hello.peer, hello.incarnation, fault):
            self._log.warning("stage server cannot be dialled", peer=hello.peer, address=hello.address, reason=cause)

    async def _fault_of(self, hello: Hello, *, is_mixed: bool = False) -> str:
        """Why others cannot dial the peer; "" if they can, as seen from here. Not everybody may learn the address."""
        if _is_on_loopback(hello):
            if not is_here(self._origin(hello), own_addresses()):
                return "it listens on loopback, where no other machine reaches it"
            return BESIDE_OTHERS if is_mixed else ""
        try:
            made = Connection(connect_to_peer(hello.address, hello.peer, self._wallet))
            await (await standing(made, DIAL_S_MAX, "its address")).close()
        except SwarmError as error:
            return f"{NOT_REACHED}: {error.message}"
        return ""

    def _is_own(self, hello: Hello) -> bool:
        """Whether the address is at the host from which the peer's session came, as far as that is known."""
        host = host_of(self._origin(hello))
        return not host or host == _host(hello) or _is_on_loopback(hello)

    def _origin(self, hello: Hello) -> str:
        session = self._connections.get(hello.peer)
        return session.connection if session is not None else ""


def _host(hello: Hello) -> str:
    return hello.address.rpartition(":")[0].strip("[]")


def _is_on_loopback(hello: Hello) -> bool:
    return is_loopback(_host(hello))
