"""The brain decides today what it decided when these digests were recorded, for two hundred jobs under faults.

A digest covers every output of every brain of a job (`chaos(seed)`), in order, less the words for people. A change that
means to decide otherwise records them anew, and says so: `python -m tests.property.test_golden_decisions`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.exactly_once import ran

GOLDEN = Path(__file__).with_name("golden_decisions.json")
SEEDS, BLOCK = 200, 50


def digest(seed: int) -> str:
    return ran(seed, partly=False).decided[:16]


@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_the_brain_decides_what_it_always_did(first: int) -> None:
    recorded: list[str] = json.loads(GOLDEN.read_text())
    assert len(recorded) == SEEDS
    seeds = range(first, first + BLOCK)
    other = [seed for seed in seeds if digest(seed) != recorded[seed]]
    assert not other, f"chaos(seed) decides otherwise for {other}"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps([digest(seed) for seed in range(SEEDS)], indent=0) + "\n")
