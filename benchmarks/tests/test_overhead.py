"""The benchmark of the safety machinery: it takes away what the mutation check knows."""

import pytest

from benchmarks.measured.overhead import MECHANISMS, Part, overhead
from tests.mutations.catalogue import read_all


def test_what_is_taken_away_are_mutants_that_do_not_exclude_each_other() -> None:
    known = {mutant.name: mutant for mutant in read_all()}
    assert known.keys() >= MECHANISMS.keys()
    places = [(hunk.file, hunk.old) for name in MECHANISMS for hunk in known[name].hunks]
    assert len(set(places)) == len(places)


def test_overhead_is_what_the_product_needs_more() -> None:
    assert overhead(1.03, 1.0) == pytest.approx(0.03)
    assert overhead(0.5, 1.0) == -0.5
    assert Part("x", 1.0).is_safety
