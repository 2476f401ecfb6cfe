"""Who is here, suspect, draining, gone?"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.messages import Hello
from swarm.types import JobId, PeerId, PeerState

NO_STAGE = -1


@dataclass(frozen=True, slots=True)
class Transition:
    """A peer changed state."""

    peer: PeerId
    incarnation: int
    before: PeerState | None  # None: was unknown
    after: PeerState
    reason: str


@dataclass(slots=True)
class Peer:
    """What is known of one peer; read it, do not change it."""

    hello: Hello
    state: PeerState
    reason: str
    since_s: float
    heard_s: float
    job: JobId
    stage: int
    resume: PeerState  # where a suspect returns to


class Membership:
    """The pool of peers; methods give the transitions they caused."""

    def __init__(self, suspect_after_s: float = 3.0, grace_s: float = 10.0, forget_after_s: float = 600.0) -> None: ...

    def hello(self, hello: Hello, now_s: float) -> list[Transition]:
        """A session was dialled. StaleMessage if a newer incarnation is known; a newer one replaces the older."""
        raise NotImplementedError

    def heard(self, peer: PeerId, now_s: float) -> list[Transition]:
        raise NotImplementedError

    def disconnected(self, peer: PeerId, incarnation: int, now_s: float, reason: str = "") -> list[Transition]:
        raise NotImplementedError

    def tick(self, now_s: float) -> list[Transition]:
        raise NotImplementedError

    def assign(self, peer: PeerId, job: JobId, stage: int, now_s: float) -> list[Transition]:
        """IDLE -> LOADING."""
        raise NotImplementedError

    def serving(self, peer: PeerId, now_s: float) -> list[Transition]:
        """LOADING -> SERVING."""
        raise NotImplementedError

    def release(self, peer: PeerId, now_s: float, reason: str = "") -> list[Transition]:
        """Back to IDLE."""
        raise NotImplementedError

    def leaving(self, peer: PeerId, now_s: float, reason: str = "") -> list[Transition]:
        """-> DRAINING."""
        raise NotImplementedError

    def idle_peers(self) -> list[Peer]:
        """In order of peer id."""
        raise NotImplementedError

    def peers(self) -> list[Peer]:
        raise NotImplementedError

    def get(self, peer: PeerId) -> Peer | None:
        raise NotImplementedError
