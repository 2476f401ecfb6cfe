"""What islands lose in runs of many exchanges, with the outer learning rate and momentum of "auto" and of the paper.

    python -m benchmarks.learning.outer_long [--seeds 2] [--steps 2000] [--every 10] [--table docs/islands.md]
        [--save RUNS.json]

Two islands of `diloco` beside averaging every step, at equal tokens. Model, learning rate and loss are those of
`benchmarks.learning.outer_options`; the text is longer, so that 4600 steps see each part of it once.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass

from benchmarks.learning.outer import ALLREDUCE, Way, loss_of, run_name
from benchmarks.learning.outer_options import ISLANDS, RATE, compare
from benchmarks.learning.runs import parsed, parser_of

MARKS = ("<!-- long -->", "<!-- end of long -->")
TEXT = f"{sysconfig.get_paths()['stdlib']}/*.py"
PAIRS = ((1.0, 0.5), (0.7, 0.9))  # of "auto", and of the paper (swarm/job/islands.py)


@dataclass(frozen=True, slots=True)
class Long:
    """A row of the table."""

    way: Way

    @property
    def name(self) -> str:
        return str(self.way)

    @property
    def against(self) -> str:
        return str(ALLREDUCE)

    def kept_as(self, seed: int, steps: int) -> str:
        return f"{run_name(self.way, RATE, seed, steps)}, long text"

    def measure(self, seed: int, steps: int, source: str) -> float:
        return loss_of(self.way, seed, RATE, steps, TEXT)


def ways(every_steps: int) -> list[Long]:
    """Averaging every step, and islands with each pair."""
    outer = [
        (("every_steps", every_steps), ("learning_rate", rate), ("momentum", momentum)) for rate, momentum in PAIRS
    ]
    return [Long(ALLREDUCE), *(Long(Way("diloco", ISLANDS, of)) for of in outer)]


def main() -> None:
    parser = parser_of(__doc__, seeds=2, steps=2000)
    parser.add_argument("--every", type=int, default=10)
    arguments = parsed(parser)
    compare(ways(arguments.every), arguments, MARKS)


if __name__ == "__main__":
    main()
