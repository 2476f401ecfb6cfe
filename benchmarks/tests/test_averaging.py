"""The benchmark of averaging rounds: real members, which must agree with gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_both_ways_take_their_turns_and_give_the_same_means() -> None:
    flags = ("--members", "3", "--mib", "0.1", "--rounds", "2", "--output", "json")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.measured.averaging", *flags], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    seconds = json.loads(done.stdout)["seconds"]
    assert {way: len(found) for way, found in seconds.items()} == {"gloo": 2, "ours": 2}
    assert all(0.0 < second < 60.0 for found in seconds.values() for second in found)
