"""Peers in the service of jobs: every change of a peer goes to its job, to metrics and to the allocator.

Membership (pure) says what a change is; this module carries out its consequences.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.brain.fleet.allocation import Reservations
from scheduler.brain.fleet.membership import CALIBRATION_S_MAX, Membership, Transition, check_reference
from scheduler.brain.inputs import AskToLeave
from scheduler.brain.outputs import Struck
from scheduler.jobs.islands import place_at, place_of
from scheduler.jobs.job import Job, now_s, peers_max
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.storage.members.quarantine import Quarantine
from swarm.types import PeerId, PeerState
from swarm.wire.messages import Calibrate, Command, Hello, Release

CALIBRATE_EVERY_S = 1.0


class CommandSender(Protocol):
    """Sends commands down the sessions of stage servers."""

    def send(self, peer: PeerId, command: Command) -> None: ...


@dataclass(eq=False)
class Peers:
    """Assigns peers to jobs and releases them, and tells jobs of changes."""

    _ports: SchedulerPorts
    _registry: JobRegistry
    _membership: Membership
    _commands: CommandSender
    _tasks: asyncio.TaskGroup
    quarantine: Quarantine
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # there may be something to allocate
    changed_s: float = -math.inf  # when a peer last changed
    reservations: Reservations = field(default_factory=Reservations)
    is_stopping: bool = False  # the scheduler ends: changes of peers mean nothing from then on
    _counted: dict[PeerId, tuple[str, int | None, str]] = field(default_factory=dict)  # job, stage and state of each
    _counts: Counter[tuple[str, int | None, str]] = field(default_factory=Counter)

    def assign(self, job: Job, peer: PeerId, stage: int) -> None:
        """The idle peer loads a stage of the job; NotAllowed."""
        self.reservations.end(peer)
        self._tell(self._membership.assign(peer, job.record.id, stage, now_s()))

    def is_of(self, job: Job, hello: Hello) -> bool:
        """Whether the job's record, which outlives the scheduler, names the peer in the place that it says it serves.

        A Hello proves nothing by itself: believing it would give a stage, and a pass, to every peer that asks.
        """
        has_stage = 0 <= hello.stage < len(job.spec.split)
        return has_stage and job.record.peers.get(hello.peer) == place_of(job.spec, hello.timeline, hello.stage)

    def may_return(self, job: Job, hello: Hello) -> bool:
        """Whether the peer's place in the job is still free for it: others may have come."""
        place, most = place_of(job.spec, hello.timeline, hello.stage), peers_max(job)
        present = [peer for peer in self._membership.peers() if peer.job == job.record.id and not peer.leaving]
        beside = sum(place_at(job, peer.hello.peer, peer.stage) == place for peer in present)
        # Moves may have left a stage with more than its part of the most. It keeps them while another one has fewer.
        return most is None or len(present) < most or beside < job.spec.limits.max_replicas

    def adopt(self, job: Job, hello: Hello) -> None:
        """The idle peer continues with the stage that it holds."""
        self._tell(self._membership.adopt(hello.peer, job.record.id, hello.stage, now_s()))
        self.has(job, hello.peer, place_of(job.spec, hello.timeline, hello.stage))

    def serving(self, peer: PeerId) -> None:
        """The peer has everything that its stage needs."""
        self._tell(self._membership.serving(peer, now_s()))

    def leave(self, peer: PeerId, reason: str) -> None:
        """Let the peer hand its work over, and give it no new work."""
        self._tell(self._membership.leaving(peer, now_s(), reason))

    def stay(self, peer: PeerId) -> None:
        """Give the peer that has handed its work over stages again; NotAllowed while it has not."""
        self._tell(self._membership.stay(peer, now_s()))

    async def calibrate(self) -> None:
        """Let idle peers measure themselves while no job waits for peers, for ever."""
        while True:
            await asyncio.sleep(CALIBRATE_EVERY_S)
            if not self._registry.waiting() and (peer := self._membership.calibrate(now_s())) is not None:
                self._commands.send(peer, Calibrate(CALIBRATION_S_MAX))

    async def load(self) -> None:
        """Know who was quarantined before."""
        await self.quarantine.load()
        for peer in self.quarantine.names():
            self._membership.quarantine(peer, now_s(), self.quarantine.record(peer).told)

    def struck(self, job: Job, strike: Struck) -> None:
        """A job has found a peer to compute wrong numbers; it may be quarantined for that."""
        peer = strike.peer
        record = self.quarantine.strike(peer, strike.evidence, is_proven=strike.is_proven, checked=strike.checked)
        self._tasks.create_task(self.quarantine.keep(peer))
        if record.is_quarantined:
            self._tell(self._membership.quarantine(peer, now_s(), record.told))
            if job.run is not None:  # if it is still one of its replicas
                job.run.driver.tell(AskToLeave(peer, f"quarantined: {strike.evidence}"))

    async def free(self, reference: str) -> PeerId:
        """Let a quarantined peer have stages again; NotFound, NotAllowed."""
        check_reference(reference)
        names = self.quarantine.names()
        name = PeerId(reference) if reference in names else self._membership.find(reference).hello.peer
        await self.quarantine.release(name)
        self._tell(self._membership.free(name, now_s()))
        return name

    def release(self, job: Job, peer: PeerId, reason: str) -> None:
        """The peer was released by this job; if it serves another job by now, nothing happens."""
        known = self._membership.get(peer)
        if known is None or known.job != job.record.id:
            return
        self._tell(self._membership.release(peer, now_s(), reason))
        self._recount(peer)  # a suspect gives its job up without a transition
        if job.brain is not None and not job.brain.is_over:
            self.has(job, peer, None)

    def release_all(self, job: Job, reason: str) -> None:
        self.reservations.end_of(job.record.id)
        for known in self._membership.peers():
            if known.job == job.record.id:
                self._commands.send(known.hello.peer, Release(job.record.id, reason))
                self.release(job, known.hello.peer, reason)

    def has(self, job: Job, peer: PeerId, place: int | None) -> None:
        """Store that the peer has a place in the job, or (None) no longer: a restarted scheduler must know."""
        if self._registry.place(job, peer, place):
            self._tasks.create_task(self._registry.put(job))

    def on_transition(self, transition: Transition) -> None:
        if self.is_stopping:
            return
        self.changed_s = now_s()
        self.wake.set()
        known = self._membership.get(transition.peer)
        at = transition if transition.job or known is None else known
        where = {"job_id": at.job, "stage": at.stage} if at.job else {}
        self._ports.log.info(
            "peer changed state",
            peer=transition.peer,
            state=transition.after.value,
            reason=transition.reason,
            **where,
        )
        self._count(transition.peer)
        job = self._registry.get(transition.job)
        if job is not None and job.run is not None:
            job.run.driver.on_transition(transition)
            if transition.after is PeerState.GONE:
                self.has(job, transition.peer, None)
        if transition.after in (PeerState.GONE, PeerState.DRAINING):
            self.reservations.end(transition.peer)

    def send(self, peer: PeerId, command: Command) -> None:
        self._commands.send(peer, command)

    def _count(self, changed: PeerId) -> None:
        """Count the peers by state; only the one that changed is looked at."""
        self._recount(changed)
        if len(self._counted) > self._membership.count:  # some were forgotten meanwhile
            for peer in [peer for peer in self._counted if self._membership.get(peer) is None]:
                self._recount(peer)
        stages = {str(job.record.id): len(job.spec.split) for job in self._registry.all() if job.run is not None}
        self._ports.metrics.peers(self._counts, stages)

    def _recount(self, peer: PeerId) -> None:
        if (before := self._counted.pop(peer, None)) is not None:
            self._counts[before] -= 1
            if not self._counts[before]:
                del self._counts[before]
        if (known := self._membership.get(peer)) is not None:
            now = (str(known.job), known.stage if known.job else None, known.state.value)
            self._counted[peer] = now
            self._counts[now] += 1

    def _tell(self, transitions: Iterable[Transition]) -> None:
        for transition in transitions:
            self.on_transition(transition)
