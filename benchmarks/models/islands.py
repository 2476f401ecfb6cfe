"""What islands keep of their speed where one becomes slow: the table in docs/islands.md.

    python -m benchmarks.models.islands

Virtual time, in which the scheduler's own rules cut the leases: 40 periods of 50 steps of 16 microbatches. An island
that is not slow trains two microbatches a second. A step takes 0.02 s more, 0.14 s at the island that is far from the
scheduler, and an exchange 14 s of the link. Printed is the share of the sum of all speeds that becomes tokens.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from tests.support.race import TURN_S, Race, Speed

STEPS, EVERY, MICROBATCHES, EXCHANGE_S, NEAR_S, FAR_S = 2000, 50, 16, 14.0, 0.02, 0.14
WAYS: Mapping[str, tuple[bool, int]] = {
    "equal": (False, 0),
    "leases": (True, 0),
    "equal, overlap 5": (False, 5),
    "leases, overlap 5": (True, 5),
}


def steady(rate: float = 2.0) -> Speed:
    return lambda _: rate


def now_and_then(for_s: float, of_s: float, times: float) -> Speed:
    """So many times slower, for so long of so long."""
    return lambda at_s: 2.0 / times if at_s % of_s < for_s else 2.0


def in_the_middle(times: float) -> Speed:
    """So many times slower in the middle fifth of the time that the job would take."""
    whole_s = STEPS * MICROBATCHES / 4.0
    return lambda at_s: 2.0 / times if 0.4 * whole_s <= at_s < 0.6 * whole_s else 2.0


SCENES: Mapping[str, Sequence[Speed]] = {
    "no island": [steady(), steady()],
    "5 times, in the middle fifth": [steady(), in_the_middle(5)],
    "5 times, 200 s of each 400": [steady(), now_and_then(200, 400, 5)],
    "5 times, 60 s of each 300": [steady(), now_and_then(60, 300, 5)],
    "stopped, 120 s of each 900": [steady(), now_and_then(120, 900, 1e6)],
    "four, of 0.58, 0.75, 1.51 and 3.33 s a step": [steady(4 / step_s) for step_s in (0.58, 0.75, 1.51, 3.33)],
}


def race(speeds: Sequence[Speed], by_speed: bool, overlap: int) -> Race:
    far_s = [NEAR_S, *([FAR_S] * (len(speeds) - 1))]
    made = Race(speeds, STEPS, EVERY, MICROBATCHES, overlap, EXCHANGE_S, far_s, by_speed)
    made.run()
    return made


def kept(made: Race) -> float:
    """The microbatches of the job over what the islands' speeds add up to in that time."""
    able = sum(TURN_S * speed(turn * TURN_S) for turn in range(math.ceil(made.now_s / TURN_S)) for speed in made.speeds)
    return STEPS * MICROBATCHES / able


def main() -> None:
    table = Table("slower", *WAYS, "cuts a period, at most")
    for name, speeds in SCENES.items():
        races = [race(speeds, *way) for way in WAYS.values()]
        cuts = Counter(cut.first_step // EVERY for _, cut in races[-1].cuts)
        table.add_row(name, *(f"{kept(made):.2f}" for made in races), str(max(cuts.values())))
    Console().print(table)


if __name__ == "__main__":
    main()
