"""scheduler.brain.islands.checkpoints: one checkpoint out of the parts of all islands."""

from __future__ import annotations

from scheduler.brain.inputs import CheckpointNotKept
from scheduler.brain.islands.checkpoints import JointCheckpoints
from scheduler.brain.outputs import DropCheckpoint, PublishCheckpoint
from swarm.events import ParameterHash

ALL = (0, 1, 2)


def part(version: int, sha256: str = "00") -> PublishCheckpoint:
    return PublishCheckpoint(version, {0: (ParameterHash("w", "float32", (1,), sha256),)})


def test_a_checkpoint_begins_with_the_first_island_and_is_complete_with_the_last() -> None:
    joint = JointCheckpoints()
    assert joint.begin(1, 3, (0, 1)) is True
    assert joint.publish(1, part(3)) is None
    assert joint.begin(0, 3, (0, 1)) is False
    assert (joint.version, joint.first) == (3, 0)
    assert joint.publish(0, part(3)) == part(3)
    joint.close()
    assert joint.version is None
    assert joint.begin(0, 6, (0, 1)) is True


def test_an_island_that_begins_after_another_gave_up_hears_why() -> None:
    joint = JointCheckpoints()
    joint.begin(0, 3, ALL)
    joint.begin(1, 3, ALL)
    drop = DropCheckpoint(3, "peer", "it broke")
    assert joint.drop(drop) == [0, 1]
    assert joint.drop(drop) == [], "told once"
    assert joint.version is None
    assert joint.begin(2, 3, ALL) == CheckpointNotKept(3, "peer", "it broke")
    assert joint.begin(0, 3, ALL) is True, "tried once more"
    assert joint.begin(2, 3, ALL) is False
    assert joint.begin(1, 6, ALL) is True, "a newer one"
    assert joint.drop(drop) == [], "it is of an older one"


def test_islands_whose_weights_differ_keep_no_checkpoint() -> None:
    joint = JointCheckpoints()
    for island in range(2):
        joint.begin(island, 3, (0, 1))
    joint.publish(0, part(3))
    assert joint.publish(1, part(3, "11")) == CheckpointNotKept(
        3, "peer", "islands 0 and 1 handed over different weights"
    )


def test_islands_at_work_are_numbered_without_gaps() -> None:
    joint = JointCheckpoints()
    assert joint.number_of(2) == -1
    assert joint.begin(2, 3, (0, 2)) is True
    assert [joint.number_of(island) for island in range(3)] == [0, -1, 1]
    assert joint.publish(2, part(3)) is None
    joint.begin(0, 3, (0, 2))
    assert joint.publish(0, part(3, "11")) == CheckpointNotKept(
        3, "peer", "islands 0 and 2 handed over different weights"
    )


def test_a_checkpoint_lacks_an_island_until_all_parts_are_there() -> None:
    joint = JointCheckpoints()
    assert joint.lacks(0) is None
    for island in (0, 1):
        joint.begin(island, 3, (0, 1))
    assert [joint.lacks(island) for island in range(3)] == [3, 3, None]
    joint.publish(0, part(3))
    assert joint.lacks(0) == 3, "another one is not there"
    joint.publish(1, part(3))
    assert joint.lacks(0) is None, "it is whole"


def test_an_island_that_begins_anew_does_not_disturb_an_older_checkpoint() -> None:
    joint = JointCheckpoints()
    joint.begin(0, 3, (0,))
    begun = joint.begin(1, 6, (0, 1))
    assert begun == CheckpointNotKept(6, "peer", "the one before is still being written")
    assert (joint.version, joint.number_of(1)) == (3, -1)
