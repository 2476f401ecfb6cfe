"""Which replica takes each hop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.brain.routing.policies import (
    ALL,
    AS_GOOD,
    POLICIES,
    Iwrr,
    Lane,
    Lanes,
    LeastCompletion,
    ReplicaLoad,
    RoutingPolicy,
    StageLoad,
    Uniform,
    choose_route,
)
from scheduler.brain.state.links import Links
from swarm.types import Decision, PeerId, Routing
from tests.support.effort import examples
from tests.support.situations import Calls, Situation, beside

A, B, C, D = (PeerId(name) for name in "abcd")


def stage(number: int, *replicas: ReplicaLoad) -> StageLoad:
    return StageLoad(number, replicas)


def nearest(loads: Sequence[StageLoad], rng: Random | None = None) -> Decision[tuple[PeerId, ...]]:
    """The first choice of `least_completion`."""
    return LeastCompletion().choose(loads, 0.0, rng or Random(0))


def test_ties_are_broken_by_the_given_dice_alone() -> None:
    loads = [stage(0, *(ReplicaLoad(peer, 0, 1.0) for peer in (A, B, C, D)))]
    first = [nearest(loads, Random(seed)).plan for seed in range(40)]
    assert first == [LeastCompletion().choose(loads, 9.0, Random(seed)).plan for seed in range(40)]
    assert set(first) == {(A,), (B,), (C,), (D,)}


def test_shares_follow_speed() -> None:
    """Closed loop with perfect feedback: a replica three times as fast gets about three times the work."""
    rng, outstanding, done = Random(0), {A: 0.0, B: 0.0}, Counter[PeerId]()
    pace_s = {A: 1.0, B: 3.0}
    for _ in range(4000):
        loads = [stage(0, *(ReplicaLoad(peer, int(outstanding[peer]), pace_s[peer]) for peer in (A, B)))]
        (chosen,) = nearest(loads, rng).plan or ()
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
        return sum(load.completion_s for load in path) + (
            sum(links[x.peer, y.peer] for x, y in pairwise(path)) if use_links else 0
        )

    by_peer = {replica.peer: replica for load in loads for replica in load.replicas}
    for use_links in (False, True):
        plan = (choose_route(loads, 0.0, Random(1), lambda x, y: links[x, y]) if use_links else nearest(loads)).plan
        assert plan is not None
        best = min(cost(path, use_links) for path in product(*(load.replicas for load in loads)))
        found = cost(tuple(by_peer[peer] for peer in plan), use_links)
        if not use_links and sum(load.lanes.is_unequal for load in loads) > 1:
            continue  # a route leads from like to like
        assert found == best if use_links else best <= found <= AS_GOOD * best


# iwrr and uniform ------------------------------------------------------------------------------------------------


def loads_of(*peers: PeerId, banned: frozenset[PeerId] = frozenset()) -> list[StageLoad]:
    return [stage(0, *(ReplicaLoad(peer, 0, 1.0, peer not in banned) for peer in peers))]


def serve(wiring: RoutingPolicy, rng: Random, pace_s: dict[PeerId, float], count: int) -> list[PeerId]:
    """Route `count` microbatches that take as long as their replica's pace."""
    chosen = []
    for _ in range(count):
        (peer,) = wiring.choose(loads_of(*pace_s), 0.0, rng).plan or ()
        wiring.given(peer)
        wiring.done(peer, pace_s[peer])
        chosen.append(peer)
    return chosen


@settings(max_examples=examples(100))
@given(st.lists(st.floats(0.05, 5.0), min_size=2, max_size=6), st.integers(0, 1000))
def test_iwrr_shares_are_inverse_to_the_measured_seconds(paces: list[float], seed: int) -> None:
    pace_s = {PeerId(str(number)): pace for number, pace in enumerate(paces)}
    wiring, rng = wiring_of("iwrr", *pace_s), Random(seed)
    serve(wiring, rng, pace_s, 50)  # everyone is measured
    count = 2000
    counts = Counter(serve(wiring, rng, pace_s, count))
    for peer, pace in pace_s.items():
        assert wiring._turns[peer].unit_s == pytest.approx(pace)
        share = count / pace / sum(1 / other for other in paces)
        # Tags differ by at most one unit of the slowest: that many microbatches of the peer, and one of its own.
        assert abs(counts[peer] - share) <= 1 + max(paces) / pace


def test_uniform_gives_equal_shares_whatever_the_speed() -> None:
    counts = Counter(serve(Uniform(), Random(0), {A: 0.1, B: 1.0, C: 9.0}, 6000))
    assert all(abs(counts[peer] - 2000) < 200 for peer in (A, B, C))


@pytest.mark.parametrize("routing", POLICIES)
def test_no_wiring_chooses_a_replica_without_credit(routing: Routing) -> None:
    rng = Random(0)
    for _ in range(50):
        assert wiring_of(routing, A, B, C).choose(loads_of(A, B, C, banned=frozenset((A, C))), 0.0, rng).plan == (B,)
    decision = wiring_of(routing, A, B, C).choose(loads_of(A, B, banned=frozenset((A, B))), 0.0, rng)
    assert (decision.plan, decision.reason) == (None, "stage 0: no credit left at 2 replicas")
    assert wiring_of(routing, A, B, C).choose([stage(2)], 0.0, rng).reason == "stage 2: no replica"


@pytest.mark.parametrize("routing", POLICIES)
def test_equal_seeds_give_equal_routes(routing: Routing) -> None:
    runs = [serve(wiring_of(routing, A, B, C), Random(seed), {A: 1.0, B: 1.0, C: 3.0}, 100) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    if routing != "least_completion":  # which asks the dice for the first of all alone
        assert runs[0] != runs[2]


@pytest.mark.parametrize("routing", POLICIES)
def test_asking_changes_nothing(routing: Routing) -> None:
    wiring = wiring_of(routing, A, B, C)
    wiring.given(A)
    plans = [wiring.choose(loads_of(A, B, C), 0.0, Random(7)).plan for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]


pairs = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)), max_size=20)


@pytest.mark.parametrize("routing", POLICIES)
@given(failing=pairs, seed=st.integers(0, 9))
def test_while_links_fail_each_policy_takes_a_route_with_the_fewest_of_them(
    routing: Routing, failing: set[tuple[int, int, int]], seed: int
) -> None:
    names = [[PeerId(f"{stage}{at}") for at in range(3)] for stage in range(4)]
    links = Links()
    for number, at, to in failing:
        links.accuse(names[number][at], names[number + 1][to], 0.0)
    policy = POLICIES[routing]()
    for number, peers in enumerate(names):
        for peer in peers:
            policy.add(peer, number)

    loads = [stage(number, *(ReplicaLoad(peer, 0, 1.0) for peer in peers)) for number, peers in enumerate(names)]
    plan = policy.choose(loads, 0.0, Random(seed), links=links).plan

    assert plan is not None
    fewest = min(sum(links.fails(*pair) for pair in pairwise(route)) for route in product(*names))
    assert sum(links.fails(*pair) for pair in pairwise(plan)) == fewest


def test_the_policy_that_was_chosen_is_asked_also_while_a_link_fails() -> None:
    """The least completion was computed then, whatever the job file said."""
    links = Links()
    links.accuse(A, D, 0.0)
    loads = [stage(0, ReplicaLoad(A, 0, 1.0)), stage(1, *(ReplicaLoad(peer, 0, 1.0) for peer in (B, C, D)))]
    wiring = Iwrr()
    for peer in (B, C, D):
        wiring.add(peer, 1)
    served = Counter[PeerId]()
    seconds = {B: 1.0, C: 3.0}
    for _ in range(400):
        (_, last) = wiring.choose(loads, 0.0, Random(0), links=links).plan or ()
        served[last] += 1
        wiring.given(last)
        wiring.done(last, seconds[last])
    anywhere = Counter(Uniform().choose(loads, 0.0, rng, links=links).plan for rng in map(Random, range(400)))

    assert served[D] == 0
    assert 2.7 < served[B] / served[C] < 3.3
    assert set(anywhere) == {(A, B), (A, C)}
    assert 0.8 < anywhere[A, B] / anywhere[A, C] < 1.25


loads_of_a_stage = st.lists(
    st.builds(
        lambda outstanding, pace_s, has_credit: (outstanding, pace_s, has_credit),
        st.integers(0, 3),
        st.sampled_from([0.5, 0.52, 0.54, 1.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(st.lists(loads_of_a_stage, min_size=1, max_size=3), st.lists(st.integers(0, 4), max_size=8), st.integers(0, 9))
def test_replicas_that_are_kept_ranked_give_the_same_choice_as_looking_at_all(
    stages: list[list[tuple[int, float, bool]]], given_before: list[int], seed: int
) -> None:
    plain = [
        StageLoad(n, tuple(ReplicaLoad(PeerId(f"{9 - at}-{n}"), *load) for at, load in enumerate(stage)))
        for n, stage in enumerate(stages)
    ]
    kept = [StageLoad(load.stage, load.replicas, load.ranked) for load in plain]
    policy, dice = LeastCompletion(), (Random(seed), Random(seed))
    for at in given_before:
        policy.given(PeerId(f"{at + 5}-0"))
    one, other = (policy.choose(loads, 0.0, rng) for loads, rng in zip((plain, kept), dice, strict=True))
    assert one == other
    assert dice[0].getstate() == dice[1].getstate()
    assert (one.plan is None) == any(all(not load[2] for load in stage) for stage in stages)


@given(st.lists(loads_of_a_stage, min_size=1, max_size=3), st.sets(st.integers(0, 14), max_size=3), st.integers(0, 9))
def test_only_links_of_peers_that_have_costly_ones_need_to_be_looked_at(
    stages: list[list[tuple[int, float, bool]]], costly: set[int], seed: int
) -> None:
    loads = [
        StageLoad(n, tuple(ReplicaLoad(PeerId(f"{5 * n + at}"), *load) for at, load in enumerate(stage)))
        for n, stage in enumerate(stages)
    ]

    def link_s(one: PeerId, other: PeerId) -> float:
        return 2.0 if int(one) in costly and int(other) in costly else 0.0

    dice = (Random(seed), Random(seed))
    one = choose_route(loads, 0.0, dice[0], link_s)
    other = choose_route(loads, 0.0, dice[1], link_s, lambda peer: int(peer) in costly)
    assert one == other
    assert dice[0].getstate() == dice[1].getstate()


FAST_TO_SLOW = {"x": 0.1, "y": 0.2, "z": 0.4}  # seconds


def unequal(*queues: str) -> list[StageLoad]:
    """One stage for each of `queues`, such as "x4 y9 z0": what the replicas x, y and z have to do."""
    return [
        stage(
            at, *(ReplicaLoad(PeerId(f"{word[0]}{at}"), int(word[1:]), FAST_TO_SLOW[word[0]]) for word in queue.split())
        )
        for at, queue in enumerate(queues)
    ]


def likes(*queues: str, left_s: float = math.inf, step_s: float = 0.0) -> str:
    """The replicas that are chosen where so many seconds of work are left, without their stages."""
    rate = sum(1 / pace_s for pace_s in FAST_TO_SLOW.values())
    plan = LeastCompletion().choose(unequal(*queues), 0.0, Random(0), left_s * rate, step_s * rate).plan
    assert plan is not None
    return "".join(peer[0] for peer in plan)


def wiring_of(routing: Routing, *peers: PeerId) -> RoutingPolicy:
    policy = POLICIES[routing]()
    for peer in peers:
        policy.add(peer, 0)
    return policy


def chosen(policy: RoutingPolicy, pace_s: dict[PeerId, float], seed: int = 0) -> str:
    loads = [stage(0, *(ReplicaLoad(peer, 0, seconds) for peer, seconds in pace_s.items()))]
    return "".join(policy.choose(loads, 0.0, Random(seed)).plan or ())


def nine(policy: RoutingPolicy, pace_s: dict[PeerId, float]) -> str:
    turns = ""
    for seed in range(9):
        turns += chosen(policy, pace_s, seed)
        policy.given(PeerId(turns[-1]))
    return turns


@pytest.mark.parametrize("situation", beside(__file__), ids=str)
def test_policies_choose_as_the_text_says(situation: Situation) -> None:
    def served(policy: RoutingPolicy, pace_s: dict[PeerId, float], count: int) -> str:
        return "".join(serve(policy, Random(0), pace_s, count))

    known = {"wiring": wiring_of, "chosen": chosen, "nine": nine, "serve": served, "likes": likes, "ALL": ALL}
    known["unit_s"] = lambda policy, peer: policy._turns[peer].unit_s
    situation.check(Calls(None, Lanes=Lanes, Lane=Lane, nan=math.nan, inf=math.inf, **known).play)


def test_likeness_does_not_matter_if_only_one_stage_is_unequal() -> None:
    equal = stage(0, ReplicaLoad(A, 0, 0.2), ReplicaLoad(B, 1, 0.2))
    (one,) = unequal("x2 y2 z0")
    assert nearest([equal, StageLoad(1, one.replicas)]).plan == (A, "x0")


def lanes_of(*paces_s: float) -> Lanes:
    made = Lanes()
    for number, pace_s in enumerate(paces_s):
        made.enter(PeerId(f"{number}"), pace_s)
    return made


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), st.floats(0.0, 0.99), st.floats(0.001, 1.0))
def test_those_beside_a_lane_are_found_and_never_none(paces_s: list[float], start: float, width: float) -> None:
    lanes, lane = lanes_of(*paces_s), Lane(start, min(1.0, start + width))
    everybody = lanes.beside(ALL)
    assert sorted(everybody) == sorted(PeerId(f"{number}") for number in range(len(paces_s)))
    assert lanes.beside(lane) == [peer for peer in everybody if lanes.of(peer).meets(lane)] != []
    assert sum(lanes.of(peer).stop - lanes.of(peer).start for peer in everybody) == pytest.approx(1.0)
