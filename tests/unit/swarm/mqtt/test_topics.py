"""Topics: one level for each name, and filters that take the topics they are for and no others."""

from __future__ import annotations

import aiomqtt
import pytest

from swarm.errors import UsageError
from swarm.mqtt import topics


def test_a_filter_takes_its_own_topics_of_its_own_swarm() -> None:
    made = {
        "scheduler": topics.scheduler("a"),
        "peer": topics.peer("p", "a"),
        "job": topics.job("j", "a"),
        "elsewhere": topics.peer("p", "b"),
        "default": topics.job("j"),
    }

    def taken(pattern: str) -> set[str]:
        return {name for name, topic in made.items() if aiomqtt.Topic(topic).matches(pattern)}

    assert taken(topics.peers("a")) == {"peer"}
    assert taken(topics.jobs("a")) == {"job"}
    assert taken(topics.jobs(topics.DEFAULT_SWARM)) == {"default"}
    assert len(set(made.values())) == len(made)


@pytest.mark.parametrize("name", ["", "a/b", "+", "#", "a\0"])
def test_a_name_that_is_not_one_level_makes_no_topic(name: str) -> None:
    for topic in (topics.peer, topics.job):
        with pytest.raises(AssertionError):
            topic(name)


@pytest.mark.parametrize("name", ["a", "team-a", "9", "a" * 63])
def test_a_swarm_has_a_plain_name(name: str) -> None:
    assert topics.check_swarm(name) == name


@pytest.mark.parametrize("name", ["", "-a", "A", "a/b", "a b", "a" * 64, "ä", "a\n"])
def test_a_swarm_with_another_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--swarm is a name of"):
        topics.check_swarm(name)
