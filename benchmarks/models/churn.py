"""How much of the possible throughput the protocol keeps while stage servers die and others come.

    python -m benchmarks.models.churn [--minutes 40] [--stages 3] [--replicas 4] [--seeds 2] [--rates 0,20,52]

The production scheduler, cells and flows run on virtual time (tests/support/simulated.py) with modelled compute: a
forward, a backward and an optimizer step take half a second each, whatever machine this runs on, so these are
efficiencies of the protocol and not of accelerators. A tiny model passes through that counts its own gradients. Every
stage server dies by kill -9 with the given chance per hour, at any moment, and a new one starts in its place after a
minute on average (exponential). Whoever comes fetches its stage from the others and goes where it helps most; moves are
on.

    E = N / integral of min over stages of the sum of the speeds of the replicas alive

N counts the committed microbatches once, however often they were computed, from one commit to another
(benchmarks/retained.py). A replica leaves the integral at its kill, a joiner enters it when it was given a stage. A
replica's speed is that of its forwards and backwards, and in "E step" that of a replica that also makes its optimizer
steps, as it must without anybody dying. "raw" is the microbatches per second, with deaths / without.

`python -m benchmarks.measured.churn_processes` measures the same with real processes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean

import torch

from benchmarks.retained import WARM_UP_STEPS, Kept, Stays, Window, possible, window
from scheduler.jobs.job import Job
from swarm.process.logs import configure
from swarm.types import JobState, PeerId, PeerState
from tests.simulation.engine.counting import CountingStage, counting_files, counting_spec, write_samples
from tests.support.devices import InlineDevice
from tests.support.sim import loop as sim
from tests.support.simulated import Done, Rig, Tokens

COMPUTE_S = 0.5
MICROBATCH_S = 2 * COMPUTE_S
AWAY_S = 60.0  # mean, until a new stage server starts in the place of one that died
LOOK_S = 0.25
MICROBATCHES = 16  # per replica and step, while nobody is dead
STEP_SHARE = MICROBATCHES * MICROBATCH_S / (MICROBATCHES * MICROBATCH_S + COMPUTE_S)
STEPS = 100_000  # more than any run makes
SAMPLES = 1000
PRESENT = (PeerState.LOADING, PeerState.SERVING, PeerState.SUSPECT)


@dataclass(frozen=True, slots=True)
class Outcome(Kept):
    """One run."""

    deaths: int
    moves: float
    replayed: float
    stalled_s: float


async def _live_and_die(
    rig: Rig, number: int, per_hour: float, stays: Stays, deaths: list[PeerId], rng: Random
) -> None:
    """One place in the fleet: a stage server, another one after its death, and so on."""
    for life in range(1, 1_000_000):
        peer = PeerId(f"peer-{number}-{life}")
        rig.add_peer(peer, rig.tasks, Random(rng.random()), device_type=_device)  # type: ignore[arg-type]
        if not per_hour:
            return
        await asyncio.sleep(rng.expovariate(per_hour / 3600.0))
        rig.kill(peer)
        stays.ended(peer, asyncio.get_running_loop().time())
        deaths.append(peer)
        await asyncio.sleep(rng.expovariate(1.0 / AWAY_S))


def _device(_seconds: object) -> InlineDevice:
    return InlineDevice(lambda: COMPUTE_S)


def _see(rig: Rig, job: Job, stays: Stays, now_s: float) -> None:
    """Who is in which stage, of replicas and joiners whose process is there."""
    for known in rig.membership.peers():
        if known.job == job.record.id and known.state in PRESENT and known.hello.peer in rig.servers:
            stays.seen(known.hello.peer, known.stage, now_s)


def play(stages: int, replicas: int, per_hour: float, minutes: float, seed: int) -> Outcome:
    """One run of so many simulated minutes; `per_hour` is each stage server's rate of death."""
    spec = counting_spec(stages=stages, steps=STEPS, microbatches=MICROBATCHES * replicas, no_progress_s=3600.0)

    async def main(root: Path) -> Outcome:
        outcome: Outcome | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tokens = write_samples(root, SAMPLES)
                rng = Random(seed)
                rig = await Rig.start(Tokens(root, None), 0, tasks, rng)  # type: ignore[arg-type]
                rig.build = CountingStage
                stays = Stays()
                deaths: list[PeerId] = []
                places = [
                    tasks.create_task(_live_and_die(rig, number, per_hour, stays, deaths, Random(f"{seed}/{number}")))
                    for number in range(stages * replicas)
                ]
                while len(rig.membership.idle_peers()) < stages * replicas:  # noqa: ASYNC110  # time is virtual
                    await asyncio.sleep(LOOK_S)
                job = await rig.jobs.submit(spec, tokens, {})
                while job.record.state is not JobState.RUNNING:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
                loop = asyncio.get_running_loop()
                commits_s: list[float] = []
                found: Window | None = None
                stalled_s = 0.0
                while found is None:
                    await asyncio.sleep(LOOK_S)
                    now_s = loop.time()
                    _see(rig, job, stays, now_s)
                    commits_s += [now_s] * (job.progress.steps_done - len(commits_s))
                    stalled_s += LOOK_S * (job.record.state is not JobState.RUNNING)
                    if len(commits_s) >= WARM_UP_STEPS:
                        found = window(commits_s, commits_s[WARM_UP_STEPS - 1] + 60.0 * minutes)
                samples = [sample for metric in rig.metrics.registry.collect() for sample in metric.samples]

                def total(name: str) -> float:
                    return sum(sample.value for sample in samples if sample.name == name)

                outcome = Outcome(
                    found.steps * spec.training.microbatches,
                    found,
                    possible(stays.all(), stages, 1.0 / MICROBATCH_S, found.from_s, found.to_s),
                    len(deaths),
                    total("swarm_rebalances_total"),
                    total("swarm_microbatches_replayed_total"),
                    stalled_s,
                )
                for place in places:
                    place.cancel()
                await rig.network.close()
                raise Done
        except* Done:
            pass
        assert outcome is not None
        return outcome

    with tempfile.TemporaryDirectory() as folder, counting_files():
        return sim.run(main(Path(folder)), seed=seed, limit_s=120.0 * minutes + 600.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per rate of death."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models.churn", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40.0, help="simulated, per run, after the warm-up")
    parser.add_argument("--stages", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=4, help="per stage, at the start")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", default="0,20,52", help="deaths per hour and 100 stage servers")
    options = parser.parse_args(arguments)
    configure("error", "text")
    torch.set_num_threads(1)
    rates = [float(rate) for rate in options.rates.split(",")]
    fleet = f"{options.stages} stages x {options.replicas} replicas, {MICROBATCH_S:g} s per microbatch"
    print(f"{fleet}, {options.minutes:g} simulated minutes, {options.seeds} seeds; with modelled compute")
    print("deaths %/h  deaths       E  E step     raw  replayed  moves  stalled s   CPU s")
    calm = 0.0
    for rate in rates:
        began_s = time.process_time()
        runs = [
            play(options.stages, options.replicas, rate / 100.0, options.minutes, seed) for seed in range(options.seeds)
        ]
        speed, kept = mean(run.speed for run in runs), mean(run.efficiency for run in runs)
        calm = speed if rate == 0 else calm
        raw = f"{speed / calm:7.1%}" if calm else "      -"
        print(
            f"{rate:10g} {sum(run.deaths for run in runs):7d} {kept:7.1%} {kept / STEP_SHARE:7.1%} {raw} "
            f"{mean(run.replayed / max(1, run.microbatches * options.stages) for run in runs):9.2%} "
            f"{sum(run.moves for run in runs):6g} {sum(run.stalled_s for run in runs):10.1f} "
            f"{time.process_time() - began_s:7.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
