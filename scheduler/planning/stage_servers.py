"""A modelled stage server: what its device computes next, and when that is done. Nothing is computed; time is virtual.

    put ──▶ queue, in the order of stage_server/brain/work_queue.py ──▶ chain ──▶ device, one thing at a time
                                          optimizer steps, as they come ──▶┘

Where some microbatches are late, an order is on the chain behind the one that runs, so the device never waits for it.
Otherwise the way from the end of a computation to the event loop and back passes between two.

Backwards are split while the device idles for a part of its steps, as by stage_server/brain/splitting.py on a device
where both parts cost no more than the whole. A test holds the order to that of work_queue.py. Not chosen: to play with
these modules and with cells, because a scheduler imports no stage server, and cells cost as much time as all decisions
of the scheduler.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Protocol

from swarm.types import Microbatch, PeerId
from swarm.wire.messages import Follow

IDLE_MIN = 0.2  # of a step; with less, no backward is split


class HopPart(IntEnum):
    """What a computation of a microbatch gives."""

    FORWARD = 0
    BACKWARD = 1  # the gradients of inputs and weights
    INPUTS = 2  # of inputs; what the weights need is kept
    WEIGHTS = 3


@dataclass(slots=True, eq=False)
class Turn:
    """The part of one stage in a microbatch, at the replica that its newest route names."""

    microbatch: Microbatch
    server: ModelledServer
    row: list[Turn | None]  # the turns of all stages in the microbatch
    attempt: int
    is_late: bool  # it uses weights one step old
    is_told: bool = False
    x: bool = False  # the forward's input is here
    y: bool = False  # the forward is done
    g: bool = False  # the backward's input is here
    dx: bool = False  # the backward is done, but perhaps for the weights
    is_added: bool = False
    is_ordered: bool = False
    is_over: bool = False
    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0

    def next(self) -> HopPart | None:
        """What can be ordered now; None: nothing."""
        if self.is_over or self.is_ordered or not self.is_told or self.is_added:
            return None
        if not self.y:
            return HopPart.FORWARD if self.x else None
        if not self.dx:
            return HopPart.BACKWARD if self.g else None
        return HopPart.WEIGHTS


class Floor(Protocol):
    """The world of a stage server: the play."""

    now_s: float

    def later(self, seconds: float, act: Callable[..., None], *values: object) -> None: ...
    def draw_s(self, server: ModelledServer, part: HopPart) -> float: ...
    def computed(self, turn: Turn, part: HopPart, seconds: float, wait_s: float) -> None: ...


class ModelledServer:
    """One stage server, in turn in several stages of several jobs' timelines."""

    def __init__(self, name: PeerId, floor: Floor, between_s: float) -> None:
        self.name, self.is_alive = name, True
        self.incarnation, self.timeline = 1, 0
        self.up_free_s = self.down_free_s = 0.0  # when its lines have sent and received what they hold
        self.busy_s = 0.0  # of its device, in all
        self._floor, self._between_s = floor, between_s
        self.serve(-1)

    def serve(
        self, stage: int, *, join: int = 0, late_behind: bool = False, ahead: bool = False, owed_max: int = 0
    ) -> None:
        """Begin with a stage, or (-1) with none. `ahead`: an order waits on the device behind that which runs."""
        self.stage, self.join, self.owed = stage, join, 0
        self.added: dict[tuple[int, int], set[int]] = {}  # what is in its sums, by timeline and step
        self.follow: Follow | None = None
        self.fetched_s, self.reports = math.inf, 0
        self._late_behind, self._begun_max, self._owed_max = late_behind, 2 if ahead else 1, owed_max
        self._begun = self._taken = 0
        self._pays, self._since = False, (self._floor.now_s, self.busy_s)  # whether splits do; the newest commit
        self._number = count()
        self._queue: list[tuple[int, int, bool, int, int, _Order]] = []
        self._weights: deque[_Order] = deque()
        self._chain: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False
        if stage < 0:
            self.life = object()  # what began in an earlier one changes nothing

    def put(self, turn: Turn, part: HopPart) -> None:
        """Order a computation."""
        turn.is_ordered = True
        order = _Order(turn, part, self._floor.now_s, self._taken)
        rank = (part in (HopPart.FORWARD, HopPart.WEIGHTS)) + 2 * (self._late_behind and turn.is_late)
        where, is_weights = turn.microbatch, part is HopPart.WEIGHTS
        heapq.heappush(self._queue, (rank, where.step, is_weights, where.index, next(self._number), order))
        if is_weights:
            self._weights.append(order)
        self._fill()

    def take(self) -> _Order | None:
        """The next order; weights that many later orders went before come next."""
        while self._weights and self._weights[0].is_taken:
            self._weights.popleft()
        order = None
        if self._weights and self._taken - self._weights[0].since >= 4 * max(1, self._owed_max):
            order = self._weights.popleft()
        while order is None and self._queue:
            first = heapq.heappop(self._queue)[-1]
            order = None if first.is_taken or first.turn.is_over else first
        if order is not None:
            order.is_taken = True
            self._taken += 1
        return order

    def committed(self) -> None:
        """A step has ended: splits pay if the device idled enough, or would have without them."""
        (since_s, busy_s), self._since = self._since, (self._floor.now_s, self.busy_s)
        idle = 1.0 - (self.busy_s - busy_s) / max(1e-9, self._floor.now_s - since_s)
        self._pays = idle * (2.0 if self._pays else 1.0) >= IDLE_MIN  # splits have filled about half of the gaps

    def run(self, seconds: float, done: Callable[[], None]) -> None:
        """Let the device do something behind what it has: an optimizer step, say."""
        self._chain.append((seconds, done))
        if not self._is_busy:
            self._begin()

    def _fill(self) -> None:
        """Hand orders to the device, as many as it may have."""
        while self._begun < self._begun_max and (order := self.take()) is not None:
            part = order.part
            if part is HopPart.BACKWARD and self._pays and self.stage and self.owed < self._owed_max:
                part = HopPart.INPUTS
                self.owed += 1
            self._begun += 1
            seconds = self._floor.draw_s(self, part)
            self.run(seconds, lambda order=order, part=part, seconds=seconds: self._computed(order, part, seconds))  # type: ignore[misc]

    def _computed(self, order: _Order, part: HopPart, seconds: float) -> None:
        self.owed -= part is HopPart.WEIGHTS
        order.turn.is_ordered = False
        self._floor.later(self._between_s, self._go_on, self.life)
        wait_s = max(0.0, self._floor.now_s - order.queued_s - seconds)
        self._floor.computed(order.turn, part, seconds, wait_s)

    def _go_on(self, life: object) -> None:
        """The event loop has heard that a computation has ended."""
        if life is self.life and self.is_alive:
            self._begun -= 1
            self._fill()

    def _begin(self) -> None:
        seconds, done = self._chain.popleft()
        self._is_busy = True
        self.busy_s += seconds
        self._floor.later(seconds, self._end, self.life, done)

    def _end(self, life: object, done: Callable[[], None]) -> None:
        if life is not self.life or not self.is_alive:
            return
        self._is_busy = False
        if self._chain:
            self._begin()
        done()


@dataclass(slots=True, eq=False)
class _Order:
    turn: Turn
    part: HopPart
    queued_s: float
    since: int  # orders that were taken before
    is_taken: bool = False
