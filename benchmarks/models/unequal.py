"""How much of the sum of their speeds unequal replicas keep: the scheduler's own brain in virtual time.

    python -m benchmarks.models.unequal [--seeds 3] [--steps 20]

Stage servers are modelled. A device computes one thing at a time: backward before forward, then the older step, then
the lower index (`stage_server/brain/work_queue.py` also puts late ones behind the others). A replica of speed 1 needs
0.4 s for a microbatch at a stage, a third of it forward; every computation varies (lognormal, sigma 0.05). A message to
or from the scheduler takes 0.5 ms, a boundary tensor 2 ms, a round, a row and an optimizer step a few ms. Nobody fails,
and nothing is taken away from a replica that is late.

Percent is committed microbatches per second, after three steps, against the speed of the slowest stage: the sum of the
speeds of its replicas. "alone" chooses each stage's replica by itself, "alike" as the scheduler does: from like to
like (`Lanes`), and in time.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from statistics import mean

from rich.console import Console
from rich.table import Table

from scheduler.brain.inputs import Happened, ReplicaRecord, RowDurable, Start, Tick
from scheduler.brain.job import JobBrain
from scheduler.brain.outputs import Fail, Send, Stopped, WriteCommit
from scheduler.brain.routing import policies
from scheduler.brain.settings import BrainSettings
from swarm.job.partition import unit_names
from swarm.types import Direction, Hop, JobId, Microbatch, PeerId
from swarm.wire.messages import Accumulated, Average, Command, Commit, Event, Forwarded, LoadStage, Route
from tests.support.scripted import ScriptedReplica

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
UNIT_S = 0.4  # for a microbatch at a stage, with speed 1
SHARE = {FORWARD: 1.0 / 3.0, BACKWARD: 2.0 / 3.0}
NOISE = 0.05
MESSAGE_S, BOUNDARY_S, ROW_S, ROUND_S, APPLY_S = 0.0005, 0.002, 0.001, 0.005, 0.005
WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True)
class Fleet:
    """The speeds of each stage's replicas, and the microbatches of a step."""

    name: str
    speeds: tuple[tuple[float, ...], ...]
    microbatches: int

    @property
    def per_s(self) -> float:
        """What the slowest stage could compute without ever waiting."""
        return min(map(sum, self.speeds)) / UNIT_S


TEN_TIMES_SLOWER = Fleet("2 stages of 1:1:1:0.1", ((1.0, 1.0, 1.0, 0.1),) * 2, 25)
FLEETS = (
    Fleet("2 stages of 1:2:4", ((1.0, 2.0, 4.0),) * 2, 28),
    Fleet("2 stages of 1:2:4", ((1.0, 2.0, 4.0),) * 2, 56),
    Fleet("4 stages of 1:2:4", ((1.0, 2.0, 4.0),) * 4, 56),
    Fleet("2 stages of 1:4", ((1.0, 4.0),) * 2, 40),
    Fleet("1:2:4, then 1:1:2:3", ((1.0, 2.0, 4.0), (1.0, 1.0, 2.0, 3.0)), 56),
    Fleet("3 stages of 8, from 1 to 4", (tuple(4.0 ** (number / 7.0) for number in range(8)),) * 3, 128),
    Fleet("2 stages of 3, all equal", ((1.0, 1.0, 1.0),) * 2, 48),
    TEN_TIMES_SLOWER,
    replace(TEN_TIMES_SLOWER, microbatches=64),
    Fleet("1:1:1:0.1, then all equal", ((1.0, 1.0, 1.0, 0.1), (1.0,) * 4), 25),
)
OVERLAPS = (0.0, 0.25, 0.5)  # of a step


@dataclass(slots=True)
class _Device:
    """A replica: what it has to compute, the most urgent first, and whether it computes."""

    stage: int
    pace_s: float
    queue: list[tuple[tuple[bool, int, int], int, float, Callable[[], None]]] = field(default_factory=list)
    busy: bool = False
    forward_s: dict[Microbatch, float] = field(default_factory=dict)


class Model:
    """A brain and its stage servers."""

    def __init__(self, fleet: Fleet, overlap: int, steps: int, seed: int) -> None:
        stages = len(fleet.speeds)
        self.committed_s: list[float] = []
        self._fleet, self._steps, self._rng = fleet, steps, Random(seed)
        self._units = unit_names(stages, False)
        self._brain = JobBrain(
            BrainSettings(
                job=JobId("bench"), epoch=1, timeline=0, steps=steps, microbatches=fleet.microbatches,
                split=(1,) * stages, spec_json="{}", overlap=overlap, max_in_flight=None, units=self._units,
                grad_clip_norm=1.0, averaging_timeout_s=60.0, fail_on_nonfinite=False, learning_rate=lambda step: 0.1,
                tokens_of=lambda step: 1024,
            ),
            Random(seed),
        )  # fmt: skip
        self._devices = {
            PeerId(f"{stage}.{number}"): _Device(stage, UNIT_S / speed)
            for stage, pool in enumerate(fleet.speeds)
            for number, speed in enumerate(pool)
        }
        self._now_s = 0.0
        self._number = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> float:
        """The share of the fleet's speed that was kept."""
        self._step(Start(tuple(ReplicaRecord(peer, 1, peer, one.stage) for peer, one in self._devices.items())))
        while len(self.committed_s) < self._steps:
            at_s, _, act = heapq.heappop(self._timers)
            while self._brain.due_s < at_s:
                self._now_s = self._brain.due_s
                self._step(Tick())
            self._now_s = at_s
            act()
        seconds = self.committed_s[-1] - self.committed_s[WARM_UP_STEPS - 1]
        done = self._fleet.microbatches * (self._steps - WARM_UP_STEPS)
        return done / seconds / self._fleet.per_s

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self._now_s + seconds, next(self._number), act))

    def _step(self, happened: Happened | RowDurable | Start | Tick) -> None:
        for output in self._brain.step(happened, self._now_s):
            match output:
                case Send(peer=peer, command=command):
                    self._after(MESSAGE_S, lambda peer=peer, command=command: self._obey(peer, command))  # type: ignore[misc]
                case WriteCommit(row=row):
                    self._after(ROW_S, lambda step=row.step: self._durable(step))  # type: ignore[misc]
                case Fail() | Stopped():
                    raise AssertionError(output)

    def _durable(self, step: int) -> None:
        self.committed_s.append(self._now_s)
        self._step(RowDurable(step))

    def _say(self, peer: PeerId, event: Event, after_s: float = 0.0) -> None:
        self._after(after_s + MESSAGE_S, lambda: self._step(Happened(peer, event)))

    def _obey(self, peer: PeerId, command: Command) -> None:
        device = self._devices[peer]
        match command:
            case Route(microbatch=microbatch, hops=hops) if device.stage == 0:
                self._arrived(microbatch, hops, 0, FORWARD)
            case Commit():
                self._put(device, (False, -1, 0), APPLY_S, lambda: self._answer(peer, command))
            case Average():
                self._answer(peer, command, ROUND_S)
            case LoadStage():
                self._answer(peer, command)

    def _answer(self, peer: PeerId, command: Command, after_s: float = 0.0) -> None:
        said = ScriptedReplica(self._brain.settings.job, peer, self._devices[peer].stage, self._units).answer(command)
        assert said is not None
        self._say(peer, said, after_s)

    # Computing -------------------------------------------------------------------------------------------------------

    def _arrived(self, microbatch: Microbatch, hops: Sequence[Hop], stage: int, direction: Direction) -> None:
        device = self._devices[hops[stage].peer]
        seconds = device.pace_s * SHARE[direction] * math.exp(self._rng.gauss(0.0, NOISE))
        urgency = (direction is FORWARD, microbatch.step, microbatch.index)
        self._put(device, urgency, seconds, lambda: self._computed(microbatch, hops, stage, direction, seconds))

    def _put(self, device: _Device, urgency: tuple[bool, int, int], seconds: float, done: Callable[[], None]) -> None:
        heapq.heappush(device.queue, (urgency, next(self._number), seconds, done))
        if not device.busy:
            self._begin(device)

    def _begin(self, device: _Device) -> None:
        *_, seconds, done = heapq.heappop(device.queue)
        device.busy = True

        def end() -> None:
            done()
            device.busy = False
            if device.queue:
                self._begin(device)

        self._after(seconds, end)

    def _computed(
        self, microbatch: Microbatch, hops: Sequence[Hop], stage: int, direction: Direction, seconds: float
    ) -> None:
        hop, is_last = hops[stage], stage == len(hops) - 1
        device = self._devices[hop.peer]
        if direction is BACKWARD:
            forward_s = device.forward_s.pop(microbatch)
            loss = 1.0 if is_last else 0.0
            self._say(hop.peer, Accumulated(microbatch, stage, hop.attempt, True, loss, forward_s, seconds, 0.0))
            if stage:
                self._after(BOUNDARY_S, lambda: self._arrived(microbatch, hops, stage - 1, BACKWARD))
            return
        device.forward_s[microbatch] = seconds
        if is_last:
            self._arrived(microbatch, hops, stage, BACKWARD)
        else:
            self._say(hop.peer, Forwarded(microbatch, stage, hop.attempt))
            self._after(BOUNDARY_S, lambda: self._arrived(microbatch, hops, stage + 1, FORWARD))


@contextmanager
def unequal_from(ratio: float) -> Iterator[None]:
    """Stages whose slowest pace is less than `ratio` times the fastest count as equal meanwhile."""
    before, policies.UNEQUAL = policies.UNEQUAL, ratio
    try:
        yield
    finally:
        policies.UNEQUAL = before


def kept(fleet: Fleet, overlap: float, *, alike: bool, seeds: int, steps: int) -> float:
    """The mean over seeds of the share of the fleet's speed that is kept; `overlap` is a share of a step."""
    with unequal_from(policies.UNEQUAL if alike else math.inf):
        late = round(overlap * fleet.microbatches)
        return mean(Model(fleet, late, steps, seed).run() for seed in range(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    columns = [f"{overlap:g} late, {way}" for overlap in OVERLAPS for way in ("alone", "alike")]
    table = Table("replicas", "microbatches", *columns)
    for fleet in FLEETS:
        cells = [
            f"{kept(fleet, overlap, alike=alike, seeds=options.seeds, steps=options.steps):.1%}"
            for overlap in OVERLAPS
            for alike in (False, True)
        ]
        table.add_row(fleet.name, str(fleet.microbatches), *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
