"""Admission of peers to a job at work: commands to joiners, their reports, and the verdict (state/joiners.py).

begin ──▶ LoadStage, Follow ──▶ Loaded ──▶ judged with every event ─┬─ new enough, the right bytes ──▶ admitted
              ▲                                                     ├─ too old ──▶ answered: it goes on following
              └── every commit, and its first digest ──▶ Follow     └─ other bytes, other sizes, too slow ──▶ refused

A joiner that waits builds its stage and hears no Follow, so it fetches nothing until `begin` comes for it once more.

Decision: docs/decisions/028.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from scheduler.brain.commit.commits import Commits
from scheduler.brain.inputs import Join
from scheduler.brain.outputs import Admitted, Send
from scheduler.brain.replicas.loading import Loading
from scheduler.brain.replicas.moves import Moves
from scheduler.brain.routing.dispatch import Dispatch
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.joiners import Joiner, choose_donors
from swarm.text import counted
from swarm.types import PeerId
from swarm.wire.messages import Admit, Event, Failed, Follow, Hello, Loaded

JOINER_BYTES_PER_S_MIN = 1e6
JOIN_S_MIN = 600.0
COMPILE_S_MAX = 1800.0


@dataclass(frozen=True, slots=True)
class Admission:
    """The joiners of one job, and the messages between them and the job."""

    _state: BrainState
    _loading: Loading
    _dispatch: Dispatch
    _commits: Commits
    _moves: Moves
    _rng: Random

    def begin(self, join: Join, now_s: float) -> None:
        """Let a peer fetch what its stage holds."""
        replica, joiners = join.replica, self._state.joiners
        if not join.waits and (joiner := joiners.fetches(replica.peer, now_s)) is not None:
            self._tell(joiner)
            return
        joiner = joiners.begin(replica, now_s, waits=join.waits)
        self._state.outbox.note("info", f"stage server {replica.peer} joins stage {replica.stage}")
        self._state.outbox.put(Send(replica.peer, self._loading.command(replica.stage, joiner.number)))
        self._tell(joiner)

    def tell(self, stage: int | None = None) -> None:
        """Send a new version to all joiners, or the known digest of a stage to its joiners."""
        for joiner in self._state.joiners:
            if stage is None or joiner.replica.stage == stage:
                self._tell(joiner)

    def hear(self, peer: PeerId, event: Event, now_s: float) -> None:
        """Handle an event of a joiner; events about an earlier life as a replica are ignored."""
        joiner = self._state.joiners.get(peer)
        assert joiner is not None
        match event:
            case Loaded() if self._state.joiners.reported(peer, event):
                fault = self._loading.unfit(joiner.replica, event)
                if fault:
                    self.refuse(joiner, fault, now_s)
            case Hello() if event.join == joiner.number and event.job == self._state.settings.job:
                self._tell(joiner)
            case Hello():
                self.refuse(joiner, "its session broke before it knew what to fetch", now_s)
            case Failed() if event.job == self._state.settings.job:
                self.refuse(joiner, event.message, now_s)

    def awaits(self, peer: PeerId, event: Event) -> bool:
        """Whether a joiner says for the first time that it has a state that is new enough."""
        joiner = self._state.joiners.get(peer)
        if joiner is None or joiner.report is not None or not isinstance(event, Loaded):
            return False
        return event.join == joiner.number and event.version >= self._state.progress.agreed

    def refuse(self, joiner: Joiner, reason: str, now_s: float) -> None:
        """Turn the joiner away, at least for now."""
        peer = joiner.replica.peer
        self._state.joiners.failed(peer, reason, now_s)
        told = f"stage server {peer} could not join stage {joiner.replica.stage}: {reason}"
        self._state.outbox.note("warning", told)
        self._state.outbox.release(peer, reason)

    def judge(self, now_s: float) -> None:
        """Admit the joiners whose reported state is right and new enough, and answer the others.

        One at a time: a joiner that was admitted is a donor of those after it.
        """
        for joiner in self._state.joiners:
            report = joiner.report
            if report is None and now_s >= self._too_long_s(joiner):
                self.refuse(joiner, "it takes too long to fetch the state", now_s)
            if report is None:
                continue
            if report.version < self._state.progress.agreed:
                self._state.joiners.answer(joiner)
                self._tell(joiner)
                continue
            digest = self._state.progress.digest_at(joiner.replica.stage, report.version)
            if digest and digest != report.digest:
                fault = f"its state of version {report.version} is not that of the replicas"
                self.refuse(joiner, fault, now_s)
            elif digest:
                self._state.joiners.admitted(joiner.replica.peer)
                self._admit(joiner, report, now_s)

    def times_s(self) -> list[float]:
        """When each joiner that still fetches will have taken too long."""
        return [self._too_long_s(one) for one in self._state.joiners if one.report is None]

    def _admit(self, joiner: Joiner, report: Loaded, now_s: float) -> None:
        """The joiner is a replica from now on."""
        settings, pool, outbox = self._state.settings, self._state.pool, self._state.outbox
        replica, version, took_s = joiner.replica, report.version, now_s - joiner.since_s
        peer = replica.peer
        pool.joined(replica, report, now_s)
        self._dispatch.add(peer)
        self._dispatch.open_window()
        self._moves.fetched(replica.stage, took_s)
        outbox.put(Admitted(peer, replica.stage))
        took = f"it took {took_s:.1f} s to get the weights after {counted(version, 'step')}"
        outbox.note("info", f"{pool.name(peer)} joined: {took}")
        outbox.send(peer, Admit(settings.job, settings.timeline, joiner.number, version))
        self._loading.begins_with(peer, report)
        self._commits.send_since(peer, version)

    def _tell(self, joiner: Joiner) -> None:
        """Tell a joiner what is new: versions, digest, donors, and that its report was seen."""
        if joiner.waits:
            return
        settings, progress, replica = self._state.settings, self._state.progress, joiner.replica
        version = progress.committed
        known = progress.digest_at(replica.stage, version)
        agreed = (version, known) if known else (progress.agreed, progress.agreed_digest(replica.stage))
        donors = choose_donors(self._state.pool.donors(replica.stage, version, replica.peer), self._rng)
        follow = Follow(settings.job, settings.timeline, joiner.number, version, *agreed, donors, joiner.answered)
        self._state.outbox.put(Send(replica.peer, follow))

    def _too_long_s(self, joiner: Joiner) -> float:
        """When a joiner will have taken too long: moves wait for it, and it counts as a replica to come."""
        if joiner.waits:
            return math.inf
        settings = self._state.settings
        fetch_s = settings.state_bytes[joiner.replica.stage] / JOINER_BYTES_PER_S_MIN if settings.state_bytes else 0.0
        return joiner.since_s + JOIN_S_MIN + (COMPILE_S_MAX if settings.compiles else 0.0) + fetch_s
