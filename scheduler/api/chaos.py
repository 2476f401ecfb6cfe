"""`swarm chaos` at the scheduler: orders a fault, and reports how the job recovers, as the scheduler sees it.

Times are counted from the order. A job has recovered when two more steps are committed: those that were open when the
fault began. The balance comes from the brain, which alone counts. If the job lost a stage, it is the balance since the
checkpoint that the job resumed from.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from scheduler.api.sessions import Connections, SessionListener
from scheduler.brain.explain.situation import Counts
from scheduler.brain.fleet.membership import Membership, Peer, Transition
from scheduler.jobs.commands import Jobs
from scheduler.jobs.driver import Brain
from scheduler.jobs.job import Job
from swarm.errors import InvalidConfig, NotAllowed, NotFound
from swarm.types import JobState, PeerId, PeerState
from swarm.wire import jobs_pb2 as pb
from swarm.wire.messages import Chaos, ChaosBegun, Event

FAULTS = ("kill", "freeze", "slow", "partition", "corrupt")
ANSWER_S_MAX = 5.0  # until the stage server confirms that the fault begins
WATCH_S_MAX = 60.0  # beyond the fault's own time
LOOK_S = 0.01
STEPS_UNTIL_RECOVERED = 2
FOR_S_MAX = 3600.0
FACTOR_MAX = 1e4
NEVER = -1.0


@dataclass(slots=True)
class _Watched:
    """The observations of one peer during a fault."""

    ordered_s: float
    answer: asyncio.Future[str]
    entered_s: dict[PeerState, float] = field(default_factory=dict)  # first time each, since the order

    def since_order_s(self, state: PeerState) -> float:
        at_s = self.entered_s.get(state)
        return NEVER if at_s is None else at_s - self.ordered_s


@dataclass(frozen=True, slots=True)
class ChaosDesk:
    """Takes one order per peer, and hears sessions before `inner` does."""

    _inner: SessionListener
    _jobs: Jobs
    _membership: Membership
    _connections: Connections
    _watched: dict[PeerId, _Watched] = field(default_factory=dict)

    # The listener ------------------------------------------------------------------------------------------------

    def on_event(self, peer: PeerId, event: Event) -> None:
        watched = self._watched.get(peer)
        if isinstance(event, ChaosBegun) and watched is not None and not watched.answer.done():
            watched.answer.set_result(event.refusal)
        self._inner.on_event(peer, event)

    def on_transition(self, transition: Transition) -> None:
        watched = self._watched.get(transition.peer)
        if watched is not None:
            watched.entered_s.setdefault(transition.after, _now_s())
        self._inner.on_transition(transition)

    # Orders ------------------------------------------------------------------------------------------------------

    async def inflict(self, request: pb.ChaosRequest) -> pb.ChaosReport:
        """Harm a stage server and watch its job; NotFound, InvalidConfig, NotAllowed."""
        _check(request)
        peer = self._find(request.peer)
        other = self._find(request.against) if request.against else None
        if other is not None and request.fault != "partition":
            raise InvalidConfig("only a partition is against somebody", hint="leave --against out")
        if peer.hello.peer in self._watched:
            raise NotAllowed(f"{peer.hello.peer} is harmed already", hint="wait until that is over")
        watched = _Watched(_now_s(), asyncio.get_running_loop().create_future())
        self._watched[peer.hello.peer] = watched
        try:
            return await self._watch(request, peer, other, watched)
        finally:
            del self._watched[peer.hello.peer]

    async def _watch(
        self, request: pb.ChaosRequest, peer: Peer, other: Peer | None, watched: _Watched
    ) -> pb.ChaosReport:
        name, stage = peer.hello.peer, peer.stage
        job = self._jobs.registry.get(peer.job)
        brain = job.brain if job is not None else None
        before = brain.counts() if brain is not None else None
        against, address = (other.hello.peer, other.hello.address) if other is not None else (PeerId(""), "")
        order = Chaos(request.fault, request.for_s, request.factor, against, address, request.seed)
        self._connections.send(name, order)
        await self._answered(name, watched)

        lasts_s = 0.0 if request.fault == "kill" else request.for_s
        until_s = watched.ordered_s + lasts_s + WATCH_S_MAX
        rerouted_s = recovered_s = NEVER
        while _now_s() < until_s:
            since_s = _now_s() - watched.ordered_s
            if job is None or brain is None or before is None:
                if since_s >= lasts_s:
                    break
            else:
                if (current := job.brain) is not None and current is not brain:
                    # A stage was lost: the job resumes from a checkpoint, with a new ledger.
                    brain, before, recovered_s = current, current.counts(), NEVER
                if rerouted_s == NEVER and brain.counts().rerouted > before.rerouted:
                    rerouted_s = watched.since_order_s(PeerState.SUSPECT)
                    rerouted_s = since_s if rerouted_s == NEVER else rerouted_s  # one decision, one moment
                if (
                    recovered_s == NEVER
                    and brain.counts().committed_steps >= before.committed_steps + STEPS_UNTIL_RECOVERED
                ):
                    recovered_s = since_s
                lost = request.fault != "kill" or PeerState.GONE in watched.entered_s
                ended = brain.is_over and (job.record.state.is_final or job.record.state is JobState.PAUSED)
                if ended or (recovered_s != NEVER and since_s >= lasts_s and lost):
                    break
            await asyncio.sleep(LOOK_S)
        report = pb.ChaosReport(
            fault=request.fault,
            peer=name,
            stage=stage,
            suspect_s=watched.since_order_s(PeerState.SUSPECT),
            gone_s=watched.since_order_s(PeerState.GONE),
            rerouted_s=rerouted_s,
            recovered_s=recovered_s,
            watched_s=_now_s() - watched.ordered_s,
        )
        if job is not None and brain is not None and before is not None:
            _tell(report, job, brain, before)
        return report

    async def _answered(self, peer: PeerId, watched: _Watched) -> None:
        """Wait until the stage server confirms the fault; if it ends, that is an answer too."""
        deadline_s = _now_s() + ANSWER_S_MAX
        while not watched.answer.done() and not watched.entered_s:
            if _now_s() > deadline_s:
                raise NotAllowed(f"{peer} did not answer the order within {ANSWER_S_MAX:g} s")
            await asyncio.sleep(LOOK_S)
        if watched.answer.done() and watched.answer.result():
            raise NotAllowed(
                f"{peer}: {watched.answer.result()}", hint="start it with: swarm stage-server --allow-chaos ..."
            )

    def _find(self, name: str) -> Peer:
        found = self._membership.find(name)
        if found.state is PeerState.GONE:
            raise NotFound(
                f"stage server {found.hello.peer} is gone: {found.reason}", hint="list them with: swarm peers"
            )
        return found


def _check(request: pb.ChaosRequest) -> None:
    if request.fault not in FAULTS:
        raise InvalidConfig(f"there is no fault {request.fault!r}", hint=f"one of: {', '.join(FAULTS)}")
    if not (math.isfinite(request.for_s) and 0.0 < request.for_s <= FOR_S_MAX):
        raise InvalidConfig(f"a fault lasts above 0 and up to {FOR_S_MAX:g} s, not {request.for_s:g}")
    if not (math.isfinite(request.factor) and 1.0 <= request.factor <= FACTOR_MAX):
        raise InvalidConfig(f"the factor is 1 to {FACTOR_MAX:g}, not {request.factor:g}")
    if request.seed >= 1 << 63:
        raise InvalidConfig(f"the seed is below 2^63, not {request.seed}")


def _tell(report: pb.ChaosReport, job: Job, brain: Brain, before: Counts) -> None:
    now = brain.counts()
    report.job = job.record.id
    report.job_state = job.record.state.value
    report.job_reason = job.record.reason
    report.microbatches_fed = now.fed
    report.microbatches_committed = now.microbatches
    report.microbatches_in_flight = now.in_flight
    report.committed = now.microbatches - before.microbatches
    report.replayed = now.replayed - before.replayed
    report.rerouted = now.rerouted - before.rerouted
    report.duplicates = now.duplicates - before.duplicates
    report.violations = now.violations - before.violations
    surplus = [
        after - earlier - report.committed for after, earlier in zip(now.accumulated, before.accumulated, strict=True)
    ]
    report.lost = -sum(min(0, one) for one in surplus)
    report.counted_twice = sum(max(0, one) for one in surplus)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
