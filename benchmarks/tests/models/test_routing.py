"""benchmarks.models.routing: the model is conserved, repeatable, and tells good wirings from bad ones."""

from __future__ import annotations

import pytest

from benchmarks.models.routing import SCENARIOS, STAGES, WAYS, Result, Scenario, Simulation, measure, table


@pytest.mark.parametrize("way", WAYS)
def test_a_seed_gives_the_same_figures_and_another_seed_does_not(way: str) -> None:
    runs = [Simulation("iwrr", SCENARIOS[0], seed).run(WAYS[way], 20.0) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_each_microbatch_in_flight_has_one_task_hop_by_hop_and_at_most_one_per_stage_on_a_route() -> None:
    scenario = Scenario("test", in_flight=7)
    for way, least, most in (("hop by hop", 7 * 1.0, 7 * 2.5), ("whole routes", 0.0, 7.0 * STAGES)):
        simulation = Simulation("least_completion", scenario, 1)
        simulation.run(WAYS[way], 30.0)
        assert len(simulation.latencies_s) > 7
        assert least <= sum(server.outstanding for server in simulation.servers.values()) <= most


def test_knowing_the_speeds_beats_dice() -> None:
    percent = {
        routing: measure("hop by hop", routing, SCENARIOS[0], 1, 60.0).percent for routing in ("uniform", "iwrr")
    }
    assert percent["uniform"] < 0.8 * percent["iwrr"] < 80.0


def test_the_table_marks_what_is_out_of_tolerance() -> None:
    rows = {"hop by hop": {"iwrr": [Result(96.0, 8.0), Result(80.0, 20.0), Result(98.0, 13.0)]}}
    (row,) = [line for line in table(rows) if line.startswith("| iwrr")]  # type: ignore[arg-type]
    assert row == "| iwrr | 96.0 / 8.0 (96.9) | 80.0 / 20.0 (90.2, OUT) | 98.0 / 13.0 (98.0) |"
