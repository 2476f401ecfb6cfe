"""scheduler.brain.islands.exchange: the rounds of one outer step."""

from __future__ import annotations

import math

from scheduler.brain.inputs import OuterRound, ReplicaRecord
from scheduler.brain.islands.exchange import DISPUTES_MAX, Delegation, Exchanging
from scheduler.brain.outputs import Fail, Note, Output, Send
from swarm.events import Averaged, ParameterNorm, RoundFailed
from swarm.messages import AbortRound, Exchange
from swarm.types import PeerId, Round, UnitName

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
        (one.command.unit, one.peer): one.command
        for one in outputs
        if isinstance(one, Send) and isinstance(one.command, Exchange)
    }


def begun() -> tuple[Exchanging, dict[tuple[UnitName, PeerId], Exchange]]:
    made = Exchanging(STEP, UNITS, Round(2, 7), 5.0)
    return made, exchanges(made.begin(delegations(), 0.0))


def answer(command: Exchange, digest: str = "mean", squared: float = 4.0) -> Averaged:
    norms = (ParameterNorm(f"w of {command.unit}", squared),)
    return Averaged(command.timeline, STEP, command.unit, command.round, digest, norms, 0.1)


def test_each_island_sends_one_envoy_per_stage_and_proposes_a_shared_weight_once() -> None:
    made, sent = begun()
    envoys = {unit: [(one.peer, one.timeline, one.tokens) for one in sent[unit, peer].envoys] for unit, peer in sent}
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
    envoys = [(one.peer, one.tokens) for one in sent[TIED, PeerId("i0s1r1")].envoys]
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
    aborts = [(one.peer, one.command) for one in outputs if isinstance(one, Send)]
    assert aborts == [
        (PeerId("i0s1r0"), AbortRound(4, STEP, S1, command.round)),
        (PeerId("i1s1r0"), AbortRound(5, STEP, S1, command.round)),
    ]
    assert made.outcomes == {"failed": 1}
    assert [one.message for one in outputs if isinstance(one, Note)] == [
        "round 8 of unit stage-1 between islands failed: i0s1r0 says E0401: no proposal came (accuses i1s1r0)"
    ]
    assert "stage-1 is exchanged again, since i0s1r0 says" in made.waiting_for()
    assert made.failed(PeerId("i1s1r0"), failed, 1.0) == [], "that round is over"
    assert (made.retries_s(), made.begin(delegations(), 1.5)) == ([2.0], [])
    again = exchanges(made.begin(delegations(), 2.0))
    assert {peer for _, peer in again} == {"i0s1r1", "i1s1r1"}
    assert {command.round.number for command in again.values()} == {10}


def test_what_a_lost_envoy_took_part_in_is_repeated_even_if_it_was_complete() -> None:
    made, sent = begun()
    for (_, peer), command in sent.items():
        if command.unit != S1:
            made.averaged(peer, answer(command), 1.0)
    made.lost(PeerId("i0s0r0"), "gone", 2.0)
    gone = [replica("i0s0r1", 0)]
    left = [one if one.timeline == 5 else Delegation(4, 100, one.replicas | {0: tuple(gone)}) for one in delegations()]
    again = exchanges(made.begin(left, 5.0))
    assert {unit for unit, _ in again} == {S0, TIED}
    assert all("i0s0r0" not in [one.peer for one in command.envoys] for command in again.values())
    assert made.lost(PeerId("i0s0r0"), "gone", 6.0) == []


def test_a_round_waits_for_an_island_that_can_send_nobody() -> None:
    made = Exchanging(STEP, UNITS, Round(1, 1), 5.0)
    one, other = delegations()
    empty = Delegation(5, 101, {0: (), 1: other.replicas[1]})
    assert {unit for unit, _ in exchanges(made.begin([one, empty], 0.0))} == {S1}
    assert "stage-0 is exchanged again" in made.waiting_for()


def test_envoys_that_hold_different_means_exchange_again_and_the_job_fails_if_they_always_do() -> None:
    made, _ = begun()
    now_s, outputs = 0.0, list[Output]()
    for _ in range(DISPUTES_MAX + 1):
        now_s += 100.0
        made.begin(delegations(), now_s)
        held = made._rounds[S0]
        assert held.round is not None
        for number, envoy in enumerate(held.envoys):
            command = Exchange(envoy.timeline, STEP, S0, held.round, held.envoys, 5.0)
            outputs += made.averaged(envoy.peer, answer(command, f"mean {number}"), now_s)
    fails = [one for one in outputs if isinstance(one, Fail)]
    assert len(fails) == 1
    assert "envoys differ in the mean proposal of unit stage-0, outer step 50" in fails[0].message


def test_news_of_other_rounds_and_of_others_than_envoys_change_nothing() -> None:
    made, sent = begun()
    command = sent[S0, PeerId("i0s0r0")]
    older = Averaged(4, STEP, S0, Round(1, 7), "mean", (), 0.1)
    assert made.averaged(PeerId("i0s0r0"), older, 0.0) == []
    assert made.averaged(PeerId("i0s0r1"), answer(command), 0.0) == []
    assert made.failed(PeerId("i0s0r1"), RoundFailed(4, STEP, S0, command.round, "no", ""), 0.0) == []
    assert made._rounds[S0].reports == {}


def says(made: Exchanging, unit: UnitName, peer: str, accused: str, now_s: float) -> None:
    """An envoy of the newest round of a unit accuses another."""
    number = max(made._rounds[unit].told)
    timeline = 4 + int(peer[1])
    made.failed(PeerId(peer), RoundFailed(timeline, STEP, unit, number, "no proposal came", accused), now_s)


def test_who_did_not_reach_whom_is_known_of_all_envoys_of_a_round_that_failed() -> None:
    """The first that speaks ends the round, and of what others say later nothing was known."""
    made = Exchanging(STEP, UNITS, Round(1, 1), 5.0)
    made.begin(delegations(3, 1), 0.0)
    assert made.apart() == {}
    for envoy, accused in (("i0s0r0", "i2s0r0"), ("i1s0r0", "i2s0r0"), ("i2s0r0", "i0s0r0")):
        says(made, S0, envoy, accused, 5.0)
    assert made.apart() == {
        frozenset((4, 6)): "i2s0r0 says no proposal came",
        frozenset((5, 6)): "i1s0r0 says no proposal came",
    }


def test_what_failed_in_few_rounds_does_not_count() -> None:
    made = Exchanging(STEP, UNITS, Round(1, 1), 5.0)
    for number in range(4):
        made.begin(delegations(3, 1), 100.0 * number)
        says(made, S0, "i0s0r0", "i2s0r0" if number else "i1s0r0", 100.0 * number + 5.0)
    assert set(made.apart()) == {frozenset((4, 6))}


def test_an_envoy_that_accuses_nobody_of_another_island_tells_of_no_link() -> None:
    made, _ = begun()
    for accused in ("", "i0s0r0", "somebody"):
        made.begin(delegations(), 100.0)
        says(made, S0, "i0s0r0", accused, 5.0)
        made._rounds[S0].retry_s = 0.0
    assert made.apart() == {}


def test_an_envoy_is_silent_once_its_round_must_be_over_and_another_has_the_mean() -> None:
    made, sent = begun()
    assert made.silent(100.0) == set(), "nobody has it"
    made.averaged(PeerId("i0s0r0"), answer(sent[S0, PeerId("i0s0r0")]), 1.0)
    assert made.silent(4.9) == set()
    assert made.silent(5.0) == {5}
    made.averaged(PeerId("i1s0r0"), answer(sent[S0, PeerId("i1s0r0")]), 6.0)
    assert made.silent(100.0) == set()
