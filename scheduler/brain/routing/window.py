"""The most microbatches in flight: enough that no stage waits for what is under way between machines.

A microbatch is in flight while it is computed at each stage, while it waits there, and while tensors, routes and
reports travel. By Little's law a pipeline keeps its busiest stage at work with

    (travel + work at all stages) / work at the busiest stage

microbatches in flight, and one more for each stage lets them come unevenly. Of the newest microbatches the least travel
counts, so waiting on a busy link widens nothing. The window is never wider than the memory of the replicas of any
stage, as far as that is known.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from scheduler.brain.state.brain_state import BrainState
from swarm.wire.messages import Accumulated

PER_STAGE = 2  # microbatches for every stage and replica, before anything is measured; memory is estimated for these
NEWEST = 16  # microbatches that count


@dataclass(slots=True)
class _Flight:
    """A microbatch on its first route."""

    fed_s: float
    work_s: tuple[float, ...] = ()  # of the stages that are done
    busy_s: float = 0.0  # computed or waiting for a device, at all of them


class Window:
    """How many microbatches of one job may be in flight."""

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
        work_s = event.forward_s + event.backward_s
        flight.work_s += (work_s,)
        flight.busy_s += work_s + event.wait_s
        if len(flight.work_s) == self._stages:
            del self._flights[step, index]
            self._travels_s.append(max(0.0, now_s - flight.fed_s - flight.busy_s))
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
