"""Which peer serves which stage."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.fleet.placement import Candidate, place
from swarm.types import PeerId


def peers(*names: str) -> list[Candidate]:
    return [Candidate(PeerId(name)) for name in names]


def test_all_idle_peers_are_used_and_spread_evenly() -> None:
    decision = place(peers("a", "b", "c", "d", "e"), stages=2, min_replicas=1)
    assert decision.plan == {"a": 0, "b": 1, "c": 0, "d": 1, "e": 0}
    assert decision.reason == "5 replicas over 2 stages (stage 0: 3, stage 1: 2)"


def test_a_pin_is_obeyed_and_the_others_fill_up_around_it() -> None:
    candidates = [Candidate(PeerId("a"), pinned_stage=1), Candidate(PeerId("b"), pinned_stage=1), *peers("c", "d")]
    assert place(candidates, stages=2, min_replicas=1).plan == {"a": 1, "b": 1, "c": 0, "d": 0}


def test_the_reason_names_the_stages_that_lack_replicas() -> None:
    decision = place([Candidate(PeerId("a"), pinned_stage=0), *peers("b")], stages=3, min_replicas=1)
    assert decision.plan is None
    assert decision.reason == "stage 2 needs 1 replica more (2 idle, 3 needed)"
    nobody = place([], stages=2, min_replicas=2)
    assert nobody.reason == "stage 0 needs 2 replicas more, stage 1 needs 2 replicas more (0 idle, 4 needed)"


def test_a_peer_pinned_to_a_stage_that_the_job_lacks_stays_idle_and_is_named() -> None:
    decision = place([Candidate(PeerId("a"), pinned_stage=7), *peers("b")], stages=1, min_replicas=1)
    assert decision.plan == {"b": 0}
    assert "a is pinned to stage 7, which this job lacks" in decision.reason


def test_faster_peers_are_spread_before_slower_ones() -> None:
    speeds = {"a": 1.0, "b": 8.0, "c": 1.0, "d": 8.0}
    plan = place([Candidate(PeerId(name), speed=speed) for name, speed in speeds.items()], 2, 1).plan
    assert plan is not None
    assert plan["b"] != plan["d"]


@given(st.lists(st.integers(-1, 4), max_size=12), st.integers(1, 4), st.integers(1, 3), st.randoms())
def test_without_pins_stages_differ_by_one_and_order_does_not_matter(pins, stages, min_replicas, rng) -> None:
    candidates = [Candidate(PeerId(f"p{number}"), pin) for number, pin in enumerate(pins)]
    decision = place(candidates, stages, min_replicas)
    shuffled = list(candidates)
    rng.shuffle(shuffled)
    assert place(shuffled, stages, min_replicas).plan == decision.plan
    sizes = [0] * stages
    for one in candidates:
        if 0 <= one.pinned_stage < stages:
            sizes[one.pinned_stage] += 1
    pinned = list(sizes)
    for _ in range(pins.count(-1)):
        sizes[sizes.index(min(sizes))] += 1
    if decision.plan is None:
        assert min(sizes) < min_replicas
        return
    assert [list(decision.plan.values()).count(stage) for stage in range(stages)] == sizes
    assert all(decision.plan[one.peer] == one.pinned_stage for one in candidates if 0 <= one.pinned_stage < stages)
    assert sum(pinned) <= len(decision.plan)
