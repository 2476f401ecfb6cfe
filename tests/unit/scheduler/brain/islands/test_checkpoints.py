"""scheduler.brain.islands.checkpoints: one checkpoint out of the parts of all islands."""

from __future__ import annotations

from scheduler.brain.inputs import CheckpointNotKept, SaveAnew
from scheduler.brain.islands.checkpoints import JointCheckpoints
from scheduler.brain.outputs import DropCheckpoint, PublishCheckpoint
from swarm.wire.messages import ParameterHash

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
    gone = CheckpointNotKept(3, "peer", "it broke")
    assert joint.drop(drop, anew=False) == (gone, [0, 1])
    assert joint.drop(drop, anew=False) == (gone, []), "told once"
    assert joint.version is None
    assert joint.begin(2, 3, ALL) == gone
    assert joint.begin(0, 3, ALL) is True, "tried once more"
    assert joint.begin(2, 3, ALL) is False
    joint.drop(drop, anew=False)
    assert joint.begin(1, 6, ALL) is True, "a newer one"
    assert joint.drop(drop, anew=False) == (gone, []), "it is of an older one"


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


def test_a_checkpoint_lacks_an_island_that_is_lost_before_all_parts_are_there() -> None:
    joint = JointCheckpoints()
    assert joint.lose(0) is None
    for island in ALL:
        joint.begin(island, 3, ALL)
    assert joint.lose(3) is None, "it has no part"
    joint.publish(0, part(3))
    assert joint.lose(0) == 3, "others are not there"
    drop = DropCheckpoint(3, "peer", "island 0 was lost")
    assert joint.drop(drop, anew=True) == (SaveAnew(3), [1, 2])
    assert joint.begin(1, 3, (1, 2)) is True, "saved anew, if it is due"
    assert joint.begin(2, 3, (1, 2)) is False


def test_a_whole_checkpoint_does_without_an_island_that_is_lost_while_another_has_begun_it() -> None:
    joint = JointCheckpoints()
    for island in (0, 1):
        joint.begin(island, 3, (0, 1))
        joint.publish(island, part(3))
    assert joint.lose(0) is None
    assert (joint.version, joint.first) == (3, 1), "who is lost hears nothing"
    assert joint.lose(1) == 3, "nobody would hear what became of it"


def test_an_island_that_begins_anew_waits_for_the_one_that_is_open() -> None:
    joint = JointCheckpoints()
    joint.begin(0, 3, (0,))
    joint.wait(1)
    assert [joint.waits(island) for island in (0, 1)] == [False, True]
    assert joint.number_of(1) == -1
    drop = DropCheckpoint(3, "disk_full", "full")
    assert joint.drop(drop, anew=False) == (CheckpointNotKept(3, "disk_full", "full"), [0, 1])
    assert not joint.waits(1)
    joint.begin(0, 6, (0, 1))
    joint.wait(1)
    joint.lose(1)
    assert not joint.waits(1)
    joint.wait(1)
    joint.close()
    assert not joint.waits(1)
