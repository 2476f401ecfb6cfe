"""Islands of unequal speed: each trains the lease that fits it, and the weights are those of one process.

Real flows, brains and torch; the transport delays and reorders every tensor at random and delivers some twice.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from scheduler.jobs.job import Job
from swarm.job.leases import Cut
from swarm.types import PeerId
from tests.support.effort import others
from tests.support.islands import (
    by_speed,
    check,
    cuts_of,
    exchanges_of,
    in_the_second_step,
    log_of,
    lose,
    paused,
    peers_of,
    restart,
    run,
    trained,
    until,
)
from tests.support.reference import reference
from tests.support.simulated import Rig, Tokens

SLOW = 4.0
# Two fragments in turn, and the whole model at once: in both ways islands train on during an exchange.
STREAMS = {"averaging__mode": "streaming", "outer__every_steps": 8, "outer__fragments": 2, "outer__overlap_steps": 3}
HIDES = {"outer__every_steps": 4, "outer__overlap_steps": 1}


def sizes(cut: Cut) -> dict[int, int]:
    return {island: sum(end - first for first, end in of) for island, of in cut.leases.items()}


async def slow_down(rig: Rig, job: Job, island: int = 1) -> None:
    """From the second step on, one island computes slowly."""
    await until(rig, job, in_the_second_step)
    for peer in peers_of(job, island):
        rig.slowness[peer] = SLOW


@pytest.mark.parametrize(("stages", "way"), [(2, {}), (1, STREAMS), (1, HIDES), *others((1, {}), (2, STREAMS))])
def test_a_slow_island_gets_less_of_each_step_and_the_weights_are_those_of_one_process(
    tmp_path: Path, stages: int, way: dict[str, object]
) -> None:
    spec = by_speed(tmp_path, pipeline__stages=stages, config__attention_dropout=0.1, **way)
    tokens = Tokens.make(tmp_path, spec)
    job, _ = run(spec, tokens, 2 * stages, slow_down)
    log = log_of(job)
    last = sizes(cuts_of(log)[-1])
    assert last[0] >= 2 * last[1], "it computes four times as long, with time for messages besides"
    expected = reference(spec, tokens, log)
    assert expected.sha256 != reference(spec, tokens).sha256
    check(job, expected)
    assert job.progress.tokens == sum(tokens.batches(spec).tokens_of(step) for step in range(12)), "all of each step"


@pytest.mark.parametrize(("seed", "way"), [(1, {}), (5, STREAMS), *others((2, {}), (3, {}), (6, STREAMS), (7, HIDES))])
def test_a_scheduler_that_is_killed_knows_the_leases(tmp_path: Path, seed: int, way: dict[str, object]) -> None:
    spec = by_speed(tmp_path, **way)

    async def story(rig: Rig, job: Job) -> None:
        await slow_down(rig, job)
        await until(rig, job, lambda one: one.progress.steps_done >= 4 + seed)
        await restart(rig)

    job = trained(tmp_path, spec, 2, story, seed, with_log=True)
    log = log_of(job)
    last = sizes(cuts_of(log)[-1])
    assert last[0] > last[1] > 0
    assert job.record.timeline == 0


@pytest.mark.parametrize(("seed", "way"), [(1, {}), (1, STREAMS), *others((2, {}), (2, STREAMS), (1, HIDES))])
def test_a_lost_island_gets_a_lease_when_it_is_back_and_the_weights_are_those_of_one_process(
    tmp_path: Path, seed: int, way: dict[str, object]
) -> None:
    """Without patience it is lost amid a period: with it, the others would wait for the silent island at its end."""
    spec = by_speed(tmp_path, **{"training__steps": 20, "outer__every_steps": 5, "outer__patience": "none"} | way)

    async def story(rig: Rig, job: Job) -> None:
        await until(rig, job, in_the_second_step)
        lose(rig, job, 1)

    job = trained(tmp_path, spec, 4, story, seed, with_log=True)
    log = log_of(job)
    assert [exchange.begins for exchange in exchanges_of(log) if exchange.begins] == [{1: 0}]
    behind = next(exchange.after_step for exchange in exchanges_of(log) if exchange.begins)
    assert any(cut.leases[1] for cut in cuts_of(log) if cut.first_step >= behind)
    assert job.record.timeline == 0


def test_a_replica_dies_where_leases_follow_speed(tmp_path: Path) -> None:
    spec = by_speed(tmp_path)

    async def story(rig: Rig, job: Job) -> None:
        await slow_down(rig, job)
        await until(rig, job, lambda one: one.progress.steps_done >= 5)
        rig.kill(peers_of(job, 0)[0])

    trained(tmp_path, spec, 4, story, with_log=True)


def test_a_job_that_goes_on_from_a_pause_begins_with_equal_leases(tmp_path: Path) -> None:
    """Behind a second pause the outer log had forgotten what was before the first."""
    spec = by_speed(tmp_path)

    async def story(rig: Rig, job: Job) -> None:
        await slow_down(rig, job)
        for peers, steps in ((3, 5), (4, 7)):
            await until(rig, job, lambda one, steps=steps: one.progress.steps_done >= steps)  # type: ignore[misc]
            await paused(rig, job)
            rig.add_peer(PeerId(f"another-{peers}"), rig.tasks, Random(7))
            await until(rig, job, lambda _, peers=peers: len(rig.membership.idle_peers()) == peers)  # type: ignore[misc]
            await rig.jobs.resume(job, "", None)

    job = trained(tmp_path, spec, 2, story, with_log=True)
    _, first, second = job.record.first_steps
    assert 4 < first < second
    log = log_of(job)
    cuts = cuts_of(log)
    assert any(cut.first_step < first for cut in cuts)
    for beginning in (first, second):
        assert all(cut.first_step != beginning for cut in cuts)
