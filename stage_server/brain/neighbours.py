"""The neighbours that may deliver an input of a microbatch or ask for its outputs: its newest route names them.

    tensor, question ──▶ judge ──▶ NAMED   by the newest route, at exactly its attempt: the cell may have it
                               ──▶ EARLY   perhaps by a route that is under way to us: it waits outside the cell
                               ──▶ FALSE   by no route that can come: refused

A message says itself who sent it, and cannot prove it. So nothing of it reaches a cell (cell.py) before the scheduler
has named exactly that peer, incarnation and attempt for exactly that side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from stage_server.brain.early_inputs import Claim
from swarm.types import Direction, Hop, Microbatch
from swarm.wire.messages import Route

EARLY_ASKERS_MAX = 8  # of one output, whose route is not here yet


class Standing(Enum):
    """The standing of a claim."""

    NAMED = auto()
    EARLY = auto()
    FALSE = auto()


@dataclass(slots=True)
class _Known:
    """The newest route of a microbatch, as far as it concerns this stage."""

    newest: int  # greatest attempt of its hops
    hops: dict[Direction, Hop]  # FORWARD: the hop before ours, which x comes from; BACKWARD: the one behind
    askers: dict[Direction, list[Hop]] = field(default_factory=lambda: {side: [] for side in Direction})  # early ones


class Neighbours:
    """The neighbours of a replica of `stage`, by microbatch."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._known: dict[Microbatch, _Known] = {}

    def learn(self, route: Route) -> list[tuple[Direction, Hop]]:
        """Note a route unless a newer one is known; gives earlier questions that it answers, with their askers."""
        newest = max(hop.attempt for hop in route.hops)
        before = self._known.get(route.microbatch)
        if before is not None and newest <= before.newest:
            return []
        hops = {}
        if self._stage > 0:
            hops[Direction.FORWARD] = route.hops[self._stage - 1]
        if self._stage + 1 < len(route.hops):
            hops[Direction.BACKWARD] = route.hops[self._stage + 1]
        known = self._known[route.microbatch] = _Known(newest, hops)
        if before is None:
            return []
        for output, askers in before.askers.items():
            known.askers[output] = [asker for asker in askers if asker.attempt > newest]
        return [
            (output, hops[_towards(output)])
            for output, askers in before.askers.items()
            if any(self._is_named(known, _towards(output), Claim.of(asker)) for asker in askers)
        ]

    def forget(self, step: int) -> None:
        """The step is committed: no peer has a place in it or in earlier steps any more."""
        for microbatch in [one for one in self._known if one.step <= step]:
            del self._known[microbatch]

    def named(self, microbatch: Microbatch) -> dict[Direction, Claim]:
        """The only claims under which inputs of the microbatch may come, as far as a route has said."""
        known = self._known.get(microbatch)
        return {} if known is None else {side: Claim.of(hop) for side, hop in known.hops.items()}

    def judge(self, microbatch: Microbatch, direction: Direction, claim: Claim) -> Standing:
        """The standing of an input that came under a claim: FORWARD x, BACKWARD g."""
        known = self._known.get(microbatch)
        if known is None:
            return Standing.EARLY
        if self._is_named(known, direction, claim):
            return Standing.NAMED
        # A hop that is new on a newer route has a greater attempt than all hops of the older.
        return Standing.EARLY if claim.attempt > known.newest else Standing.FALSE

    def asks(self, microbatch: Microbatch, output: Direction, asker: Hop) -> Standing:
        """The standing of a question for an output: FORWARD y, BACKWARD dx. An early one is remembered, within bounds.

        Without any route nothing is remembered: with the first one, outputs go to the neighbours by themselves.
        """
        standing = self.judge(microbatch, _towards(output), Claim.of(asker))
        known = self._known.get(microbatch)
        if known is not None and standing is Standing.EARLY and len(known.askers[output]) < EARLY_ASKERS_MAX:
            known.askers[output].append(asker)
        return standing

    def __len__(self) -> int:
        return len(self._known)

    def _is_named(self, known: _Known, side: Direction, claim: Claim) -> bool:
        return side in known.hops and claim == Claim.of(known.hops[side])


def _towards(output: Direction) -> Direction:
    """The side of the stage that receives an output: y goes to the sender of g, dx to the sender of x."""
    return Direction.BACKWARD if output is Direction.FORWARD else Direction.FORWARD
