"""How a stage server is dialled: at its address, or through a relay if that does not answer in time.

Without relays a channel is given at once and dials on first use, as ever. With them it is given once it stands.

On a slow link a ping waits behind tensors, and a ping that is late looks like a dead neighbour. But a dead neighbour
answers no handshake either. So each time that an established link breaks because nothing came in time, its next ping
gets longer. It gets shorter again when a link is replaced in order, or ends after it has stood for long.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

import grpc
import grpc.aio

from swarm.errors import NoWay, PeerUnavailable, RelaySilent, SwarmError
from swarm.messages import RelayAt
from swarm.pki.identity import Wallet
from swarm.pki.names import Principal, Role
from swarm.rpc.channel import (
    KEEPALIVE_TIMEOUT_MS,
    PING_S_MAX,
    THROUGH_RELAY,
    connect,
    connect_to_peer,
    ping_within,
    through_proxy,
)
from swarm.rpc.links.paths import DIRECT, DIRECT_S, Paths
from swarm.rpc.links.tunnel import Tunnel, open_tunnel
from swarm.types import PeerId

PING_S, PING_FACTOR = KEEPALIVE_TIMEOUT_MS / 1000, 4.0
HANDSHAKE_S_MAX = 3.0  # with the peer, where there is no other way
STOOD_S = 600.0  # after which the next link may have shorter pings
# gRPC: "recvmsg:Connection timed out (110)", "keepalive timeout", "ping timeout"; a reset says nothing like it.
_LATE = re.compile("timed?[ _-]?out", re.IGNORECASE)


@dataclass(slots=True)
class Connection:
    """A channel to a stage server, and the way that it takes."""

    channel: grpc.aio.Channel
    way: RelayAt = DIRECT
    tunnel: Tunnel | None = None
    neighbour: PeerId | str = ""  # or the address, where no peer is meant
    stood_at_s: float | None = None  # when both sides had shaken hands
    owed: bool = False  # when it broke, the neighbour still had to answer for tensors
    is_straight: bool = False  # to the address itself, without a relay or a proxy

    async def close(self) -> None:
        await self.channel.close()
        if self.tunnel is not None:
            await self.tunnel.close()


class Dialler:
    """Dials stage servers with the identity and the pass in `wallet`."""

    def __init__(self, wallet: Wallet, paths: Paths | None = None) -> None:
        """Without `paths` there are no relays."""
        self._wallet = wallet
        self._paths = paths or Paths()
        self._ping_s: dict[PeerId | str, float] = {}  # that a ping to a neighbour may take, where not PING_S

    async def dial(self, address: str, peer: PeerId | None) -> Connection:
        """PeerUnavailable if no way leads to the peer; NoWay if that is the fault of relays."""
        now_s = asyncio.get_running_loop().time()
        ways = self._paths.order(address, peer, now_s)
        if ways == [DIRECT] or peer is None:
            return self._made(address, peer)
        silent, answer = False, ""
        for way in ways:
            try:
                made = await (self._direct(address, peer) if way == DIRECT else self._through(way, peer))
            except SwarmError as error:
                answer = error.message
                if isinstance(error, RelaySilent | NoWay):
                    silent = True
                    self._paths.blame(way, now_s)
                continue
            self._paths.carried(peer, way, now_s)
            return made
        if DIRECT in ways:  # slower than a relay, but perhaps there
            try:
                return await self._direct(address, peer, HANDSHAKE_S_MAX)
            except PeerUnavailable as error:
                answer = answer or error.message
        if silent or not ways:
            raise NoWay(f"no relay carries to {peer}: {answer or 'there is none'}")
        raise PeerUnavailable(f"{peer} is not reached: {answer}")

    def broke(self, connection: Connection, why: str) -> None:
        """The link broke by itself; `why`: gRPC's text. Through a relay, other links there may break as well."""
        now_s = asyncio.get_running_loop().time()
        self._paths.blame(connection.way, now_s)
        if connection.stood_at_s is None or connection.way != DIRECT:
            return
        neighbour = connection.neighbour
        if now_s - connection.stood_at_s >= STOOD_S:
            self._ease(neighbour)
        if connection.owed and _LATE.search(why):
            self._ping_s[neighbour] = min(PING_S_MAX, PING_FACTOR * self._ping_s.get(neighbour, PING_S))

    def ease(self, address: str, peer: PeerId | None) -> None:
        """The link is replaced while all is well: wait less for the next one, as nothing is slow for ever."""
        self._ease(peer or address)

    def forget(self, peer: PeerId) -> None:
        """There will be no more links to the peer."""
        self._ping_s.pop(peer, None)

    def _ease(self, neighbour: PeerId | str) -> None:
        shorter_s = self._ping_s.pop(neighbour, PING_S) / PING_FACTOR
        if shorter_s > PING_S:
            self._ping_s[neighbour] = shorter_s

    def _made(self, address: str, peer: PeerId | None) -> Connection:
        proxy = self._paths.proxy_to(address)
        more = ping_within(self._ping_s.get(peer or address, PING_S)) + through_proxy(proxy)
        channel = connect_to_peer(address, peer, self._wallet, more)
        return Connection(channel, neighbour=peer or address, is_straight=not proxy)

    async def _direct(self, address: str, peer: PeerId, timeout_s: float = DIRECT_S) -> Connection:
        return await standing(self._made(address, peer), timeout_s, address)

    async def _through(self, relay: RelayAt, peer: PeerId) -> Connection:
        identity = self._wallet.identity
        if identity is None:
            raise PeerUnavailable("relays are for those who have certificates")
        tunnel = await open_tunnel(relay, peer, self._wallet)
        # The port is of this machine, and whoever is at the far end of it is not.
        server_name = Principal(identity.cluster, Role.STAGE_SERVER, peer).dns
        made = Connection(connect(tunnel.address, identity, server_name, THROUGH_RELAY), relay, tunnel)
        return await standing(made, HANDSHAKE_S_MAX, f"{peer} through relay {relay.name}")


async def standing(made: Connection, timeout_s: float, where: str) -> Connection:
    """The connection once both sides have shaken hands; PeerUnavailable if that fails or takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            while (state := made.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
                    raise PeerUnavailable(f"{where} does not answer")
                await made.channel.wait_for_state_change(state)
    except BaseException as error:
        await made.close()
        if isinstance(error, TimeoutError):
            raise PeerUnavailable(f"{where} does not answer within {timeout_s:g} s") from None
        raise
    return made
