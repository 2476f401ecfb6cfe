"""How many stages a job gets that leaves it open, where the speeds of peers are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.planning import stages as planning_stages
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, candidates
from scheduler.planning.search import basis_of
from scheduler.planning.stages import LIGHTER, WORTH, cut_of
from swarm.errors import SwarmError
from swarm.job.placement import place
from swarm.job.resolve import Basis, choose, chooser
from swarm.job.spec import JobSpec
from tests.support.pools import GIB, cities, drawn, equals, machine, planned_job, two_sites


def placed(pool: PeerPool, resolved: JobSpec) -> tuple[CutBound, tuple[tuple[str, ...], ...]]:
    """Where the scheduler places the peers of a job that is cut."""
    facts, stages = CutBound(pool, resolved), len(resolved.split)
    found = place(candidates(pool.peers), stages, resolved.limits.min_replicas, facts.needs).plan
    assert found is not None
    return facts, tuple(tuple(name for name, at in found.items() if at == stage) for stage in range(stages))


def cut_into(pool: PeerPool, spec: JobSpec, stages: int) -> JobSpec:
    return choose(spec, replace(basis_of(pool, spec), stages=stages))[0]


def step_s(pool: PeerPool, resolved: JobSpec) -> float:
    number = {peer.name: at for at, peer in enumerate(pool.peers)}
    facts, places = placed(pool, resolved)
    return facts.of([[number[name] for name in names] for names in places]).step_s


def chosen(pool: PeerPool, spec: JobSpec) -> JobSpec:
    return cut_of(spec, pool, basis_of(pool, spec))[0]


@given(st.lists(st.tuples(st.floats(1e10, 1e13), st.floats(1e6, 1e10)), min_size=1, max_size=9), st.integers(1, 6))
@settings(max_examples=20)
def test_another_number_than_the_rule_gives_is_the_best_by_the_bound_and_worth_it(
    kinds: list[tuple[float, float]], layers: int
) -> None:
    spec = planned_job(layers).having("training", microbatch_sequences=4).having("model", recompute=False)
    pool = PeerPool(tuple(machine(f"p{at}", speed=speed, line=line) for at, (speed, line) in enumerate(kinds)))
    steps_s = [step_s(pool, cut_into(pool, spec, stages)) for stages in range(1, min(layers, len(kinds)) + 1)]
    by_rule, found = choose(spec, basis_of(pool, spec))[0], chosen(pool, spec)
    if found == by_rule:
        assert step_s(pool, by_rule) <= min(steps_s) * WORTH
    else:
        assert step_s(pool, found) <= min(steps_s) * 1.001
        assert min(steps_s) * WORTH < step_s(pool, by_rule)


def test_a_number_that_the_job_names_stays_and_so_does_the_rule_where_nothing_fits() -> None:
    spec, pool = planned_job(12), cities()
    for own in (spec.having("pipeline", stages=3), spec.having("pipeline", split=(6, 6))):
        assert chosen(pool, own) == choose(own, basis_of(pool, own))[0]
    tiny = PeerPool(tuple(replace(peer, memory_bytes=1 << 20) for peer in pool.peers))
    assert cut_of(spec, tiny, Basis(257)) == choose(spec, Basis(257))


def test_where_memory_forbids_the_number_of_the_rule_another_must_be_worth_it_beside_what_is_taken_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rule gives 2 stages, memory makes 3 of them, and 4 are twice as fast."""
    spec, pool = planned_job(4), PeerPool(tuple(machine(f"p{at}", memory=3200 << 20) for at in range(4)))
    monkeypatch.setattr(planning_stages, "LIGHTER", math.inf)
    assert len(choose(spec, basis_of(pool, spec))[0].split) == 3
    assert len(chosen(pool, spec).split) == 4
    monkeypatch.setattr(planning_stages, "WORTH", 3.0)
    assert len(chosen(pool, spec).split) == 3


def test_a_chooser_gives_for_each_number_of_stages_what_choose_gives() -> None:
    """A submit asks one chooser for all numbers, and it keeps what it has tried for the others."""
    rng, kinds = Random(5), set[str]()

    def outcome(cut: Callable[[], tuple[JobSpec, str]]) -> tuple[object, str]:
        resolved: object
        try:
            resolved, said = cut()
        except SwarmError as error:
            resolved, said = type(error), error.message
        kinds.add("refused" if isinstance(resolved, type) else "lighter" if said else "plain")
        return resolved, said

    for _ in range(36):
        spec = planned_job(rng.randint(1, 8))
        if rng.random() < 0.5:
            spec = spec.having("training", microbatch_sequences=rng.choice((1, 4))).having("model", recompute=False)
        whole = drawn(rng, rng.randint(1, 8))
        peers = (replace(peer, memory_bytes=rng.choice((3, 6, 12, 48)) * GIB // 4) for peer in whole.peers)
        basis = basis_of(replace(whole, peers=tuple(peers)), spec)
        chosen = chooser(spec, basis)
        for stages in rng.sample(range(6), 3):
            by_itself = outcome(partial(choose, spec, replace(basis, stages=stages)))
            assert outcome(partial(chosen, stages)) == by_itself
    assert kinds == {"plain", "lighter", "refused"}


def mixed() -> PeerPool:
    """Two machines with much memory, and eight that hold a stage only with small microbatches."""
    return PeerPool(tuple(machine(f"p{at}", memory=24 * GIB if at < 2 else 3 * GIB // 2) for at in range(10)))


def test_what_takes_less_memory_must_be_worth_it_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, pool = planned_job(6), mixed()
    basis = basis_of(pool, spec)
    plain, (found, said) = choose(spec, basis)[0], cut_of(spec, pool, basis)
    assert step_s(pool, found) * LIGHTER < step_s(pool, plain)
    assert said.startswith("; for a shorter step: ")
    own = chosen(pool, spec.having("training", microbatch_sequences=1).having("model", recompute=False))
    assert (own.training.microbatch_sequences, own.model.recompute) == (1, False)
    sizes = []
    for worth in (math.inf, 0.5):  # with others it has other bits, however fast they are
        monkeypatch.setattr(planning_stages, "LIGHTER", worth)
        sizes.append(chosen(pool, spec.having("training", reproducible=True)).training.microbatch_sequences)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("make", "layers", "least"),
    [(equals, 12, 1.0), (cities, 12, 1.0), (cities, 24, 1.15), (two_sites, 12, 1.0), (mixed, 6, 1.2)],
)
def test_a_play_is_no_slower_than_with_a_stage_for_two_peers(
    make: Callable[[], PeerPool], layers: int, least: float
) -> None:
    spec, pool = planned_job(layers), make()

    def tokens_per_s(resolved: JobSpec) -> float:
        facts, places = placed(pool, resolved)
        size = resolved.training.global_batch_sequences // resolved.training.microbatches
        plan = Plan(facts.split, places, size, resolved.overlap, bool(resolved.model.recompute))
        return Play(pool, plan, workload(facts), PlayRules(warm_up=2, measured=2)).run().tokens_per_s

    assert tokens_per_s(chosen(pool, spec)) >= least * tokens_per_s(choose(spec, basis_of(pool, spec))[0])
