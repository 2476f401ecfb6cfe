"""What a job gains that begins as one island and divides into several later, at equal tokens.

    python -m benchmarks.learning.outer_begin [--seeds 3] [--steps 300] [--every 50] [--after 50 100]
        [--table docs/islands.md] [--save RUNS.json]

One island trains the first steps with the whole batch, as `averaging.mode = "allreduce"` does. Two islands with
`diloco` go on from its checkpoint, as after `swarm submit --resume-from JOB:STEP`: with its weights, and each with its
moments. Model, text and loss are those of `benchmarks.learning.outer`. "After" is the number of those steps, a multiple
of H.

One island needs twice as long for a step as two that divide it. So the last row has islands from the beginning, and as
many more steps as they make in the time that the row before takes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.learning.convergence import with_data
from benchmarks.learning.outer import ALLREDUCE, Way, job, loss_of, run_name
from benchmarks.learning.outer_options import ISLANDS, RATE, compare
from benchmarks.learning.runs import parsed, parser_of
from swarm.checkpoint.reader import Checkpoint
from swarm.checkpoint.storage import LocalStorage
from swarm.data.batches import Batches
from swarm.job.spec import JobSpec
from swarm.reference.checkpoints import Islands, LocalCheckpoints
from swarm.reference.trainer import StepReport, train_local

MARKS = ("<!-- begin -->", "<!-- end of begin -->")


class _Begun(Exception):
    """One island has trained its steps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.checkpoint = checkpoint


@dataclass(frozen=True, slots=True)
class Beginning:
    """A row of the table: a way, how many steps one island trains before, and how many there are more of."""

    way: Way
    after: int = 0
    more: int = 0

    @property
    def name(self) -> str:
        after = f", after {self.after} steps as one island" if self.after else ""
        return f"{self.way}{after}{f', {self.more} steps more' if self.more else ''}"

    @property
    def against(self) -> str:
        return str(ALLREDUCE)

    def kept_as(self, seed: int, steps: int) -> str:
        return run_name(self.way, RATE, seed, steps + self.more) + (f", after {self.after}" if self.after else "")

    def measure(self, seed: int, steps: int, source: str) -> float:
        if not self.after:
            return loss_of(self.way, seed, RATE, steps + self.more, source)
        together, apart = (job(way, seed, RATE, steps, source) for way in (ALLREDUCE, self.way))
        with tempfile.TemporaryDirectory() as folder:
            start = with_data(together, partial(begin, steps=self.after, folder=Path(folder)))
            return with_data(apart, partial(train_local, start=start)).evaluations[-1].loss


def begin(spec: JobSpec, batches: Batches, steps: int, folder: Path) -> Checkpoint:
    """Train so many steps of a resolved spec; the checkpoint that is written then."""
    checkpoints = LocalCheckpoints(LocalStorage(folder), spec, {}, lambda said: None)

    def look(islands: Islands, report: StepReport) -> None:
        if report.step + 1 == steps:
            raise _Begun(checkpoints.write(islands, steps, report.loss))

    try:
        train_local(spec, batches, on_commit=look)
    except _Begun as begun:
        return begun.checkpoint
    raise AssertionError(f"the job has no step {steps}")


def beginnings(every_steps: int, afters: Sequence[int]) -> list[Beginning]:
    way = Way("diloco", ISLANDS, (("every_steps", every_steps),))
    longer = Beginning(way, more=max(afters) * (ISLANDS - 1))  # as long as the last of the others takes
    return [Beginning(ALLREDUCE), *(Beginning(way, after) for after in (0, *afters)), longer]


def main() -> None:
    parser = parser_of(__doc__, seeds=3, steps=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--after", type=int, nargs="+", default=(50, 100))
    arguments = parsed(parser)
    compare(beginnings(arguments.every, arguments.after), arguments, MARKS)


if __name__ == "__main__":
    main()
