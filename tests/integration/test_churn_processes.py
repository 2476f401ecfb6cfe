"""benchmarks.churn_processes with real processes: one of three is killed, and what is kept is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.timeout(300)
def test_a_death_is_counted_and_most_of_what_was_possible_is_kept() -> None:
    # With this seed the first death comes after some seconds, the second one long after the end.
    command = "--stages 1 --replicas 3 --compute 0.05 --step 0.05 --minutes 0.2 --rates 6000 --away 1 --seed 374"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.churn_processes", *command.split()],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1].split()
    deaths, kept, steps = int(line[1]), float(line[2].rstrip("%")), int(line[5])
    assert deaths == 1
    assert steps >= 2
    assert 20.0 < kept < 110.0
