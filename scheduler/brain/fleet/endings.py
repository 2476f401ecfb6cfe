"""The peers whose address shows whether their process has ended: an ended process listens no longer.

A session that broke may come back, so its peer has the grace period. A process that was killed does not: its machine
refuses connections at once at the port that the process had. That counts only

    once for each session, after it broke and while there is no other
    at the host from which the session came, as nobody else's word of a port counts
    at a port of the process itself: a tunnel or a router that forwards one fails without it
    at an address that could be dialled before (scheduler/api/members/reach.py), as far as that is known
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote

from scheduler.brain.fleet.membership import Peer
from swarm.types import PeerId, PeerState
from swarm.wire.messages import Hello


class Session(Protocol):
    """A session, and whence it came as gRPC names it: ipv4:203.0.113.7:40312."""

    @property
    def incarnation(self) -> int: ...

    @property
    def connection(self) -> str: ...


@dataclass(frozen=True, slots=True)
class _Origin:
    """Whence the newest session of a peer came."""

    incarnation: int
    connection: str

    def shows_end_of(self, one: Peer) -> bool:
        """Whether the peer's address would refuse connections if its process had ended."""
        host, hello = unquote(self.connection).partition(":")[2].rpartition(":")[0], one.hello
        is_own = hello.address.rpartition(":")[0] == host and not hello.forwarded
        return is_own and hello.incarnation == self.incarnation and not one.unreached


class Endings:
    """Remembers whence the newest session of each peer came, until it broke."""

    def __init__(self) -> None:
        self._origins: dict[PeerId, _Origin] = {}

    def look(self, peers: Iterable[Peer], session_of: Callable[[PeerId], Session | None]) -> list[Hello]:
        """The peers that shall be dialled now. Sessions that begin and break between two looks are not seen."""
        before, self._origins, found = self._origins, {}, []
        for one in peers:
            peer = one.hello.peer
            if (session := session_of(peer)) is not None:
                self._origins[peer] = _Origin(session.incarnation, session.connection)
            elif (origin := before.get(peer)) is None or one.state is PeerState.GONE:
                continue
            elif one.state is not PeerState.SUSPECT:
                self._origins[peer] = origin  # membership has not heard of it yet
            elif origin.shows_end_of(one):
                found.append(one.hello)
        return found
