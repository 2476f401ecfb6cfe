"""Which replica takes each hop."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.routing.policies import (
    ALL,
    AS_GOOD,
    BESIDE,
    DRIFT,
    POLICIES,
    UNEQUAL,
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
        return sum(one.completion_s for one in path) + (
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


def test_of_those_that_are_as_good_the_one_that_waited_longest_is_next() -> None:
    wiring = LeastCompletion()
    paces_s = {A: 1.0, B: 1.05, C: 1.09, D: 1.2}  # D is slower by more than measurements tell
    loads = [stage(0, *(ReplicaLoad(peer, 0, pace_s) for peer, pace_s in paces_s.items()))]
    turns = []
    for seed in range(9):
        (chosen,) = wiring.choose(loads, 0.0, Random(seed)).plan or ()
        wiring.given(chosen)
        turns.append(chosen)
    assert set(turns[:3]) == {A, B, C}
    assert turns == turns[:3] * 3
    wiring.remove(turns[2])  # it was gone, and is new: first
    assert wiring.choose(loads, 0.0, Random(1)).plan == (turns[2],)


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


def iwrr_of(*peers: PeerId) -> Iwrr:
    made = Iwrr()
    for peer in peers:
        made.add(peer, 0)
    return made


@given(st.lists(st.floats(0.05, 5.0), min_size=2, max_size=6), st.integers(0, 1000))
def test_iwrr_shares_are_inverse_to_the_measured_seconds(paces: list[float], seed: int) -> None:
    pace_s = {PeerId(str(number)): pace for number, pace in enumerate(paces)}
    wiring, rng = iwrr_of(*pace_s), Random(seed)
    serve(wiring, rng, pace_s, 50)  # everyone is measured
    count = 2000
    counts = Counter(serve(wiring, rng, pace_s, count))
    for peer, pace in pace_s.items():
        assert wiring._turns[peer].unit_s == pytest.approx(pace)
        share = count / pace / sum(1 / other for other in paces)
        # Tags differ by at most one unit of the slowest: that many microbatches of the peer, and one of its own.
        assert abs(counts[peer] - share) <= 1 + max(paces) / pace


def test_iwrr_interleaves() -> None:
    """A replica twice as fast is not given its work in one block."""
    pace_s = {A: 1.0, B: 2.0}
    wiring = iwrr_of(A, B)
    turns = "".join(serve(wiring, Random(0), pace_s, 60)[30:])
    assert "aaaa" not in turns
    assert "bb" not in turns


def test_iwrr_keeps_whom_a_route_must_keep_though_it_gets_no_new_turn() -> None:
    """A replica that leaves is the one that has what its neighbours need: routing ended the job with a KeyError."""
    wiring = iwrr_of(A, B)
    wiring.remove(A)
    assert wiring.choose(loads_of(A), 0.0, Random(0)).plan == (A,)


def test_iwrr_charges_before_the_answer_and_by_units() -> None:
    wiring = iwrr_of(A, B)
    wiring.given(A)
    assert [wiring.choose(loads_of(A, B), 0.0, Random(seed)).plan for seed in range(5)] == [(B,)] * 5
    wiring.given(B, units=2.5)
    wiring.given(A)
    assert wiring.choose(loads_of(A, B), 0.0, Random(0)).plan == (A,)


def test_iwrr_tries_a_newcomer_soon_and_does_not_flood_it() -> None:
    pace_s = {A: 1.0, B: 1.0}
    wiring, rng = iwrr_of(A, B), Random(0)
    serve(wiring, rng, pace_s, 1000)
    wiring.add(C, 0)
    wiring.add(D, 1)  # of another stage: its tag is of no concern
    chosen = serve(wiring, rng, pace_s | {C: 1.0}, 30)
    assert C in chosen[:3]
    assert 9 <= chosen.count(C) <= 11


def test_iwrr_forgets_a_suspect_that_comes_back() -> None:
    pace_s = {A: 1.0, B: 9.0}
    wiring, rng = iwrr_of(A, B), Random(0)
    serve(wiring, rng, pace_s, 50)
    wiring.remove(B)
    wiring.done(B, 9.0)  # late words of one that is not there change nothing
    wiring.given(B)
    serve(wiring, rng, {A: 1.0}, 100)
    wiring.add(B, 0)
    assert wiring._turns[B].unit_s == 1.0
    assert 9 <= serve(wiring, rng, {A: 1.0, B: 1.0}, 20).count(B) <= 11


def test_iwrr_mean_is_that_of_its_samples_from_the_first_on() -> None:
    wiring = iwrr_of(A)
    assert wiring._turns[A].unit_s == 1.0
    wiring.done(A, 4.0)
    assert wiring._turns[A].unit_s == pytest.approx(4.0)
    wiring.done(A, 5.0, units=2.5)  # 2 s per unit
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        wiring.done(A, seconds)
    assert wiring._turns[A].unit_s == pytest.approx((0.1 * 2.0 + 0.09 * 4.0) / 0.19)


def test_uniform_gives_equal_shares_whatever_the_speed() -> None:
    counts = Counter(serve(Uniform(), Random(0), {A: 0.1, B: 1.0, C: 9.0}, 6000))
    assert all(abs(counts[peer] - 2000) < 200 for peer in (A, B, C))


def made(routing: Routing) -> RoutingPolicy:
    wiring = POLICIES[routing]()
    for peer in (A, B, C):
        wiring.add(peer, 0)
    return wiring


@pytest.mark.parametrize("routing", POLICIES)
def test_no_wiring_chooses_a_replica_without_credit(routing: Routing) -> None:
    rng = Random(0)
    for _ in range(50):
        assert made(routing).choose(loads_of(A, B, C, banned=frozenset((A, C))), 0.0, rng).plan == (B,)
    decision = made(routing).choose(loads_of(A, B, banned=frozenset((A, B))), 0.0, rng)
    assert (decision.plan, decision.reason) == (None, "stage 0: no credit left at 2 replicas")
    assert made(routing).choose([stage(2)], 0.0, rng).reason == "stage 2: no replica"


@pytest.mark.parametrize("routing", POLICIES)
def test_equal_seeds_give_equal_routes(routing: Routing) -> None:
    runs = [serve(made(routing), Random(seed), {A: 1.0, B: 1.0, C: 3.0}, 100) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    if routing != "least_completion":  # which asks the dice for the first of all alone
        assert runs[0] != runs[2]


@pytest.mark.parametrize("routing", POLICIES)
def test_asking_changes_nothing(routing: Routing) -> None:
    wiring = made(routing)
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


def unequal(queues: Sequence[dict[str, int]]) -> list[StageLoad]:
    """One stage for each of `queues`, with the replicas x, y and z and what they have to do."""
    return [
        stage(number, *(ReplicaLoad(PeerId(f"{name}{number}"), queue[name], FAST_TO_SLOW[name]) for name in queue))
        for number, queue in enumerate(queues)
    ]


def likes(queues: Sequence[dict[str, int]], to_do: float, of_step: float = 0.0) -> str:
    """The names of the replicas that are chosen, without their stages."""
    plan = LeastCompletion().choose(unequal(queues), 0.0, Random(0), to_do, of_step).plan
    assert plan is not None
    return "".join(peer[0] for peer in plan)


@pytest.mark.parametrize(
    ("first", "route"),
    [({"x": 0, "y": 9, "z": 9}, "xx"), ({"x": 9, "y": 0, "z": 9}, "yy"), ({"x": 19, "y": 19, "z": 0}, "zz")],
)
def test_a_route_leads_from_like_to_like(first: dict[str, int], route: str) -> None:
    """A microbatch that passed a slow replica was in flight at a fast one meanwhile, which ran dry behind it."""
    assert likes([first, {"x": 2, "y": 2, "z": 2}], math.inf) == route


def test_likeness_does_not_matter_if_only_one_stage_is_unequal() -> None:
    equal = stage(0, ReplicaLoad(A, 0, 0.2), ReplicaLoad(B, 1, 0.2))
    (one,) = unequal([{"x": 2, "y": 2, "z": 0}])
    assert nearest([equal, StageLoad(1, one.replicas)]).plan == (A, "x0")


def test_a_slow_replica_gets_more_than_would_end_with_the_others_while_there_is_much_to_do() -> None:
    queue = {"x": 4, "y": 9, "z": 0}  # until 0.5 s and until 0.4 s, one more included
    assert likes([queue, queue], math.inf) == "zz"
    queue = {"x": 4, "y": 9, "z": 1}  # 0.5 s and 0.8 s: at two thirds of the time, three eighths of the number
    assert likes([queue, queue], math.inf) == "xx"
    queue = {"x": 6, "y": 9, "z": 1}  # 0.7 s and 0.8 s
    assert likes([queue, queue], math.inf) == "zz"


def test_no_replica_gets_work_with_which_it_would_end_after_all_the_rest() -> None:
    queue = {"x": 6, "y": 9, "z": 1}  # z would need 0.8 s
    rate = 1 / 0.1 + 1 / 0.2 + 1 / 0.4
    assert likes([queue, queue], 0.81 * rate) == "zz"
    assert likes([queue, queue], 0.79 * rate) == "xx"
    assert likes([queue, queue], 0.0) == "xx", "where nobody is in time, the first to end"


def test_a_hop_that_is_settled_already_does_not_say_when_the_rest_ends() -> None:
    """A refill names one replica for it, and by the pace of a slow one alone everybody would be in time."""
    queue = {"x": 6, "y": 9, "z": 1}  # z would need 0.8 s
    rate = 1 / 0.1 + 1 / 0.2 + 1 / 0.4
    assert likes([queue, queue, {"z": 0}], 0.79 * rate) == "xxz"


def test_a_route_goes_beside_a_lane_whose_replicas_would_be_late() -> None:
    first, second = {"x": 19, "y": 19, "z": 0}, {"x": 2, "y": 5, "z": 9}
    rate = 1 / 0.1 + 1 / 0.2 + 1 / 0.4
    assert likes([first, second], math.inf) == "zz"
    assert likes([first, second], 1.0 * rate) == "zx"


RATE = 1 / 0.1 + 1 / 0.2 + 1 / 0.4


def test_a_replica_without_work_takes_what_it_ends_before_its_own_step_is_committed() -> None:
    """One that is due less than a whole microbatch of what is left would else get none, though nobody waits for it."""
    idle = {"x": 2, "y": 9, "z": 0}
    assert likes([idle, {"x": 0, "y": 0, "z": 0}], 0.39 * RATE)[0] == "x"
    assert likes([idle, {"x": 0, "y": 0, "z": 0}], 0.39 * RATE, 0.41 * RATE)[0] == "z"
    busy = {"x": 2, "y": 9, "z": 1}
    assert likes([busy, {"x": 0, "y": 0, "z": 0}], 0.39 * RATE, 0.81 * RATE)[0] == "x"


def test_a_route_does_not_lead_through_slow_replicas_that_are_late_together() -> None:
    """Two that took ten times as long, one behind the other, held up each step for as long as it took."""
    idle, free = {"x": 6, "y": 9, "z": 0}, {"x": 0, "y": 0, "z": 0}
    assert likes([idle, free], 0.71 * RATE) == "zz"
    assert likes([idle, free], 0.69 * RATE) == "zx"


def lanes_of(*paces_s: float) -> Lanes:
    made = Lanes()
    for number, pace_s in enumerate(paces_s):
        made.enter(PeerId(f"{number}"), pace_s)
    return made


def test_a_lane_is_as_wide_as_the_share_of_the_speed_slowest_first() -> None:
    lanes = Lanes()
    lanes.enter(A, 1.0)
    lanes.enter(B, 4.0)
    lanes.enter(C, 2.0)
    ends = [(lanes.of(peer).start, lanes.of(peer).stop) for peer in (B, C, A)]
    assert ends == [pytest.approx(one) for one in [(0.0, 1 / 7), (1 / 7, 3 / 7), (3 / 7, 1.0)]]
    assert lanes.per_s == 1.75
    assert lanes.beside(ALL) == [B, C, A]


def test_replicas_are_beside_a_lane_that_covers_a_tenth_of_theirs() -> None:
    lanes = Lanes()
    for peer in (A, B):
        lanes.enter(peer, 1.0)  # 0 to 0.5, 0.5 to 1
    assert lanes.beside(Lane(0.0, 0.5)) == [A]
    assert lanes.beside(Lane(0.0, 0.5 + 0.6 * BESIDE)) == [A, B]
    assert lanes.beside(Lane(0.0, 0.5 + 0.4 * BESIDE)) == [A]
    assert lanes.beside(Lane(0.99, 1.0)) == [B]


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8), st.floats(0.0, 0.99), st.floats(0.001, 1.0))
def test_those_beside_a_lane_are_found_and_never_none(paces_s: list[float], start: float, width: float) -> None:
    lanes, lane = lanes_of(*paces_s), Lane(start, min(1.0, start + width))
    everybody = lanes.beside(ALL)
    assert sorted(everybody) == sorted(PeerId(f"{number}") for number in range(len(paces_s)))
    assert lanes.beside(lane) == [peer for peer in everybody if lanes.of(peer).meets(lane)] != []
    assert sum(lanes.of(peer).stop - lanes.of(peer).start for peer in everybody) == pytest.approx(1.0)


def test_a_stage_is_unequal_from_half_as_long_again() -> None:
    assert not Lanes().is_unequal
    assert not lanes_of(1.0, UNEQUAL).is_unequal
    assert lanes_of(1.0, 1.01 * UNEQUAL).is_unequal


def test_lanes_are_drawn_anew_for_a_change_that_matters_and_for_those_who_come_and_go() -> None:
    lanes = Lanes()
    lanes.enter(A, 1.0)
    lanes.enter(B, 1.0)
    before = lanes.of(B)
    lanes.enter(B, 0.99 * DRIFT)
    assert lanes.of(B) == before
    assert lanes.fits({A: 1.0, B: 0.99 * DRIFT})
    assert not lanes.fits({A: 1.0, B: 1.01 * DRIFT})
    lanes.enter(B, 1.01 * DRIFT)
    assert lanes.of(B) != before
    lanes.enter(C, 1.0)
    assert lanes.of(C).stop == 1.0, "among equals, the last by id"
    lanes.leave(B)
    lanes.leave(B)
    assert lanes.beside(ALL) == [A, C]
    assert not lanes.fits({A: 1.0})
