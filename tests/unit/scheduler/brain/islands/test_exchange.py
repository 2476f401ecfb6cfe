"""scheduler.brain.islands.exchange: the rounds of one outer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest

from scheduler.brain.inputs import ReplicaRecord, Tick
from scheduler.brain.islands.exchange import DISPUTES_MAX, Exchanging, LinkFailure, _turn, doubts, going, largest_group
from scheduler.brain.islands.roster import Delegation
from scheduler.brain.outputs import Exchanged, Fail, Note, OuterRound, Output, Send
from swarm.types import PeerId, Round, UnitName
from swarm.wire.messages import AbortRound, Averaged, Exchange, ParameterNorm, RoundFailed
from tests.simulation.engine.islands import Shape, World, begun_world

S0, S1, TIED = UnitName("stage-0"), UnitName("stage-1"), UnitName("tied")
UNITS = {S0: (0,), S1: (1,), TIED: (0, 1)}
STEP = 50


def replica(name: str, stage: int) -> ReplicaRecord:
    return ReplicaRecord(PeerId(name), 1, f"at {name}", stage)


def delegations(islands: int = 2, replicas: int = 2) -> list[Delegation]:
    return [
        Delegation(
            4 + island,
            100 + island,
            {
                stage: tuple(replica(f"i{island}s{stage}r{number}", stage) for number in range(replicas))
                for stage in range(2)
            },
        )
        for island in range(islands)
    ]


def exchanges(outputs: list[Output]) -> dict[tuple[UnitName, PeerId], Exchange]:
    return {
        (output.command.unit, output.peer): output.command
        for output in outputs
        if isinstance(output, Send) and isinstance(output.command, Exchange)
    }


def begun() -> tuple[Exchanging, dict[tuple[UnitName, PeerId], Exchange]]:
    made = Exchanging(STEP, UNITS, Round(2, 7), 5.0)
    return made, exchanges(made.begin(delegations(), 0.0))


def answer(command: Exchange, digest: str = "mean", squared: float = 4.0) -> Averaged:
    norms = (ParameterNorm(f"w of {command.unit}", squared),)
    return Averaged(command.timeline, STEP, command.unit, command.round, digest, norms, 0.1)


def test_each_island_sends_one_envoy_per_stage_and_proposes_a_shared_weight_once() -> None:
    made, sent = begun()
    envoys = {
        unit: [(envoy.peer, envoy.timeline, envoy.tokens) for envoy in sent[unit, peer].envoys] for unit, peer in sent
    }
    assert envoys == {
        S0: [("i0s0r0", 4, 100), ("i1s0r0", 5, 101)],
        S1: [("i0s1r0", 4, 100), ("i1s1r0", 5, 101)],
        TIED: [("i0s0r0", 4, 100), ("i0s1r0", 4, 0), ("i1s0r0", 5, 101), ("i1s1r0", 5, 0)],
    }
    assert all(command.timeline == (4 if peer.startswith("i0") else 5) for (_, peer), command in sent.items())
    assert {command.round.number for command in sent.values()} == {7, 8, 9}
    assert made.begin(delegations(), 1.0) == [], "they are under way"


def test_in_a_single_island_all_replicas_go_and_one_of_them_proposes() -> None:
    made = Exchanging(STEP, UNITS, Round(1, 1), 5.0)
    sent = exchanges(made.begin(delegations(1), 0.0))
    envoys = [(envoy.peer, envoy.tokens) for envoy in sent[TIED, PeerId("i0s1r1")].envoys]
    assert envoys == [("i0s0r0", 100), ("i0s0r1", 0), ("i0s1r0", 0), ("i0s1r1", 0)]


def test_it_is_done_once_all_envoys_hold_the_same() -> None:
    made, sent = begun()
    for (_, peer), command in sent.items():
        assert made.result() is None
        assert made.averaged(peer, answer(command), 1.0) == []
        assert made.averaged(peer, answer(command), 1.0) == [], "said again"
    result = made.result()
    assert result is not None
    assert result.rounds[0] == OuterRound(S0, Round(2, 7), (PeerId("i0s0r0"), PeerId("i1s0r0")))
    assert (result.step, result.skip, result.norm) == (STEP, False, math.sqrt(12.0))
    assert made.next_round == Round(2, 10)


def test_a_mean_that_is_not_finite_is_skipped() -> None:
    for squared in (math.nan, math.inf):
        made, sent = begun()
        for (_, peer), command in sent.items():
            made.averaged(peer, answer(command, squared=squared if command.unit == S1 else 1.0), 1.0)
        result = made.result()
        assert result is not None
        assert (result.skip, result.norm) == (True, 0.0)


def test_a_failed_round_is_repeated_after_a_pause_with_the_next_replicas() -> None:
    made, sent = begun()
    command = sent[S1, PeerId("i0s1r0")]
    failed = RoundFailed(4, STEP, S1, command.round, "E0401: no proposal came", "i1s1r0")
    outputs = made.failed(PeerId("i0s1r0"), failed, 1.0)
    assert made.outcomes == {"failed": 1}
    assert [output.message for output in outputs if isinstance(output, Note)] == [
        "round 8 of unit stage-1 between islands failed: i0s1r0 says E0401: no proposal came (accuses i1s1r0)"
    ]
    assert "stage-1 is exchanged again, since i0s1r0 says" in made.waiting_for()
    assert made.failed(PeerId("i1s1r0"), failed, 1.0) == [], "that round is over"
    assert (min(made.retries_s()), made.begin(delegations(), 1.5)) == (2.0, [])
    outputs = made.begin(delegations(), 2.0)
    aborts = [(output.peer, output.command) for output in outputs if isinstance(output, Send)][:2]
    assert aborts == [
        (PeerId("i0s1r0"), AbortRound(4, STEP, S1, command.round)),
        (PeerId("i1s1r0"), AbortRound(5, STEP, S1, command.round)),
    ], "until then others may say how they fared"
    again = exchanges(outputs)
    assert {peer for _, peer in again} == {"i0s1r1", "i1s1r1"}
    assert {command.round.number for command in again.values()} == {10}


def test_what_a_lost_envoy_took_part_in_is_repeated_even_if_it_was_complete() -> None:
    made, sent = begun()
    for (_, peer), command in sent.items():
        if command.unit != S1:
            made.averaged(peer, answer(command), 1.0)
    made.lost(PeerId("i0s0r0"), "gone", 2.0)
    gone = [replica("i0s0r1", 0)]
    left = [
        delegation if delegation.timeline == 5 else Delegation(4, 100, delegation.replicas | {0: tuple(gone)})
        for delegation in delegations()
    ]
    again = exchanges(made.begin(left, 5.0))
    assert {unit for unit, _ in again} == {S0, TIED}
    assert all("i0s0r0" not in [envoy.peer for envoy in command.envoys] for command in again.values())
    assert made.lost(PeerId("i0s0r0"), "gone", 6.0) == []


def test_a_round_waits_for_an_island_that_can_send_nobody() -> None:
    made = Exchanging(STEP, UNITS, Round(1, 1), 5.0)
    one, other = delegations()
    empty = Delegation(5, 101, {0: (), 1: other.replicas[1]})
    assert {unit for unit, _ in exchanges(made.begin([one, empty], 0.0))} == {S1}
    assert "stage-0 is exchanged again" in made.waiting_for()


def test_envoys_that_hold_different_means_exchange_again_and_the_job_fails_if_they_always_do() -> None:
    made = Exchanging(STEP, {S0: (0,)}, Round(2, 7), 5.0)
    now_s, outputs = 0.0, list[Output]()
    for _ in range(DISPUTES_MAX + 1):
        now_s += 100.0
        made.begin(delegations(), now_s)
        held = made._rounds[S0].newest[-1]
        for number, envoy in enumerate(held.envoys):
            command = Exchange(envoy.timeline, STEP, S0, held.number, held.envoys, 5.0)
            outputs += made.averaged(envoy.peer, answer(command, f"mean {number}"), now_s)
    fails = [output for output in outputs if isinstance(output, Fail)]
    assert len(fails) == 1
    assert "envoys differ in the mean proposal of unit stage-0, outer step 50" in fails[0].message


def spoken(made: Exchanging, held: Mapping[str, str], now_s: float) -> list[Output]:
    """What comes out once all envoys of the newest round of S0 have spoken; others than those `held` hold "mean"."""
    outputs, newest = list[Output](), made._rounds[S0].newest[-1]
    for envoy in newest.envoys:
        command = Exchange(envoy.timeline, STEP, S0, newest.number, newest.envoys, 5.0)
        outputs += made.averaged(envoy.peer, answer(command, held.get(envoy.peer, "mean")), now_s)
    return outputs


def test_an_envoy_that_most_islands_overrule_fails_no_job_and_its_island_alone_is_at_fault() -> None:
    """Three false digests of one stage server ended the job of all islands, although the others agreed each time."""
    made, now_s, outputs = Exchanging(STEP, {S0: (0,)}, Round(2, 7), 5.0), 0.0, list[Output]()
    for number in range(2 * DISPUTES_MAX):
        now_s += 100.0
        made.begin(delegations(3, replicas=1), now_s)
        outputs += spoken(made, {"i1s0r0": f"other {number}"}, now_s)
    assert not any(isinstance(output, Fail) for output in outputs)
    said = "i1s0r0 holds other 3, and most islands hold another mean"
    assert made.rifts(now_s) == {frozenset({5}): LinkFailure(said)}
    assert "envoys differ in the mean proposal of unit stage-0" in made.waiting_for()
    made.begin(delegations(3, replicas=1), now_s + 100.0)
    assert spoken(made, {}, now_s + 100.0) == []
    assert made.result() is not None, "it may think better of it"


def test_where_another_replica_goes_for_an_overruled_envoy_the_exchange_is_made() -> None:
    made = Exchanging(STEP, {S0: (0,)}, Round(2, 7), 5.0)
    made.begin(delegations(3), 0.0)
    spoken(made, {"i1s0r0": "other"}, 1.0)
    made.begin(delegations(3), 10.0)
    assert "i1s0r0" not in {envoy.peer for envoy in made._rounds[S0].newest[-1].envoys}
    spoken(made, {"i1s0r0": "other"}, 11.0)
    assert made.result() is not None


def test_of_two_envoys_of_an_island_people_are_told_of_the_one_that_differs() -> None:
    """Both go for tied embeddings. The other one was named, which holds what most islands do."""
    made = Exchanging(STEP, {S0: (0, 1)}, Round(2, 7), 5.0)
    made.begin(delegations(3, replicas=1), 0.0)
    spoken(made, {"i1s1r0": "other"}, 1.0)
    assert made.rifts(1.0) == {frozenset({5}): LinkFailure("i1s1r0 holds other, and most islands hold another mean")}


def test_an_island_whose_envoys_agree_is_not_overruled_by_islands_whose_own_do_not() -> None:
    """Most islands said the same two means, which is none, and the only one that said one was at fault."""
    made = Exchanging(STEP, {S0: (0, 1)}, Round(2, 7), 5.0)
    made.begin(delegations(3, replicas=1), 0.0)
    spoken(made, {"i0s1r0": "other", "i1s1r0": "other"}, 1.0)
    assert made.rifts(1.0) == {}


def test_news_of_other_rounds_and_of_others_than_envoys_change_nothing() -> None:
    made, sent = begun()
    command = sent[S0, PeerId("i0s0r0")]
    older = Averaged(4, STEP, S0, Round(1, 7), "mean", (), 0.1)
    assert made.averaged(PeerId("i0s0r0"), older, 0.0) == []
    assert made.averaged(PeerId("i0s0r1"), answer(command), 0.0) == []
    assert made.failed(PeerId("i0s0r1"), RoundFailed(4, STEP, S0, command.round, "no", ""), 0.0) == []
    assert (made._rounds[S0].newest[0].reports, made._rounds[S0].newest[0].missed) == ({}, {})


def says(made: Exchanging, unit: UnitName, peer: str, accused: str, now_s: float) -> None:
    """An envoy of the newest round of a unit accuses others, or nobody."""
    number, timeline = made._rounds[unit].newest[-1].number, 4 + int(peer[1])
    for word in accused.split(" "):
        made.failed(PeerId(peer), RoundFailed(timeline, STEP, unit, number, "no proposal came", word), now_s)


def fine(made: Exchanging, unit: UnitName, peer: str, now_s: float) -> None:
    """An envoy of the newest round of a unit has the mean."""
    number, timeline = made._rounds[unit].newest[-1].number, 4 + int(peer[1])
    made.averaged(PeerId(peer), Averaged(timeline, STEP, unit, number, "mean", (), 0.1), now_s)


def found(made: Exchanging, now_s: float) -> list[list[int]]:
    """The islands that cannot exchange, alone or by two."""
    return sorted(sorted(timeline - 4 for timeline in rift) for rift in made.rifts(now_s))


def test_who_did_not_reach_whom_is_known_of_all_envoys_of_a_round_that_failed() -> None:
    """The first that spoke ended the round, so what others would have said was not known."""
    made = Exchanging(STEP, UNITS, Round(1, 1), 5.0)
    made.begin(delegations(3, 1), 0.0)
    assert made.rifts(4.0) == {}
    says(made, S0, "i0s0r0", "i2s0r0", 4.0)
    assert (made.outcomes["failed"], found(made, 4.0)) == (0, [])
    says(made, S0, "i1s0r0", "i2s0r0", 4.0)
    assert (made.outcomes["failed"], found(made, 4.0)) == (1, [[0, 2], [1, 2]])
    says(made, S0, "i2s0r0", "i0s0r0", 4.5)
    assert made.rifts(4.5) == {
        frozenset((4, 6)): LinkFailure("i0s0r0 says no proposal came"),
        frozenset((5, 6)): LinkFailure("i1s0r0 says no proposal came", by=5),
    }


def test_islands_are_found_that_fail_at_once_each_time_for_another_pair() -> None:
    """Sends that fail at once ended each round for one of four pairs, each in less than a third of the rounds."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 60.0)
    now_s, cut = 0.0, [("i0s0r0", "i2s0r0"), ("i1s0r0", "i3s0r0"), ("i3s0r0", "i0s0r0"), ("i2s0r0", "i1s0r0")]
    for number in range(8):
        made.begin(delegations(4, 1), now_s)
        for peer, accused in cut[number % 4 :] + cut[: number % 4]:
            says(made, S0, peer, accused, now_s)
        now_s += 40.0
    assert found(made, now_s) == [[0, 2], [0, 3], [1, 2], [1, 3]]


def test_what_failed_in_some_of_the_newest_rounds_counts_only_where_nothing_failed_in_all() -> None:
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    for number, accused in enumerate(("i1s0r0 i2s0r0", "i2s0r0", "i1s0r0 i2s0r0")):
        made.begin(delegations(3, 1), 100.0 * number)
        says(made, S0, "i0s0r0", accused, 100.0 * number + 5.0)
        fine(made, S0, "i1s0r0", 100.0 * number + 5.0)
        fine(made, S0, "i2s0r0", 100.0 * number + 5.0)
    assert found(made, 205.0) == [[0, 2]]
    made.begin(delegations(3, 1), 300.0)
    says(made, S0, "i0s0r0", "i1s0r0", 305.0)
    fine(made, S0, "i2s0r0", 305.0)
    assert found(made, 305.0) == [[0, 1]], "somebody is to blame"


def test_an_envoy_that_accuses_nobody_of_another_island_blames_its_own() -> None:
    for accused in ("", "i0s0r0", "somebody"):
        made, _ = begun()
        says(made, S0, "i0s0r0", accused, 1.0)
        assert found(made, 2.0) == [[0]]


def test_an_envoy_that_others_deny_stands_alone() -> None:
    made, _ = begun()
    says(made, S0, "i0s0r0", "i1s0r0", 1.0)
    assert [rift.by for rift in made.rifts(1.0).values()] == [None], "the other one has not spoken"
    fine(made, S0, "i1s0r0", 1.5)
    assert [rift.by for rift in made.rifts(2.0).values()] == [4]


def test_an_envoy_that_says_nothing_is_relieved_and_its_island_blamed_if_no_other_speaks() -> None:
    """The first envoy that hung cost its island, although another stage server could have gone."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    made.begin(delegations(2, 2), 0.0)
    fine(made, S0, "i0s0r0", 1.0)
    assert (made.retries_s(), found(made, 5.9), found(made, 6.0)) == ([7.5], [], [[1]])
    (told,) = made.begin(delegations(2, 2), 7.5)
    assert isinstance(told, Note)
    assert "no word came from i1s0r0" in told.message
    again = exchanges(made.begin(delegations(2, 2), 8.5))
    assert {peer for _, peer in again} == {"i0s0r1", "i1s0r1"}
    assert found(made, 9.0) == [[1]], "the newest round that is over"
    fine(made, S0, "i0s0r1", 9.0)
    fine(made, S0, "i1s0r1", 9.0)
    assert (found(made, 100.0), made.result() is None, made.retries_s()) == ([], False, [math.inf])


def test_a_round_whose_last_word_comes_late_but_before_the_next_one_counts() -> None:
    """It was thrown away although all held the mean. If nothing moved then, the job stalled with nobody at fault."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    made.begin(delegations(2, 2), 0.0)
    fine(made, S0, "i0s0r0", 1.0)
    made.begin(delegations(2, 2), 7.5)
    assert made.result() is None
    assert made.outcomes["failed"] == 1
    fine(made, S0, "i1s0r0", 8.0)
    assert made.result() is not None
    assert made.outcomes["failed"] == 0, "it did not fail after all"
    assert (made.begin(delegations(2, 2), 9.0), found(made, 9.0)) == ([], [])


def test_a_round_that_comes_to_its_end_takes_no_other_one_for_a_success() -> None:
    """Each one that all held at once counted like one whose last word came late: as one failure less. So people were
    told of fewer rounds that failed, or of none."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    made.begin(delegations(2, 2), 0.0)
    says(made, S0, "i0s0r0", "i1s0r0", 1.0)
    made.begin(delegations(2, 2), 10.0)
    fine(made, S0, "i0s0r1", 11.0)
    fine(made, S0, "i1s0r1", 11.0)
    assert made.result() is not None
    assert made.outcomes["failed"] == 1


def test_a_round_is_not_repeated_with_those_who_would_only_have_to_begin_again() -> None:
    """Envoys that need long for the mean of a large stage had to begin again before they came to its end."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    made.begin(delegations(2, 1), 0.0)
    assert made.begin(delegations(2, 1), 40.0) == []
    fine(made, S0, "i0s0r0", 41.0)
    fine(made, S0, "i1s0r0", 41.0)
    assert made.result() is not None


def test_a_round_behind_one_that_was_late_has_twice_as_long() -> None:
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    made.begin(delegations(2, 2), 0.0)
    made.begin(delegations(2, 2), 7.5)
    assert exchanges(made.begin(delegations(2, 2), 8.5))
    assert made.retries_s() == [8.5 + 15.0]


def test_an_island_that_says_nothing_is_found_though_others_fail_at_once_to_reach_it() -> None:
    """Each round was over before it must have said something. So of two islands the one that hung went on, if it was
    the first, the other one was left out, and then the job stalled."""
    made, now_s, began = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 60.0), 0.0, list[float]()
    while now_s < 300.0:
        if made.begin(delegations(2, 1), now_s):
            began.append(now_s)
            says(made, S0, "i1s0r0", "i0s0r0", now_s)
        now_s += 1.0
    soon = [0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 61.0, 91.0]
    assert began == [*soon, 152.0, 213.0, 274.0], "the first ones are repeated soon: a link may be cut for a minute"
    assert found(made, 300.0) == [[0], [0, 1]]
    fine(made, S0, "i0s0r0", 300.0)
    assert found(made, 300.0) == [[0, 1]], "it has said something"


def test_an_envoy_that_was_lost_says_nothing_of_links() -> None:
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    made.begin(delegations(3, 2), 0.0)
    says(made, S0, "i0s0r0", "i1s0r0", 1.0)
    made.lost(PeerId("i1s0r0"), "gone", 2.0)
    says_late = RoundFailed(6, STEP, S0, Round(1, 1), "no proposal came", "i1s0r0")
    assert made.failed(PeerId("i2s0r0"), says_late, 3.0) == []
    made.begin(delegations(3, 2), 4.0)
    says(made, S0, "i0s0r1", "i2s0r1", 9.0)
    says(made, S0, "i1s0r1", "i2s0r1", 9.0)
    assert found(made, 9.0) == [[0, 2], [1, 2]]


@pytest.mark.parametrize("is_over", [False, True])
def test_nobody_waits_for_what_an_envoy_that_is_lost_would_say(is_over: bool) -> None:
    """Once seven rounds had failed, the next one began only when the one that was lost must have spoken: a whole
    `averaging.timeout_s` later."""
    made, now_s, failed = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 60.0), 0.0, 0
    while failed < 9:
        if made.begin(delegations(2, 1), now_s):
            failed += 1
            if is_over or failed < 9:
                says(made, S0, "i0s0r0", "i1s0r0", now_s)
        now_s += 1.0
    made.lost(PeerId("i1s0r0"), "gone", now_s)
    assert made.retries_s() == [now_s + 30.0]


def test_the_island_is_blamed_that_lost_most_envoys_if_no_round_came_to_its_end() -> None:
    """A round of which an envoy was lost told nothing. So one that did not know its rounds any more, or named what does
    not exist, again and again, held up the job until it stalled, with nobody at fault."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    for number, peer in enumerate(("i1s0r0", "i1s0r0", "i0s0r0")):
        made.begin(delegations(2, 1), 100.0 * number)
        made.lost(PeerId(peer), f"session {number}", 100.0 * number + 1.0)
    assert made.rifts(202.0) == {frozenset((5,)): LinkFailure("i1s0r0 is lost: session 1")}
    made.begin(delegations(2, 1), 300.0)
    says(made, S0, "i1s0r0", "i0s0r0", 305.0)
    says(made, S0, "i0s0r0", "i1s0r0", 305.0)
    assert found(made, 305.0) == [[0, 1]], "one did"


def test_an_envoy_that_is_lost_twice_in_one_pause_makes_no_earlier_round_void() -> None:
    """Each session that broke took one more round away. So nobody had told anything, and the healthy island was left
    out whose envoy dialled a few times, in the place of the one that the others did not reach."""
    made = Exchanging(STEP, {S0: (0,)}, Round(1, 1), 5.0)
    for number in range(2):
        made.begin(delegations(3, 1), 5.5 * number)
        says(made, S0, "i0s0r0", "i2s0r0", 5.5 * number + 4.0)
        says(made, S0, "i1s0r0", "i2s0r0", 5.5 * number + 4.0)
    for number in range(3):
        made.lost(PeerId("i0s0r0"), f"session {number}", 9.6)
    assert found(made, 9.7) == [[0, 2], [1, 2]]


@pytest.mark.parametrize(("islands", "replicas"), [(2, 2), (2, 3), (8, 2), (8, 3), (5, 5), (8, 1)])
def test_the_envoys_of_two_islands_try_all_pairs(islands: int, replicas: int) -> None:
    """All went on to their next one in step. So only like ones met, and two that hung kept both from exchanging."""
    digits = 1 + math.ceil(math.log(islands, replicas)) if replicas > 1 else 1
    turns = [[_turn(f, island, replicas) for f in range(replicas**digits)] for island in range(islands)]
    for one, other in combinations(turns, 2):
        assert len(set(zip(one, other, strict=True))) == replicas**2
    for turn in turns:
        assert all(len(set(turn[at : at + 2 * replicas])) == replicas for at in range(0, len(turn), replicas))


def test_while_rounds_run_nobody_looks_who_could_go_and_for_how_many_tokens() -> None:
    """Each input did, of each step since the last exchange: that took ten times as long as all else with 500 steps."""
    world = World(Shape(steps=6, lease=3), 0)
    looked, tokens_of = list[int](), world.brain.settings.tokens_of
    for each in world.brain._roster.islands:
        each.settings = replace(each.settings, tokens_of=lambda portion: looked.append(portion) or tokens_of(portion))
    while not any(isinstance(command, Exchange) for replica in world.replicas.values() for command in replica.commands):
        world.turn()
    assert sorted(set(looked)) == [0, 1, 2, 3, 4, 5]
    looked.clear()
    world.tell(Tick())
    assert looked == []


ALL = {0: 4, 1: 4, 2: 4, 3: 4}


@pytest.mark.parametrize(
    ("apart", "sizes", "stay"),
    [
        ([], ALL, (0, 1, 2, 3)),
        ([(0, 3), (1, 3), (2, 3)], ALL, (0, 1, 2)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], ALL, (0, 1)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], ALL | {3: 5}, (2, 3)),
        ([(0, 1)], {0: 4, 1: 4}, (0,)),
        ([(0, 1)], {0: 4, 1: 5}, (1,)),
        ([(0, 1), (1, 2)], {0: 1, 1: 9, 2: 1}, (0, 2)),
        ([(0, 1), (0, 2), (1, 2)], {0: 4, 1: 4, 2: 4}, (0,)),
    ],
)
def test_the_largest_group_that_is_together_goes_on(
    apart: list[tuple[int, int]], sizes: dict[int, int], stay: tuple[int, ...]
) -> None:
    assert largest_group(sizes, [frozenset(pair) for pair in apart]) == stay


@pytest.mark.parametrize(
    ("apart", "before", "stay"),
    [
        ([(0, 1)], [], (0, 2, 3)),
        ([(0, 1)], [(0, 4)], (1, 2, 3)),
        ([(0, 2)], [(0, 1), (0, 1)], (1, 2, 3)),
        ([(0, 1)], [(0, 1)], (0, 2, 3)),
        ([(0, 2), (0, 3), (1, 2), (1, 3)], [(1, 4)], (2, 3)),
        ([(0,)], [(1, 2)], (1, 2, 3)),
    ],
)
def test_of_equal_groups_the_one_goes_on_that_seldom_lacked_another(
    apart: list[tuple[int, ...]], before: list[tuple[int, ...]], stay: tuple[int, ...]
) -> None:
    pairs = [frozenset(pair) for pair in apart]
    assert largest_group(ALL, pairs, doubts({*pairs, *map(frozenset, before)})) == stay


@pytest.mark.parametrize("seed", range(200))
def test_who_goes_into_an_exchange_is_what_sets_say(seed: int) -> None:
    """All that are ready, once all are or patience is over; nobody goes without one that is owed, or in a whole one."""
    rng = Random(seed)
    at_work = set(rng.sample(range(5), rng.randint(1, 5)))
    ready = {island: rng.choice([0.0, 3.0, 7.0]) for island in at_work if rng.random() < 0.7}
    owed = {island for island in at_work if rng.random() < 0.2}
    whole, least, now_s = rng.random() < 0.2, rng.randint(0, 4), rng.choice([7.0, 9.0, 12.0])
    patience_s = rng.choice([0.0, 5.0, math.inf])
    found = going(ready, at_work, owed, whole=whole, least=least, patience_s=patience_s, now_s=now_s)
    missing = at_work - set(ready)
    if not missing:
        assert found == tuple(sorted(at_work))
    elif whole or missing & owed or len(ready) < max(1, least):
        assert found == math.inf, "they wait for what happens"
    elif now_s < min(ready.values()) + patience_s:
        assert found == min(ready.values()) + patience_s, "when to ask again"
    else:
        assert found == tuple(sorted(ready))


CUT = [(0, 2), (1, 2)]  # the others do not reach island 2


@pytest.mark.parametrize(
    ("apart", "situation", "stay"),
    [
        (CUT, {}, (0, 1)),
        ([(1,)], {}, (0, 2)),
        ([(0, 1), (0, 2), (1, 2)], {}, (0,)),
        ([], {}, None),
        (CUT, {"now_s": 4.9}, None),  # patience is not over
        (CUT, {"is_complete": True}, None),
        (CUT, {"owed": (2,)}, None),  # it would be late twice running
        (CUT, {"owed": (0,)}, (0, 1)),
        ([(0, 1), (0, 2), (1, 2)], {"owed": (0,)}, None),  # the one that was late would have all others be late
        (CUT, {"least": 3}, None),
        (CUT, {"least": 2}, (0, 1)),
        (CUT, {"is_whole": True}, None),  # something is saved behind it
        ([], {"without_envoys": 2}, (0, 1)),
    ],
)
def test_an_exchange_under_way_goes_on_without_those_that_are_not_reached_once_patience_is_over(
    apart: list[tuple[int, ...]],
    situation: dict[str, Any],
    stay: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brain = begun_world(Shape(islands=3)).brain
    outer, roster, (before, step, *_) = brain._outer, brain._roster, brain.courses[0].outer
    outer._exchanging = made = Exchanging(step.step, UNITS, Round(1, 1), 5.0)
    outer._going, outer._until_s, roster.least = (0, 1, 2), 5.0, situation.get("least", 0)
    outer._newest.append(Exchanged(before.step, (), False, 0.0, late=situation.get("owed", ())))
    exchanged = Exchanged(step.step, (), False, 0.0) if situation.get("is_complete") else None
    monkeypatch.setattr(made, "broken", lambda _: {frozenset(pair): LinkFailure("no proposal came") for pair in apart})
    monkeypatch.setattr(made, "result", lambda: exchanged)
    if (silent := situation.get("without_envoys")) is not None:
        monkeypatch.setattr(roster.islands[silent], "delegates", lambda *_: [])
    found = outer._without_some(step, lambda _: situation.get("is_whole", False), situation.get("now_s", 5.0))
    assert found == stay


@pytest.mark.parametrize("steps", [97, 106, 114, 122, 129])
def test_an_island_that_was_late_is_owed_until_the_closing_merge_of_its_fragment(steps: int) -> None:
    """It was forgotten where six exchanges lay between, so its last proposal counted with too few tokens."""
    brain = begun_world(Shape(steps=steps, lease=32, fragments=4, overlap=1)).brain
    outer, late = brain._outer, brain.timelines[1]
    merges = brain.courses[0].outer
    for fragment in range(4):
        *_, newest, closing = (merge for merge in merges if merge.fragment == fragment)
        for merge in merges[: merges.index(closing)]:
            outer._newest.append(Exchanged(merge.step, (), False, 0.0, late=(late,) if merge == newest else ()))
        assert [*outer.owed(fragment)] == [1]
        outer._newest.clear()
