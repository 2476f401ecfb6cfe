"""Stragglers: finds the replica of a route that the others wait for, and whether it takes too long.

    routed ─▶ stage 0 forward ─Forwarded─▶ stage 1 forward ─ ... ─▶ last stage ─Accumulated─▶ ... ─▶ stage 0 backward

At any time a replica either waits for the output of a neighbour, or it is its turn. Only turns are watched
(deadlines.py), so a replica that is slow, frozen or cut off is told apart from those that wait for it. The last stage
has one turn for both directions, since no other stage computes in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler.brain.routing.deadlines import Deadlines, Overdue, WatchedHop
from scheduler.brain.settings import DeadlineSettings
from swarm.types import Direction, PeerId


@dataclass(slots=True)
class _Place:
    """One stage of a microbatch's route."""

    peer: PeerId
    held: bool  # accumulated
    forwarded: bool
    turn: Direction | None = None  # being watched


class Stragglers:
    """All microbatches of one job that are under way."""

    def __init__(self, settings: DeadlineSettings) -> None:
        self._deadlines = Deadlines(settings)
        self._routes: dict[tuple[int, int], list[_Place]] = {}
        self._again: dict[Overdue, float] = {}  # when to report it again
        self._forgotten: set[tuple[int, int]] = set()  # routes of which a turn is no longer watched

    def routed(self, step: int, index: int, peers: Sequence[PeerId], held: Sequence[bool], now_s: float) -> None:
        """There is a new route; `held` says which of its replicas have accumulated."""
        before = self._routes.get((step, index))
        places = []
        for stage, (peer, is_held) in enumerate(zip(peers, held, strict=True)):
            old = before[stage] if before is not None else None
            if old is not None and old.peer == peer and old.held <= is_held:
                old.held = is_held
                places.append(old)
            else:
                for direction in Direction if old is not None else ():
                    self._deadlines.cancel(WatchedHop(step, stage, index, direction, old.peer))  # type: ignore[union-attr]
                places.append(_Place(peer, is_held, is_held))
        self._routes[step, index] = places
        self._look(step, index, range(len(places)), now_s)

    def forwarded(self, step: int, stage: int, index: int, peer: PeerId, now_s: float) -> None:
        """A replica computed forward; a forward for an older route is ignored."""
        places = self._routes.get((step, index))
        if places is None or not 0 <= stage < len(places) or places[stage].peer != peer or places[stage].forwarded:
            return
        places[stage].forwarded = True
        self._end_turn(step, stage, index, places[stage], now_s)
        self._look_beside(step, stage, index, now_s)

    def accumulated(self, step: int, stage: int, index: int, peer: PeerId, now_s: float) -> None:
        """A replica accumulated a microbatch that it was asked for."""
        places = self._routes.get((step, index))
        if places is None or places[stage].peer != peer:
            return
        place = places[stage]
        place.held = place.forwarded = True
        self._end_turn(step, stage, index, place, now_s)
        self._look_beside(step, stage, index, now_s)

    def expired(self, now_s: float) -> list[Overdue]:
        """Turns that take too long, each reported once, and turns that are due to be reported again."""
        again = [late for late, due_s in self._again.items() if due_s <= now_s]
        for late in again:
            del self._again[late]
        late_still = [
            replace(late, waited_s=late.waited_s + late.deadline_s) for late in again if self._is_turn(late.hop)
        ]
        return self._deadlines.expired(now_s) + late_still

    def look_again(self, late: Overdue, now_s: float) -> None:
        """The long turn has a good reason: report it again after the same time, unless it has ended by then."""
        self._again[late] = now_s + late.deadline_s

    def due_s(self) -> float | None:
        """When the next turn expires if nothing happens."""
        times_s = [*self._again.values(), *filter(None, (self._deadlines.due_s(),))]
        return min(times_s, default=None)

    def forget_step(self, step: int) -> None:
        """The step is decided: nothing of it is awaited."""
        self._deadlines.forget_step(step)
        for key in [key for key in self._routes if key[0] <= step]:
            del self._routes[key]
        self._forgotten &= self._routes.keys()

    def forget_peer(self, peer: PeerId) -> None:
        """The peer is suspect or gone: its turns are given to others."""
        self._deadlines.forget_peer(peer)
        for route, places in self._routes.items():
            for place in places:
                if place.peer == peer:
                    place.turn = None
                    self._forgotten.add(route)

    def deadline_s(self, stage: int, direction: Direction) -> float:
        """How many seconds a turn may take now."""
        return self._deadlines.of(stage, direction)

    def validate(self) -> None:
        """Assert that no turn has begun unnoticed, but for routes whose peer was forgotten."""
        self._deadlines.validate()
        for route in self._routes.keys() - self._forgotten:
            places = self._routes[route]
            for stage, place in enumerate(places):
                assert place.held or self._turn(places, stage) in (None, place.turn), (route, stage, place)

    def _is_turn(self, hop: WatchedHop) -> bool:
        places = self._routes.get((hop.step, hop.index))
        return places is not None and (places[hop.stage].peer, places[hop.stage].turn) == (hop.peer, hop.direction)

    def _look_beside(self, step: int, stage: int, index: int, now_s: float) -> None:
        """Look at a stage and its neighbours: a report of the stage can begin no other turns."""
        stages = len(self._routes[step, index])
        beside = range(max(0, stage - 1), min(stages, stage + 2))
        self._look(step, index, range(stages) if (step, index) in self._forgotten else beside, now_s)

    def _look(self, step: int, index: int, stages: range, now_s: float) -> None:
        """Begin to watch every turn at these stages that has begun."""
        places = self._routes[step, index]
        if len(stages) == len(places):
            self._forgotten.discard((step, index))
        for stage in stages:
            place = places[stage]
            turn = None if place.held else self._turn(places, stage)
            if turn is not None and place.turn is not turn:
                place.turn = turn
                self._deadlines.began(WatchedHop(step, stage, index, turn, place.peer), now_s)

    def _turn(self, places: Sequence[_Place], stage: int) -> Direction | None:
        """The computation that the stage can do now, if any."""
        if not places[stage].forwarded:
            return Direction.FORWARD if stage == 0 or places[stage - 1].forwarded else None
        return Direction.BACKWARD if places[stage + 1].held else None

    def _end_turn(self, step: int, stage: int, index: int, place: _Place, now_s: float) -> None:
        if place.turn is not None:
            self._deadlines.done(WatchedHop(step, stage, index, place.turn, place.peer), now_s)
            place.turn = None
