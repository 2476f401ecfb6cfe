"""The system under faults: 200 seeds over all scenarios, each the same every time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.engine.batch import Sum, outcome_of
from tests.simulation.engine.player import play
from tests.simulation.engine.scenario import SCENARIOS, Scenario

SEEDS = 200
SEEDS_OF_REAL = 2
FIRST_SEED = 1


def seeds_of(scenario: Scenario) -> range:
    """A share of the seeds, by weight: few for real models, which cost a hundred times as much."""
    if scenario.workload.real:
        return range(FIRST_SEED, FIRST_SEED + SEEDS_OF_REAL)
    real = sum(one.workload.real for one in SCENARIOS.values())
    counting = sorted(one.name for one in SCENARIOS.values() if not one.workload.real)
    turn = [name for name in counting for _ in range(SCENARIOS[name].weight)]
    whole, more = divmod(SEEDS - real * SEEDS_OF_REAL, len(turn))
    return range(FIRST_SEED, FIRST_SEED + whole * scenario.weight + turn[:more].count(scenario.name))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(SCENARIOS, key=lambda name: -SCENARIOS[name].weight))
def test_nothing_is_lost(name: str) -> None:
    total, failed = Sum(), []
    for seed in seeds_of(SCENARIOS[name]):
        outcome = outcome_of((name, seed))
        total.add(outcome)
        if outcome.failures:
            failed.append(outcome)
    explanations = [outcome.explanation for outcome in failed[:3]]
    assert not failed, "\n\n".join([*explanations, "\n".join(outcome.replay for outcome in failed)])
    missing = [kind for kind in SCENARIOS[name].must_happen if not total.counts[kind]]
    assert not missing, f"the seeds prove nothing: {missing} never happened"
    if name == "failpoints":
        assert not total.rare(), f"hit too seldom: {total.hits()}"


def test_all_seeds_are_used() -> None:
    assert sum(len(seeds_of(scenario)) for scenario in SCENARIOS.values()) == SEEDS


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    """Whatever the order of sets of strings is there, and whatever ran before."""
    names = ("disorder", "everything", "crashes")
    play(SCENARIOS["calm"], 7)
    here = [play(SCENARIOS[name], 3).history.sha256() for name in names]
    code = (
        "from stage_server.lean_imports import lean_imports\n"
        "with lean_imports():\n"
        "    from tests.simulation.engine.player import play\n"
        "from tests.simulation.engine.scenario import SCENARIOS\n"
        f"print(*(play(SCENARIOS[name], 3).history.sha256() for name in {names}))"
    )
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    there = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.split() == here
    assert play(SCENARIOS[names[0]], 4).history.sha256() != here[0]
