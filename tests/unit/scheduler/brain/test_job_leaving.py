"""What a stage's last replicas owe and are owed when others leave it, or have just joined it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.brain.inputs import AskToLeave, Join, PeerBack, PeerGone, PeerSuspect, ReplicaRecord, Tick
from scheduler.brain.outputs import Admitted, Independent, Note, Output, Stopped
from scheduler.brain.settings import RebalanceSettings, SavingRules
from swarm.errors import StaleMessage
from swarm.job.placement import Candidate
from swarm.types import JobState, PeerId
from swarm.wire.messages import Average, Commit, Failed, Loaded, LoadStage, Release, Route, SaveStage
from tests.support.brain import JOB, A, B, C, D, Swarm, sends

J = PeerId("j")


def step(swarm: Swarm) -> None:
    """One step from its first microbatch to the agreement on its commit."""
    swarm.answer(LoadStage)
    swarm.until_written()
    swarm.commit()


def stalled(outputs: list[Output]) -> bool:
    return any(isinstance(one, Stopped) and one.state is JobState.STALLED for one in outputs)


def test_a_replica_that_only_hands_over_a_checkpoint_cannot_keep_a_stage_alive() -> None:
    """It was kept as the last of its stage, with weights of two steps ago, and the job waited for it for ever."""
    swarm = Swarm({A: 0, B: 0, C: 1}, recover=True, steps=8, saving=SavingRules(every_steps=1))
    step(swarm)
    ((saver, _),) = [one for one in swarm.pop(SaveStage) if swarm.stage_of[one[0]] == 0]
    other = B if saver == A else A
    swarm.tell(AskToLeave(saver, "drained"))
    for _ in range(3):
        step(swarm)
    assert not sends(swarm.outputs, Release), "its part of the checkpoint is still to come"
    assert stalled(swarm.tell(PeerGone(other, "killed"), 2.0))


def committing_without_a(swarm: Swarm) -> None:
    """A leaves, and is not released because d is late; of step 1 it was no member."""
    swarm.until_written()
    swarm.tell(AskToLeave(A, "drained"))
    swarm.write()
    for peer in (A, B, C):
        swarm.answer(Commit, peer=peer)
    assert swarm.pop(Commit, peer=D)
    swarm.until_written()


@pytest.mark.parametrize("written", [False, True])
def test_a_replica_that_stays_hears_of_the_commits_that_were_decided_without_it(written: bool) -> None:
    """It was waited for, and never told."""
    swarm = Swarm(recover=True, steps=8)
    committing_without_a(swarm)
    if written:
        swarm.write()
    assert not [peer for peer, one in swarm.inbox if isinstance(one, Commit) and peer == A]
    outputs = swarm.tell(PeerGone(B, "killed"), 2.0)
    if not written:
        outputs = swarm.write()
    (commit,) = [one.command for one in sends(outputs, Commit) if one.peer == A]
    assert isinstance(commit, Commit)
    assert (commit.step, commit.donors) == (1, ())
    lacks = Failed(JOB, StaleMessage.code, "step 1 was averaged without this replica", "")
    assert stalled(swarm.hear(A, lacks)), "nobody has that gradient: the stage is lost, the job is not"


def joined(swarm: Swarm) -> list[Output]:
    """J joins stage 1, and is admitted."""
    outputs = swarm.tell(Join(ReplicaRecord(J, 1, "at j", 1)))
    (load,) = [one.command for one in sends(outputs, LoadStage)]
    assert isinstance(load, LoadStage)
    swarm.stage_of[J] = 1
    loaded = swarm.reply(J, load)
    assert isinstance(loaded, Loaded)
    version = swarm.brain.counts().committed_steps
    outputs = swarm.hear(J, replace(loaded, join=load.join, version=version, digest="after" if version else "start"))
    assert Admitted(J, 1) in outputs
    return outputs


def test_a_joiner_in_the_middle_of_averaging_stands_alone_once_it_has_made_that_commit() -> None:
    """It was called serving before: who relied on it took its only donor away, and the job was rolled back."""
    swarm = Swarm.averaging({A: 0, C: 1}, recover=True)
    assert Independent(J, 1) not in joined(swarm)
    swarm.answer(Average)
    swarm.write()
    swarm.answer(Commit, peer=A)
    swarm.answer(Commit, peer=C)
    assert Independent(J, 1) not in swarm.outputs
    assert swarm.brain.is_joining(J)
    swarm.answer(Commit, peer=J)
    assert swarm.outputs.count(Independent(J, 1)) == 1
    assert not swarm.brain.is_joining(J)
    assert not stalled(swarm.tell(PeerGone(C, "killed"), 2.0))
    step(swarm)
    assert swarm.brain.counts().committed_steps == 2


def test_a_joiner_between_two_rounds_stands_alone_at_once() -> None:
    swarm = Swarm({A: 0, C: 1}, recover=True)
    step(swarm)
    assert Independent(J, 1) in joined(swarm)


def test_a_joiner_that_nobody_can_tell_of_a_commit_loses_the_stage_and_not_the_job() -> None:
    swarm = Swarm.averaging({A: 0, C: 1}, recover=True)
    joined(swarm)
    swarm.answer(Average)
    swarm.write()
    swarm.tell(PeerGone(C, "killed"), 2.0)
    lacks = Failed(JOB, StaleMessage.code, "step 0 was averaged without this replica", "")
    assert stalled(swarm.hear(J, lacks))


def test_nobody_is_released_while_only_a_suspect_would_stay() -> None:
    swarm = Swarm.written(recover=True, steps=8)
    swarm.tell(AskToLeave(A, "drained"))
    swarm.write()
    swarm.answer(Commit, peer=B)
    swarm.tell(PeerSuspect(B, "silent"))
    for peer in (A, C, D):
        swarm.answer(Commit, peer=peer)
    assert not sends(swarm.outputs, Release)
    outputs = swarm.tell(PeerGone(B, "killed"), 2.0)
    assert not stalled(outputs)
    assert {one.command.hops[0].peer for one in sends(outputs, Route) if isinstance(one.command, Route)} == {A}


def test_a_replica_that_gives_up_beside_a_suspect_is_no_reason_to_fail_the_job() -> None:
    swarm = Swarm.loaded(recover=True, steps=8)
    swarm.tell(PeerSuspect(B, "silent"))
    outputs = swarm.hear(A, Failed(JOB, "E0000", "no room", ""))
    assert [one.peer for one in sends(outputs, Release)] == [A]
    assert not swarm.brain.is_over
    swarm.tell(PeerBack(B), 2.0)
    step(swarm)
    assert swarm.brain.counts().committed_steps == 1


def test_a_replica_that_was_sent_to_a_stage_counts_there_before_the_brain_has_heard_of_it() -> None:
    """Peers that were idle at the same time all went to one stage."""
    swarm = Swarm.loaded({A: 0, C: 1}, recover=True)
    stages = (0, 1)
    first = swarm.brain.where_to_join(Candidate(J), stages, 1.0).plan
    assert first is not None
    assert swarm.brain.where_to_join(Candidate(PeerId("k")), stages, 1.0).plan == first
    assert swarm.brain.where_to_join(Candidate(PeerId("k")), stages, 1.0, {J: first}).plan == 1 - first


def test_no_replica_moves_while_others_may_be_gone() -> None:
    """It would be asked to leave as the last of its stage, wait there for another, and be in the way of other moves."""
    settings = RebalanceSettings(interval_s=1.0, cooldown_s=0.0, windows=1)
    swarm = Swarm.loaded({A: 0, B: 1, C: 1, D: 1}, steps=9, recover=True, rebalance=settings)
    for _ in range(3):
        swarm.answer(Route)
    swarm.tell(PeerSuspect(C, "looks silent"), 2.0)
    swarm.tell(PeerSuspect(D, "looks silent"), 2.0)
    noted = [one.message for now_s in (3.0, 5.0) for one in swarm.tell(Tick(), now_s) if isinstance(one, Note)]
    assert len(noted) == 1
    assert noted[0].startswith("rebalancing: stage 0 sets the pace")
    assert noted[0].endswith("of 1, but c, d may be gone")
    swarm.tell(PeerBack(C), 6.0)
    swarm.tell(PeerBack(D), 6.0)
    noted = [one.message for one in swarm.tell(Tick(), 8.0) if isinstance(one, Note)]
    assert any("takes no new work: stage 0 sets the pace" in text for text in noted), noted
