"""What islands keep of their speed in trouble: scenes of `benchmarks.models.islands` with the product's processes.

    python -m benchmarks.sites.troubled_islands [--scenes "nothing;hangs"] [--ways auto] [--scale 0.2] [--save F]

    [scheduler] ── [lyon: a stage server]
             └──── slow link ──── [berlin: a stage server]          each in a network namespace

Two islands of one stage server train a job with steps of 4 s and an exchange every 50 steps; in the last scene there
are four of unequal speeds. Trouble comes to berlin from the second period on, as long and as often as in the model, in
shares of a period. "before": equal leases, no overlap, no patience. "auto": leases that follow speed, patience as
"auto" chooses, and an overlap of a tenth of a period. "allreduce": no islands, each step is averaged.

With --scale 0.2 steps take a fifth of that, the link carries five times as much, and trouble, limits and the wait for a
replica that is gone are a fifth as long. What does not shrink, such as the time to see that a peer is not reached, then
takes more of a period than in a real job.

"kept" is the share of the sum of all speeds that becomes tokens, by the scheduler's commit rows. Speeds are what the
same stage servers have before, with nothing exchanged and no slow link, and less while berlin is slow or stopped; what
a lost island trained does not count. "waits": the longest times that lyon trained nothing. Computations take given
times (benchmarks.measured.modelled_stage_server), so that two cores are enough. Needs root, for network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.learning.kept import Kept
from benchmarks.sites.kept_speed import OPTIMIZER_S, PROGRAM, SEQUENCES, Modelled, parsed
from benchmarks.sites.two_sites import Sites
from benchmarks.tables import show
from swarm.job.islands import course_of, island_of
from swarm.job.spec import JobSpec
from swarm.pki.profiles import ENVIRONMENT
from tests.chaos.harmed_stage_server import harm_file, write_harm
from tests.chaos.relay import Relay
from tests.chaos.trial import Job
from tests.support.processes import Process

PLACES = ("lyon", "berlin", "oslo", "porto")
FAR = 1  # the site that trouble comes to
MICROBATCHES, EVERY = 8, 50  # of an island's equal part of a step; steps between two exchanges
FIRST = EVERY + 3  # steps that are not measured: a scheduler has no patience before it knows a period
MORE, ALONE_STEPS = EVERY, 10  # steps behind what is measured, as all islands are waited for at the end; of a speed
WIDTH = 128
SLOWER = 5.0
GRACE_S, ROUND_S, NO_PROGRESS_S = 8.0, 100.0, 300.0
RUN_S_MAX = 5000.0
WAITS = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens, in periods: for how long, how often and from when on; and what sites and links there are."""

    name: str
    kind: str = ""
    lasts: float = 0.0
    each: float = math.inf
    begins: float = 0.7  # shortly before an exchange
    periods: int = 4  # that are measured
    step_s: tuple[float, ...] = (4.0, 4.0)  # of an equal part of a step, by site
    overlap: int = EVERY // 10
    link: str = "0.66:100"  # Mbit/s each way, and ms there and back: an exchange takes a fifteenth of a period
    scale: float = 1.0

    def is_on(self, at: float) -> bool:
        return bool(self.kind) and at >= self.begins and (at - self.begins) % self.each < self.lasts

    @property
    def period_s(self) -> float:
        """With leases that suit the speeds."""
        return self.scale * EVERY * len(self.step_s) / sum(1 / each_s for each_s in self.step_s)

    @property
    def factor(self) -> float:
        """The part of its speed that the far site has meanwhile."""
        return {"slow": 1 / SLOWER, "stopped": 0.0}.get(self.kind, 1.0)


SCENES = (
    Scene("nothing"),
    Scene("5 times slower in the middle fifth", "slow", 0.8, begins=1.6),
    Scene("5 times slower, 1 of 2 periods", "slow", 1.0, 2.0),
    Scene("link cut, 0.3 of 1.5 periods", "cut", 0.3, 1.5),
    Scene("the same, scheduler reached", "apart", 0.3, 1.5),
    Scene("stopped, 0.6 of 4.5 periods", "stopped", 0.6, 4.5),
    Scene("hangs", "stopped", math.inf, periods=2),
    Scene("four", step_s=(0.58, 0.75, 1.51, 3.33), overlap=15, link="2:100", periods=20),
)
WAYS = ("before", "auto")  # and "allreduce"


@dataclass(frozen=True, slots=True)
class Row:
    """A step that the island at a site has committed; `counts`: its tokens are in the weights."""

    site: int
    step: int  # inner
    at_s: float
    tokens: int
    counts: bool


def rows_of(found: Sequence[tuple[int, int, float, int]], spec: JobSpec, site_of: Mapping[int, int]) -> list[Row]:
    """The inner steps of commit rows, by time: timeline, step, Unix seconds and tokens; `site_of` islands."""
    courses = {timeline: course_of(spec, timeline) for timeline, *_ in found}
    merged = dict[int, int]()  # the newest outer step, by timeline: what comes behind it was lost
    for timeline, step, *_ in found:
        if courses[timeline].is_outer(step):
            merged[timeline] = max(step, merged.get(timeline, -1))
    return sorted(
        (
            Row(
                site_of[island_of(spec, line)],
                courses[line].inner_steps(step),
                at_s,
                tokens,
                not spec.has_outer_steps or step < merged.get(line, -1),
            )
            for line, step, at_s, tokens in found
            if not courses[line].is_outer(step)
        ),
        key=lambda row: row.at_s,
    )


def speeds_of(rows: Sequence[Row], sites: int) -> list[float]:
    """The tokens a second of each site between its second step and its last."""
    of = [[row for row in rows if row.site == site][1:] for site in range(sites)]
    return [sum(row.tokens for row in each[1:]) / (each[-1].at_s - each[0].at_s) for each in of]


def between(rows: Sequence[Row], first: int, last: int) -> tuple[float, float]:
    """When the last island had committed inner step `first`, and `last`."""
    begin_s, end_s = (max(row.at_s for row in rows if row.step == step) for step in (first, last))
    return begin_s, end_s


def kept(
    rows: Sequence[Row],
    span_s: tuple[float, float],
    speeds: Sequence[float],
    troubles_s: Sequence[tuple[float, float]],
    factor: float,
) -> float:
    """The tokens that count, of what the speeds add up to in this span: in trouble a part of the far one."""
    begin_s, end_s = span_s
    tokens = sum(row.tokens for row in rows if row.counts and begin_s < row.at_s <= end_s)
    trouble_s = sum(max(0.0, min(end_s, until_s) - max(begin_s, since_s)) for since_s, until_s in troubles_s)
    return tokens / (sum(speeds) * (end_s - begin_s) - (1 - factor) * speeds[FAR] * trouble_s)


def waits(rows: Sequence[Row], span_s: tuple[float, float], speed: float, site: int = 0) -> list[float]:
    """The longest times for which a site trained nothing, the longest first."""
    of = [row for row in rows if row.site == site and span_s[0] <= row.at_s <= span_s[1]]
    longer_s = [row.at_s - before.at_s - row.tokens / speed for before, row in pairwise(of)]
    return sorted(longer_s, reverse=True)[:WAITS]


class Troubled(Modelled):
    """A scheduler, and sites with one stage server each."""

    def __init__(self, folder: Path, relay: Relay, scene: Scene) -> None:
        super().__init__(folder, relay, argparse.Namespace(width=WIDTH, overlap=0))
        self._scene, self._islands = scene, len(scene.step_s)
        self.scheduler_flags = ("--grace", f"{scene.scale * GRACE_S:g}")
        self._run_s_max = scene.scale * RUN_S_MAX
        self.server_hosts = relay.hosts[1:]
        self.before_servers = [relay.at(host) for host in range(1, len(relay.hosts))]

    def fill(self) -> None:
        for place in PLACES[: self._islands]:
            self.add_servers(1, "--site", place)

    def start_server(self, number: int, *flags: str, module: str = "") -> Process:
        each_s = self._scene.scale * self._scene.step_s[number] / MICROBATCHES
        program = f"{PROGRAM} --compute {each_s / 2:g} --step {OPTIMIZER_S:g} --harmed"
        return super(Sites, self).start_server(number, *flags, module=program)

    def slow(self, is_slow: bool) -> None:
        mbit_per_s, rtt_ms = map(float, self._scene.link.split(":")) if is_slow else (0.0, 0.0)
        for far in range(2, len(self.relay.hosts)):
            self.relay.access(far, *[mbit_per_s / self._scene.scale * 1e6 / 8] * 2)
            for host in range(far):
                self.relay.between(host, far, delay_s=rtt_ms / 2e3)

    def trouble(self, is_on: bool) -> None:
        """From now on, or until now."""
        match self._scene.kind:
            case "stopped":
                list(self.servers.values())[FAR].kill(signal.SIGSTOP if is_on else signal.SIGCONT)
            case "slow" if is_on:
                write_harm(self.folder / f"server-{FAR}", slow=SLOWER)
            case "slow":
                harm_file(self.folder / f"server-{FAR}").unlink()
            case kind:
                for host in range(FAR + 1) if kind == "cut" else [FAR]:
                    self.relay.between(host, FAR + 1, cut=is_on)

    def job_of(self, steps: int, way: str, **outer: object) -> Job:
        by_speed, scale = way == "auto", self._scene.scale
        same = partial(
            self.start,
            pipeline__stages=1,
            training__global_batch_sequences=self._islands * MICROBATCHES * SEQUENCES,
            averaging__timeout_s=scale * ROUND_S,
            limits__no_progress_s=scale * NO_PROGRESS_S,
        )
        if way == "allreduce":
            return same(way, steps, {})
        outer = {
            "every_steps": EVERY,
            "overlap_steps": self._scene.overlap * by_speed,
            "patience": "auto" if by_speed else "none",
        } | outer
        shares = "speed" if by_speed else "equal"
        return same("diloco", steps, outer, islands__count=self._islands, islands__shares=shares)

    def located(self, job: Job) -> dict[int, int]:
        """The site of each island, while the job is at work."""
        self.until_step(job, 1)
        numbers = {peer: number for number, peer in enumerate(self.servers)}
        return {int(peer.island or 0): numbers[peer.id] for peer in self.peers() if peer.job == job.id}

    def rows(self, job: Job, site_of: Mapping[int, int]) -> list[Row]:
        with contextlib.closing(sqlite3.connect(f"file:{self.database}?mode=ro", uri=True)) as database:
            text = "select timeline, step, committed_unix_s, tokens from commits where job = ?"
            return rows_of(database.execute(text, (job.id,)).fetchall(), job.spec, site_of)

    def is_over(self, job: Job, steps: int = sys.maxsize) -> bool:
        """Whether the job has made so many steps, or has ended."""
        view = self.view(job)
        assert view.state not in ("failed", "cancelled"), view.reason
        return bool(view.step >= steps or view.state == "succeeded")

    def ends(self, job: Job) -> None:
        self.until("the job ends", partial(self.is_over, job), self._run_s_max)

    def alone(self) -> list[float]:
        """The speed of each site."""
        self.slow(False)
        job = self.job_of(ALONE_STEPS, "before", every_steps=10 * ALONE_STEPS)
        site_of = self.located(job)
        self.ends(job)
        self.until_free(list(self.servers))
        return speeds_of(self.rows(job, site_of), self._islands)

    def play(self, way: str) -> Mapping[str, object]:
        """Train once."""
        scene, speeds, last = self._scene, self.alone(), FIRST + self._scene.periods * EVERY
        self.slow(True)
        job = self.job_of(last + MORE, way)
        site_of = self.located(job)
        self.until_step(job, FIRST, self._run_s_max)
        began_s, since_s, troubles_s = time.time(), math.inf, list[tuple[float, float]]()
        is_over = False
        while not is_over or since_s < math.inf:
            now_s = time.time()
            assert now_s < began_s + self._run_s_max, self.view(job)
            is_over = self.is_over(job, last)
            is_on = not is_over and scene.is_on((now_s - began_s) / scene.period_s)
            if is_on and since_s == math.inf:
                since_s = now_s
                self.trouble(True)
            elif not is_on and since_s < math.inf:
                troubles_s.append((since_s, now_s))
                since_s = math.inf
                self.trouble(False)
            time.sleep(0.05)
        told = {what: len(self.said(self.scheduler, f"is {what}:", began_s)) for what in ("late", "lost")}
        self.ends(job)
        rows = self.rows(job, site_of)
        span_s = between(rows, FIRST - 1, last - 1)
        return told | {
            "kept": kept(rows, span_s, speeds, troubles_s, scene.factor),
            "waits_s": waits(rows, span_s, speeds[0]),
            "exchanges_s": self.metric("swarm_outer_exchange_seconds_sum"),
            "span_s": span_s[1] - span_s[0],
            "speeds": speeds,
        }


def run(scene: Scene, way: str) -> Mapping[str, object]:
    """Train once; what processes print goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="swarm-troubled-") as name, Relay(1 + len(scene.step_s), seed=0) as relay:
        os.environ[ENVIRONMENT] = str(Path(name) / "profiles")
        relay.move_here(0)
        with contextlib.redirect_stdout(sys.stderr), Troubled(Path(name), relay, scene) as sites:
            sites.fill()
            return sites.play(way)


COLUMNS = ("scene", "way", "kept", "lyon's longest waits, s", "late", "lost")


def shown(scene: str, way: str, found: Mapping[str, object]) -> list[str]:
    waits_s = found["waits_s"]
    assert isinstance(waits_s, list)
    return [
        scene,
        way,
        f"{found['kept']:.3f}",
        ", ".join(f"{wait_s:.1f}" for wait_s in waits_s),
        str(found["late"]),
        str(found["lost"]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", default=";".join(scene.name for scene in SCENES), help="names, with ; between")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--save", type=Path, help="a JSON file that keeps what each run found")
    parser.add_argument("--scale", type=float, default=1.0, help="of steps, trouble and limits")
    options = parsed(parser)
    kept_runs, table, load = Kept(options.save), [], os.getloadavg()[0]
    for scene in SCENES:
        if scene.name not in options.scenes.split(";"):
            continue
        for way in options.ways.split(","):
            at_length = replace(scene, scale=options.scale)
            found = kept_runs.once(f"{scene.name}, {way}, {options.scale:g}", partial(run, at_length, way))
            print(scene.name, way, found, file=sys.stderr, flush=True)
            table.append(shown(scene.name, way, found))
    show(COLUMNS, table)
    print(f"load {load:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores")
    return 0


if __name__ == "__main__":
    sys.exit(main())
