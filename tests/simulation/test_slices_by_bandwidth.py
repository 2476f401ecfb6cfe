"""The claim: rounds get shorter on unequal links by what was measured alone, and a liar only slows them for a while.

The rule of the brain and real members, in virtual time, on links that share what they pass: members report what they
measured, the brain shares the next slices out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from statistics import median

import pytest

from scheduler.brain.commit.by_site import SiteRounds
from scheduler.brain.commit.slices import ROUNDS_MIN, plan_round
from scheduler.brain.inputs import ReplicaRecord
from scheduler.brain.state.step import UnitAveraging
from stage_server.brain import slices
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import Average, Averaged
from tests.support.brain import Swarm
from tests.support.effort import others
from tests.support.fluid_rounds import Fleet
from tests.support.sim.fluid import Line

UNIT, ELEMENTS = UnitName("stage-0"), 64 * 256
NAMES = "abcdefgh"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "CHUNK_ELEMENTS_MIN", 256)
    monkeypatch.setattr(slices, "MEASURED_BYTES_MIN", 1024)


def lines_of(*rates: float) -> list[Line]:
    return [Line(1e4 * rate, 1e4 * rate) for rate in rates]


def honest(report: Averaged) -> Averaged:
    return report


def seconds_of(lines: Sequence[Line], rounds: int, told: Callable[[Averaged], Averaged] = honest) -> list[float]:
    """How long rounds take, one after the other; `told` is what the last member makes of its report."""
    names = [PeerId(name) for name in NAMES[: len(lines)]]
    rule = SiteRounds(Swarm(dict.fromkeys(names, 0)).brain._state)
    replicas = [ReplicaRecord(name, 1, name, 0) for name in names]
    found, jitter = [], Random("jitter")
    for step in range(rounds):
        number = Round(1, step + 1)
        shares, _ = rule.plan(UNIT, number, replicas, again=False)
        members = plan_round(replicas, {}, ELEMENTS, shares)
        weather = [Line(line.up * jitter.uniform(0.9, 1.0), line.down * jitter.uniform(0.9, 1.0)) for line in lines]
        fleet = Fleet(
            Average(0, 0, UNIT, Round(1, 1), members, 7, 1e6), "none", None, dict(zip(names, weather, strict=True))
        )
        round_s, means = fleet.run()
        assert len({mean.digest for mean in means.values()}) == 1
        found.append(round_s)
        averaging = UnitAveraging(number, members)
        for name, mean in means.items():
            report = Averaged(0, step, UNIT, number, mean.digest, (), round_s, *mean.rates)
            averaging.reports[PeerId(name)] = told(report) if name == names[-1] else report
        rule.averaged(UNIT, averaging)
    return found


@pytest.mark.parametrize(
    ("rates", "gain"),
    [
        ((4, 4, 4, 1), 1.3),
        ((1, 2, 4, 8), 1.25),
        ((1, 1, 1, 1), 0.9),  # the weather's doing
        *others(((1, 4, 4, 4, 4, 4, 4, 4), 1.4), ((1, 4), 0.9)),
    ],
)
def test_rounds_get_shorter_on_unequal_links(rates: Sequence[float], gain: float) -> None:
    seconds = seconds_of(lines_of(*rates), 24)
    before, after = median(seconds[:ROUNDS_MIN]), median(seconds[-ROUNDS_MIN:])
    print(f"{rates}: {before:.2f} s before, {after:.2f} s after, ratio {before / after:.2f}")
    assert before / after >= gain


def test_a_liar_slows_few_rounds() -> None:
    """It says that it is the fastest, gets all slices, and its link is the slowest."""

    def lie(report: Averaged) -> Averaged:
        return Averaged(0, report.step, UNIT, report.round, report.digest, (), 1e-9, 1e300, 1e300)

    true_s = seconds_of(lines_of(1, 1, 1, 0.5), 1)[0]
    seconds = seconds_of(lines_of(1, 1, 1, 0.5), 100, lie)
    slow = [at for at, round_s in enumerate(seconds) if round_s > 1.3 * true_s]
    assert 0 < len(slow) <= 2 * ROUNDS_MIN
    assert max(seconds) <= 4 * true_s
