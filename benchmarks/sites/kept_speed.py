"""How much of the speed that two islands have alone is left to them, over a slow link and on loopback.

    python -m benchmarks.sites.kept_speed [--turns 3] [--link 50:100] [--overlap 2] [--save RUNS.json]

    lyon [namespace: scheduler, a stage server for each of two stages] ──── link ──── berlin [a stage server for each]

"alone": both islands train at the same time, no link is slow, and nothing is exchanged before the run ends. The other
ways are measured against that, in turns: with the slow link and without any exchange, so that only what berlin and the
scheduler say to each other crosses it; with diloco and int8; with streaming and fp4; with one island that averages
every step; and the modes with islands on loopback, which is what outer steps cost by themselves.

Computations take given times (benchmarks.measured.modelled_stage_server), so that two cores are enough. Speed is the
sum of both islands' inner steps per second by the scheduler's commit rows; with exchanges over one whole period of
every_steps, which has one exchange of each fragment. Needs root, for network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.learning.kept import Kept
from benchmarks.sites.two_sites import STAGES, Sites
from benchmarks.tables import show
from swarm.data.tokenizer import ByteTokenizer
from swarm.job.islands import course_of, outer_courses
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.pki.profiles import ENVIRONMENT
from tests.chaos.islands import SITES
from tests.chaos.relay import Relay, why_not
from tests.chaos.trial import Job
from tests.support.processes import Process
from tests.support.simulated import Tokens, small_spec

EVERY_STEPS = 50
FIRST_STEPS = 3  # are not measured
MORE_STEPS = 2  # the closing exchange is not measured
MICROBATCHES, SEQUENCES = 4, 2  # of an island's step; of a microbatch
OPTIMIZER_S = 0.02
PROGRAM = "benchmarks.measured.modelled_stage_server"
RUN_S_MAX = 600.0
ALONE = "alone"


@dataclass(frozen=True, slots=True)
class Way:
    """How islands join, and how many steps are measured."""

    name: str
    mode: str
    outer: tuple[tuple[str, object], ...] = ()
    is_slow: bool = True  # the link
    steps: int = EVERY_STEPS

    @property
    def all_steps(self) -> int:
        return FIRST_STEPS + self.steps + MORE_STEPS


NEVER, EVERY = (("every_steps", 10 * EVERY_STEPS),), ("every_steps", EVERY_STEPS)
WAYS = (
    Way(ALONE, "diloco", NEVER, is_slow=False, steps=10),
    Way("no exchange", "diloco", NEVER, steps=10),
    Way("diloco, int8", "diloco", (EVERY, ("compression", "int8"))),
    Way("streaming, fp4", "streaming", (EVERY, ("compression", "fp4"))),
    Way("allreduce", "allreduce", steps=8),
    Way("diloco, int8, on loopback", "diloco", (EVERY, ("compression", "int8")), is_slow=False),
    Way("streaming, fp4, on loopback", "streaming", (EVERY, ("compression", "fp4")), is_slow=False),
)


def commits_of(rows: Sequence[tuple[int, int, float]], spec: JobSpec, *, outer: bool = False) -> dict[int, list[float]]:
    """When inner steps were committed, or outer ones, by timeline; rows are timeline, step and Unix seconds."""
    found: dict[int, list[float]] = {}
    for timeline, step, at_s in sorted(rows):
        if course_of(spec, timeline).is_outer(step) == outer:
            found.setdefault(timeline, []).append(at_s)
    return found


@dataclass(frozen=True, slots=True)
class Speed:
    """Inner steps of an island in so many seconds, and by how much exchanges made the steps behind them longer."""

    steps: int
    seconds: float
    added_s: Mapping[int, float]  # by inner step

    @property
    def steps_per_s(self) -> float:
        return self.steps / self.seconds


def speed_of(commits_s: Sequence[float], first: int, steps: int, behind: Collection[int]) -> Speed:
    """Of so many inner steps of an island from the `first` on; exchanges lie behind some inner steps."""
    took_s = {at: commits_s[at] - commits_s[at - 1] for at in range(first, first + steps)}
    usual_s = median(took_s.values())
    return Speed(steps, sum(took_s.values()), {at: each_s - usual_s for at, each_s in took_s.items() if at in behind})


def exchanged(islands: Sequence[Speed]) -> tuple[float, float]:
    """What exchanges took of the time of the island that they took most of, with the wait for the others; and without
    it: of each exchange, what it took of the last island to come."""
    most = max(sum(island.added_s.values()) / island.seconds for island in islands)
    of_last_s = sum(min(island.added_s[at] for island in islands) for at in islands[0].added_s)
    return most, of_last_s * len(islands) / sum(island.seconds for island in islands)


class Modelled(Sites):
    """Sites with one stage server for each stage, whose computations take given times."""

    def __init__(self, folder: Path, relay: Relay, options: argparse.Namespace) -> None:
        super().__init__(folder, "0", relay, options.width, replicas=1)
        self._options = options

    def start_server(self, number: int, *flags: str, module: str = "") -> Process:
        program = f"{PROGRAM} --compute {self._options.compute:g} --step {OPTIMIZER_S:g}"
        return super().start_server(number, *flags, module=program)

    def __exit__(self, *why: object) -> None:
        for process in self.servers.values():
            if process.child.poll() is None:
                process.kill()  # all at once; there is nothing to be saved
        super().__exit__(*why)

    def slow(self, is_slow: bool) -> None:
        """What the link between the sites is from now on."""
        mbit_per_s, rtt_ms = map(float, self._options.link.split(":")) if is_slow else (0.0, 0.0)
        self.relay.between(0, 1, delay_s=rtt_ms / 2e3, bytes_per_s=mbit_per_s * 1e6 / 8)

    def start(self, mode: str, steps: int, outer: Mapping[str, object], **others: object) -> Job:
        """Submit a job with an island at each site, or with one of all; `others` of its values may be given."""
        changes: dict[str, object] = {
            "config__hidden_size": self._width,
            "config__intermediate_size": 2 * self._width,
            "pipeline__stages": STAGES,
            "training__reproducible": False,
            "training__learning_rate": 1e-4,
            "training__steps": steps,
            "training__microbatch_sequences": SEQUENCES,
            "training__global_batch_sequences": len(SITES) * MICROBATCHES * SEQUENCES,
            "checkpoint__every_steps": 0,
            "checkpoint__every_s": 0.0,
            "averaging__mode": mode,
        }
        changes |= {f"outer__{key}": value for key, value in outer.items()}
        if mode != "allreduce":
            changes |= {"islands__count": len(SITES), "pipeline__overlap": self._options.overlap}
        changes["pipeline__sync_steps"] = 0
        spec = small_spec(self.text, **(changes | others))
        spec = resolve(spec, Basis(ByteTokenizer.vocabulary_size, stages=STAGES))
        tokens = Tokens.make(self.folder / f"tokens-{time.monotonic_ns()}", spec)
        return Job(self.submit(spec, tokens.manifest).id, spec, tokens)

    def commits(self, job: Job, *, outer: bool = False) -> dict[int, list[float]]:
        """As `commits_of`."""
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            found = database.execute("select timeline, step, committed_unix_s from commits where job = ?", (job.id,))
            return commits_of(found.fetchall(), job.spec, outer=outer)

    def measure(self, way: Way) -> tuple[float, float, float]:
        """Train once: inner steps per second of both islands, an averaged step being one of each; and `exchanged`."""
        self.slow(way.is_slow)
        job = self.start(way.mode, way.all_steps, dict(way.outer))
        self.until("the job ends", lambda: self.view(job).state in ("succeeded", "failed", "stalled"), RUN_S_MAX)
        assert self.view(job).state == "succeeded", self.view(job).reason
        self.until_free(list(self.servers))
        outer = outer_courses(job.spec)[0].outer if job.spec.has_outer_steps else ()
        behind = {at for record in outer for at in (record.captured, record.behind)}
        each = [speed_of(record, FIRST_STEPS, way.steps, behind) for record in self.commits(job).values()]
        return sum(record.steps_per_s for record in each) * len(SITES) / len(each), *exchanged(each)


@contextlib.contextmanager
def modelled_sites(options: argparse.Namespace) -> Iterator[Modelled]:
    """Two sites with a stage server for each stage; what they print goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="swarm-kept-") as name, Relay(len(SITES), seed=0) as relay:
        folder = Path(name)
        os.environ[ENVIRONMENT] = str(folder / "profiles")
        relay.move_here(0)
        with contextlib.redirect_stdout(sys.stderr), Modelled(folder, relay, options) as sites:
            sites.fill()
            yield sites


def rows(found: Mapping[str, Sequence[tuple[float, float, float]]]) -> list[list[str]]:
    """A row for each way: its speed against that alone, and what exchanges took; medians of the turns."""
    rows = []
    for name, turns in found.items():
        kept = [speed / alone for (speed, *_), (alone, *_) in zip(turns, found[ALONE], strict=True)]
        spread = f"{min(kept):.3f} to {max(kept):.3f} ({len(kept)})"
        speed, share, of_last = (median(column) for column in zip(*turns, strict=True))
        rows.append([name, f"{speed:.3f}", f"{median(kept):.3f}", spread, f"{share:.1%}", f"{of_last:.1%}"])
    return rows


COLUMNS = ("way", "steps/s", "against alone", "least to most (turns)", "exchanges", "of the last to come")


def parser_of(text: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--link", default="50:100", metavar="MBIT:MS", help="each way, and there and back")
    parser.add_argument("--compute", type=float, default=0.05, help="seconds of a forward, and of a backward")
    parser.add_argument("--width", type=int, default=384, help="of the model")
    parser.add_argument("--overlap", type=int, default=0, help="late microbatches of a step of an island")
    parser.add_argument("--save", type=Path, help="a JSON file that keeps what each turn found")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    options = parser.parse_args()
    if reason := why_not():
        parser.error(reason)
    return options


def main() -> int:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--ways", default=";".join(way.name for way in WAYS[1:]), help="with ; between; and alone")
    options = parsed(parser)
    ways = [way for way in WAYS if way.name in (ALONE, *options.ways.split(";"))]
    kept, load = Kept(options.save), os.getloadavg()[0]
    found: dict[str, list[tuple[float, float, float]]] = {way.name: [] for way in ways}
    with modelled_sites(options) as sites:
        for turn in range(options.turns):
            for way in ways:
                late = f", {options.overlap} late" if way.mode != "allreduce" else ""
                shape = f"{options.compute:g} s, width {options.width}{late}"
                name = f"{way.name}, {options.link}, {shape}, turn {turn}"
                found[way.name].append(tuple(kept.once(name, partial(sites.measure, way))))
                print(f"{name}  {found[way.name][-1]}", file=sys.stderr, flush=True)
    show(COLUMNS, rows(found), 100)
    print(f"{options.link} Mbit/s:ms, load {load:.1f} before, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
