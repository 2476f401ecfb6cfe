"""benchmarks.measured.scheduler: the modelled fleet does all that it is told, once, and whole steps are counted."""

from __future__ import annotations

import pytest

from benchmarks.measured.scheduler import Alone, Measured, Shape, measure

SMALL = Shape(peers=12, stages=4, microbatches=8, steps=2, rate=100.0)


def test_the_fleet_computes_every_microbatch_of_a_committed_step_once_at_every_stage() -> None:
    alone = Alone(SMALL)
    alone.run()
    counts = alone.play.brain.counts()
    assert (counts.committed_steps, dict(counts.reroutes), counts.violations) == (3, {}, 0)
    assert counts.accumulated == (3 * 8,) * 4
    alone.play.brain.validate()


@pytest.mark.parametrize("level", ["brain", "sessions"])
def test_whole_steps_are_measured_and_virtual_time_repeats_itself(level: str) -> None:
    one, other = measure(level, SMALL), measure(level, SMALL)
    overlap = 4 * SMALL.stages  # of the step that follows, at either end
    assert abs(one.hops - SMALL.steps * 8 * SMALL.stages) <= overlap
    assert (one.hops, one.virtual_s) == (other.hops, other.virtual_s)
    assert 0.0 < one.hops / one.virtual_s < SMALL.rate * 1.25
    assert one.cpu_s > 0.0


def test_figures_are_per_hop_and_quantiles_are_of_steps_that_happened() -> None:
    measured = Measured("brain", SMALL, hops=1000, cpu_s=0.5, virtual_s=2.0, steps_s=[0.001] * 98 + [0.002, 0.009])
    assert (measured.hop_us, measured.hops_per_s, measured.busy) == (500.0, 2000.0, 0.25)
    assert [measured.quantile_ms(share) for share in (0.5, 0.99, 1.0)] == [1.0, 2.0, 9.0]
