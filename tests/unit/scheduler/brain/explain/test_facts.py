"""What a person is told of a job that waits or is slow, and of a peer that gets little work."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from scheduler.brain.checkpoint.schedule import OpenCheckpoint
from scheduler.brain.explain.facts import (
    AWAITS_DATABASE,
    LOADED,
    RESUMED,
    SHOWN,
    Fact,
    Holder,
    IdlePeer,
    IslandStanding,
    JobQueue,
    JobStanding,
    JoinerStanding,
    ReplicaStanding,
    Situation,
    Team,
    explain_job,
    explain_peer,
    explain_trust,
    machines_lost,
    reason_at_work,
    why_it_stays,
)
from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.fleet.membership import NO_STAGE, Measured, Peer
from scheduler.brain.fleet.quarantine import Strike, TrustRecord
from scheduler.brain.state.pool import Leave
from swarm.types import NO_JOB, JobId, JobState, Memory, PeerId, PeerState
from swarm.wire.messages import Hello, LinkSpeed
from tests.support.golden import Golden
from tests.support.memories import memories

JOB = JobId("job")
A, B, C, D = (PeerId(name) for name in "abcd")  # a and b serve stage 0, c stage 1
NOW_S = 100.0


def standing(**changes: Any) -> JobStanding:
    job = JobStanding(
        JOB, JobState.RUNNING, "all 3 replicas are loaded", 65.0, "", 4, 9, 12, 2.0, memories(1 << 30, 1 << 20), 1
    )
    return replace(job, **changes)


def situation(**changes: Any) -> Situation:
    replicas = (
        ReplicaStanding(A, 0, 0.25, 2, 18),
        ReplicaStanding(B, 0, 1.0, 1, 6),
        ReplicaStanding(C, 1, 0.4, 3, 24),
    )
    return replace(Situation(True, 2, 4, "step 4: 3 microbatches in flight", "one stage", replicas), **changes)


def changed(peer: PeerId, **changes: Any) -> tuple[ReplicaStanding, ...]:
    return tuple(replace(one, **changes) if one.peer == peer else one for one in situation().replicas)


def peer(name: PeerId = B, state: PeerState = PeerState.SERVING, job: JobId = JOB, stage: int = 0) -> Peer:
    hello = Hello(name, 1, 1, "0", "", "", "cpu", 1, 1 << 30, -1, NO_JOB, 0, 0)
    return Peer(hello, state, "stage 0 of job", 90.0, 98.0, job, stage)


def idle_peer(state: PeerState = PeerState.IDLE) -> Peer:
    return peer(D, state, NO_JOB, NO_STAGE)


def told(facts: list[Fact], *topics: str) -> str:
    """A line for each fact, with its numbers; of all topics if none is named."""
    return "\n".join(
        f"{fact.topic}: {fact.text} {dict(sorted(fact.numbers.items()))}".removesuffix(" {}")
        for fact in facts
        if not topics or fact.topic in topics
    )


def of_job(*topics: str, at_work: Situation | None = None, idle: tuple[IdlePeer, ...] = (), **changes: Any) -> str:
    return told(explain_job(standing(**changes), at_work or situation(), list(idle), NOW_S), *topics)


def of_peer(one: Peer, at_work: Situation | None = None, *topics: str) -> str:
    return told(explain_peer(one, at_work or situation(), None, {}, NOW_S), *topics)


def test_a_rebalancing_decision_says_how_old_it_is(golden: Golden) -> None:
    """`stage 1: it limits the job` and, two lines on, `stage 0 limits`: of two moments, which nobody could see."""
    golden(of_job("rebalancing", at_work=situation(rebalanced_s=70.0)))


def test_overlap_is_told_with_the_share_of_a_step_that_its_busiest_stage_computes(golden: Golden) -> None:
    unknown = situation(replicas=changed(C, pace_s=0.0))
    golden(of_job("overlap", overlap=3, step_s=6.0), of_job("overlap", at_work=unknown, overlap=3))


def test_the_seconds_of_an_optimizer_on_the_host_are_told(golden: Golden) -> None:
    golden(of_job("optimizer", host_step_s=3.05))
    assert of_job("optimizer") == ""


def test_what_a_job_waits_for_is_told_of_both_memories(golden: Golden) -> None:
    """Whoever read `24.0 GiB idle` beside `stage 0 needs 21.2 GiB` could not see that the host's memory was short."""
    waiting = standing(state=JobState.QUEUED, needs=(Memory(14 << 30, 22 << 30), *[Memory(7 << 30, 20 << 30)] * 3))
    offers = (Memory(24 << 30, 8 << 30), Memory(24 << 30))
    golden(*(told(explain_job(waiting, None, [IdlePeer(A, one)], NOW_S), "needs", "idle") for one in offers))


def test_the_stage_that_limits_is_named_with_capacities(golden: Golden) -> None:
    golden(of_job())


def test_suspects_and_leavers_are_no_capacity(golden: Golden) -> None:
    suspect = situation(replicas=changed(A, suspect=True))
    assert (suspect.capacity(0), suspect.limiting()) == (1.0, 0)
    golden(of_job("stage 0", "suspect", at_work=suspect))
    assert situation(replicas=changed(A, leave=Leave("drained", until=7))).capacity(0) == 1.0
    assert situation(replicas=changed(A, leave=Leave("drained"))).capacity(0) == 5.0, "it stays, and works"
    assert situation(replicas=changed(C, suspect=True)).capacity(1) == 0.0


def test_nothing_is_claimed_of_what_was_never_measured(golden: Golden) -> None:
    one, nobody = situation(replicas=changed(B, pace_s=0.0)), situation(replicas=changed(C, pace_s=0.0))
    assert one.capacity(0) == 8.0, "taken to be as fast as the fastest"
    assert (nobody.capacity(1), nobody.limiting()) == (None, None)
    golden(
        of_job("stage 0", at_work=one),
        of_job("stage 1", "progress", at_work=nobody, step_s=nan),
        of_peer(peer(C, stage=1), nobody, "pace"),
    )


def test_stages_that_are_alike_and_single_ones_limit_nothing() -> None:
    assert situation(replicas=changed(C, pace_s=0.2)).limiting() is None
    assert situation(stages=1).limiting() is None


def test_joins_moves_leaves_failures_and_saving_are_told(golden: Golden) -> None:
    at_work = situation(
        joiners=(JoinerStanding(D, 1, 88.0, False),),
        moves=2,
        newest_move=(A, Leave("stage 0 limits", 0), 40.0),
        links={(A, C): 104.0},
        checkpoint=OpenCheckpoint(4, 97.0, {C: 1}),
        replicas=changed(B, leave=Leave("drained by its user", until=6), asked_s=99.0),
    )
    unused = IdlePeer(PeerId("e"), Memory(1), {JOB: "no stage fits its memory"})
    golden(of_job(at_work=at_work, idle=(unused, IdlePeer(PeerId("f"), Memory(1)))))


STAYS = {
    "last": (situation(), Leave("x")),
    "successor": (situation(joiners=(JoinerStanding(D, 1, 90.0, True),)), Leave("x")),
    "loading": (situation(is_running=False, waiting_for="waits for c to load"), Leave("x")),
    "steps": (situation(agreed=5), Leave("x", until=6)),
    "saver": (situation(checkpoint=OpenCheckpoint(4, 0.0, {C: 1})), Leave("x", until=4)),
    "due": (situation(), Leave("x", until=4)),
}


def test_why_a_peer_that_is_to_leave_stays(golden: Golden) -> None:
    leaving = {
        name: replace(job, replicas=tuple(replace(one, leave=leave) if one.peer == C else one for one in job.replicas))
        for name, (job, leave) in STAYS.items()
    }
    golden(*(f"{name}: {why_it_stays(job, C)}" for name, job in leaving.items()))


def test_a_peer_that_is_no_replica_waits_for_nothing_and_a_suspect_to_be_heard() -> None:
    assert why_it_stays(situation(), D) == ""
    assert why_it_stays(situation(), A) == "it was asked to leave"
    assert "heard again" in why_it_stays(situation(replicas=changed(A, suspect=True)), A)


def test_a_job_that_waits_says_what_it_needs_and_what_is_there(golden: Golden) -> None:
    waiting = standing(state=JobState.PLACING, reason="1 idle peer for 4", min_replicas=2, hint="start more")
    idle = [IdlePeer(D, Memory(3 << 29))]
    golden(told(explain_job(waiting, None, idle, NOW_S)), told(explain_job(waiting, None, [], NOW_S), "idle"))
    assert told(explain_job(standing(state=JobState.SUCCEEDED), None, [], NOW_S), "needs") == ""


def test_a_slow_replica_gets_little_work_and_the_numbers_say_so(golden: Golden) -> None:
    none_yet = situation(replicas=tuple(replace(one, contributions=0) for one in situation().replicas))
    golden(
        of_peer(peer()),
        of_peer(peer(A), None, "pace"),
        of_peer(peer(C, stage=1), None, "work"),
        of_peer(peer(), none_yet, "work"),
    )


def test_a_peer_says_that_it_is_suspect_joins_leaves_or_has_broken_links(golden: Golden) -> None:
    joins, loads = (situation(joiners=(JoinerStanding(D, 1, 88.0, True),)), peer(D, PeerState.LOADING, stage=1))
    guest = situation(joiners=(JoinerStanding(D, 1, 88.0, False, waits=True),))
    moving = situation(replicas=changed(B, leave=Leave("stage 1 limits", 1, 5)))
    golden(
        of_peer(peer(state=PeerState.SUSPECT), situation(links={(B, C): 101.0}), "suspect", "link"),
        of_peer(loads, joins),
        of_peer(loads, guest, "joining"),
        of_peer(peer(B, PeerState.LOADING), situation(replicas=changed(B, needs_donors=True)), "joining", "work"),
        of_peer(peer(), moving, "leaving"),
    )
    assert of_peer(loads, joins, "work") == ""


def test_an_idle_peer_says_why_each_job_does_not_use_it(golden: Golden) -> None:
    refused = IdlePeer(D, Memory(1), {JOB: "no stage fits its memory", JobId("other"): "the job takes nobody in now"})
    golden(
        *(
            told(explain_peer(idle_peer(state), None, unused, waiting, NOW_S), "not used") or "nothing"
            for state, unused, waiting in (
                (PeerState.IDLE, refused, {}),
                (PeerState.IDLE, refused, {JobId("new"): "1 idle peer for 2 stages"}),
                (PeerState.IDLE, None, {}),
                (PeerState.DRAINING, None, {JOB: "waits"}),
                (PeerState.GONE, None, {}),
            )
        )
    )


def test_islands_say_how_far_they_are_and_a_stage_server_which_one_it_serves(golden: Golden) -> None:
    islands = (
        IslandStanding(0, 4, 2, ((A,), (C,)), "waits for the other islands"),
        IslandStanding(1, 3, 1, ((B,), ()), "step 3: 1 microbatch in flight"),
        IslandStanding(2, 0, 0, (), "lost: nobody serves stage 0"),
    )
    at_work = situation(islands=islands)
    golden(
        of_job("island 0", "island 1", "island 2", at_work=at_work),
        of_peer(peer(), at_work, "serves"),
        of_peer(peer(), None, "serves"),
    )


def test_an_island_is_as_fast_as_its_slowest_stage() -> None:
    own = situation()
    slowest = min(own.capacity(stage) or 0.0 for stage in range(own.stages))
    assert slowest > 0.0
    assert IslandStanding(0, 4, 2, ((A,), (C,)), "", own).microbatches_per_s == slowest
    unmeasured = replace(own, replicas=tuple(replace(one, pace_s=0.0) for one in own.replicas))
    assert IslandStanding(0, 4, 2, ((A,), (C,)), "", unmeasured).microbatches_per_s == 0.0
    assert IslandStanding(1, 0, 0, (), "lost").microbatches_per_s == 0.0


def test_a_peer_says_how_fast_its_links_are(golden: Golden) -> None:
    golden(of_peer(replace(peer(), links=(LinkSpeed(C, 3.1e6, 0.0123),)), None, "link"))


def test_the_slowest_link_of_a_job_is_named_with_what_takes_long_because_of_it(golden: Golden) -> None:
    """A line of 1 Mbit/s held up saves and averaging for minutes, and nothing said which line it was."""
    one = peer(A)
    one.measured = Measured((LinkSpeed(C, 125_000.0, 0.2), LinkSpeed(D, 10.0, 9.0)))
    steps = (StepTimes(3, 0.0, 10.0, 33.0, 34.0), StepTimes(4, 34.0, 40.0))
    slow = explain_job(standing(), situation(state_bytes=(8_000_000, 1), steps=steps), [], NOW_S, [one, peer(C)])
    golden(told(slow, "slow link"))
    one.measured = Measured((LinkSpeed(C, 125e6, 0.01),))
    assert told(explain_job(standing(), situation(), [], NOW_S, [one]), "slow link") == ""


@pytest.mark.parametrize(
    ("team", "text"),
    [
        (Team(1), "trains with 1 stage server"),
        (Team(4), "trains with 4 stage servers"),
        (Team(4, 1), "trains with 4 stage servers, 1 of them is not heard"),
        (Team(4, 2, 1, 3), "trains with 4 stage servers, 2 of them are not heard, 1 of them leaves, 3 more join"),
    ],
)
def test_a_job_is_said_to_train_with_those_that_it_has(team: Team, text: str) -> None:
    for stored in (LOADED, RESUMED):
        assert reason_at_work(stored, team, awaits_database=False, unsaved="") == text


def test_a_checkpoint_that_could_not_be_written_is_said_until_one_is() -> None:
    told = reason_at_work(LOADED, Team(2), awaits_database=False, unsaved="the checkpoint at step 20: no space")
    assert told == "trains with 2 stage servers; the checkpoint at step 20: no space"


def test_what_was_decided_on_the_way_stands_and_the_database_comes_first() -> None:
    stored = "cannot pause, goes on: the checkpoint at step 20 could not be written"
    assert reason_at_work(stored, Team(2), awaits_database=False, unsaved="x") == stored
    assert reason_at_work(stored, Team(2), awaits_database=True, unsaved="x") == AWAITS_DATABASE


@pytest.mark.parametrize(
    ("lost", "back", "are_enough", "told"),
    [
        (0, 0, True, ""),
        (1, 0, False, "one machine was lost; no step lost"),
        (1, 1, True, "one machine was lost and is back; no step lost"),
        (1, 0, True, "one machine was lost and replaced; no step lost"),
        (2, 2, True, "2 machines were lost and are back; no step lost"),
        (2, 1, False, "2 machines were lost; no step lost"),
    ],
)
def test_a_job_says_which_machines_it_lost_and_that_no_step_went_with_them(
    lost: int, back: int, are_enough: bool, told: str
) -> None:
    """After a kill the headline stayed "trains with 4 stage servers", and nobody saw that something had happened."""
    assert machines_lost(lost, back, are_enough=are_enough) == told


JOB_A, JOB_B, JOB_C = JobId("a-1"), JobId("b-2"), JobId("c-3")


def queue_told(queue: JobQueue, job: JobId) -> dict[str, str]:
    return {fact.topic: fact.text for fact in queue.facts(job)}


def test_a_job_alone_is_told_nothing_of_a_queue() -> None:
    """`placing: stage 0 needs 1 replica more` did not say that another job had all four stage servers."""
    assert JobQueue((JOB_A,), ()).text(JOB_A) == ""
    assert queue_told(JobQueue((JOB_A,), ()), JOB_A) == {"queue": "number 1 of 1 that wait"}


def test_its_place_and_the_holder_are_in_the_reason() -> None:
    queue = JobQueue((JOB_A, JOB_B), (Holder(JOB_C, 4, 50, 200, 185.0),))
    assert queue.text(JOB_B) == "number 2 of 2 that wait; c-3 has 4 stage servers"
    assert JobQueue((JOB_B,), (Holder(JOB_C, 4), Holder(JOB_A, 1))).text(JOB_B) == "c-3 and 1 more have 5 stage servers"
    assert queue_told(queue, JOB_B) == {
        "queue": "number 2 of 2 that wait: a-1 before it",
        "in use": "c-3 has 4 stage servers, step 50 of 200, about 3 min 05 s left at this speed",
    }
    assert queue.facts(JOB_B)[1].numbers == {"stage_servers": 4.0, "left_s": 185.0}


def test_of_a_job_that_is_not_the_readers_only_its_size_is_told() -> None:
    assert queue_told(JobQueue((JOB_B,), (Holder(JOB_C, 1),)), JOB_B)["in use"] == "c-3 has 1 stage server"


def test_a_large_pool_is_told_in_few_lines() -> None:
    holders = tuple(Holder(JobId(f"j-{number}"), 2) for number in range(SHOWN + 3))
    facts = JobQueue((JOB_B,), holders).facts(JOB_B)
    assert [fact.topic for fact in facts] == ["queue"] + ["in use"] * (SHOWN + 1)
    assert facts[-1].text == "by 3 jobs more"


def test_priorities_are_told_where_those_that_wait_differ_in_them() -> None:
    alike = JobQueue((JOB_A, JOB_B), (), {JOB_A: 3, JOB_B: 3})
    assert alike.text(JOB_B) == "number 2 of 2 that wait"
    unequal = JobQueue((JOB_C, JOB_A, JOB_B), (), {JOB_C: 7, JOB_A: 0, JOB_B: 0})
    assert unequal.text(JOB_B) == "number 3 of 3 that wait, priority 0"
    assert queue_told(unequal, JOB_B)["queue"] == "number 3 of 3 that wait, priority 0: c-3 (priority 7), a-1 before it"


def test_the_evidence_is_told_in_a_sentence() -> None:
    assert explain_trust(TrustRecord(), 9.0) == []
    single = TrustRecord().struck(Strike(4.0, "y was wrong", False, 1))
    (strike,) = explain_trust(single, 9.0)
    assert strike.text == "5.0 s ago: y was wrong; not proven by a third; 1 hop of it had been checked in that job"
    quarantined, *strikes = explain_trust(single.struck(Strike(6.0, "dx was wrong", True, 214)), 9.0)
    assert quarantined.topic == "quarantined"
    assert quarantined.text == (
        "for 3.0 s: dx was wrong; 2 strikes, proven by a third; 214 hops of it checked in that job"
    )
    assert len(strikes) == 2
