"""Dispatches microbatches to replicas: routes for new ones, new replicas for hops lost, late or not delivered.

    feed ──▶ route ──all accumulated──▶ done         FlightWindow: the most microbatches in flight
      ▲         │
    refill ◀────┴── orphans: taken from a suspect, a late replica or an end of a failing link; void with a lost replica

A microbatch is given again only at stages where no replica holds it. Where one does, that replica keeps it, and its
neighbours on the new route get the route.

A replica that passed its deadline is late only if it also took more than three times what the stage's fastest one would
need for the same queue. Not chosen: the deadline alone, because a tenth of all work was then done twice.

Decision: docs/decisions/022.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from scheduler.brain.routing.evaluation import Evaluations
from scheduler.brain.routing.loads import Loads
from scheduler.brain.routing.policies import POLICIES, StageLoad
from scheduler.brain.routing.stragglers import Stragglers
from scheduler.brain.state.brain_state import BrainState
from scheduler.brain.state.ledger import Verdict
from scheduler.brain.state.links import LINK_DEAD_S
from scheduler.brain.state.step import Phase, StepRun
from swarm.text import counted
from swarm.types import Direction, EvaluationBatch, Hop, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Evaluate, EvaluationUndelivered, Forwarded, Route, Undelivered

QUEUE_SLACK = 3.0  # a hop is late after this many times what the fastest replica would need for the same queue
FIRST_SLACK = 10.0  # for a replica that was never measured: its first computations prepare the device
RELAX_S = 5.0  # how often a slow replica without work is assumed to have become a little faster


class Dispatch:
    """The routes of one job."""

    def __init__(self, state: BrainState, loads: Loads, evaluations: Evaluations, rng: Random) -> None:
        self._state = state
        self._loads = loads
        self._evaluations = evaluations
        self._rng = rng
        self._policy = POLICIES[state.settings.routing]()
        self._stragglers = Stragglers(state.settings.deadlines)
        self._stages = len(state.settings.split)
        self._window = FlightWindow(state)
        self._why_not = ""  # why a microbatch could not be given away
        self._relax_s = 0.0  # when to look at replicas without work
        self._relaxes = False  # some of them are believed to be slow

    # Who may be given work ---------------------------------------------------------------------------------------

    def add(self, peer: PeerId) -> None:
        self._policy.add(peer, self._state.pool.stage_of(peer))
        self._loads.add(peer)

    def remove(self, peer: PeerId, stage: int) -> None:
        self._state.links.forget(peer)
        self._stragglers.forget_peer(peer)
        self._evaluations.withdraw(peer)
        self._policy.remove(peer)
        self._loads.remove(peer, stage)
        self._window.changed()

    def pause(self, peer: PeerId) -> None:
        """No new work for a replica that leaves; it finishes what it has."""
        self._policy.remove(peer)
        self._loads.changed(peer)
        self._window.changed()

    def suspect(self, peer: PeerId, reason: str, now_s: float) -> None:
        """Give a suspect no new work, and its unfinished hops to others."""
        self._stragglers.forget_peer(peer)
        self.pause(peer)
        self._evaluations.withdraw(peer)
        for run in self._state.progress.redoable():
            self._state.ledger.withdraw(run.step, peer, f"suspect, {reason}", now_s)

    def go_on(self, peer: PeerId) -> None:
        """Let a replica have new work again, unless something else forbids it."""
        if self._state.pool.may_work(peer):
            self._policy.add(peer, self._state.pool.stage_of(peer))
        self._loads.changed(peer)
        self._window.changed()

    def open_window(self) -> None:
        """Set the most microbatches in flight, for the replicas that are here."""
        self._window.open()

    # What replicas say -------------------------------------------------------------------------------------------

    def forwarded(self, peer: PeerId, event: Forwarded, now_s: float) -> None:
        self._stragglers.forwarded(event.microbatch.step, event.stage, event.microbatch.index, peer, now_s)

    def accumulated(self, peer: PeerId, event: Accumulated, now_s: float) -> str:
        """A replica added a microbatch to its sums; gives the fault if it was never asked for it."""
        step, index = event.microbatch.step, event.microbatch.index
        run = self._state.progress.runs.get(step)
        if run is not None and not run.can_be_redone:
            # All members proved their sets when they sealed; nothing can have been added to them since.
            self._state.ledger.duplicates += 1
            return ""
        verdict = self._state.ledger.accumulated(peer, event, now_s)
        if verdict in (Verdict.COUNTED, Verdict.SECOND):
            self._loads.measured(peer, event.forward_s + event.backward_s)
            self._policy.done(peer, event.forward_s + event.backward_s + event.wait_s)
            self._stragglers.accumulated(step, event.stage, index, peer, now_s)
        if verdict is Verdict.COUNTED:
            self._window.accumulated(event, now_s)
        return f"accumulated {event.microbatch} without being asked" if verdict is Verdict.UNASKED else ""

    def evaluation_undelivered(self, peer: PeerId, event: EvaluationUndelivered, now_s: float) -> None:
        """A link failed: give what is evaluated at its far end to other replicas."""
        if event.to in self._state.pool:
            self._state.links.accuse(peer, event.to, now_s)
            self._evaluations.withdraw(event.to)

    def undelivered(self, peer: PeerId, event: Undelivered, now_s: float) -> tuple[PeerId, str] | None:
        """A link failed: give the hop at one of its ends to another replica.

        If the end that lacks something has no substitute, all that the other end did for the step must become void
        once the link has failed for a while; the result names that replica and the cause.
        """
        step, index = event.microbatch.step, event.microbatch.index
        run, stage = self._state.progress.runs.get(step), self._state.pool.stage_of(peer)
        if run is None or run.phase is not Phase.FEEDING or event.to not in self._state.pool:
            return None
        self._state.links.accuse(peer, event.to, now_s)
        hops = self._state.ledger.hops(step, index)
        if not 0 <= event.stage < self._stages or abs(event.stage - stage) != 1:
            self._state.ledger.violations += 1
            return None
        far, near = hops[event.stage], hops[stage]
        if far is None or (far.peer, far.attempt) != (event.to, event.attempt) or near is None or near.peer != peer:
            return None  # moved since
        ends = ((event.to, event.stage), (peer, stage))
        lacking = [at for end, at in ends if self._state.ledger.holder(step, at, index) != end]
        if not lacking:
            return None  # both have what they need: only a receipt was lost
        cause = f"{peer} cannot reach {event.to}: {event.reason}"
        movable = [(end, at) for end, at in ends if self._has_other(at, hops)]
        undone = next((at for _, at in movable if at in lacking), None)
        if undone is None:
            is_dead = self._state.links.failed_for_s(peer, event.to, now_s) >= LINK_DEAD_S
            return (movable[0][0], cause) if movable and is_dead else None
        self._state.ledger.take(step, undone, index, cause, now_s)
        return None

    def close(self, step: int) -> None:
        """The step's row is durable: stop waiting for its hops."""
        if not self._state.course.is_outer(step):
            self._state.ledger.close(step)
        self._stragglers.forget_step(step)
        self._window.close(step)

    # Giving microbatches away ------------------------------------------------------------------------------------

    def feed(self, now_s: float, *, new_steps: bool) -> None:
        """Feed microbatches in order, older steps first, while there is room in flight and their weights are made."""
        progress, ledger = self._state.progress, self._state.ledger
        while ledger.away() < self._window.most:
            unfed = ((step, ledger.unfed(step)) for step in ledger.open_steps())
            step, index = next(((s, i) for s, i in unfed if i is not None), (progress.next, 0))
            opens = step == progress.next
            if opens and not (new_steps and self._may_open(step)):
                return
            if self._state.version_of(step, index) > progress.committed:
                return
            if opens:
                progress.begin(step)
                ledger.open(step)
            peers = self._choose([None] * self._stages, step, now_s)
            if peers is None:
                return
            for peer in peers:
                self._policy.given(peer)
            index = ledger.feed(step, [self._hop(peer, step) for peer in peers], now_s)
            self._window.fed(step, index, now_s)
            self._send_route(step, index, now_s)

    def refill(self, run: StepRun, now_s: float, *, keep: bool = False) -> None:
        """Give every orphan a new hop; a microbatch that a replica already holds stays with that replica.

        `keep`: a hop without a holder goes to the replica that was at work on it before.
        """
        raised = False
        for index, stages in self._state.ledger.orphans(run.step):
            kept = self._state.ledger.hops(run.step, index)
            fixed = [hop.peer if hop else self._state.ledger.holder(run.step, s, index) for s, hop in enumerate(kept)]
            if keep:
                before = [self._state.ledger.at_work(run.step, stage, index) for stage in range(self._stages)]
                usable = set(self._state.pool) - set(self._state.pool.suspects())
                fixed = [one or (asked if asked in usable else None) for one, asked in zip(fixed, before, strict=True)]
            peers = self._choose(fixed, run.step, now_s)
            if peers is None:
                return  # tried again with the next event
            if not raised:
                self._state.ledger.next_attempt(run.step)
                raised = True
            self._window.disturbed(run.step, index)
            for stage in stages:
                hop = self._hop(peers[stage], run.step)
                self._state.ledger.reroute(run.step, stage, index, hop, "refill", now_s)
                if fixed[stage] is None:
                    self._policy.given(peers[stage])
            self._send_route(run.step, index, now_s)

    def evaluate(self, now_s: float) -> None:
        """Feed evaluation microbatches; also inform replicas that lost their place on a route."""
        if self._evaluations.is_idle:
            return
        any_fails = self._state.links.any(now_s)
        if not self._evaluations.may_feed(self._window.most):
            return
        pools = self._loads.by_stage()
        if any_fails:
            reached = [tuple(load for load in pool if not self._state.links.touches(load.peer)) for pool in pools]
            usable = [any(load.has_credit for load in pool) for pool in reached]
            pools = [reached[stage] if usable[stage] else pool for stage, pool in enumerate(pools)]
        for turn in self._evaluations.feed(pools, self._window.most):
            replicas = [self._state.pool[peer].replica for peer in turn.peers]
            hops = tuple(Hop(of.peer, of.incarnation, turn.attempt, of.address) for of in replicas)
            batch = EvaluationBatch(self._state.settings.timeline, turn.version, turn.index)
            for peer in (*turn.peers, *turn.displaced):
                self._state.outbox.send(peer, Evaluate(batch, hops))

    # What takes too long -----------------------------------------------------------------------------------------

    def hurry(self, now_s: float) -> None:
        """Give late hops to other replicas; from time to time, assume that slow replicas have become faster."""
        self._state.links.any(now_s)  # forgets old accusations
        for late in self._stragglers.expired(now_s) if self._state.settings.recover else ():
            step, stage, index, peer = late.hop.step, late.hop.stage, late.hop.index, late.hop.peer
            run = self._state.progress.runs.get(step)
            if run is None or run.phase is not Phase.FEEDING or peer not in self._state.pool:
                continue
            hops = self._state.ledger.hops(step, index)
            named = hops[stage]
            if named is None or named.peer != peer or self._state.ledger.holder(step, stage, index) == peer:
                continue
            slack = QUEUE_SLACK if self._loads.is_measured(peer) else QUEUE_SLACK * FIRST_SLACK
            if late.waited_s < slack * (self._state.ledger.outstanding(peer) + 1) * self._loads.best_s(stage):
                self._stragglers.look_again(late, now_s)
                continue  # its queue explains that, or that it is new
            self._loads.waited(peer, late.waited_s)
            if self._has_other(stage, hops):
                self._state.outbox.note("warning", f"{late.reason}: given to another replica")
                self._state.ledger.take(step, stage, index, late.reason, now_s)
        if now_s >= self._relax_s:
            self._relax_s = now_s + RELAX_S
            self._relaxes = self._loads.relax(now_s)

    def times_s(self) -> list[float]:
        """When `hurry` may have something to do although nothing happens."""
        late_s = self._stragglers.due_s() or math.inf
        return [late_s, self._relax_s] if self._relaxes else [late_s]

    def deadline_s(self, stage: int, direction: Direction) -> float:
        """How many seconds a replica may take for its turn now."""
        return self._stragglers.deadline_s(stage, direction)

    def waiting_for(self) -> str:
        stuck = f"; {self._why_not}" if self._why_not else ""
        return f"{counted(self._state.ledger.in_flight(), 'microbatch')} in flight{stuck}"

    def validate(self) -> None:
        """Assert that the kept turns and deadlines equal those computed anew."""
        self._stragglers.validate()

    def _choose(self, fixed: Sequence[PeerId | None], step: int, now_s: float) -> tuple[PeerId, ...] | None:
        """Choose one replica per stage, keeping the fixed ones."""
        loads = [
            StageLoad(load.stage, (self._loads.load(kept, keep=True),)) if kept else load
            for kept, load in zip(fixed, self._loads.stages(), strict=True)
        ]
        ledger, links = self._state.ledger, self._state.links
        failing = links if links.any(now_s) else None
        to_do = ledger.away() + self._to_feed()
        decision = self._policy.choose(loads, now_s, self._rng, to_do, ledger.left(until=step), failing)
        self._why_not = "" if decision.plan else decision.reason
        return decision.plan

    def _to_feed(self) -> int:
        """Microbatches of open steps and of the next one that can be fed before there is another commit."""
        settings, progress, ledger = self._state.settings, self._state.progress, self._state.ledger
        fed = {step: ledger.unfed(step) for step in ledger.open_steps()}
        count = 0
        for step, first in {**fed, **({progress.next: 0} if self._may_open(progress.next) else {})}.items():
            if first is not None:
                until = self._state.course.microbatches(step, settings.microbatches)
                if self._state.version_of(step, until - 1) > progress.committed:
                    until = settings.overlap if self._state.version_of(step, 0) <= progress.committed else 0
                count += max(0, until - first)
        return count

    def _may_open(self, step: int) -> bool:
        """Whether the next step has microbatches; an outer one waits for other islands instead."""
        course = self._state.course
        return step < self._state.settings.steps and not course.is_outer(step) and course.may_begin(step)

    def _has_other(self, stage: int, hops: Sequence[Hop | None]) -> bool:
        """Whether another replica of the stage can be reached from the neighbours on the route."""
        named = hops[stage]
        near = [hops[at] for at in (stage - 1, stage + 1) if 0 <= at < self._stages]
        return any(
            (named is None or other != named.peer)
            and self._state.pool.may_work(other)
            and not any(hop is not None and self._state.links.fails(other, hop.peer) for hop in near)
            for other in self._state.pool.by_stage[stage]
        )

    def _hop(self, peer: PeerId, step: int) -> Hop:
        replica = self._state.pool[peer].replica
        return Hop(peer, replica.incarnation, self._state.ledger.attempt(step), replica.address)

    def _send_route(self, step: int, index: int, now_s: float) -> None:
        """Send the route to all replicas on it, and to the replicas that it displaced."""
        hops = tuple(hop for hop in self._state.ledger.hops(step, index) if hop is not None)
        assert len(hops) == self._stages
        held = [self._state.ledger.holder(step, stage, index) == hop.peer for stage, hop in enumerate(hops)]
        self._stragglers.routed(step, index, [hop.peer for hop in hops], held, now_s)
        settings = self._state.settings
        route = Route(Microbatch(settings.timeline, step, index), self._state.version_of(step, index), hops)
        for peer in dict.fromkeys([hop.peer for hop in hops] + self._state.ledger.displaced(step, index)):
            self._state.outbox.send(peer, route)


PER_STAGE = 2  # microbatches for every stage and replica, before anything is measured; memory is estimated for these
NEWEST = 16  # microbatches that count


@dataclass(slots=True)
class _Flight:
    """A microbatch on its first route."""

    fed_s: float
    back_s: float = 0.0  # when the first stage was done
    work_s: tuple[float, ...] = ()  # of the stages that are done
    busy_s: float = 0.0  # computed or waiting for a device, at all of them


class FlightWindow:
    """The most microbatches in flight: enough that no stage waits for what is under way between machines.

    A microbatch is in flight while it is computed at each stage, while it waits there, and while tensors, routes and
    reports travel. By Little's law a pipeline keeps its busiest stage at work with

        (travel + work at all stages) / work at the busiest stage

    microbatches in flight, and one more for each stage lets them come unevenly. Weights that a stage computes later
    count as its work, though they are done beside the flight, which they shorten by as much. The least travel of the
    newest microbatches counts, so waiting on a busy link widens nothing. The window is never wider than the memory of
    the replicas of any stage, as far as that is known.
    """

    def __init__(self, state: BrainState) -> None:
        self._state = state
        self._stages = len(state.settings.split)
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._travels_s: deque[float] = deque(maxlen=NEWEST)
        self._works_s: deque[tuple[float, ...]] = deque(maxlen=NEWEST)  # one by one, the costliest first
        self._least = self._room = self._lanes = 0
        self.most = 0

    def open(self) -> None:
        """Begin with the replicas that are here."""
        pool = self._state.pool
        self._lanes = max(map(len, pool.by_stage))
        self.changed()

    def changed(self) -> None:
        """Other replicas may be given work than before: theirs is the memory that bounds it."""
        pool = self._state.pool
        rooms = [[pool[peer].replica.room for peer in peers if pool.may_work(peer)] for peers in pool.by_stage]
        self._room = min(map(sum, rooms))
        known = [sum(of) for of in rooms if of and all(of)]
        self._least = min([PER_STAGE * self._stages * self._lanes, *known])
        self._widen()

    def fed(self, step: int, index: int, now_s: float) -> None:
        self._flights[step, index] = _Flight(now_s)

    def disturbed(self, step: int, index: int) -> None:
        """A hop is done again: what the microbatch takes says nothing."""
        self._flights.pop((step, index), None)

    def accumulated(self, event: Accumulated, now_s: float) -> None:
        """A stage is done with a microbatch."""
        step, index = event.microbatch.step, event.microbatch.index
        flight = self._flights.get((step, index))
        if flight is None:
            return
        if event.stage == 0:
            flight.back_s = now_s
        work_s = event.forward_s + event.backward_s
        flight.work_s += (work_s,)
        flight.busy_s += work_s + event.wait_s
        if len(flight.work_s) == self._stages:
            del self._flights[step, index]
            self._travels_s.append(max(0.0, flight.back_s - flight.fed_s - flight.busy_s))
            self._works_s.append(tuple(sorted(flight.work_s, reverse=True)))
            self._widen()

    def close(self, step: int) -> None:
        for of in [of for of in self._flights if of[0] <= step]:
            del self._flights[of]

    def _widen(self) -> None:
        settings = self._state.settings
        most = max(self._least, min(self._wanted(), self._room))
        self.most = settings.max_in_flight or min(settings.microbatches + settings.overlap, most)

    def _wanted(self) -> int:
        """So many keep the busiest stage at work; 0 if nothing was measured, or times that no device takes."""
        busiest_s = sum(work_s[0] for work_s in self._works_s)
        if not busiest_s:
            return 0
        count = len(self._works_s)
        whole_s = min(self._travels_s) + sum(map(sum, self._works_s)) / count
        times = whole_s * count / busiest_s
        return self._lanes * (int(times) + self._stages) if math.isfinite(times) else 0
