"""swarm.job.fragments: which parameters are merged together."""

from __future__ import annotations

import pytest

from swarm.job.fragments import Part, auto_fragments, fragment_of


def test_fragments_are_strided_layers_with_the_embedding_first_and_the_head_last() -> None:
    assert [fragment_of(layer, 3) for layer in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert (fragment_of(Part.EMBEDDING, 3), fragment_of(Part.HEAD, 3)) == (0, 2)
    assert {fragment_of(place, 1) for place in (Part.EMBEDDING, Part.HEAD, 0, 5)} == {0}


@pytest.mark.parametrize(("layers", "fragments"), [(1, 1), (3, 1), (4, 2), (12, 4)])
def test_a_fragment_has_three_layers_unless_the_job_says_otherwise(layers: int, fragments: int) -> None:
    assert auto_fragments(layers) == fragments
