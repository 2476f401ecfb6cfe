"""The system under faults: a seed of each scenario, the same every time; `make test-all` and `make sim` play more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.simulation.engine.batch import SEEDS_OF_REAL, Outcome, Sum, catalogue, outcome_of
from tests.simulation.engine.player import play
from tests.simulation.engine.scenario import EDGES, SCENARIOS
from tests.support.effort import others


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(SCENARIOS, key=lambda name: -SCENARIOS[name].weight))
def test_nothing_is_lost(name: str) -> None:
    failed = [outcome for seed in (2, *others(1)) if (outcome := outcome_of((name, seed))).failures]
    assert not failed, "\n\n".join([outcome.explanation for outcome in failed] + [outcome.replay for outcome in failed])


def test_the_catalogue_has_all_its_seeds_and_gives_heavy_scenarios_more() -> None:
    runs = catalogue(200)
    assert len(set(runs)) == len(runs) == 200
    count = Counter(name for name, _ in runs)
    assert set(count) == set(SCENARIOS)
    assert count["failpoints"] >= 4 * count["calm"] - 4
    assert count["llama"] == SEEDS_OF_REAL
    assert all((name, 1) in runs for name in SCENARIOS)
    assert set(catalogue(150)) < set(runs)
    assert all((name, 1) in catalogue(60) for name in SCENARIOS), "CI plays so many"


def test_runs_that_prove_nothing_are_told() -> None:
    total = Sum()
    assert total.rare() == list(EDGES)
    assert [Sum(seeds=seeds).hits_due() for seeds in (0, 60, 200, 900)] == [1, 15, 50, 50]
    total.add(Outcome("loss", 1, (), "", "", Counter(lost=1), Counter(), 1, 1, 1.0, 1.0))
    assert total.missing() == []
    total.add(Outcome("slow", 1, (), "", "", Counter(clog=1), Counter(), 1, 1, 1.0, 1.0))
    total.add(Outcome("clog", 1, (), "", "", Counter(clog=0), Counter(), 1, 1, 1.0, 1.0))
    assert total.missing() == ["clog in clog", "slow in slow"]


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    """Whatever the order of sets of strings is there, and whatever ran before."""
    names = ("disorder", "crashes")
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
