"""A fleet of stage servers that computes nothing: it says what real ones would say, when they would say it.

    Route ──▶ forward at stage 0 ─Forwarded─▶ ... ─▶ last stage ─Accumulated─▶ ... ─▶ backward at stage 0 ─Accumulated

Every peer has one device, which takes computations in the order in which their inputs arrive. A forward takes a third
of a microbatch's time at a stage, a backward two thirds. Peers differ in speed by up to a quarter. Nobody fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from swarm.types import Hop, Microbatch, PeerId, UnitName
from swarm.wire.messages import (
    Accumulated,
    Average,
    Averaged,
    Command,
    Commit,
    Committed,
    Event,
    Forwarded,
    Loaded,
    LoadStage,
    ParameterNorm,
    Release,
    Route,
    UnitSize,
    Void,
)

FORWARD = 1.0 / 3.0  # of a microbatch's time at a stage
SPREAD = 0.25  # of the peers' speeds
ROUND_S = COMMIT_S = 0.05  # at least; at most twice as long
TENSORS = 9  # of a layer
ELEMENTS = 1_000_000


@dataclass(slots=True)
class _Flight:
    """A microbatch under way: whose turn it is, and which it is of all turns that were ever begun."""

    hops: Sequence[Hop]
    stage: int = 0
    backward: bool = False
    turn: int = 0


class Fleet:
    """All stage servers of one job; `later` calls back at a time, `say` takes an event of a peer."""

    def __init__(
        self,
        hop_s: float,
        units: dict[UnitName, tuple[int, ...]],
        clock: Callable[[], float],
        later: Callable[[float, Callable[[], None]], object],
        say: Callable[[PeerId, Event], None],
        rng: Random,
    ) -> None:
        self.hops = 0  # that were computed, forward and backward
        self.committed: dict[int, float] = {}  # when the first peer heard of each step's commit
        self.voided = 0
        self._hop_s = hop_s
        self._units = units
        self._clock, self._later, self._say, self._rng = clock, later, say, rng
        self._stage_of: dict[PeerId, int] = {}
        self._slowness: dict[PeerId, float] = {}
        self._free_s: dict[PeerId, float] = {}
        self._flights: dict[Microbatch, _Flight] = {}

    def obey(self, peer: PeerId, command: Command) -> None:
        """The peer does what the scheduler tells it."""
        match command:
            case Route(microbatch=microbatch, hops=hops):
                self.route(microbatch, hops)
            case LoadStage(job=job, timeline=timeline, stage=stage, version=version):
                self._stage_of[peer] = stage
                self._slowness[peer] = self._rng.uniform(1.0 - SPREAD, 1.0 + SPREAD)
                sizes = tuple(UnitSize(unit, ELEMENTS) for unit, at in self._units.items() if stage in at)
                self._answer(peer, 0.0, Loaded(job, timeline, stage, version, "loaded", sizes, "probe"))
            case Average(timeline=timeline, step=step, unit=unit, round=number):
                norms = tuple(ParameterNorm(f"{unit}.{tensor}", 1.0) for tensor in range(TENSORS))
                self._answer(peer, ROUND_S, Averaged(timeline, step, unit, number, "mean", norms, ROUND_S))
            case Commit(timeline=timeline, step=step, version=version):
                self.committed.setdefault(step, self._clock())
                self._flights = {one: flight for one, flight in self._flights.items() if one.step > step}
                self._answer(peer, COMMIT_S, Committed(timeline, step, version, self._stage_of[peer], "weights"))
            case Void():
                self.voided += 1
            case Release(reason=reason):
                raise AssertionError(f"{peer} was released: {reason}")

    def route(self, microbatch: Microbatch, hops: Sequence[Hop]) -> None:
        """The peers of a route hear of it, one after the other; only the first time matters."""
        known = self._flights.get(microbatch)
        if known is None:
            flight = self._flights[microbatch] = _Flight(hops)
            self._begin(microbatch, flight)
        elif known.hops != hops:
            moved = known.hops[known.stage] != hops[known.stage]
            known.hops = hops
            if moved and known.turn:
                self._begin(microbatch, known)

    def _begin(self, microbatch: Microbatch, flight: _Flight) -> None:
        """The input of a computation has arrived at the peer whose turn it is."""
        peer, last = flight.hops[flight.stage].peer, len(flight.hops) - 1
        share = 1.0 if flight.stage == last else 1.0 - FORWARD if flight.backward else FORWARD
        takes_s = share * self._hop_s * self._slowness[peer]
        begins_s = max(self._clock(), self._free_s.get(peer, 0.0))
        self._free_s[peer] = begins_s + takes_s
        flight.turn += 1
        turn, waited_s = flight.turn, begins_s - self._clock()
        self._later(begins_s + takes_s, lambda: self._computed(microbatch, flight, turn, takes_s, waited_s))

    def _computed(self, microbatch: Microbatch, flight: _Flight, turn: int, takes_s: float, waited_s: float) -> None:
        if flight.turn != turn or self._flights.get(microbatch) is not flight:
            return  # it was given to another peer, or its step is over
        stage, last = flight.stage, len(flight.hops) - 1
        hop = flight.hops[stage]
        if stage < last and not flight.backward:
            self._say(hop.peer, Forwarded(microbatch, stage, hop.attempt))
            flight.stage += 1
        else:
            self.hops += 1
            loss, forward_s = (1.0 if stage == last else 0.0), self._hop_s * FORWARD
            wait_s = max(0.0, waited_s)
            event = Accumulated(microbatch, stage, hop.attempt, True, loss, forward_s, takes_s, wait_s)
            self._say(hop.peer, event)
            flight.backward = True
            flight.stage -= 1
        if flight.stage >= 0:
            self._begin(microbatch, flight)

    def _answer(self, peer: PeerId, after_s: float, event: Event) -> None:
        at_s = self._clock() + after_s * self._rng.uniform(1.0, 2.0)
        self._later(at_s, lambda: self._say(peer, event))
