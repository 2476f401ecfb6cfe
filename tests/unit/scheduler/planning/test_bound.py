"""The bound of small placements is what a hand works out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.planning.bound import COMMIT_S, GAP_S, HOPS_PER_S, CutBound
from scheduler.planning.pool import PeerPool, PoolLink
from scheduler.planning.search import basis_of
from swarm.job.partition import BOUNDARY_BYTES, stage_flops
from swarm.job.resolve import choose
from tests.support.pools import equals, machine, planned_job

TOKENS = 2 * 512


def bound_of(pool: PeerPool, stages: int, **sections: dict[str, object]) -> CutBound:
    sections = {"training": {"microbatch_sequences": 2}, "pipeline": {"overlap": 0, "stages": stages}} | sections
    job = planned_job(4, **sections)
    return CutBound(pool, choose(job, basis_of(pool, job))[0])


def test_two_equal_stages_take_turns_and_a_step_fills_averages_and_commits() -> None:
    pool = equals(4)
    facts = bound_of(pool, 2)
    bound = facts.of([[0, 1], [2, 3]])
    first_s, last_s = (TOKENS * flops / 2e12 + 2 * GAP_S for flops in stage_flops(facts.spec, facts.split))
    bits = 8 * TOKENS * 768 * BOUNDARY_BYTES["bfloat16"]
    assert bound.microbatches_per_s == pytest.approx(2 / max(first_s, last_s))
    assert bound.fill_s == pytest.approx(min(first_s, last_s) + 2 * (0.001 + bits / 1e9))
    assert facts.commit_s == pytest.approx(2 * 0.002 + COMMIT_S)
    # Each of two members sends its half and its mean, at the rate of its line.
    unit_bits = max(facts.unit_bits)
    assert bound.round_s == pytest.approx(unit_bits / 1e9 + 0.002)
    assert bound.step_s == pytest.approx(64 / bound.microbatches_per_s + bound.fill_s + bound.round_s + facts.commit_s)
    between_s = bound.fill_s + bound.round_s + facts.commit_s
    for overlap in (1, 8, 64):
        late = bound_of(pool, 2, pipeline={"overlap": overlap, "stages": 2}).of([[0, 1], [2, 3]])
        late_s = overlap / bound.microbatches_per_s
        assert late.step_s == pytest.approx(bound.step_s - min(between_s / 2, late_s))
        least_s = max(0.0, between_s - late_s)
        assert late.least_s == pytest.approx(64 / bound.microbatches_per_s + least_s)


def test_a_slow_line_a_slow_link_or_the_scheduler_limits() -> None:
    bits = 8 * TOKENS * 768 * BOUNDARY_BYTES["bfloat16"]
    slow = PeerPool((machine("a", line=1e6), machine("b")))
    assert bound_of(slow, 2).of([[0], [1]]).microbatches_per_s == pytest.approx(1e6 / bits)
    apart = PeerPool(
        (machine("a", "x"), machine("b", "y")), {("x", "y"): PoolLink(0.1, 2e6), ("y", "x"): PoolLink(0.1, 1e6)}
    )
    bound = bound_of(apart, 2).of([[0], [1]])
    assert bound.limits == "the link from y to x"
    assert bound.microbatches_per_s == pytest.approx(1e6 / bits), "the gradient goes the slower way"
    fast = PeerPool(tuple(machine(f"p{number}", speed=1e15, line=1e13) for number in range(20)))
    assert bound_of(fast, 2).of([range(10), range(10, 20)]).microbatches_per_s == HOPS_PER_S / 2


def test_a_link_carries_its_part_of_all_tensors_and_gradients() -> None:
    peers = tuple(machine(name, name[0]) for name in ("x0", "x1", "x2", "y0", "x3", "y1"))
    facts = bound_of(PeerPool(peers, {("x", "y"): PoolLink(0.1, 1e6), ("y", "x"): PoolLink(0.1, 1e9)}), 2)
    # Of the tensors of three peers of x and one of y, half goes on to y; of the gradients that go back, half of y's.
    part = 3 / 4 * 1 / 2 + 1 / 2 * 1 / 4
    bound = facts.of([[0, 1, 2, 3], [4, 5]])
    assert bound.limits == "the link from x to y"
    assert bound.microbatches_per_s == pytest.approx(1e6 / facts.boundary_bits / part)


def test_where_two_stages_are_unequal_fast_peers_send_to_fast_peers() -> None:
    peers = tuple(machine(name, name[0], speed=speed) for name, speed in (("x0", 1e12), ("y0", 9e12), ("x1", 1e12)))
    pool = PeerPool(
        (*peers, machine("y1", "y", speed=9e12)), {("x", "y"): PoolLink(0.1, 1e9), ("y", "x"): PoolLink(0.1, 1e9)}
    )
    facts = bound_of(pool, 2)
    first, last = (facts.figures(stage, members) for stage, members in enumerate(([0, 1], [2, 3])))
    sent = facts.boundary(first, last).sent
    assert sent.sum() == pytest.approx(1.0)
    assert sent[0, 1] + sent[1, 0] == pytest.approx(abs(first.shares[0] - last.shares[0])), "as their lanes differ"
    equal = facts.boundary(facts.figures(0, [0, 2]), last).sent
    assert equal[facts.end[0]] == pytest.approx(last.shares), "where one is equal, in proportion"


def test_a_tied_embedding_is_averaged_by_both_ends() -> None:
    job = {"model": {"config": {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
                                "vocab_size": 100_000, "tie_word_embeddings": True}}}  # fmt: skip
    facts = bound_of(equals(4), 2, **job)
    assert facts.tied_s([[0, 1], [2, 3]]) > facts.of([[0, 1], [2, 3]]).fill_s
    assert facts.of([[0], [1]]).round_s == facts.tied_s([[0], [1]]) > 0


def test_fewer_replicas_need_more_memory_each() -> None:
    pool = equals(8)
    facts = bound_of(pool, 2)
    most = max(need.total_bytes for need in facts.needs)
    held = bound_of(PeerPool(tuple(replace(peer, memory_bytes=most) for peer in pool.peers)), 2)
    assert held.is_held([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert not held.is_held([[0], [1]])
