"""Which replica takes each hop."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from scheduler.wiring import ReplicaLoad, StageLoad, choose_route
from swarm.types import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")


def stage(number: int, *replicas: ReplicaLoad) -> StageLoad:
    return StageLoad(number, replicas)


def test_the_replica_that_would_finish_first_is_chosen_not_the_idle_one() -> None:
    fast_but_busy, slow_and_idle = ReplicaLoad(A, 3, 1.0), ReplicaLoad(B, 0, 5.0)
    decision = choose_route([stage(0, fast_but_busy, slow_and_idle)], 0.0, Random(0))
    assert decision.plan == (A,)
    assert choose_route([stage(0, ReplicaLoad(A, 5, 1.0), slow_and_idle)], 0.0, Random(0)).plan == (B,)


def test_a_link_can_cost_more_than_a_slower_replica() -> None:
    loads = [stage(0, ReplicaLoad(A, 0, 1.0)), stage(1, ReplicaLoad(B, 0, 1.0), ReplicaLoad(C, 0, 2.0))]
    links = {(A, B): 3.0, (A, C): 0.5}
    assert choose_route(loads, 0.0, Random(0)).plan == (A, B)
    assert choose_route(loads, 0.0, Random(0), lambda x, y: links[x, y]).plan == (A, C)


def test_there_is_no_plan_if_a_stage_has_no_replica_with_credit_and_the_reason_names_it() -> None:
    loads = [stage(0, ReplicaLoad(A, 0, 1.0)), stage(1, ReplicaLoad(B, 0, 1.0, has_credit=False))]
    decision = choose_route(loads, 0.0, Random(0))
    assert decision.plan is None
    assert decision.reason == "stage 1: none of 1 replicas has credit"
    assert choose_route([stage(3)], 0.0, Random(0)).reason == "stage 3: no replica"


def test_a_replica_without_credit_is_never_chosen() -> None:
    loads = [stage(0, ReplicaLoad(A, 0, 0.1, has_credit=False), ReplicaLoad(B, 9, 9.0))]
    assert choose_route(loads, 0.0, Random(0)).plan == (B,)


def test_ties_are_broken_by_the_given_dice_alone() -> None:
    loads = [stage(0, *(ReplicaLoad(peer, 0, 1.0) for peer in (A, B, C, D)))]
    first = [choose_route(loads, 0.0, Random(seed)).plan for seed in range(40)]
    assert first == [choose_route(loads, 9.0, Random(seed)).plan for seed in range(40)]
    assert set(first) == {(A,), (B,), (C,), (D,)}


def test_shares_follow_speed() -> None:
    """Closed loop with perfect feedback: a replica three times as fast gets about three times the work."""
    rng, outstanding, done = Random(0), {A: 0.0, B: 0.0}, Counter[PeerId]()
    pace_s = {A: 1.0, B: 3.0}
    for _ in range(4000):
        loads = [stage(0, *(ReplicaLoad(peer, int(outstanding[peer]), pace_s[peer]) for peer in (A, B)))]
        (chosen,) = choose_route(loads, 0.0, rng).plan or ()
        outstanding[chosen] += 1
        done[chosen] += 1
        for peer in (A, B):  # time passes until one microbatch of the whole stage is done
            outstanding[peer] = max(0.0, outstanding[peer] - 0.75 / pace_s[peer])
    assert 2.5 < done[A] / done[B] < 3.5


@given(st.data())
def test_the_path_is_the_cheapest_of_all(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    costs = st.integers(0, 5)
    loads = [
        stage(s, *(ReplicaLoad(PeerId(f"{s}.{r}"), data.draw(costs), 1.0 + data.draw(costs)) for r in range(size)))
        for s, size in enumerate(sizes)
    ]
    pairs = [(x.peer, y.peer) for a, b in pairwise(loads) for x in a.replicas for y in b.replicas]
    links = {pair: float(data.draw(costs)) for pair in pairs}

    def cost(path: tuple[ReplicaLoad, ...], use_links: bool) -> float:
        return sum(one.completion_s for one in path) + (
            sum(links[x.peer, y.peer] for x, y in pairwise(path)) if use_links else 0
        )

    by_peer = {replica.peer: replica for load in loads for replica in load.replicas}
    for use_links in (False, True):
        plan = choose_route(loads, 0.0, Random(1), (lambda x, y: links[x, y]) if use_links else None).plan
        assert plan is not None
        best = min(cost(path, use_links) for path in product(*(load.replicas for load in loads)))
        assert cost(tuple(by_peer[peer] for peer in plan), use_links) == best
