"""Each play of counting islands makes the decisions that were recorded before the code was last rearranged.

`digests.json` has a line for each play: a digest of all that brains decided in it, words included. A change that means
to decide or to say something else records them again, and its commit says so:

    python -m tests.simulation.test_digests            names the plays that differ
    python -m tests.simulation.test_digests --write    records them

Not chosen: plays of the whole system (run.py), because what they do at one moment, and so what follows, is not in the
same order in every process: timers that are due together run in the order of a heap, and generators that were dropped
are closed when memory is collected.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from scheduler.brain.inputs import Input
from scheduler.brain.islands.brain import IslandsBrain
from scheduler.brain.job import JobBrain
from scheduler.brain.transcript import digest
from tests.simulation.engine import islands, shapes
from tests.simulation.engine.batch import cores
from tests.support.effort import ALL

DIGESTS = Path(__file__).parents[1] / "transcripts" / "digests.json"
TABLES = {name.lower(): table for name, table in vars(shapes).items() if isinstance(table, dict) and name.isupper()}
FEW = ("plays lost-lonely 3", "plays guests-streaming 5", "plays stopping-slow 7", "plays all-of-these 1")


def plays() -> dict[str, Callable[[], object]]:
    """All plays, by name: each row of each table of shapes, with all of its seeds."""
    return {
        f"{table} {name} {seed}": partial(islands.play, row.shape, seed)
        for table, rows in TABLES.items()
        for name, row in rows.items()
        for seed in sorted({*range(row.below), row.kept, *row.too})
    }


def digest_of(name: str) -> str:
    """Play it; the digest of all decisions."""
    decided = hashlib.blake2b(digest_size=8)

    def watching(step: Callable[[Any, Input, float], list[Any]]) -> Callable[[Any, Input, float], list[Any]]:
        def watched(brain: Any, happened: Input, now_s: float) -> list[Any]:
            outputs = step(brain, happened, now_s)
            decided.update(digest(outputs).encode())
            return outputs

        return watched

    with (
        patch.object(JobBrain, "step", watching(JobBrain.step)),
        patch.object(IslandsBrain, "step", watching(IslandsBrain.step)),
    ):
        plays()[name]()
    return decided.hexdigest()


def test_brains_decide_what_they_always_did() -> None:
    recorded: dict[str, str] = json.loads(DIGESTS.read_text())
    assert recorded.keys() == plays().keys()
    tried = tuple(recorded) if ALL else FEW
    assert {name: digest_of(name) for name in tried} == {name: recorded[name] for name in tried}


def main() -> int:
    parser = argparse.ArgumentParser(description="compare all plays with the recorded digests, or record them")
    parser.add_argument("--write", action="store_true", help="record them")
    names = list(plays())
    is_writing = parser.parse_args().write
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        found = dict(zip(names, pool.map(digest_of, names, chunksize=4), strict=True))
    if is_writing:
        DIGESTS.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    recorded = json.loads(DIGESTS.read_text())
    differing = [name for name in names if recorded.get(name) != found[name]]
    print(f"{len(names)} plays, {len(differing)} decide otherwise", *differing, sep="\n")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
