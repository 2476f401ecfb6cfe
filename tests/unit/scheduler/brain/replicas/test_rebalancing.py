"""scheduler.brain.replicas.rebalancing: which move, when, and the reason in numbers."""

from __future__ import annotations

from math import inf

import pytest

from scheduler.brain.replicas.rebalancing import Move, Rebalancer, StagePool, StageReplica, plan_moves, where_to_join
from scheduler.brain.settings import RebalanceSettings
from swarm.types import PeerId

SETTINGS = RebalanceSettings()


def pools(*seconds: list[float], state_bytes: int = 1000, bytes_per_s: float = 100.0) -> list[StagePool]:
    """Stages of replicas "<stage>.<number>" with these seconds per microbatch."""
    return [
        StagePool(
            stage,
            tuple(StageReplica(PeerId(f"{stage}.{number}"), each) for number, each in enumerate(crowd)),
            state_bytes,
            bytes_per_s,
        )
        for stage, crowd in enumerate(seconds)
    ]


def change(pool: StagePool, **facts: object) -> StagePool:
    """The pool with these facts about each of its replicas."""
    replicas = tuple(
        StageReplica(**{"peer": one.peer, "seconds": one.seconds, **facts})  # type: ignore[arg-type]
        for one in pool.replicas
    )
    return StagePool(pool.stage, replicas, pool.state_bytes, pool.bytes_per_s, pool.work)


def carried_out(stages: list[StagePool], move: Move, now_s: float) -> list[StagePool]:
    """The stages after the move, the mover as fast as it was."""
    (mover,) = [one for one in stages[move.source].replicas if one.peer == move.peer]
    after = []
    for pool in stages:
        replicas = tuple(one for one in pool.replicas if one is not mover)
        if pool.stage == move.target:
            replicas += (StageReplica(mover.peer, mover.seconds, now_s),)
        after.append(StagePool(pool.stage, replicas, pool.state_bytes, pool.bytes_per_s, pool.work))
    return after


def until_settled(stages: list[StagePool], settings: RebalanceSettings = SETTINGS) -> tuple[list[StagePool], int]:
    """Windows that passed until no move was left, transfers taking no time."""
    rebalancer = Rebalancer(settings)
    for window in range(1, 50):
        now_s = window * settings.interval_s
        moved = False
        while (move := rebalancer.consider(stages, now_s).plan) is not None:
            stages = carried_out(stages, move, now_s)
            moved = True
        if moved:
            return stages, window
    return stages, 0


def test_the_stage_that_limits_gets_a_peer_after_three_windows_and_the_reason_counts_them() -> None:
    rebalancer = Rebalancer(SETTINGS)
    stages = pools([1.0], [1.0] * 4)
    decisions = [rebalancer.consider(stages, now_s) for now_s in (0.0, 30.0, 60.0)]
    assert [decision.plan is not None for decision in decisions] == [False, False, True]
    move = decisions[-1].plan
    assert move is not None
    assert (move.peer, move.source, move.target, move.moves) == ("1.0", 1, 0, 1)
    assert decisions[1].reason == (
        "stage 0 sets the pace: 1 microbatches/s, the fastest stage could do 4; "
        "moving 1.0 from stage 1 to 0 gives +100.0%, "
        "cost 10 s of transfer, net +99.4%, confirmed 2 of 3"
    )


def test_asking_more_often_does_not_confirm_sooner() -> None:
    rebalancer = Rebalancer(SETTINGS)
    stages = pools([1.0], [1.0] * 4)
    assert [rebalancer.consider(stages, float(now_s)).plan for now_s in range(60)] == [None] * 60
    assert rebalancer.consider(stages, 60.0).plan is not None


def test_a_window_without_the_imbalance_starts_the_count_anew() -> None:
    rebalancer = Rebalancer(SETTINGS)
    skewed, even = pools([1.0], [1.0] * 4), pools([1.0] * 2, [1.0] * 3)
    plans = [
        rebalancer.consider(stages, 30.0 * window).plan
        for window, stages in enumerate([skewed, skewed, even, skewed, skewed])
    ]
    assert plans == [None] * 5
    assert rebalancer.consider(skewed, 150.0).plan is not None


def test_nobody_moves_while_another_peer_does_and_the_rest_of_a_confirmed_plan_follows_at_once() -> None:
    rebalancer = Rebalancer(SETTINGS)
    stages = pools([1.0, 1.0], [1.0] * 8)
    for now_s in (0.0, 30.0):
        rebalancer.consider(stages, now_s)
    first = rebalancer.consider(stages, 60.0).plan
    assert first is not None
    assert first.moves == 3
    after = carried_out(stages, first, 60.0)
    under_way = rebalancer.consider(after, 61.0, moving=first.peer)
    assert under_way.plan is None
    assert under_way.reason == "1.0 is on its way; one move at a time"
    second = rebalancer.consider(after, 70.0).plan
    assert second is not None
    assert second.peer == "1.1"


@pytest.mark.parametrize("crowds", [(1, 4), (1, 4, 4, 4), (2, 8), (1, 1, 4, 4), (4, 1, 4, 1, 4, 4, 4, 4), (3, 12, 12)])
def test_a_skew_of_one_to_four_is_gone_within_three_periods(crowds: tuple[int, ...]) -> None:
    stages, windows = until_settled(pools(*([1.0] * crowd for crowd in crowds)))
    sizes = [len(pool.replicas) for pool in stages]
    assert 1 <= windows <= 3
    assert min(sizes) == sum(crowds) // len(crowds)


def test_speeds_one_to_four_are_levelled_by_capacity_not_by_heads() -> None:
    stages, windows = until_settled(pools([1.0] * 4, [4.0] * 4))
    assert windows == 3
    assert [(len(pool.replicas), pool.capacity) for pool in stages] == [(3, 3.0), (5, 2.0)]


def test_a_joiner_under_way_counts_as_if_it_had_arrived() -> None:
    stages = pools([1.0], [1.0] * 3)
    joiner = StageReplica(PeerId("new"), 1.0, arriving=True)
    helped = StagePool(0, (*stages[0].replicas, joiner), 1000, 100.0)
    assert plan_moves(stages, SETTINGS, 0.0).first is not None
    assert plan_moves([helped, stages[1]], SETTINGS, 0.0).first is None


def test_a_stage_never_loses_its_last_replica_even_if_others_are_under_way_to_it() -> None:
    stages = pools([10.0], [1.0])
    assert "stage 1 cannot spare its last 1" in plan_moves(stages, SETTINGS, 0.0).reason
    arriving = StageReplica(PeerId("new"), 1.0, arriving=True)
    stages[1] = StagePool(1, (*stages[1].replicas, arriving), 1000, 100.0)
    assert plan_moves(stages, SETTINGS, 0.0).first is None
    assert plan_moves(pools([10.0] * 2, [1.0] * 2), RebalanceSettings(min_replicas=2), 0.0).first is None


def test_pinned_and_newly_come_peers_stay() -> None:
    stages = pools([1.0], [1.0] * 4)
    pinned = plan_moves([stages[0], change(stages[1], pinned=True)], SETTINGS, 0.0)
    assert pinned.first is None
    assert "(4 pinned)" in pinned.reason
    fresh = [stages[0], change(stages[1], since_s=50.0)]
    assert "4 moved or joined less than 120 s ago" in plan_moves(fresh, SETTINGS, 169.0).reason
    assert plan_moves(fresh, SETTINGS, 170.0).first is not None


def test_of_equally_good_movers_the_lowest_peer_id_goes_wherever_it_serves() -> None:
    needy, *rich = pools([1.0], [1.0] * 3, [1.0] * 3)
    for names in (("za", "zb"), ("zb", "za")):
        named = [
            StagePool(
                pool.stage, tuple(StageReplica(PeerId(name + one.peer), 1.0) for one in pool.replicas), 1000, 100.0
            )
            for name, pool in zip(names, rich, strict=True)
        ]
        move = plan_moves([needy, *named], SETTINGS, 0.0).first
        assert move is not None
        assert move.peer.startswith("za")


def test_two_stages_that_limit_together_get_a_plan_of_two_moves() -> None:
    plan = plan_moves(pools([1.0], [1.0], [1.0] * 4), SETTINGS, 0.0)
    assert plan.first is not None
    assert (plan.first.target, plan.first.moves, plan.first.rate_after) == (0, 2, 2.0)
    assert plan.targets == {0, 1}
    assert "and 1 more gives +100.0%" in plan.reason


def test_many_replicas_lower_the_bar_and_few_do_not() -> None:
    assert plan_moves(pools([1.0] * 23, [1.0] * 25), SETTINGS, 0.0).first is not None  # +4.3 %, bar 2.2 %
    nearly = pools([1.0] * 3, [0.9] * 3, [8.0] * 24)
    plan = plan_moves(nearly, SETTINGS, 0.0)  # a slow peer adds 4 %, the bar for 3 replicas is 15 %
    assert plan.first is None or plan.first.gain >= 0.15


def test_a_transfer_as_long_as_the_horizon_gains_nothing() -> None:
    slow = pools([1.0], [1.0] * 4, state_bytes=1800, bytes_per_s=1.0)
    plan = plan_moves(slow, SETTINGS, 0.0)
    assert plan.first is None
    assert "cost 1.8e+03 s of transfer" in plan.reason
    assert plan_moves(pools([1.0], [1.0] * 4, bytes_per_s=0.0), SETTINGS, 0.0).first is None


def test_a_stage_without_replicas_gets_one() -> None:
    stages = pools([], [1.0] * 2)
    plan = plan_moves(stages, SETTINGS, 0.0)
    assert plan.first is not None
    assert plan.first.gain == inf
    assert plan.reason.startswith(
        "stage 0 sets the pace: 0 microbatches/s, the fastest stage could do 2; "
        "moving 1.0 from stage 1 to 0 gives 1 microbatches/s, cost 10 s"
    )


def test_work_turns_seconds_of_one_stage_into_seconds_of_another() -> None:
    heavy, light = pools([2.0], [1.0] * 3)
    heavy = StagePool(0, heavy.replicas, 1000, 100.0, work=2.0)
    move = plan_moves([heavy, light], SETTINGS, 0.0).first
    assert move is not None
    assert move.rate_after == pytest.approx(1.0)  # 1/2 from before and 1/2 from the mover


def test_a_new_peer_goes_to_the_stage_that_limits_and_says_what_it_changes() -> None:
    decision = where_to_join(pools([1.0] * 3, [1.0] * 2, [1.0] * 4))
    assert decision.plan == 1
    assert decision.reason == (
        "stage 1 does 2 microbatches/s with 2 replicas, 4 at best elsewhere; the pipeline goes from 2 to 3"
    )


def test_of_equal_stages_a_new_peer_takes_the_one_with_fewest_replicas_then_the_first() -> None:
    assert where_to_join(pools([1.0] * 2, [0.5], [1.0] * 2)).plan == 1
    assert where_to_join(pools([1.0] * 2, [1.0] * 2)).plan == 0


def test_a_new_peer_goes_first_where_replicas_are_missing() -> None:
    stages = pools([0.1], [1.0] * 3)
    assert where_to_join(stages, min_replicas=2).plan == 0
    assert where_to_join(pools([], [1.0])).plan == 0
