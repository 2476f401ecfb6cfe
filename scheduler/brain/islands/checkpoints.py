"""One checkpoint of all islands: begun with the first island that is asked for its part, complete with the last.

    island 0    begin ───────────────── whole ─┐
    island 1          begin ─── whole          ├─▶ begin (once) ──▶ publish (once) ──▶ kept or not, told to all
    a part fails ──▶ the others give theirs up; an island that had not begun does so as soon as it begins

Each island collects its part by itself (scheduler/brain/checkpoint). All are of one version, behind an outer step or at
the start, where islands hold the same weights. Pure; a version is one of an island.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.brain.inputs import CheckpointNotKept
from scheduler.brain.outputs import DropCheckpoint, PublishCheckpoint
from swarm.events import ParameterHash


@dataclass(slots=True)
class _Joint:
    """A checkpoint under way, or one that failed before all islands had begun it."""

    version: int
    islands: tuple[int, ...]  # at work when it began
    begun: set[int] = field(default_factory=set)
    whole: dict[int, Mapping[int, tuple[ParameterHash, ...]]] = field(default_factory=dict)  # by island and stage
    failed: CheckpointNotKept | None = None


class JointCheckpoints:
    """The checkpoints of a job with islands; there is one at a time."""

    def __init__(self) -> None:
        self._joint: _Joint | None = None

    @property
    def version(self) -> int | None:
        """The version that is being collected or published."""
        return None if self._joint is None or self._joint.failed is not None else self._joint.version

    @property
    def first(self) -> int:
        """The first island of those that have begun it."""
        assert self._joint is not None
        return min(self._joint.begun)

    def begin(self, island: int, version: int, present: tuple[int, ...]) -> bool | CheckpointNotKept:
        """An island begins its part: whether it is the first; or why it is to give up, as the others have.

        `present`: the islands at work, each of which has a part in a checkpoint that begins now.
        """
        joint = self._joint
        if joint is not None and joint.version == version and island not in joint.begun:
            joint.begun.add(island)
            return joint.failed or False
        if joint is not None and joint.failed is None and island not in joint.islands:
            return CheckpointNotKept(version, "peer", "the one before is still being written")
        self._joint = _Joint(version, present, {island})
        return True

    def number_of(self, island: int) -> int:
        """The number under which an island's part is kept; -1 if it has none. Islands are numbered without gaps."""
        islands = () if self._joint is None else self._joint.islands
        return islands.index(island) if island in islands else -1

    def lacks(self, island: int) -> int | None:
        """The version of a checkpoint that cannot become whole without the island; None if there is none."""
        joint = self._joint
        if joint is None or joint.failed is not None or island not in joint.islands:
            return None
        return None if len(joint.whole) == len(joint.islands) else joint.version

    def publish(self, island: int, part: PublishCheckpoint) -> PublishCheckpoint | CheckpointNotKept | None:
        """An island has handed over its part: the checkpoint once it is the last one.

        Behind an outer step the weights are the outer weights; if those of islands differ, it is not kept.
        """
        joint = self._joint
        assert joint is not None
        assert joint.version == part.version
        joint.whole[island] = part.parameters
        if len(joint.whole) < len(joint.islands):
            return None
        lowest = joint.islands[0]
        first = joint.whole[lowest]
        if other := next((one for one in sorted(joint.whole) if joint.whole[one] != first), None):
            fault = f"islands {lowest} and {other} handed over different weights"
            return CheckpointNotKept(part.version, "peer", fault)
        return PublishCheckpoint(part.version, first)

    def drop(self, drop: DropCheckpoint) -> list[int]:
        """An island has given up the checkpoint: those that must do so too; none if it was given up already."""
        joint = self._joint
        if joint is None or joint.version != drop.version or joint.failed is not None:
            return []
        joint.failed = CheckpointNotKept(drop.version, drop.reason, drop.fault)
        return sorted(joint.begun)

    def close(self) -> None:
        """It is kept."""
        self._joint = None
