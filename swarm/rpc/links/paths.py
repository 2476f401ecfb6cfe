"""The ways to a stage server: its own address, or one of two relays.

    relays, as the scheduler names them ──hash of (peer, relay)──▶ two for each peer, the same in every process
    direct ──no handshake in DIRECT_S──▶ a relay ──it carries──▶ that relay for KEPT_S, then direct again

A listening stage server and its dialler compute the same two relays, so no message has to name them. The
hash spreads the replicas of a stage over the relays. Time is an argument. Decision: docs/decisions/057.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from swarm.types import PeerId
from swarm.wire.messages import RelayAt

RELAYS_OF_PEER = 2
DIRECT_S = 0.3  # that the direct path has until relays are tried
KEPT_S = 600.0  # that a relay is preferred, once it was needed
BLAMED_S = 30.0  # that a relay comes last, once a link broke there
PEERS_KEPT_MAX = 8192

DIRECT = RelayAt("", "")


class Paths:
    """One process's knowledge of the ways to others."""

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

        def rank(one: RelayAt) -> bytes:
            return blake2b(f"{peer} {one.name}".encode(), digest_size=8).digest()

        return tuple(sorted(self._relays, key=rank)[:RELAYS_OF_PEER])

    def proxy_to(self, address: str) -> str:
        """The HTTP proxy through which an address is dialled; empty: none."""
        return "" if address.rpartition(":")[0] == self._host else self._proxy

    def order(self, address: str, peer: PeerId | None, now_s: float) -> list[RelayAt]:
        """The ways to try, in this order; DIRECT is one. `address` is the peer's own, or empty."""
        direct = [DIRECT] if address else []
        if peer is None:
            return direct
        relays = sorted(self.relays_of(peer), key=lambda one: self._blamed.get(one.name, 0.0) > now_s)
        name, until_s = self._won.get(peer, ("", 0.0))
        if until_s <= now_s or self._blamed.get(name, 0.0) > now_s:
            return [*direct, *relays]
        kept = [one for one in relays if one.name == name]
        return [*kept, *direct, *(one for one in relays if one.name != name)]

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
            known = {one.name for one in self._relays}
            self._blamed = {name: until_s for name, until_s in self._blamed.items() if name in known}
            self._blamed[way.name] = now_s + BLAMED_S
