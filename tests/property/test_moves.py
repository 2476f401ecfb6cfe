"""Moves between stages, whatever the speeds, the pins and the churn: no stage emptied, no thrashing, no lower rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.brain.replicas.rebalancing import Move, Rebalancer, StagePool, StageReplica, plan_moves, where_to_join
from scheduler.brain.settings import RebalanceSettings
from swarm.types import PeerId

SETTINGS = RebalanceSettings()


@dataclass(frozen=True, slots=True)
class Peer:
    """The truth about a peer."""

    stage: int
    seconds: float
    since_s: float = -1e9
    pinned: bool = False
    arrives_s: float = -1e9


Fleet = dict[PeerId, Peer]

fleets = st.builds(
    lambda stages, rows: (
        stages,
        {
            PeerId(f"p{n:03}"): Peer(n if n < stages else at % stages, s, pinned=pin)
            for n, (at, s, pin) in enumerate(rows)
        },
    ),
    st.integers(2, 6),
    st.lists(
        st.tuples(st.integers(0, 5), st.sampled_from([0.5, 1.0, 1.0, 1.0, 2.0, 4.0]), st.booleans()),
        min_size=6,
        max_size=24,
    ),
)


def pools_of(stages: int, fleet: Fleet, now_s: float, noise: Random | None = None) -> list[StagePool]:
    return [
        StagePool(
            stage,
            tuple(
                StageReplica(
                    peer,
                    one.seconds * (noise.uniform(0.9, 1.1) if noise else 1.0),
                    one.since_s,
                    one.pinned,
                    one.arrives_s > now_s,
                )
                for peer, one in fleet.items()
                if one.stage == stage
            ),
            state_bytes=1000,
            bytes_per_s=100.0,
        )
        for stage in range(stages)
    ]


def rate(stages: int, fleet: Fleet) -> float:
    return min(pool.capacity for pool in pools_of(stages, fleet, 0.0))


@settings(max_examples=150, deadline=None)
@given(fleets, st.integers(1, 3))
def test_a_plan_keeps_every_promise_and_a_reason(case: tuple[int, Fleet], min_replicas: int) -> None:
    stages, fleet = case
    pools = pools_of(stages, fleet, 0.0)
    plan = plan_moves(pools, replace(SETTINGS, min_replicas=min_replicas), 0.0)
    assert plan.reason.startswith("stage ")
    move = plan.first
    if move is None:
        return
    mover = fleet[move.peer]
    assert mover.stage == move.source != move.target
    assert not mover.pinned
    assert sum(replica.stage == move.source for replica in fleet.values()) > min_replicas
    before, after = rate(stages, fleet), rate(stages, {**fleet, move.peer: replace(mover, stage=move.target)})
    assert after >= before * (1 - 1e-9)
    assert move.rate_after > move.rate_now
    assert move.rate_now == pytest.approx(before)
    if move.moves == 1:
        assert move.rate_after == pytest.approx(after)


@settings(max_examples=60, deadline=None)
@given(fleets, st.integers(0, 2**32))
def test_the_order_of_peers_and_stages_decides_nothing(case: tuple[int, Fleet], seed: int) -> None:
    stages, fleet = case
    rng = Random(seed)
    pools = pools_of(stages, fleet, 0.0)
    names = list(fleet)
    rng.shuffle(names)
    shuffled = pools_of(stages, {name: fleet[name] for name in names}, 0.0)
    rng.shuffle(shuffled)
    assert plan_moves(shuffled, SETTINGS, 0.0) == plan_moves(pools, SETTINGS, 0.0)


@settings(max_examples=60, deadline=None)
@given(fleets)
def test_moves_end_and_each_makes_the_rate_no_worse(case: tuple[int, Fleet]) -> None:
    stages, fleet = case
    rebalancer = Rebalancer(replace(SETTINGS, cooldown_s=0.0))
    seen = rate(stages, fleet)
    made = 0
    for window in range(3 * len(fleet) + 10):
        now_s = 30.0 * window
        move = rebalancer.consider(pools_of(stages, fleet, now_s), now_s).plan
        if move is not None:
            made += 1
            fleet = {**fleet, move.peer: replace(fleet[move.peer], stage=move.target, since_s=now_s)}
            assert (seen := max(seen, rate(stages, fleet))) == pytest.approx(rate(stages, fleet))
    assert move is None
    assert made <= len(fleet)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 6), st.integers(2, 30), st.integers(0, 2**32))
def test_a_balanced_swarm_never_moves_whatever_the_noise(stages: int, crowd: int, seed: int) -> None:
    rng = Random(seed)
    fleet = {PeerId(f"p{n:03}"): Peer(n % stages, 1.0) for n in range(stages * crowd)}
    rebalancer = Rebalancer(SETTINGS)
    for window in range(40):
        assert rebalancer.consider(pools_of(stages, fleet, 30.0 * window, rng), 30.0 * window).plan is None


def test_a_balanced_swarm_of_twelve_makes_no_move_in_a_day_of_noise() -> None:
    rng = Random(5)
    fleet = {PeerId(f"p{n:03}"): Peer(n % 4, 1.0) for n in range(12)}
    rebalancer = Rebalancer(SETTINGS)
    for window in range(24 * 120):
        assert rebalancer.consider(pools_of(4, fleet, 30.0 * window, rng), 30.0 * window).plan is None


@pytest.mark.parametrize("seed", range(4))
def test_under_churn_one_peer_moves_at_a_time_rests_and_leaves_nobody_alone(seed: int) -> None:
    """Peers of unequal speed die and join for two hours; transfers take 10 s and may not end."""
    rng = Random(seed)
    stages = rng.choice([2, 4, 8])
    fleet = {PeerId(f"p{n:03}"): Peer(n % stages, rng.choice([1.0, 1.0, 2.0, 4.0])) for n in range(4 * stages)}
    rebalancer = Rebalancer(SETTINGS)
    moves: list[tuple[float, Move]] = []
    moving: PeerId | None = None
    for tick in range(720):
        now_s = 10.0 * tick
        if rng.random() < 0.04 and len(fleet) > stages:
            del fleet[rng.choice(sorted(fleet))]
        if rng.random() < 0.04:
            stage = where_to_join(pools_of(stages, fleet, now_s)).plan
            assert stage is not None
            fleet[PeerId(f"j{tick:05}")] = Peer(stage, rng.choice([1.0, 2.0]), now_s, arrives_s=now_s + 10.0)
        if moving is not None and (moving not in fleet or fleet[moving].arrives_s <= now_s):
            moving = None
        move = rebalancer.consider(pools_of(stages, fleet, now_s, rng), now_s, moving).plan
        if move is None:
            continue
        assert moving is None
        mover = fleet[move.peer]
        assert now_s - mover.since_s >= SETTINGS.cooldown_s
        others = [name for name, one in fleet.items() if one.stage == move.source and name != move.peer]
        assert any(fleet[name].arrives_s <= now_s for name in others)
        moving = move.peer
        fleet[move.peer] = replace(mover, stage=move.target, since_s=now_s, arrives_s=now_s + 10.0)
        moves.append((now_s, move))
    assert moves, "the churn must ask for moves, else this shows nothing"
    for number, (at_s, move) in enumerate(moves):
        for later_s, later in moves[number + 1 :]:
            assert later.peer != move.peer or later_s - at_s >= SETTINGS.cooldown_s


@settings(max_examples=60, deadline=None)
@given(fleets)
def test_no_other_stage_would_be_better_for_a_joiner(case: tuple[int, Fleet]) -> None:
    stages, fleet = case
    pools = pools_of(stages, fleet, 0.0)
    capacities = [pool.capacity for pool in pools]
    speeds = [replica.speed for pool in pools for replica in pool.replicas]
    speed = median(speeds) if speeds else 1.0  # what it is taken for

    def after(stage: int) -> list[float]:
        return sorted(round(each + (speed if at == stage else 0.0), 6) for at, each in enumerate(capacities))

    chosen = where_to_join(pools)
    assert chosen.reason
    assert chosen.plan is not None
    assert after(chosen.plan) == max(after(stage) for stage in range(stages))
