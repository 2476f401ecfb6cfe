"""The bound never falls with better machines, the search finds what trying everything finds, hashes decide nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.planner import ABOVE_BOUND
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, PoolLink, PoolPeer
from scheduler.planning.search import Search, basis_of
from swarm.errors import SwarmError
from swarm.job.resolve import choose
from tests.support.effort import seeds
from tests.support.pools import GIB, drawn, equals, planned_job

ROOT = Path(__file__).parents[2]


def better(rng: Random, pool: PeerPool) -> Iterator[tuple[PeerPool, PeerPool]]:
    """Pools, and the same with one peer or one link that is better in one way.

    Peers are better where all are at one site: a faster one behind a slow link draws more over it.
    """
    number, factor = rng.randrange(len(pool.peers)), rng.uniform(1.0, 10.0)
    together = replace(pool, peers=tuple(replace(peer, site="a") for peer in pool.peers))
    one = together.peers[number]
    changes: Sequence[PoolPeer] = (
        replace(one, speed=factor * one.speed),
        replace(one, up_bits_per_s=factor * one.up_bits_per_s),
        replace(one, down_bits_per_s=factor * one.down_bits_per_s),
        replace(one, memory_bytes=one.memory_bytes + 32 * GIB),
    )
    for changed in changes:
        yield together, replace(together, peers=(*together.peers[:number], changed, *together.peers[number + 1 :]))
    way = rng.choice(sorted(pool.links))
    link = pool.links[way]
    for wider in (PoolLink(link.delay_s / factor, link.bits_per_s), PoolLink(link.delay_s, factor * link.bits_per_s)):
        yield pool, replace(pool, links={**pool.links, way: wider})


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_never_falls_with_a_faster_peer_or_link_or_more_memory(seed: int) -> None:
    rng = Random(seed)
    stages = rng.randint(1, 4)
    sections = {"averaging": {"compression": rng.choice(("none", "int8"))}, "pipeline": {"overlap": rng.choice((0, 8))}}
    spec, _ = choose(planned_job(4, **sections).having("pipeline", stages=stages), basis_of(equals(), planned_job(4)))
    order = rng.sample(range(8), 8)
    places = [order[stage::stages] for stage in range(stages)]
    for pool, improved in better(rng, drawn(rng, 8)):
        before, after = CutBound(pool, spec), CutBound(improved, spec)
        assert after.of(places).step_s <= before.of(places).step_s * (1 + 1e-12)
        assert after.least_step_s() <= after.of(places).step_s
        parts = [after.figures(stage, members) for stage, members in enumerate(places)]
        assert all(after.least_with_s(parts, {at: places[at]}) <= after.of(places).step_s for at in range(stages))
        assert (after.holds >= before.holds).all()


@pytest.mark.parametrize("seed", seeds(30, 8, 11, 22, 27))  # for their bounds the two slowest and two fastest of 30
def test_no_play_is_faster_than_its_bound_by_more_than_the_planner_allows_for(seed: int) -> None:
    rng = Random(seed)
    stages = rng.randint(1, 4)
    pool = drawn(rng, stages * rng.randint(1, 3))
    pool = replace(pool, peers=tuple(replace(p, speed=p.speed / 50, memory_bytes=48 * GIB) for p in pool.peers))
    sections = {"training": {"global_batch_sequences": 32, "microbatch_sequences": 2}, "data": {"sequence_length": 128}}
    pipeline = {"stages": stages, "overlap": rng.choice((0, 4, 8, 16)), "rebalance": False}
    job = planned_job(4, **sections, pipeline=pipeline)
    facts = CutBound(pool, choose(job, basis_of(pool, job))[0])
    order = rng.sample(range(len(pool.peers)), len(pool.peers))
    places = [order[stage::stages] for stage in range(stages)]
    names = tuple(tuple(pool.peers[number].name for number in members) for members in places)
    play = Play(pool, Plan(facts.split, names, 2, facts.spec.overlap), workload(facts), PlayRules(measured=5))
    assert 0.4 < facts.of(places).least_s / play.run().step_s < 1.0 + ABOVE_BOUND


def exhaustive(pool: PeerPool, search: Search) -> float:
    """The least cost of all placements of all cuts that the search knows."""
    least = float("inf")
    for (stages, *_), climber in search._climbers.items():
        facts = climber.facts
        for stage_of in product(range(stages + 1), repeat=len(pool.peers)):
            places = [[one for one, at in enumerate(stage_of) if at == stage] for stage in range(stages)]
            if all(places) and all(facts.holds[one, at] for at, some in enumerate(places) for one in some):
                cost = facts.of(places).step_s
                least = cost if cost < least and facts.is_held(places) else least
    return least


def test_the_search_finds_what_trying_every_placement_finds_in_50_of_50_fleets() -> None:
    worse, tried, seed = [], 0, 0
    while tried < 50:
        seed += 1
        rng = Random(seed)
        pool = drawn(rng, rng.randint(2, 5))
        search = Search(pool, planned_job(3, model={"recompute": False}, training={"microbatch_sequences": 4}))
        try:
            for _ in search.run():
                pass
        except SwarmError:
            continue  # no cut fits this fleet
        tried += 1
        if search.found[0].cost > exhaustive(pool, search) * (1 + 1e-3):
            worse.append(seed)
    assert worse == []


def test_a_plan_has_the_same_bytes_under_any_seed_of_hashing(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(planned_toml())
    (tmp_path / "pool.toml").write_text(
        'schema = "swarm.pool/1"\n'
        + "".join(
            f'[[peer]]\nname = "{site}"\ncount = 3\nsite = "{site}"\nspeed = {speed}e12\nup = "50Mbit"\n'
            for site, speed in (("oregon", 1), ("paris", 2), ("seoul", 4))
        )
    )
    said = set()
    for seed in ("0", "1", "77"):
        command = [sys.executable, "-P", "-m", "scheduler.planning", "job.toml", "--pool", "pool.toml", "-o", "json"]
        command += ["--effort", "1000"]
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        said.add(subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True).stdout)
    assert len(said) == 1


def planned_toml() -> str:
    return (
        'name = "t"\n[model.config]\nhidden_size = 768\nnum_hidden_layers = 6\nnum_attention_heads = 12\n'
        '[data]\nsource = "x"\nsequence_length = 512\n[training]\nglobal_batch_sequences = 16\n'
    )
