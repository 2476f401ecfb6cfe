"""The claim: steps come and go in order, and a version's digest is known as soon as one replica has made it."""

from __future__ import annotations

import pytest

from scheduler.brain.inputs import Resumed
from scheduler.brain.outputs import CommitRow
from scheduler.brain.state.brain_state import Progress
from scheduler.brain.state.step import Phase
from swarm.types import PeerId
from swarm.wire.messages import Committed

A, B = PeerId("a"), PeerId("b")


def row(step: int) -> CommitRow:
    return CommitRow(0, step, {}, 1.0, 1.0, 1.0, 0.1, False, 8)


def test_steps_begin_and_are_agreed_on_in_order() -> None:
    progress = Progress(4)
    first, second = progress.begin(4), progress.begin(5)
    assert (progress.agreed, progress.committed, progress.next) == (4, 4, 6)
    assert progress.redoable() == [first, second]
    with pytest.raises(AssertionError):
        progress.begin(7)
    with pytest.raises(AssertionError):
        progress.agree(second)
    progress.agree(first)
    assert progress.agreed == 5
    assert progress.redoable() == [second]


def test_what_was_committed_before_a_restart_is_not_known_to_be_made() -> None:
    progress = Progress(0)
    progress.resume(Resumed({A: 0}, 3, (row(1), row(2)), (), 1.0))
    assert (progress.agreed, progress.committed, progress.next) == (1, 3, 3)
    assert {step: run.phase for step, run in progress.runs.items()} == {1: Phase.COMMITTING, 2: Phase.COMMITTING}
    assert progress.redoable() == []


def test_the_digest_of_a_version_is_what_the_first_replica_says() -> None:
    progress = Progress(0)
    assert progress.digest_at(0, 0) == ""
    progress.loaded({0: "start", 1: "begin"})
    assert (progress.digest_at(0, 0), progress.digest_at(1, 0)) == ("start", "begin")
    run = progress.begin(0)
    assert progress.digest_at(1, 1) == ""
    run.commits[B] = Committed(0, 0, 1, 1, "after")
    assert progress.digest_at(1, 1) == "after"
    assert progress.digest_at(0, 1) == ""
    run.commits[A] = Committed(0, 0, 1, 0, "next")
    progress.agree(run)
    assert [progress.agreed_digest(stage) for stage in (0, 1, 2)] == ["next", "after", ""]
    assert progress.digest_at(0, 1) == "next"
