"""What a replica of a job says, by rule and without work: for a brain that has no stage servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from swarm.types import JobId, PeerId, UnitName
from swarm.wire.messages import (
    Accumulated,
    Average,
    Averaged,
    Command,
    Commit,
    Committed,
    Event,
    Loaded,
    LoadStage,
    ParameterHash,
    ParameterNorm,
    Route,
    Saved,
    SaveStage,
    UnitSize,
)


@dataclass(slots=True)
class ScriptedReplica:
    """One replica of a stage; `changes` are fields of an event that a test makes late, odd or false."""

    job: JobId
    peer: PeerId
    stage: int
    units: Mapping[UnitName, tuple[int, ...]]  # the stages that hold each unit of the job
    timeline: int = 0

    def loaded(self, version: int = 0, digest: str = "start", **changes: Any) -> Loaded:
        sizes = tuple(UnitSize(unit, 1000) for unit, stages in self.units.items() if self.stage in stages)
        return replace(Loaded(self.job, self.timeline, self.stage, version, digest, sizes), **changes)

    def answer(self, command: Command, **changes: Any) -> Event | None:
        """What it says once it has done what the command asks for; None if that is nothing, or not its turn."""
        stage, timeline = self.stage, self.timeline
        said: Event
        match command:
            case LoadStage(version=version):
                said = self.loaded(version)
            case Route(microbatch=microbatch, hops=hops) if hops[stage].peer == self.peer:
                loss = 1.0 + microbatch.index if stage == len(hops) - 1 else 0.0
                said = Accumulated(microbatch, stage, hops[stage].attempt, True, loss, 0.1, 0.2, 0.0)
            case Average(step=step, unit=unit, round=number):
                norms = (ParameterNorm(f"w of {unit}", 4.0),)
                said = Averaged(timeline, step, unit, number, "mean", norms, 0.1)
            case Commit(step=step, version=version):
                said = Committed(timeline, step, version, stage, "after")
            case SaveStage(version=version, again=again):
                hashes = (ParameterHash(f"w{stage}", "float32", (1,), "00"),)
                said = Saved(self.job, timeline, version, stage, hashes, again=again)
            case _:
                return None
        return replace(said, **changes)
