"""benchmarks.measured.memory: what is added up, and what it is compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.measured.memory import MIB, Taken, ratio
from swarm.job.footprint import Footprint

FOOTPRINT = Footprint(
    weights=8 * MIB, optimizer=8 * MIB, mean=4 * MIB, sums=4 * MIB, gradients=4 * MIB, graphs=50 * MIB, inputs=MIB,
    averaging=8 * MIB, outputs=MIB, outer=0, log=8 * MIB,
)  # fmt: skip


def test_gradients_averaging_and_the_log_of_commits_are_not_what_a_job_cannot_do_without() -> None:
    taken = Taken(0, idle=100 * MIB, training=190 * MIB, saving=200 * MIB, footprint=FOOTPRINT)
    assert taken.needed == 72 * MIB
    more = replace(FOOTPRINT, gradients=0, mean=0, averaging=0, log=0)
    assert replace(taken, footprint=more).needed == taken.needed
    assert ratio(taken.training, taken.idle, taken.needed) == pytest.approx(90 / 72)
