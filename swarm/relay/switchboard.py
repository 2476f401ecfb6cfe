"""Decides which stage servers a relay connects: listeners, with callers of the same job. No I/O; time is an argument.

    Listen(pass of H) ──▶ H listens for the job of its pass
    Connect(to=H, pass of N) ──same job──▶ Open(connection) ──▶ Accept(connection) by H, once, within OPEN_S_MAX

A pass is the scheduler's statement of the job and stage that its holder serves. A relay connects no caller without a
pass, and none to stage servers of another job.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from secrets import token_hex

from swarm.errors import NoPass, PeerUnavailable, Refused, RetryElsewhere, Revoked
from swarm.limits import RELAY_LINKS_MAX, RELAY_LINKS_OF_ONE_MAX
from swarm.types import PeerId
from swarm.wire.messages import Pass


@dataclass(frozen=True, slots=True)
class Opening:
    """A link that waits to be accepted, or stands."""

    connection: str
    shown: Pass  # of the one that dialled
    to: PeerId


@dataclass(eq=False, slots=True)
class Listening:
    """The line to a listening stage server: the openings that it should accept; None ends the line."""

    openings: asyncio.Queue[Opening | None] = field(default_factory=asyncio.Queue)
    shown: Pass | None = None


class Switchboard:
    """The switchboard of one relay; lines are only passed on here."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._listening: dict[PeerId, Listening] = {}
        self._waiting: dict[str, Opening] = {}
        self._links: Counter[PeerId] = Counter()  # that wait or stand, by the one that listens
        self._of_one: Counter[tuple[PeerId, PeerId]] = Counter()  # the same, by who dialled and who listens
        self._cut: dict[PeerId, float] = {}  # who was revoked, and when

    @property
    def listeners(self) -> int:
        return len(self._listening)

    # Who listens ------------------------------------------------------------------------------------------------

    def listen(self, peer: PeerId, line: Listening) -> Listening | None:
        """The peer listens on this line; gives the older line that it replaces."""
        older = self._listening.get(peer)
        self._listening[peer] = line
        return older

    def show(self, peer: PeerId, line: Listening, shown: Pass | None, now_unix_s: float) -> None:
        """The pass of the peer from now on; None: it serves nothing. NoPass, Revoked."""
        if shown is not None:
            self._check(shown, peer, now_unix_s)
        line.shown = shown

    def hang_up(self, peer: PeerId, line: Listening) -> None:
        """The line has ended."""
        if self._listening.get(peer) is line:
            del self._listening[peer]

    # Who is put through -----------------------------------------------------------------------------------------

    def connect(self, caller: PeerId, shown: Pass, to: PeerId, now_unix_s: float) -> tuple[Opening, Listening]:
        """A new link that waits for `to`, and the line that announces it to `to`.

        NoPass, Revoked; PeerUnavailable if `to` does not listen for the job; RetryElsewhere if it has too many links.
        """
        self._check(shown, caller, now_unix_s)
        listening = self._listening.get(to)
        if listening is None:
            raise PeerUnavailable(f"{to} does not listen here")
        theirs = listening.shown
        if theirs is None or theirs.job != shown.job or now_unix_s >= theirs.expires_unix_s:
            raise NoPass(f"{to} does not serve job {shown.job}")
        if self._links[to] >= RELAY_LINKS_MAX:
            raise RetryElsewhere(f"{RELAY_LINKS_MAX} links lead to {to} already")
        if self._of_one[caller, to] >= RELAY_LINKS_OF_ONE_MAX:
            raise RetryElsewhere(f"{RELAY_LINKS_OF_ONE_MAX} links lead from {caller} to {to} already")
        opening = Opening(token_hex(16), shown, to)
        self._waiting[opening.connection] = opening
        self._links[to] += 1
        self._of_one[caller, to] += 1
        return opening, listening

    def accept(self, caller: PeerId, connection: str) -> Opening:
        """The link that was offered to the caller; Refused for another's link, or one that was accepted."""
        opening = self._waiting.get(connection)
        if opening is None or opening.to != caller:
            raise Refused(f"no link of this name waits for {caller}")
        return self._waiting.pop(connection)

    def ended(self, opening: Opening) -> None:
        """The link has ended, or was never accepted; called once."""
        self._waiting.pop(opening.connection, None)
        self._links -= Counter((opening.to,))
        self._of_one -= Counter(((opening.shown.peer, opening.to),))

    def cut_off(self, peer: PeerId, unix_s: float) -> Listening | None:
        """Make all passes of a revoked peer void that were issued until then. Returns its line, if it listens."""
        self._cut[peer] = max(unix_s, self._cut.get(peer, 0.0))
        return self._listening.pop(peer, None)

    def _check(self, shown: Pass, holder: PeerId, now_unix_s: float) -> None:
        if shown.cluster != self._cluster:
            raise NoPass(f"the pass is of swarm {shown.cluster}")
        if shown.peer != holder:
            raise NoPass(f"{holder} showed the pass of {shown.peer}")
        if now_unix_s >= shown.expires_unix_s:
            raise NoPass(f"the pass of {holder} has ended")
        if shown.issued_unix_s <= self._cut.get(holder, 0.0):
            raise Revoked(f"stage server {holder} was revoked after the pass was issued")
