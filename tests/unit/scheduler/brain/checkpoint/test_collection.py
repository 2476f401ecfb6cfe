"""scheduler.brain.checkpoint.collection: which replicas hand over a checkpoint, and which owe their part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scheduler.brain import inputs
from scheduler.brain.checkpoint.collection import CheckpointCollector
from scheduler.brain.outputs import PublishCheckpoint
from swarm.types import PeerId
from swarm.wire.messages import ParameterHash, Saved, SaveStage
from tests.support.brain import JOB, A, C, Swarm


def collector() -> CheckpointCollector:
    swarm = Swarm.loaded({A: 0, C: 1})
    return swarm.brain._parts.collector


def test_the_job_waits_for_the_parts_that_it_asked_for_once_it_has_trained_all() -> None:
    swarm = Swarm.written({A: 0, C: 1}, steps=1)
    swarm.commit()
    parts: dict[PeerId, Any] = {peer: swarm.reply(peer, one) for peer, one in swarm.pop(SaveStage)}
    assert parts.keys() == {A, C}
    assert swarm.brain.awaits(A, parts[A])
    assert not swarm.brain.awaits(A, parts[C])
    assert not swarm.brain.awaits(A, replace(parts[A], timeline=1))
    swarm.hear(A, parts[A])
    assert not swarm.brain.awaits(A, parts[A]), "it has handed it over"


def test_a_part_is_owed_again_if_it_was_late_since_a_checkpoint_was_kept() -> None:
    """That one was late was never forgotten, and any other part that was late then counted as late before."""
    one = collector()
    one.begin(1, 0.0)
    one.saved(A, Saved(JOB, 0, 1, 0, (ParameterHash("w", "float32", (1,), "00"),)), 1.0)
    assert (one.owing(), one.owing(again=True)) == ([C], [])
    one.stuck(60.0, 61.0)
    assert one.owing() == [], "it is given up"
    one.begin(2, 70.0)
    assert (one.owing(), one.owing(again=True)) == ([A, C], [C])
    assert not one.kept(1)
    assert one.owing(again=True) == [C]
    assert one.kept(2)
    one.begin(3, 80.0)
    assert (one.owing(), one.owing(again=True)) == ([A, C], [])


def test_a_part_of_a_try_that_was_given_up_does_not_count_for_the_next() -> None:
    """Its files went with that try. The next one then lacked them and was refused, so that a pause failed, for example
    where an island was lost while all handed over their parts.
    """
    swarm = Swarm.written({A: 0, C: 1}, steps=1)
    swarm.commit()
    parts: dict[PeerId, Any] = {peer: swarm.reply(peer, save) for peer, save in swarm.pop(SaveStage)}
    swarm.tell(inputs.SaveAnew(1))
    again: dict[PeerId, Any] = dict(swarm.pop(SaveStage))
    assert {save.again for save in again.values()} == {1}
    swarm.hear(A, parts[A])
    swarm.hear(C, replace(parts[C], parameters=(), fault="the checkpoint of version 1 was given up"))
    assert swarm.brain._parts.collector.owing() == [A, C]
    assert any(
        isinstance(output, PublishCheckpoint)
        for peer in (A, C)
        for output in swarm.hear(peer, swarm.reply(peer, again[peer]))
    )


def test_a_part_that_the_storage_refused_was_not_late() -> None:
    one = collector()
    one.begin(1, 0.0)
    one.failed(1, "disk_full", "full", 1.0)
    one.begin(2, 2.0)
    assert one.owing(again=True) == []
