"""How many stages a job gets that leaves it open, where the speeds of peers are known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.planning import stages as planning_stages
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, candidates
from scheduler.planning.search import basis_of
from scheduler.planning.stages import WORTH, with_stages
from swarm.job.placement import place, stages_for
from swarm.job.resolve import Basis, choose
from swarm.job.spec import JobSpec
from tests.support.pools import cities, equals, machine, planned_job, two_sites


def placed(pool: PeerPool, spec: JobSpec, stages: int) -> tuple[CutBound, tuple[tuple[str, ...], ...]]:
    """The job cut into so many stages, and where the scheduler places the peers."""
    facts = CutBound(pool, choose(spec, replace(basis_of(pool, spec), stages=stages))[0])
    found = place(candidates(pool.peers), stages, spec.limits.min_replicas, facts.needs).plan
    assert found is not None
    return facts, tuple(tuple(name for name, at in found.items() if at == stage) for stage in range(stages))


def chosen(pool: PeerPool, spec: JobSpec) -> int:
    return with_stages(spec, pool, basis_of(pool, spec)).stages


@given(st.lists(st.tuples(st.floats(1e10, 1e13), st.floats(1e6, 1e10)), min_size=1, max_size=9), st.integers(1, 6))
@settings(max_examples=20)
def test_another_number_than_the_rule_gives_is_the_best_by_the_bound_and_worth_it(
    kinds: list[tuple[float, float]], layers: int
) -> None:
    spec = planned_job(layers)
    pool = PeerPool(tuple(machine(f"p{at}", speed=speed, line=line) for at, (speed, line) in enumerate(kinds)))
    number = {peer.name: at for at, peer in enumerate(pool.peers)}
    steps_s = {}
    for stages in range(1, min(layers, len(kinds)) + 1):
        facts, places = placed(pool, spec, stages)
        steps_s[stages] = facts.of([[number[name] for name in names] for names in places]).step_s
    best_s, found = min(steps_s.values()), chosen(pool, spec)
    as_by_rule_s = steps_s[min(stages_for(len(kinds)), layers)]
    assert steps_s[found] <= best_s * 1.001 if found else as_by_rule_s <= best_s * WORTH
    assert not found or best_s * WORTH < as_by_rule_s


def test_a_number_that_the_job_names_stays_and_so_does_the_rule_where_nothing_fits() -> None:
    spec, pool = planned_job(12), cities()
    for own in (spec.having("pipeline", stages=3), spec.having("pipeline", split=(6, 6))):
        assert chosen(pool, own) == 0
    tiny = PeerPool(tuple(replace(peer, memory_bytes=1 << 20) for peer in pool.peers))
    assert with_stages(spec, tiny, Basis(257)).stages == 0


def test_where_memory_forbids_the_number_of_the_rule_another_must_be_worth_it_beside_what_is_taken_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule gives 2 stages, memory makes 3 of them, and 4 are twice as fast."""
    spec, pool = planned_job(4), PeerPool(tuple(machine(f"p{at}", memory=3200 << 20) for at in range(4)))
    assert len(choose(spec, basis_of(pool, spec))[0].split) == 3
    assert chosen(pool, spec) == 4
    monkeypatch.setattr(planning_stages, "WORTH", 3.0)
    assert chosen(pool, spec) == 0


@pytest.mark.parametrize(
    ("make", "layers", "least"), [(equals, 12, 1.0), (cities, 12, 1.0), (cities, 24, 1.15), (two_sites, 12, 1.0)]
)
def test_a_play_is_no_slower_than_with_a_stage_for_two_peers(
    make: Callable[[], PeerPool], layers: int, least: float
) -> None:
    spec, pool = planned_job(layers), make()

    def tokens_per_s(stages: int) -> float:
        facts, places = placed(pool, spec, stages)
        resolved = facts.spec
        size = resolved.training.global_batch_sequences // resolved.training.microbatches
        plan = Plan(facts.split, places, size, resolved.overlap, bool(resolved.model.recompute))
        return Play(pool, plan, workload(facts), PlayRules(warm_up=2, measured=2)).run().tokens_per_s

    before = min(stages_for(len(pool.peers)), spec.stages_max)
    assert tokens_per_s(chosen(pool, spec) or before) >= least * tokens_per_s(before)
