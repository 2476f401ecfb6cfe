"""stage_server.replica.crossing: who may go on in another island."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from stage_server.replica.crossing import can_cross, to_load
from swarm.errors import StaleMessage
from swarm.types import JobId
from swarm.wire.messages import LoadStage

COMMAND = LoadStage(JobId("job"), 32769, 1, (2, 2), 3, "{}", held=3)


def replica(version: int = 3, stage: int = 1, job: str = "job", stages: int = 2) -> Any:
    cells = SimpleNamespace(version=version, stages=stages)
    return SimpleNamespace(job=JobId(job), me=SimpleNamespace(stage=stage), cells=cells)


def test_whoever_holds_the_stage_at_that_version_goes_over() -> None:
    assert can_cross(replica(), COMMAND)


def test_nobody_else_does() -> None:
    assert not can_cross(None, COMMAND)
    assert not can_cross(replica(), replace(COMMAND, held=0)), "it is to load the stage"
    for other in (replica(version=4), replica(version=2), replica(stage=0), replica(job="other"), replica(stages=3)):
        assert not can_cross(other, COMMAND)


def test_what_is_not_held_is_not_loaded_instead() -> None:
    with pytest.raises(StaleMessage, match="version 3 of stage 1 is not held here"):
        to_load(COMMAND)
    load = replace(COMMAND, held=0)
    assert to_load(load) == load
