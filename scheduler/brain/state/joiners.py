"""Joiners: peers on their way into a job at work, with their reports and the answers, until they are replicas.

    begin ──▶ fetches ──Loaded(version, digest)──▶ reported ──right and new enough──▶ admitted: a replica
                 ▲                                    │
                 └────────── Follow: answered ────────┘ too old: the job went on

A joiner keeps what it reported until it is answered, so a report stays true while it is judged. A joiner at version v
is admitted while v + 1 is not yet agreed by all replicas. The commits that it is missing are then still open, and the
job cannot advance past them without it, so it cannot fall behind again. A joiner as fast as the others gets in, however
short the steps are.

It lacks the averaged gradients of rounds in which it was no member, and fetches them from the logs of other replicas.

Decision: docs/decisions/028.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from scheduler.brain.inputs import ReplicaRecord
from swarm.types import Hop, PeerId
from swarm.wire.messages import Loaded

DONORS_MAX = 8  # named to one joiner: enough to share the load and to survive deaths, few enough for thousands of peers
PAUSE_S = 5.0  # before a peer that failed to join tries again; doubles with each time in a row
PAUSE_S_MAX = 300.0


@dataclass(slots=True)
class Joiner:
    """One attempt of one peer; `number` tells it from earlier ones."""

    replica: ReplicaRecord
    number: int
    since_s: float
    waits: bool = False  # it is not told yet what to fetch
    answered: int = 0  # reports
    answered_version: int = -1  # of the newest of them
    report: Loaded | None = None  # waits for an answer
    nonsense: int = 0  # events that no healthy peer sends


@dataclass(slots=True)
class _JoinFailures:
    count: int
    until_s: float
    reason: str


class Joiners:
    """All joiners of one job."""

    def __init__(self) -> None:
        self._joiners: dict[PeerId, Joiner] = {}
        self._failures: dict[PeerId, _JoinFailures] = {}
        self._number = 0

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._joiners

    def __len__(self) -> int:
        return len(self._joiners)

    def __iter__(self) -> Iterator[Joiner]:
        return iter(list(self._joiners.values()))

    def get(self, peer: PeerId) -> Joiner | None:
        return self._joiners.get(peer)

    def begin(self, replica: ReplicaRecord, now_s: float, *, waits: bool = False) -> Joiner:
        """Let the peer join the stage; an earlier attempt is forgotten."""
        self._number += 1
        joiner = self._joiners[replica.peer] = Joiner(replica, self._number, now_s, waits)
        return joiner

    def fetches(self, peer: PeerId, now_s: float) -> Joiner | None:
        """A joiner that waited may fetch from now on; None if there is none."""
        joiner = self._joiners.get(peer)
        if joiner is None or not joiner.waits:
            return None
        joiner.waits, joiner.since_s = False, now_s
        return joiner

    def reported(self, peer: PeerId, event: Loaded) -> bool:
        """The peer's state is complete; False if that is news of an earlier attempt, or was answered already.

        With a new session a peer repeats every report that was not answered; the versions that it reports only rise.
        """
        joiner = self._joiners.get(peer)
        if joiner is None or event.join != joiner.number or event.version <= joiner.answered_version:
            return False
        joiner.report = event
        return True

    def answer(self, joiner: Joiner) -> None:
        """Drop a report that was too old, and tell the joiner so."""
        assert joiner.report is not None
        joiner.answered_version = joiner.report.version
        joiner.report = None
        joiner.answered += 1

    def admitted(self, peer: PeerId) -> Joiner:
        """The peer is a replica now."""
        self._failures.pop(peer, None)
        return self._joiners.pop(peer)

    def forget(self, peer: PeerId) -> Joiner | None:
        """The peer is gone, or was taken out."""
        return self._joiners.pop(peer, None)

    def failed(self, peer: PeerId, reason: str, now_s: float) -> None:
        """The peer could not join: not again for a while."""
        self.forget(peer)
        count = self._failures[peer].count + 1 if peer in self._failures else 1
        pause_s = min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(count - 1, 10))
        self._failures[peer] = _JoinFailures(count, now_s + pause_s, reason)

    def barred(self, peer: PeerId, now_s: float) -> str:
        """Why the peer may not try now; empty if it may."""
        failures = self._failures.get(peer)
        if failures is None or failures.until_s <= now_s:
            return ""
        return f"it could not join ({failures.reason}); again in {failures.until_s - now_s:.0f} s"


def choose_donors(candidates: Sequence[Hop], rng: Random) -> tuple[Hop, ...]:
    """The donors that a joiner may ask: all candidates, or a random few of many."""
    return tuple(candidates if len(candidates) <= DONORS_MAX else rng.sample(list(candidates), DONORS_MAX))
