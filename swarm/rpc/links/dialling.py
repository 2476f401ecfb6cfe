"""How a stage server is dialled: at its address, or through a relay if that does not answer in time.

Without relays a channel is given at once and dials on first use, as ever. With them it is given once it stands.

On a slow link a ping waits behind tensors, so pings are patient: links see by acknowledgements whether a neighbour
lives (peers.py).

Decision: docs/decisions/057.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import grpc
import grpc.aio

from swarm.errors import NoWay, PeerUnavailable, RelaySilent, SwarmError
from swarm.pki.identity import Wallet
from swarm.pki.names import Principal, Role
from swarm.rpc.channel import PATIENT, connect, connect_to_peer, connect_within, through_proxy
from swarm.rpc.links.tunnel import Tunnel, open_tunnel
from swarm.types import PeerId
from swarm.wire.messages import RelayAt

HANDSHAKE_S_MAX = 3.0  # with the peer, where there is no other way
THROUGH_S_MAX = 10.0  # with a peer that has just accepted: each turn waits behind all that the relay carries
RELAYS_OF_PEER = 2
DIRECT_S = 0.3  # that the direct path has until relays are tried
KEPT_S = 600.0  # that a relay is preferred, once it was needed
BLAMED_S = 30.0  # that a relay comes last, once a link broke there
PEERS_KEPT_MAX = 8192

DIRECT = RelayAt("", "")


class Paths:
    """The ways to a stage server: its own address, or one of two relays.

        relays, as the scheduler names them ──hash of (peer, relay)──▶ two for each peer, the same in every process
        direct ──no handshake in DIRECT_S──▶ a relay ──it carries──▶ that relay for KEPT_S, then direct again

    A listening stage server and its dialler compute the same two relays, so no message has to name them. The hash
    spreads the replicas of a stage over the relays. Time is an argument.
    """

    def __init__(self, relays: Sequence[RelayAt] = (), proxy: str = "", host: str = "") -> None:
        """`proxy`: an HTTP proxy on the way to all hosts but this process's own `host`; empty: none."""
        self._relays = tuple(relays)
        self._proxy, self._host = proxy, host
        self._won: dict[PeerId, tuple[str, float]] = {}  # the relay that carried, and until when it is preferred
        self._blamed: dict[str, float] = {}  # relays, and until when

    def know(self, relays: Sequence[RelayAt]) -> None:
        """These relays are here now."""
        self._relays = tuple(relays)

    def relays_of(self, peer: PeerId) -> tuple[RelayAt, ...]:
        """Where a stage server listens that others cannot dial."""

        def rank(relay: RelayAt) -> bytes:
            return blake2b(f"{peer} {relay.name}".encode(), digest_size=8).digest()

        return tuple(sorted(self._relays, key=rank)[:RELAYS_OF_PEER])

    def proxy_to(self, address: str) -> str:
        """The HTTP proxy through which an address is dialled; empty: none."""
        return "" if address.rpartition(":")[0] == self._host else self._proxy

    def order(self, address: str, peer: PeerId | None, now_s: float) -> list[RelayAt]:
        """The ways to try, in this order; DIRECT is one. `address` is the peer's own, or empty."""
        direct = [DIRECT] if address else []
        if peer is None:
            return direct
        relays = sorted(self.relays_of(peer), key=lambda relay: self._blamed.get(relay.name, 0.0) > now_s)
        name, until_s = self._won.get(peer, ("", 0.0))
        if until_s <= now_s or self._blamed.get(name, 0.0) > now_s:
            return [*direct, *relays]
        kept = [relay for relay in relays if relay.name == name]
        return [*kept, *direct, *(relay for relay in relays if relay.name != name)]

    def carried(self, peer: PeerId, way: RelayAt, now_s: float) -> None:
        """This way led to the peer."""
        self._blamed.pop(way.name, None)
        if way == DIRECT:
            self._won.pop(peer, None)
        elif self._won.get(peer, ("", 0.0))[0] != way.name or self._won[peer][1] <= now_s:
            if len(self._won) >= PEERS_KEPT_MAX:
                del self._won[next(iter(self._won))]
            self._won[peer] = way.name, now_s + KEPT_S

    def blame(self, way: RelayAt, now_s: float) -> None:
        """A link broke at this relay, or it does not answer: it comes last for all peers."""
        if way != DIRECT:
            known = {relay.name for relay in self._relays}
            self._blamed = {name: until_s for name, until_s in self._blamed.items() if name in known}
            self._blamed[way.name] = now_s + BLAMED_S


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
