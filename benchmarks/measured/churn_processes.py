"""How much of the possible throughput real processes keep while stage servers are killed and others come.

    python -m benchmarks.measured.churn_processes [--minutes 10] [--stages 3] [--replicas 4] [--rates 0,52] [--every 15]

A scheduler and stages x replicas stage servers, all real processes on loopback. Their computations take given times
(--compute, modelled_stage_server.py), so these are efficiencies of the protocol and not of accelerators. Each stage
server dies by kill -9 with the given chance per hour, at any moment; its process is started again after a pause (45 s
on average, exponential), under the same name, fetches a stage from the others and goes where it helps most. With
`--every` one more run follows, in which one of them, drawn, dies every so many seconds.

    E = N / integral of min over stages of the sum of the speeds of the replicas alive

N is counted from the database's commit rows, each microbatch once, and from one commit to another
(benchmarks/retained.py). A replica leaves the integral at the instant of its kill, a joiner enters when the scheduler
lists it as idle; "start" is what a process took until then. A replica's speed is that of its computations, and in
"E step" that of a replica that also makes its optimizer steps, as it must without anybody dying. "raw" is the
microbatches per second, with deaths / without, in the first rate of the list if that is 0.

"busy" is how much of the processors all programs of the machine used: near 100 % the figures show the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean

import psutil

from benchmarks.retained import WARM_UP_STEPS, Kept, Stays, possible, window
from tests.chaos.trial import Broken, Job, Trial
from tests.support.processes import Process

GRACE_S = 5.0  # the product's own default
LOOK_S = 0.1
ROWS_S = 1.0  # between looks at the commit rows
TOLD_S = 15.0
STEPS = 100_000  # more than any run makes
MICROBATCHES = 16  # per replica and step, while nobody is dead
LAST_COMMIT_S_MAX = 300.0  # after the time is over
PRESENT = ("loading", "serving", "suspect", "draining")


@dataclass(frozen=True, slots=True)
class Model:
    """What computations take."""

    compute_s: float
    step_s: float

    @property
    def speed(self) -> float:
        """Microbatches per second of a replica that makes no optimizer steps."""
        return 1.0 / (2.0 * self.compute_s)

    @property
    def step_share(self) -> float:
        """What a replica that makes its optimizer steps reaches of that."""
        computing_s = MICROBATCHES / self.speed
        return computing_s / (computing_s + self.step_s)

    @property
    def program(self) -> str:
        return f"benchmarks.measured.modelled_stage_server --compute {self.compute_s:g} --step {self.step_s:g}"


@dataclass(frozen=True, slots=True)
class Outcome(Kept):
    """One run."""

    deaths: int
    moves: int
    starts_s: tuple[float, ...]
    busy: float


class Modelled(Trial):
    """A trial whose stage servers have modelled compute."""

    def __init__(self, folder: Path, seed: str, model: Model) -> None:
        super().__init__(folder, seed, grace_s=GRACE_S)
        self.model = model

    def start_server(self, number: int, *flags: str, module: str = "") -> Process:
        return super().start_server(number, *flags, module=module or self.model.program)

    def __exit__(self, *why: object) -> None:
        for process in self.servers.values():
            if process.child.poll() is None:
                process.kill()  # all at once; there is nothing to be saved
        super().__exit__(*why)


@dataclass(slots=True)
class Place:
    """One place in the fleet: a stage server, after its death its next process, and so on. Times are Unix seconds."""

    name: str
    rng: Random
    incarnation: int = 0  # of the process that was seen last
    killed: int = 0  # incarnation; what the scheduler lists of it is no longer true
    dies_s: float = math.inf
    starts_s: float = math.inf
    started_s: float = math.nan  # the process that is on its way

    @property
    def life(self) -> str:
        return f"{self.name}.{self.incarnation}"


class Churn:
    """Kills and starts the stage servers of a trial, and notes who was alive in which stage."""

    def __init__(
        self, trial: Trial, job: Job, per_hour: float, away_s: float, seed: int, every_s: float = math.inf
    ) -> None:
        self._trial = trial
        self._job = job
        self._per_s = per_hour / 3600.0
        self._away_s = away_s
        self._every_s = every_s
        self._next_s = time.time() + every_s
        self._rng = Random(seed)
        self._places = [Place(name, Random(f"{seed}/{number}")) for number, name in enumerate(trial.servers)]
        self.stays = Stays()
        self.starts_s: list[float] = []
        self.deaths = 0

    def look(self) -> None:
        """Kill who is to die, start who is to come, and see who is where."""
        if self._next_s <= time.time():
            self._next_s += self._every_s
            alive = [place for place in self._places if place.starts_s == math.inf and place.incarnation > place.killed]
            self._rng.choice(alive).dies_s = 0.0
        for place in self._places:
            if place.dies_s <= time.time():
                self._die(place)
            elif place.starts_s <= time.time():
                place.starts_s, place.started_s = math.inf, time.time()
                self._trial.respawn(place.name, module="")
        views = {view.id: view for view in self._trial.peers()}
        for place in self._places:
            view, process = views.get(place.name), self._trial.servers[place.name]
            if place.starts_s < math.inf:
                continue  # dead
            if process.child.poll() is not None:
                raise Broken(f"{place.name} ended by itself:\n{process.log.read_text()[-2000:]}")
            if view is None or view.incarnation <= place.killed or view.state == "gone":
                continue
            if view.incarnation > place.incarnation:
                self._born(place, view.incarnation, view.since_unix_s)
            if view.job == self._job.id and view.state in PRESENT:
                self.stays.seen(place.life, view.stage, time.time())

    def _die(self, place: Place) -> None:
        self._trial.servers[place.name].kill()
        now_s = time.time()
        self.stays.ended(place.life, now_s)
        self.deaths += 1
        place.killed = place.incarnation
        place.dies_s, place.starts_s = math.inf, now_s + place.rng.expovariate(1.0 / self._away_s)

    def _born(self, place: Place, incarnation: int, idle_s: float) -> None:
        """Seen for the first time; if no longer idle, it was given its stage at once."""
        place.incarnation = incarnation
        self.stays.idle(place.life, idle_s)
        if not math.isnan(place.started_s):
            self.starts_s.append(idle_s - place.started_s)
        if self._per_s:
            place.dies_s = time.time() + place.rng.expovariate(self._per_s)


def play(
    model: Model,
    stages: int,
    replicas: int,
    per_hour: float,
    minutes: float,
    *,
    away_s: float = 45.0,
    every_s: float = math.inf,
    seed: int = 0,
) -> Outcome:
    """One run of so many minutes after the warm-up; `per_hour` is each stage server's rate of death."""
    with tempfile.TemporaryDirectory(prefix="swarm-churn-") as name, Modelled(Path(name), str(seed), model) as trial:
        _tell(f"{stages * replicas} stage servers start")
        trial.add_servers(stages * replicas)
        job = trial.job(
            stages,
            STEPS,
            training__global_batch_sequences=2 * MICROBATCHES * replicas,
            training__learning_rate=1e-4,
            checkpoint__every_steps=20,
        )
        trial.until_step(job, WARM_UP_STEPS)
        churn = Churn(trial, job, per_hour, away_s, seed, every_s)
        until_s = trial.rows(job)[WARM_UP_STEPS - 1].committed_unix_s + 60.0 * minutes
        psutil.cpu_percent()
        rows_s = told_s = time.time()
        while True:
            churn.look()
            time.sleep(LOOK_S)
            if time.time() < rows_s + ROWS_S:
                continue
            rows_s = time.time()
            commits_s = [row.committed_unix_s for row in trial.rows(job)]
            if (found := window(commits_s, until_s)) is not None:
                break
            view = trial.view(job)
            if view.state not in ("running", "stalled") or rows_s > until_s + LAST_COMMIT_S_MAX:
                raise Broken(f"the job is {view.state}: {view.reason}")
            if rows_s >= told_s + TOLD_S:
                told_s = rows_s
                alive = " ".join(map(str, churn.stays.alive(stages)))
                left_s = max(0.0, until_s - rows_s)
                _tell(f"{left_s:4.0f} s left, {len(commits_s)} steps, {churn.deaths} deaths, alive by stage: {alive}")
        return Outcome(
            found.steps * job.spec.training.microbatches,
            found,
            possible(churn.stays.all(), stages, model.speed, found.from_s, found.to_s),
            churn.deaths,
            churn.stays.moves,
            tuple(churn.starts_s),
            psutil.cpu_percent() / 100.0,
        )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per rate of death."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured.churn_processes", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of each rate, after the warm-up")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4, help="per stage, at the start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rates", default="0,52", help="deaths per hour and 100 stage servers")
    parser.add_argument("--every", type=float, help="one more run: seconds between two deaths in the whole fleet")
    parser.add_argument("--away", type=float, default=45.0, help="mean seconds until a dead process is started again")
    parser.add_argument("--compute", type=float, default=0.25, help="seconds of a forward, and of a backward")
    parser.add_argument("--step", type=float, default=0.25, help="seconds of an optimizer step")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as with Ctrl-C: nothing is left behind
    model = Model(options.compute, options.step)
    fleet = f"{options.stages} stages x {options.replicas} replicas, {1 / model.speed:g} s per microbatch and stage"
    tell = _tell if options.output == "json" else partial(print, flush=True)
    tell(f"{fleet}, {options.step:g} s per optimizer step; protocol efficiencies, with modelled compute")
    tell("deaths %/h  deaths       E  E step     raw  steps  moves  start s mean max   busy   load")
    calm = 0.0
    runs = []
    planned = [(float(rate), math.inf) for rate in options.rates.split(",")]
    if options.every:
        planned.append((360_000.0 / options.every / (options.stages * options.replicas), options.every))
    for rate, every_s in planned:
        try:
            run = play(
                model,
                options.stages,
                options.replicas,
                rate / 100.0 if every_s == math.inf else 0.0,
                options.minutes,
                away_s=options.away,
                every_s=every_s,
                seed=options.seed,
            )
        except KeyboardInterrupt:
            return 130
        runs.append({"rate": rate, "deaths": run.deaths, "speed": run.speed, "kept": run.efficiency / model.step_share})
        calm = run.speed if rate == 0 else calm
        raw = f"{run.speed / calm:7.1%}" if calm else "      -"
        starts = f"{mean(run.starts_s):8.1f} {max(run.starts_s):7.1f}" if run.starts_s else "       -       -"
        tell(
            f"{rate:10.5g} {run.deaths:7d} {run.efficiency:7.1%} {run.efficiency / model.step_share:7.1%} {raw} "
            f"{run.window.steps:6d} {run.moves:6d} {starts} {run.busy:6.0%} {os.getloadavg()[0]:6.1f}"
        )
    if options.output == "json":
        print(json.dumps(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
