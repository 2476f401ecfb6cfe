"""What smaller microbatches, or forward computed again, bring where a job is cut: the figures in docs/planning.md.

    python -m benchmarks.models.lighter [--pools 10]

Each pool has 8 to 40 machines that are drawn from examples/planning/pool.toml. The job there gets 24 or 32 layers, of
width 2048 or 2560, 256 or 1024 sequences a step, and one or two replicas of a stage at least. The scheduler cuts it as
it does (scheduler/planning/stages.py), and again without what takes less memory. Both cuts are played.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from unittest import mock

from rich.progress import track

from benchmarks.tables import show
from scheduler.planning import stages
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, candidates, read_pool
from scheduler.planning.search import basis_of
from swarm.job.placement import place
from swarm.job.spec import JobSpec, load_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "planning"
FIRST_SEED = 20
PLAYED = PlayRules(warm_up=2, measured=2)


def drawn(number: int) -> tuple[PeerPool, JobSpec]:
    """A pool, and a job for it."""
    pool, spec, rng = read_pool(EXAMPLE / "pool.toml"), load_job(EXAMPLE / "job.toml"), Random(FIRST_SEED + number)
    peers = tuple(rng.sample(pool.peers, rng.randint(8, 40)))
    layers, width = rng.choice((24, 32)), rng.choice((2048, 2560))
    spec = spec.having("training", global_batch_sequences=rng.choice((256, 1024)))
    spec = spec.having("limits", min_replicas=rng.choice((1, 2)))
    size = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": width * 11 // 4 // 16 * 16}
    return replace(pool, peers=peers), spec.having("model", config={**spec.model.config, **size})


def cut(pool: PeerPool, spec: JobSpec, worth: float) -> JobSpec:
    """The job as the scheduler cuts it, where what takes less memory must be so many times as fast by the bound."""
    with mock.patch.object(stages, "LIGHTER", worth):
        return stages.cut_of(spec, pool, basis_of(pool, spec))[0]


def played(pool: PeerPool, resolved: JobSpec) -> float:
    """Tokens per second, with all machines where the scheduler places them."""
    facts, count = CutBound(pool, resolved), len(resolved.split)
    found = place(candidates(pool.peers), count, resolved.limits.min_replicas, facts.needs).plan
    assert found is not None
    places = tuple(tuple(name for name, at in found.items() if at == stage) for stage in range(count))
    size = resolved.training.global_batch_sequences // resolved.training.microbatches
    plan = Plan(facts.split, places, size, resolved.overlap, bool(resolved.model.recompute))
    return Play(pool, plan, workload(facts), PLAYED).run().tokens_per_s


def told(resolved: JobSpec) -> str:
    size = resolved.training.microbatch_sequences
    return f"{len(resolved.split)} stages, {size}{', again' if resolved.model.recompute else ''}"


def rows(pools: int) -> Iterator[list[str]]:
    for number in track(range(pools), "Playing"):
        pool, spec = drawn(number)
        before, after = cut(pool, spec, math.inf), cut(pool, spec, stages.LIGHTER)
        size = f"{spec.model.config['num_hidden_layers']} x {spec.model.config['hidden_size']}"
        gain = "" if before == after else f"{played(pool, after) / played(pool, before):.2f}"
        yield [str(len(pool.peers)), size, told(before), told(after), gain]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pools", type=int, default=10)
    options = parser.parse_args()
    show(("machines", "layers x width", "without", "cut", "times as fast"), list(rows(options.pools)))


if __name__ == "__main__":
    main()
