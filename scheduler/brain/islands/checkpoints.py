"""One checkpoint of all islands: begun with the first island that is asked for its part, complete with the last.

    island 0    begin ───────────────── whole ─┐
    island 1          begin ─── whole          ├─▶ begin (once) ──▶ publish (once) ──▶ kept or not, told to all
    a part fails ──▶ the others give theirs up; an island that had not begun does so as soon as it begins
    an island is lost before all is whole ──▶ what is due with the job's stop or end is saved anew without it
    an island begins anew ──▶ it has no part in the open one, and saves nothing until that is closed

Each island collects its part by itself (scheduler/brain/checkpoint). All are of one version, behind an outer step or at
the start, where islands hold the same weights. Pure; a version is one of an island. Decision: docs/decisions/069.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from scheduler.brain.inputs import CheckpointNotKept, SaveAnew
from scheduler.brain.outputs import BeginCheckpoint, DropCheckpoint, PublishCheckpoint
from swarm.wire.messages import ParameterHash

Saving: TypeAlias = BeginCheckpoint | PublishCheckpoint | DropCheckpoint
Gone: TypeAlias = CheckpointNotKept | SaveAnew  # what islands are told of one that is given up


@dataclass(slots=True)
class _Joint:
    """A checkpoint under way, or one that failed before all islands had begun it."""

    version: int
    islands: tuple[int, ...]  # at work when it began
    begun: set[int] = field(default_factory=set)
    whole: dict[int, Mapping[int, tuple[ParameterHash, ...]]] = field(default_factory=dict)  # by island and stage
    failed: Gone | None = None


class JointCheckpoints:
    """The checkpoints of a job with islands; there is one at a time."""

    def __init__(self) -> None:
        self._joint: _Joint | None = None
        self._waiting: set[int] = set()  # islands that began anew while it was open

    @property
    def version(self) -> int | None:
        """The version that is being collected or published."""
        return None if self._joint is None or self._joint.failed is not None else self._joint.version

    @property
    def first(self) -> int:
        """The lowest of the islands that have begun it."""
        assert self._joint is not None
        return min(self._joint.begun)

    def begin(self, island: int, version: int, present: tuple[int, ...]) -> bool | Gone:
        """Begin an island's part. True if it is the first; a reason to give up if the others have given up.

        `present`: the islands at work, which all have a part in a checkpoint that begins now.
        """
        joint = self._joint
        if joint is not None and joint.version == version and island not in joint.begun:
            joint.begun.add(island)
            return joint.failed or False
        assert self.version is None, "the one before is closed"
        self._joint = _Joint(version, present, {island})
        return True

    def number_of(self, island: int) -> int:
        """The number of the island's part, counted without gaps; -1 if it has no part."""
        islands = () if self._joint is None else self._joint.islands
        return islands.index(island) if island in islands else -1

    def lose(self, island: int) -> int | None:
        """Note a lost island. Returns the version that cannot become whole without it, or that no other began."""
        joint = self._joint
        self._waiting.discard(island)
        if joint is None:
            return None
        joint.begun.discard(island)
        is_spared = island not in joint.islands or len(joint.whole) == len(joint.islands)
        return None if joint.failed is not None or (is_spared and joint.begun) else joint.version

    def wait(self, island: int) -> None:
        """Let an island that begins anew wait until the open checkpoint is closed."""
        self._waiting.add(island)

    def waits(self, island: int) -> bool:
        return island in self._waiting

    def publish(self, island: int, part: PublishCheckpoint) -> PublishCheckpoint | CheckpointNotKept | None:
        """Take an island's part. Returns the whole checkpoint with the last part, or a refusal if weights differ.

        At a level version all islands hold the same outer weights.
        """
        joint = self._joint
        assert joint is not None
        assert joint.version == part.version
        joint.whole[island] = part.parameters
        if len(joint.whole) < len(joint.islands):
            return None
        lowest = joint.islands[0]
        first = joint.whole[lowest]
        if other := next((island for island in sorted(joint.whole) if joint.whole[island] != first), None):
            fault = f"islands {lowest} and {other} handed over different weights"
            return CheckpointNotKept(part.version, "peer", fault)
        return PublishCheckpoint(part.version, first)

    def drop(self, drop: DropCheckpoint, *, anew: bool) -> tuple[Gone, list[int]]:
        """Give it up. Returns the message and the islands that get it: the islands that began or wait."""
        gone = SaveAnew(drop.version) if anew else CheckpointNotKept(drop.version, drop.reason, drop.fault)
        joint = self._joint
        if joint is None or joint.version != drop.version or joint.failed is not None:
            return gone, []
        joint.failed, told = gone, [*sorted(joint.begun), *sorted(self._waiting)]
        self._waiting.clear()
        return gone, told

    def close(self) -> None:
        """It is kept."""
        self._joint = None
        self._waiting.clear()
