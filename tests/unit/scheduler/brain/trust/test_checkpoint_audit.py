"""The claim: what is stored for a checkpoint is what others of the stage hash, and who says otherwise is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import pytest

from scheduler.brain.checkpoint.schedule import CheckpointSchedule
from scheduler.brain.inputs import PeerGone
from scheduler.brain.settings import SavingRules
from swarm.types import PeerId
from swarm.wire.messages import Event, Hashed, HashStage, ParameterHash, Saved, SaveStage
from tests.support.obedient import JOB, STEPS, Swarm

StateOf = Callable[[PeerId, str, int], str]


def trained(**changes: object) -> Swarm:
    return Swarm.trained(second_hash=True, **changes)


def false_at(liar: str, *kinds: str) -> StateOf:
    return lambda peer, kind, version: f"false {version}" if peer == liar and kind in kinds else f"version {version}"


def asked(swarm: Swarm, kind: type[SaveStage] | type[HashStage], version: int) -> list[PeerId]:
    return [peer for peer, command in swarm.told if isinstance(command, kind) and command.version == version]


@pytest.mark.parametrize("pools", [("abc", "def"), ("ab", "c"), ("a",), ("abcd",)])
def test_honest_replicas_are_never_struck_and_all_files_are_vouched_for(pools: tuple[str, ...]) -> None:
    swarm = trained(pools=pools)
    swarm.assert_finished()
    assert (swarm.struck, swarm.unfit) == ([], [])
    last = [vouched.files for vouched in swarm.vouched if vouched.version == STEPS]
    assert sorted(last, key=str) == [{f"model/{stage}": f"version {STEPS}"} for stage in range(len(pools))]
    others = sum(min(2, len(pool) - 1) for pool in pools)
    assert len(asked(swarm, HashStage, STEPS)) == others
    assert not set(asked(swarm, HashStage, STEPS)) & set(asked(swarm, SaveStage, STEPS))
    alone = sum("nobody else has hashed it" in note for note in swarm.notes)
    assert alone == sum(len(pool) == 1 for pool in pools) * 2, "of the checkpoint at step 2, and of the last one"


@pytest.mark.parametrize("kinds", [("stored",), ("hashed",), ("stored", "hashed")])
@pytest.mark.parametrize("liar", ["a", "b", "f"])
def test_a_liar_among_three_is_proven_wrong_and_what_it_stored_is_saved_again(liar: str, kinds: tuple[str]) -> None:
    swarm = trained(state_of=false_at(liar, *kinds))
    swarm.assert_finished()
    assert {(strike.peer, strike.is_proven) for strike in swarm.struck} <= {(liar, True)}
    assert [refusal.peer for refusal in swarm.unfit] == [strike.peer for strike in swarm.struck]
    asked_for = {SaveStage: "stored", HashStage: "hashed"}
    lied = any(peer == liar and asked_for.get(type(command)) in kinds for peer, command in swarm.told)
    assert bool(swarm.struck) == lied
    for vouched in swarm.vouched:
        assert all(not content.startswith("false") for content in vouched.files.values())
    if swarm.struck:
        assert "second hash" in swarm.struck[0].evidence
        assert "model/" in swarm.struck[0].evidence


def test_of_two_nobody_is_struck_and_the_other_one_saves() -> None:
    """It stores false files, and says the truth of those of others."""
    first = asked(trained(pools=("ab", "cd")), SaveStage, 2)[0]
    swarm = trained(pools=("ab", "cd"), state_of=false_at(first, "stored"))
    swarm.assert_finished()
    assert swarm.struck == []
    assert asked(swarm, SaveStage, 2)[0] == first
    assert any("unclear who is right: model/0" in note for note in swarm.notes)
    assert all(not content.startswith("false") for vouched in swarm.vouched for content in vouched.files.values())


def test_who_cannot_hash_has_no_say_and_is_not_waited_for() -> None:
    def lie(peer: PeerId, event: Event) -> Event:
        return replace(event, files=(), parameters=(), fault="no memory") if isinstance(event, Hashed) else event

    swarm = trained(lie=lie)
    swarm.assert_finished()
    assert swarm.now_s < 30.0
    assert swarm.struck == []


def test_the_hashes_of_weights_that_the_manifest_gets_are_compared_too() -> None:
    def lie(peer: PeerId, event: Event) -> Event:
        is_false = isinstance(event, Saved) and event.stage == 0
        return replace(event, parameters=(ParameterHash("w0", "float32", (1,), "11"),)) if is_false else event

    swarm = trained(lie=lie)
    assert swarm.struck[0].is_proven
    assert "the hash of w0" in swarm.struck[0].evidence


def test_a_saver_that_is_lost_is_replaced_and_the_witnesses_are_not_asked_in_vain() -> None:
    swarm = Swarm(("abc", "def"), second_hash=True, eval_every_steps=0)
    lost: list[PeerId] = []

    def lie(peer: PeerId, event: Event) -> Event | None:
        if isinstance(event, Saved) and event.version == STEPS and not lost:
            lost.append(peer)
        return None if peer in lost else event

    swarm.lie = lie
    swarm.start()
    swarm.run(lambda: bool(lost), most=20000)
    swarm.step(PeerGone(lost[0], "lost"))
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.struck == []


def test_word_of_an_earlier_request_accuses_nobody() -> None:
    """A saver that was asked twice for one version was struck: its first word came before its second files."""
    swarm = Swarm(("abc", "def"), second_hash=True, eval_every_steps=0)
    swarm.start()
    swarm.run(lambda: bool(asked(swarm, SaveStage, 2)), most=20000)
    for saver in asked(swarm, SaveStage, 2):
        stage = swarm.replicas[saver].stage
        swarm.say(saver, Saved(JOB, 1, 2, stage, swarm.weights_of(stage)))
    swarm.inbox = deque(sorted(swarm.inbox, key=lambda one: not isinstance(one[1], HashStage)))
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.struck == []
    assert {path for vouched in swarm.vouched for path in vouched.files} == {"model/0", "model/1"}


def test_only_those_who_are_asked_have_a_say() -> None:
    """The fourth of four, which nobody has asked, says of the newest checkpoint what it likes."""
    swarm = Swarm(("abcd",), second_hash=True, eval_every_steps=0)
    swarm.start()
    swarm.run(lambda: bool(asked(swarm, HashStage, 2)), most=20000)
    (other,) = {PeerId(name) for name in "abcd"} - {*asked(swarm, HashStage, 2), *asked(swarm, SaveStage, 2)}
    for stage in (0, 7):
        swarm.say(other, Hashed(JOB, 1, 2, stage, (), ()))
    swarm.run(most=20000)
    swarm.assert_finished()
    assert swarm.struck == []


def test_a_version_that_is_not_accepted_is_followed_by_the_next() -> None:
    schedule = CheckpointSchedule(SavingRules(every_steps=10), 1, 0, 100)
    assert schedule.due(3, 1.0).plan is None
    schedule.at_once = True
    assert schedule.due(4, 2.0).plan == 4
    schedule.begin(4, [PeerId("a")], 2.0)
    assert schedule.due(5, 3.0).plan is None
