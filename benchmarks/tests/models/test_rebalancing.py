"""benchmarks.models.rebalancing: lives do not depend on the rule, and good rules are told from none."""

from __future__ import annotations

from benchmarks.models.rebalancing import Setting, Simulation, report, runs
from benchmarks.models.rules import Costed, Nobody, Petals, Rule, Swarm
from scheduler.brain.settings import RebalanceSettings

SHORT = Setting(hours=3.0, peers=16, up_h=2.0, away_s=1800.0, join_s=30.0)


def run(rule: Rule, setting: Setting = SHORT, seed: int = 1) -> Simulation:
    simulation = Simulation(setting, rule, seed)
    simulation.run()
    return simulation


def test_a_seed_gives_the_same_lives_under_every_rule_and_the_same_figures_again() -> None:
    rules: list[Rule] = [Nobody(), Swarm(60.0), Petals(), Costed(RebalanceSettings()), Costed(RebalanceSettings())]
    tallies = [run(rule).tally for rule in rules]
    assert len({tally.deaths for tally in tallies}) == len({round(tally.optimum, 6) for tally in tallies}) == 1
    assert tallies[-1] == tallies[-2]
    assert run(Nobody(), seed=2).tally != tallies[0]


def test_a_rule_that_rebalances_does_more_work_and_none_more_than_the_optimum() -> None:
    none, swarm, costed = (
        sum(tally.percent for tally in runs(SHORT, rule, 3)) / 3
        for rule in (Nobody, lambda: Swarm(60.0), lambda: Costed(RebalanceSettings()))
    )
    assert 20.0 < none < swarm - 5.0
    assert swarm < 100.0
    assert none + 5.0 < costed < 100.0


def test_without_deaths_nothing_is_lost_and_nobody_moves() -> None:
    calm = Setting(hours=1.0, peers=16, up_h=1e9)
    simulation = run(Costed(RebalanceSettings()), calm)
    tally = simulation.tally
    assert (round(tally.percent, 6), tally.moves) == (100.0, 0)
    assert tally.done == tally.alive
    assert sum(done for done, _ in tally.hourly.values()) == tally.done


def test_every_cost_of_a_death_lowers_the_throughput_and_nothing_else() -> None:
    costs = [{}, {"redo_s": 60.0}, {"detect_s": 60.0}, {"stall_s": 20.0}]
    tallies = [run(Nobody(), Setting(hours=2.0, peers=40, up_h=1.0, away_s=60.0, **cost)).tally for cost in costs]
    free, *charged = tallies
    assert all(tally.done < free.done for tally in charged)
    assert all(tally.alive == free.alive for tally in charged)
    assert free.done < free.alive  # joiners are alive before they serve


def test_the_report_has_all_tables() -> None:
    lines = report(1, 1.0)
    assert sum(line.startswith("| costed (ours)") for line in lines) == 3
    assert sum(line.startswith(("| 20%/h", "| 52%/h")) for line in lines) == 4
    assert any("82.7 / 99.0 / 45.4" in line for line in lines)
