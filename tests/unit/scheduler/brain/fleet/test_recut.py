"""Which jobs that wait could go on with the stage servers that are here, in fewer stages."""

from __future__ import annotations

from dataclasses import replace

from scheduler.brain.fleet.allocation import PendingJob
from scheduler.brain.fleet.memory_split import ModelCosts
from scheduler.brain.fleet.placement import Candidate
from scheduler.brain.fleet.recut import stages_here
from swarm.types import JobId, Memory, PeerId
from tests.support.memories import memories


def peers(*names: str) -> list[Candidate]:
    return [Candidate(PeerId(name), offer=Memory(100)) for name in names]


def waiting(stages: int) -> PendingJob:
    return PendingJob(JobId("b-1"), memories(10) * stages, 1, 1.0)


def model(layer_bytes: int, layers: int = 4) -> ModelCosts:
    return ModelCosts(layers, 1, 1, lambda of, stage, stages, replicas: Memory(layer_bytes * of))


def test_what_is_here_is_offered_only_if_it_can_hold_the_job() -> None:
    """A job waited for a second stage server, while the one that was idle could hold all of it."""
    assert stages_here(waiting(2), model(25), peers("a")) == 1
    assert stages_here(waiting(2), model(26), peers("a")) is None, "one layer too many"
    assert stages_here(waiting(4), model(50), peers("a", "b", "c")) == 3, "the most first"
    assert stages_here(waiting(4), model(50), peers("a", "b")) == 2
    assert stages_here(waiting(2), model(1), []) is None
    assert stages_here(waiting(1), model(1), peers("a")) is None, "there are no fewer stages"
    assert stages_here(replace(waiting(2), min_replicas=2), model(25), peers("a")) is None
    assert stages_here(replace(waiting(2), unfit=frozenset({PeerId("a")})), model(25), peers("a")) is None
    pinned = [replace(one, pinned_stage=1) for one in peers("a")]
    assert stages_here(waiting(2), model(25), pinned) is None
    assert stages_here(waiting(2), model(25), [replace(one, unreached=True) for one in peers("x")]) == 1, (
        "alone it needs no links"
    )
