"""The claim: replicas that hold other bytes than most are named, and all of them where there is no most."""

from __future__ import annotations

import pytest

from scheduler.brain.commit.digests import difference
from swarm.errors import ReplicaDiverged
from swarm.types import PeerId


def digests(text: str) -> dict[PeerId, str]:
    """'a=x b=y' as a mapping."""
    return {PeerId(peer): digest for peer, digest in (pair.split("=") for pair in text.split())}


@pytest.mark.parametrize("held", ["a=x", "a=x b=x c=x"])
def test_equal_bytes_are_no_news(held: str) -> None:
    assert difference(digests(held), "of stage 0") is None


@pytest.mark.parametrize(
    ("held", "odd"),
    [("a=x b=y c=x", "b"), ("c=x b=y a=z d=x", "a, b"), ("a=x b=y", "a, b"), ("d=x c=y b=y a=x", "a, b, c, d")],
)
def test_the_odd_ones_out_are_named(held: str, odd: str) -> None:
    fault = difference(digests(held), "of stage 0 after step 3")
    assert fault is not None
    assert fault.code == ReplicaDiverged.code
    assert fault.message.startswith(f"replicas differ in the bytes of stage 0 after step 3: {odd} (")
