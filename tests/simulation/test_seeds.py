"""The system under faults: 200 seeds over all scenarios, each the same every time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from tests.simulation.engine.batch import Outcome, Sum, outcome_of, workers
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


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[str, list[Future[Outcome]]]]:
    """All seeds of the scenarios that were asked for, under way on all cores."""
    items = [item for item in request.session.items if "played" in getattr(item, "fixturenames", ())]
    names = {item.callspec.params["name"] if hasattr(item, "callspec") else "" for item in items}
    chosen = sorted(SCENARIOS if "" in names else names)
    with workers() as pool:
        yield {name: [pool.submit(outcome_of, (name, seed)) for seed in seeds_of(SCENARIOS[name])] for name in chosen}


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_nothing_is_lost(name: str, played: dict[str, list[Future[Outcome]]]) -> None:
    happened: Counter[str] = Counter()
    failed = []
    for future in played[name]:
        outcome = future.result()
        happened.update(outcome.counts)
        if outcome.failures:
            failed.append(outcome)
    explanations = [outcome.explanation for outcome in failed[:3]]
    assert not failed, "\n\n".join([*explanations, "\n".join(outcome.replay for outcome in failed)])
    missing = [kind for kind in SCENARIOS[name].must_happen if not happened[kind]]
    assert not missing, f"the seeds prove nothing: {missing} never happened"


def test_every_failpoint_is_hit_often(played: dict[str, list[Future[Outcome]]]) -> None:
    total = Sum()
    for futures in played.values():
        for future in futures:
            total.add(future.result())
    assert not total.rare(), total.hits()


def test_all_seeds_are_used() -> None:
    assert sum(len(seeds_of(scenario)) for scenario in SCENARIOS.values()) == SEEDS


def test_a_seed_gives_the_same_history_in_every_process() -> None:
    """Whatever the order of sets of strings is there, and whatever ran before."""
    names = ("disorder", "everything", "crashes")
    play(SCENARIOS["calm"], 7)
    here = [play(SCENARIOS[name], 3).history.sha256() for name in names]
    code = (
        "from tests.simulation.engine.player import play\n"
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
