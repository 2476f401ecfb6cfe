"""swarm.job.outer: when islands capture and merge."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.job.outer import REPLACE, SENT, MergeRule, OuterPlan, OuterUpdate, Part, Rhythm, fragment_of


def plan(steps: int, every: int, fragments: int = 1, overlap: int = 0, mixing: float = 0.0) -> OuterPlan:
    return OuterPlan(Rhythm(steps, every, fragments, overlap), mixing, OuterUpdate(0.7, 0.9))


def captures(plan: OuterPlan) -> dict[int, tuple[int, ...]]:
    of = plan.rhythm
    return {step: found for step in range(of.steps) if (found := of.captures(step))}


def merges(plan: OuterPlan) -> dict[int, tuple[int, ...]]:
    of = plan.rhythm
    return {step: found for step in range(of.steps) if (found := of.merges(step))}


def test_diloco_merges_behind_every_h_steps_and_behind_the_last() -> None:
    assert captures(plan(12, 5)) == merges(plan(12, 5)) == {4: (0,), 9: (0,), 11: (0,)}
    assert merges(plan(10, 5)) == {4: (0,), 9: (0,)}, "once, where a merge is due behind the last step anyway"
    assert plan(12, 5).rule(4) == plan(12, 5).rule(11) == REPLACE


def test_streaming_takes_fragments_in_turn_and_merges_each_a_little_later() -> None:
    of = plan(30, 12, fragments=3, overlap=2, mixing=0.5)
    assert captures(of) == {3: (1,), 7: (2,), 11: (0,), 15: (1,), 19: (2,), 23: (0,), 29: (0, 1, 2)}
    assert merges(of) == {5: (1,), 9: (2,), 13: (0,), 17: (1,), 21: (2,), 25: (0,), 29: (0, 1, 2)}
    assert of.rule(25) == MergeRule(0.5, 0.0)
    assert of.rule(29) == REPLACE


def test_gaia_asks_for_less_and_less_and_a_closing_capture_has_everything() -> None:
    of = OuterPlan(Rhythm(9, 2, 1, 1), 0.0, OuterUpdate(1.0, 0.0), 0.5)
    assert [of.significant_from(captured) for captured in (1, 4, 9)] == [0.5, 0.25, 0.0]
    assert [of.rule(step) for step in (2, 7, 8)] == [SENT, SENT, REPLACE]
    assert plan(9, 2).significant_from(4) == 0.0, "other modes propose everything"


def test_what_could_not_be_merged_before_the_end_waits_for_the_closing_merge() -> None:
    of = plan(14, 12, fragments=1, overlap=2, mixing=0.5)
    assert captures(of) == merges(of) == {13: (0,)}


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 6), st.integers(0, 5))
def test_every_capture_is_merged_once_before_the_next_and_every_fragment_at_the_end(
    steps: int, every: int, fragments: int, overlap: int
) -> None:
    of = Rhythm(steps, every, fragments, min(overlap, (every - 1) // fragments))
    under_way: set[int] = set()
    for step in range(steps):
        for fragment in of.captures(step):
            assert fragment not in under_way
            under_way.add(fragment)
        for fragment in of.merges(step):
            under_way.remove(fragment)
    assert not under_way
    assert of.merges(steps - 1) == tuple(range(fragments))


def test_fragments_are_strided_layers_with_the_embedding_first_and_the_head_last() -> None:
    assert [fragment_of(layer, 3) for layer in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert (fragment_of(Part.EMBEDDING, 3), fragment_of(Part.HEAD, 3)) == (0, 2)
    assert {fragment_of(place, 1) for place in (Part.EMBEDDING, Part.HEAD, 0, 5)} == {0}
