"""scheduler.brain.islands.saving: one checkpoint out of the parts of all islands."""

from __future__ import annotations

from scheduler.brain.inputs import CheckpointNotKept
from scheduler.brain.islands.saving import JointCheckpoints
from scheduler.brain.outputs import DropCheckpoint, PublishCheckpoint
from swarm.events import ParameterHash


def part(version: int, sha256: str = "00") -> PublishCheckpoint:
    return PublishCheckpoint(version, {0: (ParameterHash("w", "float32", (1,), sha256),)})


def test_a_checkpoint_begins_with_the_first_island_and_is_complete_with_the_last() -> None:
    joint = JointCheckpoints(2)
    assert joint.begin(1, 3) is True
    assert joint.publish(1, part(3)) is None
    assert joint.begin(0, 3) is False
    assert (joint.version, joint.first) == (3, 0)
    assert joint.publish(0, part(3)) == part(3)
    joint.close()
    assert joint.version is None
    assert joint.begin(0, 6) is True


def test_an_island_that_begins_after_another_gave_up_hears_why() -> None:
    joint = JointCheckpoints(3)
    joint.begin(0, 3)
    joint.begin(1, 3)
    drop = DropCheckpoint(3, "peer", "it broke")
    assert joint.drop(drop) == [0, 1]
    assert joint.drop(drop) == [], "told once"
    assert joint.version is None
    assert joint.begin(2, 3) == CheckpointNotKept(3, "peer", "it broke")
    assert joint.begin(0, 3) is True, "tried once more"
    assert joint.begin(2, 3) is False
    assert joint.begin(1, 6) is True, "a newer one"
    assert joint.drop(drop) == [], "it is of an older one"


def test_islands_whose_weights_differ_keep_no_checkpoint() -> None:
    joint = JointCheckpoints(2)
    for island in range(2):
        joint.begin(island, 3)
    joint.publish(0, part(3))
    assert joint.publish(1, part(3, "11")) == CheckpointNotKept(
        3, "peer", "islands 0 and 1 handed over different weights"
    )
