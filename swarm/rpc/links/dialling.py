"""How a stage server is dialled: at its address, or through a relay if that does not answer in time.

Without relays a channel is given at once and dials on first use, as ever. With them it is given once it stands.

On a slow link a ping waits behind tensors, so pings are patient: links see by acknowledgements whether a neighbour
lives (peers.py).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio

from swarm.errors import NoWay, PeerUnavailable, RelaySilent, SwarmError
from swarm.pki.identity import Wallet
from swarm.pki.names import Principal, Role
from swarm.rpc.channel import (
    PATIENT,
    connect,
    connect_to_peer,
    connect_within,
    through_proxy,
)
from swarm.rpc.links.paths import DIRECT, DIRECT_S, Paths
from swarm.rpc.links.tunnel import Tunnel, open_tunnel
from swarm.types import PeerId
from swarm.wire.messages import RelayAt

HANDSHAKE_S_MAX = 3.0  # with the peer, where there is no other way
THROUGH_S_MAX = 10.0  # with a peer that has just accepted: each turn waits behind all that the relay carries


@dataclass(slots=True)
class Connection:
    """A channel to a stage server, and the way that it takes."""

    channel: grpc.aio.Channel
    way: RelayAt = DIRECT
    tunnel: Tunnel | None = None
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

    def broke(self, connection: Connection) -> None:
        """The link broke by itself. Through a relay, other links there may break as well."""
        self._paths.blame(connection.way, asyncio.get_running_loop().time())

    def _made(self, address: str, peer: PeerId | None) -> Connection:
        proxy = self._paths.proxy_to(address)
        channel = connect_to_peer(address, peer, self._wallet, PATIENT + through_proxy(proxy))
        return Connection(channel, is_straight=not proxy)

    async def _direct(self, address: str, peer: PeerId, timeout_s: float = DIRECT_S) -> Connection:
        return await standing(self._made(address, peer), timeout_s, address)

    async def _through(self, relay: RelayAt, peer: PeerId) -> Connection:
        identity = self._wallet.identity
        if identity is None:
            raise PeerUnavailable("relays are for those who have certificates")
        tunnel = await open_tunnel(relay, peer, self._wallet)
        # The port is of this machine, and whoever is at the far end of it is not.
        server_name = Principal(identity.cluster, Role.STAGE_SERVER, peer).dns
        channel = connect(tunnel.address, identity, server_name, PATIENT + connect_within(THROUGH_S_MAX))
        return await standing(Connection(channel, relay, tunnel), THROUGH_S_MAX, f"{peer} through relay {relay.name}")


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
