"""Stragglers: finds the replica of a route that the others wait for, and whether it takes too long.

    routed ─▶ stage 0 forward ─Forwarded─▶ stage 1 forward ─ ... ─▶ last stage ─Accumulated─▶ ... ─▶ stage 0 backward

At any time a replica either waits for the output of a neighbour, or it is its turn. Only turns are watched
(`Deadlines`), so a slow, frozen or cut-off replica is told apart from the replicas that wait for it. The last stage has
one turn for both directions, since no other stage computes in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from scheduler.brain.settings import DeadlineSettings
from swarm.types import Direction, PeerId


@dataclass(slots=True)
class _RouteHop:
    """One stage of a microbatch's route."""

    peer: PeerId
    held: bool  # accumulated
    forwarded: bool
    turn: Direction | None = None  # being watched


class Stragglers:
    """All microbatches of one job that are under way."""

    def __init__(self, settings: DeadlineSettings) -> None:
        self._deadlines = Deadlines(settings)
        self._routes: dict[tuple[int, int], list[_RouteHop]] = {}
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
                places.append(_RouteHop(peer, is_held, is_held))
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

    def _turn(self, places: Sequence[_RouteHop], stage: int) -> Direction | None:
        """The computation that the stage can do now, if any."""
        if not places[stage].forwarded:
            return Direction.FORWARD if stage == 0 or places[stage - 1].forwarded else None
        return Direction.BACKWARD if places[stage + 1].held else None

    def _end_turn(self, step: int, stage: int, index: int, place: _RouteHop, now_s: float) -> None:
        if place.turn is not None:
            self._deadlines.done(WatchedHop(step, stage, index, place.turn, place.peer), now_s)
            place.turn = None


SAMPLES_KEPT = 64
SAMPLES_MIN = 8
MISSES_PER_DOUBLING = 8
NEW_MIN = 8  # a deadline stands until one sample in so many is new
SPREAD_MIN = 0.05  # of the median: even times do not make a deadline without slack
NORMAL = 1.4826
LATE_KEPT = 1024  # expired hops that may complete after all, per stage and direction


@dataclass(frozen=True, slots=True, order=True)
class WatchedHop:
    """The turn of a peer in microbatch (step, index): its forward or its backward at one stage."""

    step: int
    stage: int
    index: int
    direction: Direction
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Overdue:
    """A hop that is past its deadline."""

    hop: WatchedHop
    waited_s: float
    deadline_s: float

    @property
    def reason(self) -> str:
        hop = self.hop
        return (
            f"{hop.peer} has had {hop.direction} of {hop.step}.{hop.index} at stage {hop.stage} for "
            f"{self.waited_s:.3g} s; others take less than {self.deadline_s:.3g} s"
        )


def deadline_s(samples: Sequence[float], settings: DeadlineSettings) -> float:
    """Seconds after which a hop is too late, given `samples`, the seconds of completed hops."""
    if len(samples) < SAMPLES_MIN:
        return settings.max_s
    if 1.001 * max(samples) * (1.0 + NORMAL * settings.k) < settings.min_s:
        return settings.min_s  # median and MAD are no greater than the greatest sample: no need to know them
    middle = _median(samples)
    spread = _median([abs(sample - middle) for sample in samples])
    return _within(middle + settings.k * max(NORMAL * spread, SPREAD_MIN * middle), settings)


@dataclass(slots=True)
class _HopQueue:
    """A stage and direction. Hops are in the order in which they began, so the first expires first."""

    samples: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES_KEPT))
    began_s: dict[WatchedHop, float] = field(default_factory=dict)
    late_s: dict[WatchedHop, float] = field(default_factory=dict)
    misses: int = 0  # since the last completion
    measured: tuple[float, ...] = ()  # the samples of which the deadline is
    newer: int = 0  # samples since then
    deadline_s: float | None = None  # None: must be computed again


class Deadlines:
    """Deadlines of hops: they follow the measured times, and find the hops that took too long.

        deadline = median + k * max(1.4826 * MAD, 0.05 * median), within [min_s, max_s]

    of the last 64 completions of a stage and direction. MAD is the median absolute deviation; 1.4826 turns it into a
    standard deviation if times are normal. Outliers, however slow, cannot shift it as long as they are fewer than half
    of the samples. Before 8 completions are known the deadline is max_s. It is computed anew once an eighth of its
    samples is new, as it takes long, and one sample hardly moves it.

    A hop that is past its deadline is reported once and no longer watched. Its seconds still count if it completes
    after all, so a deadline that became too tight widens. If nothing completes at all, because everything became slower
    at once, the deadline doubles with every 8 hops that expire in a row.

    Watches the hops of one job.

    Most deadlines are never asked for, as no hop expires before the least deadline has passed. So of a lane that has
    changed only that bound is noted at first. What is asked changes no answer: which samples count, completions say.
    """

    def __init__(self, settings: DeadlineSettings) -> None:
        assert 0.0 < settings.min_s <= settings.max_s < inf
        self._settings = settings
        self._lanes: dict[tuple[int, Direction], _HopQueue] = {}
        self._soonest_s: dict[tuple[int, Direction], float] = {}  # when the lane's first hop expires, or a bound
        self._bounds: set[tuple[int, Direction]] = set()  # lanes of which only a lower bound is noted

    def of(self, stage: int, direction: Direction) -> float:
        """How many seconds a hop may take now."""
        lane = self._lanes.get((stage, direction))
        return self._settings.max_s if lane is None else self._deadline_s(lane)

    def began(self, hop: WatchedHop, now_s: float) -> None:
        """The peer can compute: it has, or was sent, its input. A second call begins anew. Times never go back."""
        lane = self._lanes.setdefault((hop.stage, hop.direction), _HopQueue())
        lane.began_s.pop(hop, None)
        lane.late_s.pop(hop, None)
        lane.began_s[hop] = now_s
        self._changed((hop.stage, hop.direction), lane)

    def done(self, hop: WatchedHop, now_s: float) -> None:
        """The hop completed; one that is not watched is ignored."""
        lane = self._lanes.get((hop.stage, hop.direction))
        if lane is None:
            return
        began_s = lane.began_s.pop(hop, None)
        if began_s is None:
            began_s = lane.late_s.pop(hop, None)
        if began_s is not None:
            lane.samples.append(max(0.0, now_s - began_s))
            lane.newer += 1
            if lane.misses or NEW_MIN * lane.newer >= len(lane.samples):
                lane.measured, lane.newer = tuple(lane.samples), 0
                lane.misses, lane.deadline_s = 0, None
            self._changed((hop.stage, hop.direction), lane)

    def expired(self, now_s: float) -> list[Overdue]:
        """The hops that are past their deadline, each reported once, in order of step, stage and index."""
        overdue: list[Overdue] = []
        if now_s < min(self._soonest_s.values(), default=inf):
            return overdue
        for at, lane in self._lanes.items():
            if now_s < self._soonest_s[at]:
                continue
            limit_s = self._deadline_s(lane)
            for hop, began_s in list(lane.began_s.items()):
                if now_s < began_s + limit_s:  # to the bit as in `due_s`: else it might not have expired when it is due
                    break
                overdue.append(Overdue(hop, now_s - began_s, limit_s))
                del lane.began_s[hop]
                lane.late_s[hop] = began_s
                lane.misses += 1
                lane.deadline_s = None
            while len(lane.late_s) > LATE_KEPT:
                del lane.late_s[next(iter(lane.late_s))]
            self._settle(at)
        return sorted(overdue, key=lambda one: one.hop)

    def due_s(self) -> float | None:
        """When the next hop expires if nothing happens; None if none is watched."""
        for at in tuple(self._bounds):
            self._settle(at)
        due_s = min(self._soonest_s.values(), default=inf)
        return None if due_s == inf else due_s

    def forget_peer(self, peer: PeerId) -> None:
        """The peer is suspect or gone: its hops are given to others."""
        self._forget(lambda hop: hop.peer == peer)

    def cancel(self, hop: WatchedHop) -> None:
        """The hop was given to another replica."""
        lane = self._lanes.get((hop.stage, hop.direction))
        if lane is not None:
            lane.began_s.pop(hop, None)
            lane.late_s.pop(hop, None)
            self._changed((hop.stage, hop.direction), lane)

    def forget_step(self, step: int) -> None:
        """The step committed, or is void: nothing of it, or of earlier steps, is awaited."""
        self._forget(lambda hop: hop.step <= step)

    def watched(self) -> list[WatchedHop]:
        """The hops that have begun and are neither done nor expired."""
        return sorted(hop for lane in self._lanes.values() for hop in lane.began_s)

    def validate(self) -> None:
        """Assert that the noted time of each lane is when its first hop expires, or earlier."""
        assert self._soonest_s.keys() == self._lanes.keys()
        for at, noted_s in self._soonest_s.items():
            lane = self._lanes[at]
            expires_s = next(iter(lane.began_s.values()), inf) + self._deadline_s(lane)
            assert noted_s <= expires_s if at in self._bounds else noted_s == expires_s, (at, noted_s, expires_s)

    def _changed(self, at: tuple[int, Direction], lane: _HopQueue) -> None:
        self._soonest_s[at] = next(iter(lane.began_s.values()), inf) + self._settings.min_s
        self._bounds.add(at)

    def _settle(self, at: tuple[int, Direction]) -> None:
        lane = self._lanes[at]
        self._soonest_s[at] = next(iter(lane.began_s.values()), inf) + self._deadline_s(lane)
        self._bounds.discard(at)

    def _deadline_s(self, lane: _HopQueue) -> float:
        if lane.deadline_s is None:
            base_s = deadline_s(lane.measured, self._settings)
            lane.deadline_s = _within(base_s * 2.0 ** min(lane.misses // MISSES_PER_DOUBLING, 30), self._settings)
        return lane.deadline_s

    def _forget(self, is_meant: Callable[[WatchedHop], bool]) -> None:
        for at, lane in self._lanes.items():
            for hops in (lane.began_s, lane.late_s):
                for hop in [hop for hop in hops if is_meant(hop)]:
                    del hops[hop]
            self._changed(at, lane)


def _median(samples: Iterable[float]) -> float:
    """As `statistics.median`, of some samples that are floats."""
    ordered = sorted(samples)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _within(seconds: float, settings: DeadlineSettings) -> float:
    return min(settings.max_s, max(settings.min_s, seconds))
