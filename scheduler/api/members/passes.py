"""Passes of stage servers: the job and stage of each, signed, so that the peers that it dials need not ask.

A pass goes down the session right before the stage that it is for, and anew every RENEW_S. It is good for PASS_LIFE_S,
so a revoked stage server soon has none; `CutOff` tells all others at once and only saves these minutes.

Decisions: docs/decisions/052, 053.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler.api.sessions import Connections
from scheduler.brain.fleet.membership import Membership
from scheduler.jobs.islands import timeline_of
from scheduler.jobs.registry import JobRegistry
from swarm.pki.passes import PassKey
from swarm.rpc.passes import issue
from swarm.types import PeerId
from swarm.wire.messages import Command, CutOff, LoadStage, Pass, RelayAt, TakePass, Welcome

PASS_LIFE_S = 600.0
RENEW_S = 300.0
LOOK_S = 5.0  # between two looks for peers that need a new one
_KEPT_S = 2 * PASS_LIFE_S  # that peers which attach hear of a revocation


@dataclass(frozen=True, slots=True)
class Issuer:
    """The key and the clock with which a scheduler issues passes."""

    key: PassKey
    cluster: str
    revoked: tuple[CutOff, ...] = ()  # under earlier starts


@dataclass(eq=False)
class Passes:
    """Sends commands down the sessions, and each LoadStage with a pass for it."""

    _issuer: Issuer
    _registry: JobRegistry
    _membership: Membership
    _connections: Connections
    _wall_s: Callable[[], float]
    _start: tuple[float, float] | None = None
    _issued: dict[PeerId, float] = field(default_factory=dict)  # the newest, by our clock
    relays: tuple[RelayAt, ...] = ()  # that are here
    on_cut_off: Callable[[CutOff], None] = lambda order: None  # relays hear of it, too

    def __post_init__(self) -> None:
        self._revoked = {order.peer: order for order in self._issuer.revoked}

    def welcome(self, peer: PeerId, heartbeat_s: float) -> Welcome:
        """The first command of a session."""
        now_unix_s = self._now_unix_s()
        self._revoked = {one: cut for one, cut in self._revoked.items() if now_unix_s - cut.unix_s < _KEPT_S}
        cut_off = tuple(self._revoked.values())
        return Welcome(peer, heartbeat_s, self._issuer.key.public, now_unix_s, cut_off, self.relays)

    def send(self, peer: PeerId, command: Command) -> None:
        """Send a command, as CommandSender does."""
        if isinstance(command, LoadStage):
            self.renew(peer)
        self._connections.send(peer, command)

    def renew(self, peer: PeerId) -> None:
        """Give the peer a pass for the stage that it serves now, if any."""
        known, session = self._membership.get(peer), self._connections.get(peer)
        job = None if known is None else self._registry.get(known.job)
        if known is None or session is None or job is None:
            return
        now_unix_s = self._issued[peer] = self._now_unix_s()
        given = Pass(
            cluster=self._issuer.cluster,
            job=job.record.id,
            timeline=timeline_of(job, peer),
            peer=peer,
            incarnation=session.incarnation,
            stage=known.stage,
            stages=len(job.spec.split),
            issued_unix_s=now_unix_s,
            expires_unix_s=now_unix_s + PASS_LIFE_S,
        )
        self._connections.send(peer, TakePass(issue(self._issuer.key, given)))

    def cut_off(self, peer: PeerId) -> None:
        """The peer was revoked: everybody is to end its streams, and to take none with the passes that it has."""
        order = self._revoked[peer] = CutOff(peer, self._now_unix_s())
        self._issued.pop(peer, None)
        for other, _ in self._connections.all():
            if other != peer:
                self._connections.send(other, order)
        self.on_cut_off(order)

    async def keep(self) -> None:
        """Renew passes in time, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            attached = {peer for peer, _ in self._connections.all()}
            self._issued = {peer: issued for peer, issued in self._issued.items() if peer in attached}
            for peer in [peer for peer, issued in self._issued.items() if self._now_unix_s() - issued >= RENEW_S]:
                self.renew(peer)
                await asyncio.sleep(0)  # a signature at a time, between other things

    def _now_unix_s(self) -> float:
        """The wall clock at the first call, and the time since: a clock that is set right must not end any pass."""
        loop_s = asyncio.get_running_loop().time()
        started_s, started_unix_s = self._start = self._start or (loop_s, self._wall_s())
        return started_unix_s + loop_s - started_s
