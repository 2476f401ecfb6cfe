"""The benchmark of two sites: how long it trains, who may die, and what its table says."""

from benchmarks.sites.two_sites import (
    COLUMNS,
    Run,
    carried_bytes,
    counted_steps,
    may_kill,
    rows,
    steps_within,
    troubles,
)
from swarm.job.outer_log import OuterRecord

DEVICES = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes
    lo: 9000000   10    0    0    0     0          0         0  9000000    10    0    0    0     0       0          0
  tun0: 1200      10    0    0    0     0          0         0      345    10    0    0    0     0       0          0
"""


def test_a_run_ends_behind_an_exchange() -> None:
    assert steps_within(1.5, 256.0) == 100  # 90 steps
    assert steps_within(1.5, 0.1) == 20


def test_one_island_at_most_can_lose_a_stage_to_deaths() -> None:
    assert [may_kill(serving) for serving in (8, 7, 6, 5)] == [True, True, False, False]


def test_a_site_is_slow_for_a_third_of_the_time_and_cut_off_twice() -> None:
    found = [troubles(at / 600) for at in range(600)]
    assert [sum(column) for column in zip(*found, strict=True)] == [200, 40]
    begins = [[at for at in range(1, 600) if found[at][kind] > found[at - 1][kind]] for kind in range(2)]
    assert begins == [[200], [100, 500]]


def test_only_what_crosses_the_slow_link_is_its_traffic() -> None:
    assert carried_bytes(DEVICES) == 1545


def test_tokens_of_a_lost_island_do_not_count() -> None:
    assert counted_steps(100, ()) == 100
    assert counted_steps(100, (OuterRecord(40, (0,)), OuterRecord(60, (0,), {1: 0}))) == 80


def test_a_run_with_deaths_is_shown_beside_the_undisturbed_one() -> None:
    calm = Run("diloco", 0, 60, 500.0, 3.0, 2.9, 6000, 0)
    harmed = Run("diloco", 7, 400, 250.0, 2.5, 2.4, 40_000, 1)
    found = rows([calm, harmed])
    assert [len(row) for row in found] == [len(COLUMNS)] * 2
    assert found[0][:4] == ["diloco", "0", "60", "500"]
    assert found[1][:4] == ["diloco", "7, 1 island lost", "400", "250 (50%)"]
