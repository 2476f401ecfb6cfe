"""How much of the sum of their speeds unequal replicas keep: the scheduler's own brain in virtual time.

    python -m benchmarks.models.unequal [--seeds 3] [--steps 20]

Stage servers are modelled (scheduler/planning/play.py). A replica of speed 1 needs 0.4 s for a microbatch at a stage, a
third of it forward; every computation varies (lognormal, sigma 0.05). A message to or from the scheduler takes 0.5 ms,
a boundary tensor 2 ms, a round, a row and an optimizer step a few ms. A device has the next computation at once, and
none ahead. Nobody fails, and nothing is taken away from a replica that is late.

Percent is committed microbatches per second, after three steps, against the speed of the slowest stage: the sum of the
speeds of its replicas. "alone" chooses each stage's replica by itself, "alike" as the scheduler does: from like to
like (`Lanes`), and in time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean

from rich.console import Console
from rich.table import Table

from scheduler.brain.routing import policies
from scheduler.brain.settings import DeadlineSettings
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, PlayRules, Workload
from scheduler.planning.pool import PeerPool, PoolLink, PoolPeer
from swarm.job.partition import unit_names

UNIT_S = 0.4  # for a microbatch at a stage, with speed 1
FAST_BITS_PER_S = 1e12  # lines that hold nothing up
APPLY_S = 0.005
NOBODY_IS_LATE = DeadlineSettings(min_s=1e6, max_s=1e6)
RULES = PlayRules(
    warm_up=3, looks_ahead=False, between_s=0.0, row_s=0.001, round_s=0.005, deadlines=NOBODY_IS_LATE
)  # fmt: skip


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

    def play(self, overlap: int, rules: PlayRules, seed: int) -> Play:
        """The play of the fleet with so many late microbatches."""
        stages = len(self.speeds)
        places = tuple(tuple(f"{at}.{number}" for number in range(len(pool))) for at, pool in enumerate(self.speeds))
        peers = tuple(
            PoolPeer(name, "cpu", 0, "", speed, FAST_BITS_PER_S, FAST_BITS_PER_S)
            for names, pool in zip(places, self.speeds, strict=True)
            for name, speed in zip(names, pool, strict=True)
        )
        units = unit_names(stages, False)
        load = Workload(
            self.microbatches, tokens=1, work=(UNIT_S,) * stages, boundary_bytes=1.0, units=units,
            unit_bytes=dict.fromkeys(units, 4000.0), state_bytes=(1,) * stages, apply_s=(APPLY_S,) * stages,
        )  # fmt: skip
        pool = PeerPool(peers, {("", ""): PoolLink(0.0, FAST_BITS_PER_S)})
        return Play(pool, Plan((1,) * stages, places, 1, overlap), load, rules, seed)


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
    rules = replace(RULES, measured=steps - RULES.warm_up)
    with unequal_from(policies.UNEQUAL if alike else math.inf):
        late = round(overlap * fleet.microbatches)
        return mean(fleet.play(late, rules, seed).run().tokens_per_s for seed in range(seeds)) / fleet.per_s


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
