"""Islands that train on a virtual clock, with links between them that carry so much a second.

    island 0   step 4 ─▶ step 5 ─▶ ·········· ─▶ step 6       it stands at the barrier: step 5 has passed, no more may
    island 1   step 4 ─▶ announces ▫┘           │
                         sends      ▇▇▇▇▇▇▇▇▇▇▇▇┘ arrives

Messages of an island to another one arrive in the order in which they were sent, each when its last byte has been
carried, and `delay_s` later. Two things hold an island back before a step:

- **The mirror clock**: it may be no more than `slack` steps ahead of what it has heard of the slowest island. That is
  heard when what was sent behind a step has come, or with `clock = "alone"` by a small message that passes it by.
- **The barrier**: if a link has more to carry than it does in `barrier_s`, its sender announces that, in a small
  message. One step of the receiver may pass the announcement; before the next one it waits for what was announced.

What was announced or heard of lies in the queue of a link already, so it comes whatever islands wait for, and no wait
is for ever. An announcement is for the whole island, since a step reads all blocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from benchmarks.learning.gaia.band import Meter
from benchmarks.learning.gaia.significance import Copy, Gaia, Update
from swarm.model.stage import Stage

PASSING = 1  # steps that may pass an announcement
Reason: TypeAlias = Literal["barrier", "clock"]
REASONS: tuple[Reason, ...] = ("barrier", "clock")


@dataclass(frozen=True, slots=True)
class Sites:
    """How fast each island is, and how much its links carry."""

    step_s: tuple[float, ...] = (1.0, 1.0)
    bytes_per_s: tuple[float, ...] = (math.inf, math.inf)  # of each link of a site; between two, the less of both
    delay_s: float = 0.0  # of a message

    def rate(self, one: int, other: int) -> float:
        return min(self.bytes_per_s[one], self.bytes_per_s[other])

    def carried(self, island: int) -> float:
        """The bytes a second that an island can send to all others together: as all get the same, so many times what
        the slowest of its links carries."""
        rates = [self.rate(island, other) for other in range(len(self.step_s)) if other != island]
        return len(rates) * min(rates)


@dataclass(frozen=True, slots=True)
class Announced:
    """What an island waits for before it makes more than `steps` steps."""

    clock: int  # the sender's steps behind which it was sent
    steps: int


@dataclass(slots=True)
class Island:
    stages: list[Stage]
    copy: Copy
    meter: Meter
    heard: list[int]  # inner steps that each island has made, as far as this one knows
    arrived: list[int]  # the same, of those whose updates have come
    free_s: list[float]  # when the link to each other one has sent all before
    steps: int = 0
    sent_bytes: int = 0  # to each of the others
    busy: bool = False
    came: list[Update] = field(default_factory=list)  # between its steps it takes them over
    announced: list[list[Announced]] = field(default_factory=list)  # by each island
    stood: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))  # how often
    stood_s: dict[Reason, float] = field(default_factory=lambda: dict.fromkeys(REASONS, 0.0))
    thresholds: list[float] = field(default_factory=list)
    uses: list[tuple[float, float]] = field(default_factory=list)  # when, and the use of the limit
    held: tuple[Reason, float] | None = None  # by what, and since when

    @classmethod
    def of(cls, stages: list[Stage], copy: Copy, meter: Meter, islands: int) -> Island:
        """One of so many islands, at its start."""
        one = cls(stages, copy, meter, [0] * islands, [0] * islands, [0.0] * islands)
        one.announced = [[] for _ in range(islands)]
        return one

    def stand(self, why: Reason | None, now_s: float) -> None:
        """Note what holds it back from now on, if anything."""
        if self.held is not None:
            before, since_s = self.held
            self.stood_s[before] += now_s - since_s
        if why is not None and (self.held is None or self.held[0] != why):
            self.stood[why] += 1
        self.held = None if why is None else (why, now_s)


class Sea:
    """Islands that train until each has made all its steps, and all is sent."""

    def __init__(
        self, gaia: Gaia, sites: Sites, islands: Sequence[Island], steps: int, train: Callable[[int], float]
    ) -> None:
        """`train` makes the next inner step of an island, and gives the share of the highest learning rate there."""
        self.gaia, self.sites, self.islands, self.steps, self._train = gaia, sites, islands, steps, train
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def run(self) -> None:
        for number in range(len(self.islands)):
            self._begin(number)
        while self._events:
            self.now_s, _, happens = heapq.heappop(self._events)
            happens()
        assert all(one.steps == self.steps for one in self.islands), "an island waits for ever"

    def _at(self, when_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, self._count, happens))
        self._count += 1

    def _begin(self, number: int) -> None:
        one = self.islands[number]
        if one.busy:
            return
        while one.came:
            one.copy.receive(one.came.pop(0))
        if one.steps == self.steps:
            return
        why = self._holds_back(one)
        one.stand(why, self.now_s)
        if why is None:
            one.busy = True
            rate = self._train(number)
            self._at(self.now_s + self.sites.step_s[number], partial(self._done, number, rate))

    def _holds_back(self, one: Island) -> Reason | None:
        if one.steps > min(one.heard) + self.gaia.slack:
            return "clock"
        if any(one.steps >= each.steps for announced in one.announced for each in announced):
            return "barrier"
        return None

    def _done(self, number: int, rate: float) -> None:
        one = self.islands[number]
        one.busy = False
        one.steps += 1
        one.heard[number] = one.arrived[number] = one.steps
        update, taken = self._send(one, rate)
        for other in range(len(self.islands)):
            if other != number:
                bytes_per_s = self.sites.rate(number, other)
                sent_s = one.free_s[other] = max(self.now_s, one.free_s[other]) + taken / bytes_per_s
                if taken and sent_s - self.now_s > self.gaia.barrier_s:
                    self._at(self.now_s + self.sites.delay_s, partial(self._announce, other, number, one.steps))
                self._at(sent_s + self.sites.delay_s, partial(self._arrive, other, number, update, one.steps))
                if self.gaia.clock == "alone":
                    self._at(self.now_s + self.sites.delay_s, partial(self._hear, other, number, one.steps))
        self._begin(number)

    def _send(self, one: Island, rate: float) -> tuple[Update, int]:
        """What is significant now; behind the last step all."""
        if one.steps == self.steps:
            update, taken = one.copy.send(0.0)
            one.sent_bytes += taken
            return update, taken
        others = len(self.islands) - 1
        adjust = one.meter.adjust if self.gaia.band is not None else 0.0
        threshold = max(0.0, self.gaia.threshold_at(one.steps - 1, rate) + adjust)
        update, taken = one.copy.send(threshold, one.meter.room_bytes(self.now_s) / others)
        one.sent_bytes += taken
        one.meter.record(self.now_s, taken * others)
        one.meter.judge(self.now_s)
        one.thresholds.append(threshold)
        one.uses.append((self.now_s, one.meter.use(self.now_s)))
        return update, taken

    def _announce(self, number: int, sender: int, clock: int) -> None:
        one = self.islands[number]
        if one.arrived[sender] < clock:
            one.announced[sender].append(Announced(clock, one.steps + one.busy + PASSING))

    def _hear(self, number: int, sender: int, clock: int) -> None:
        self.islands[number].heard[sender] = max(clock, self.islands[number].heard[sender])
        self._begin(number)

    def _arrive(self, number: int, sender: int, update: Update, clock: int) -> None:
        one = self.islands[number]
        one.arrived[sender] = clock
        one.announced[sender] = [each for each in one.announced[sender] if each.clock > clock]
        one.came.append(update)
        self._hear(number, sender, clock)
