"""Topics: one level for each name, and filters that take the topics they are for and no others."""

from __future__ import annotations

import pytest

from swarm.errors import UsageError
from swarm.mqtt import topics


def test_topics_of_different_things_and_swarms_differ() -> None:
    made = [topics.scheduler("a"), topics.peer("p", "a"), topics.job("p", "a"), topics.peer("p", "b"), topics.job("p")]
    assert len(set(made)) == len(made)
    assert made[-1] == "swarm/v1/default/jobs/p"


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "a\0"])
def test_a_name_that_is_not_one_level_makes_no_topic(name: str) -> None:
    for topic in (topics.peer, topics.job):
        with pytest.raises(AssertionError):
            topic(name)


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "a b", "a" * 64, "ä", "a\n"])
def test_a_swarm_with_another_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--swarm is a name of"):
        topics.check_swarm(name)
    for plain in ("a", "team-a", "9", "a" * 63):
        assert topics.check_swarm(plain) == plain
