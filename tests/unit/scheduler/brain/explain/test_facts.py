"""What a person is told of a job that waits or is slow, and of a peer that gets little work."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from scheduler.brain.checkpoint.schedule import OpenCheckpoint
from scheduler.brain.explain.facts import (
    Fact,
    IdlePeer,
    IslandStanding,
    JobStanding,
    JoinerStanding,
    ReplicaStanding,
    Situation,
    explain_job,
    explain_peer,
    why_it_stays,
)
from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.fleet.membership import NO_STAGE, Measured, Peer
from scheduler.brain.state.leaves import Leave
from swarm.types import NO_JOB, JobId, JobState, Memory, PeerId, PeerState
from swarm.wire.messages import Hello, LinkSpeed
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


def told(facts: list[Fact]) -> dict[str, str]:
    return {fact.topic: fact.text for fact in facts}


def test_a_rebalancing_decision_says_how_old_it_is() -> None:
    """`stage 1: it limits the job` and, two lines on, `stage 0 limits`: of two moments, which nobody could see."""
    says = told(explain_job(standing(), situation(rebalanced_s=70.0), [], NOW_S))
    assert says["rebalancing"] == "30.0 s ago: one stage"


def numbers(facts: list[Fact], topic: str) -> dict[str, float]:
    (found,) = [dict(fact.numbers) for fact in facts if fact.topic == topic]
    return found


def test_overlap_is_told_with_the_share_of_a_step_that_its_busiest_stage_computes() -> None:
    facts = explain_job(standing(overlap=3, step_s=6.0), situation(), [], NOW_S)
    assert told(facts)["overlap"].startswith("3 of the 12 microbatches of a step use weights one step old; ")
    assert told(facts)["overlap"].endswith("; the overlap hides up to 20% of a step")
    busy = pytest.approx(12 / 2.5 / 6.0)
    assert numbers(facts, "overlap") == {"microbatches": 3.0, "busy_ratio": busy, "hidden_ratio": pytest.approx(0.2)}
    unknown = explain_job(standing(overlap=3), situation(replicas=changed(C, pace_s=0.0)), [], NOW_S)
    assert numbers(unknown, "overlap") == {"microbatches": 3.0}


def test_the_seconds_of_an_optimizer_on_the_host_are_told() -> None:
    facts = explain_job(standing(host_step_s=3.05), situation(), [], NOW_S)
    assert told(facts)["optimizer"] == (
        "runs on the hosts: up to 3.0 s of a step where a host has one core, less with more"
    )
    assert numbers(facts, "optimizer") == {"host_step_s": 3.05}
    assert "optimizer" not in told(explain_job(standing(), situation(), [], NOW_S))


def test_what_a_job_waits_for_is_told_of_both_memories() -> None:
    """Whoever read `24.0 GiB idle` beside `stage 0 needs 21.2 GiB` could not see that the host's memory was short."""
    waiting = standing(state=JobState.QUEUED, needs=(Memory(14 << 30, 22 << 30), *[Memory(7 << 30, 20 << 30)] * 3))
    idle = [IdlePeer(A, Memory(24 << 30, 8 << 30))]
    says = told(explain_job(waiting, None, idle, NOW_S))
    assert says["needs"].endswith(
        "memory: stage 0 14.0 GiB on the device and 22.0 GiB of host memory, "
        "stages 1 to 3 7.0 GiB on the device and 20.0 GiB of host memory each"
    )
    assert says["idle"] == "1: a (24.0 GiB on the device and 8.0 GiB of host memory)"
    says = told(explain_job(waiting, None, [IdlePeer(A, Memory(24 << 30))], NOW_S))
    assert says["needs"].endswith("memory: stage 0 36.0 GiB, stages 1 to 3 27.0 GiB each")


def test_the_stage_that_limits_is_named_with_capacities() -> None:
    facts = explain_job(standing(), situation(), [], NOW_S)
    says = told(facts)
    assert says["state"] == "running for 1 min 05 s: all 3 replicas are loaded"
    assert says["progress"] == "step 4 of 9; 2 s per step of 12 microbatches, 6 microbatches/s"
    assert says["waits for"] == "step 4: 3 microbatches in flight"
    assert says["stage 0"] == "2 replicas do 5 microbatches/s; a 0.25 s, b 1 s"
    assert says["stage 1"] == "1 replica does 2.5 microbatches/s: it limits the job (the next one does 5); c 0.4 s"
    assert numbers(facts, "stage 1")["microbatches_per_s"] == 2.5
    assert numbers(facts, "progress") == {"step": 4.0, "steps": 9.0, "step_s": 2.0, "microbatches_per_s": 6.0}
    assert says["rebalancing"] == "one stage"
    assert {"joining", "leaving", "suspect", "moves", "link", "checkpoint", "idle"}.isdisjoint(says)


def test_suspects_and_leavers_are_no_capacity() -> None:
    suspect = situation(replicas=changed(A, suspect=True))
    assert suspect.capacity(0) == 1.0
    assert suspect.limiting() == 0
    says = told(explain_job(standing(), suspect, [], NOW_S))
    assert says["stage 0"].startswith("2 replicas, of which 1 gets work, do 1 microbatches/s: it limits the job")
    assert says["suspect"] == "a (stage 0) gets no work until it is heard again"
    assert situation(replicas=changed(A, leave=Leave("drained", until=7))).capacity(0) == 1.0
    assert situation(replicas=changed(A, leave=Leave("drained"))).capacity(0) == 5.0, "it stays, and works"
    assert situation(replicas=changed(C, suspect=True)).capacity(1) == 0.0


def test_nothing_is_claimed_of_what_was_never_measured() -> None:
    one = situation(replicas=changed(B, pace_s=0.0))
    assert one.capacity(0) == 8.0, "taken to be as fast as the fastest"
    assert "(estimated)" in told(explain_job(standing(), one, [], NOW_S))["stage 0"]
    nobody = situation(replicas=changed(C, pace_s=0.0))
    assert nobody.capacity(1) is None
    assert nobody.limiting() is None
    says = told(explain_job(standing(step_s=nan), nobody, [], NOW_S))
    assert says["stage 1"] == "1 replica, not measured yet; c not measured"
    assert says["progress"] == "step 4 of 9"
    assert told(explain_peer(peer(C, stage=1), nobody, None, {}, NOW_S))["pace"].startswith("not measured yet")


def test_stages_that_are_alike_and_single_ones_limit_nothing() -> None:
    assert situation(replicas=changed(C, pace_s=0.2)).limiting() is None
    assert situation(stages=1).limiting() is None


def test_joins_moves_leaves_failures_and_saving_are_told() -> None:
    facts = explain_job(
        standing(),
        situation(
            joiners=(JoinerStanding(D, 1, 88.0, False),),
            moves=2,
            newest_move=(A, Leave("stage 0 limits", 0), 40.0),
            links={(A, C): 104.0},
            checkpoint=OpenCheckpoint(4, 97.0, {C: 1}),
            replicas=changed(B, leave=Leave("drained by its user", until=6), asked_s=99.0),
        ),
        [IdlePeer(PeerId("e"), Memory(1), {JOB: "no stage fits its memory"}), IdlePeer(PeerId("f"), Memory(1))],
        NOW_S,
    )
    says = told(facts)
    assert says["joining"] == "d has been joining stage 1 for 12.0 s: it fetches the stage's state"
    assert says["moves"] == "2 so far; the newest 1 min 00 s ago: a to stage 0: stage 0 limits"
    assert says["link"] == "a and c cannot reach each other; avoided for 4.0 s more"
    assert says["checkpoint"] == "the one of step 4 has been under way for 3.0 s: waits for stage 1 (c)"
    assert says["leaving"] == (
        "b was asked to leave 1.0 s ago (drained by its user): it takes no new work; 2 steps to finish, "
        "1 microbatch outstanding"
    )
    assert [fact.text for fact in facts if fact.topic == "idle"] == ["e is not used: no stage fits its memory"]


@pytest.mark.parametrize(
    ("job", "leave", "stays"),
    [
        (
            situation(),
            Leave("x"),
            "it is the last of stage 1 and stays until another one has joined; no one joins: start",
        ),
        (situation(joiners=(JoinerStanding(D, 1, 90.0, True),)), Leave("x"), "until another one has joined; d joins"),
        (situation(is_running=False, waiting_for="waits for c to load"), Leave("x"), "it stays until the job runs"),
        (
            situation(agreed=5),
            Leave("x", until=6),
            "it takes no new work; 1 step to finish, 3 microbatches outstanding",
        ),
        (
            situation(checkpoint=OpenCheckpoint(4, 0.0, {C: 1})),
            Leave("x", until=4),
            "hands over stage 1 for the checkpoint",
        ),
        (situation(), Leave("x", until=4), "it is about to be released"),
    ],
    ids=["last", "successor", "loading", "steps", "saver", "due"],
)
def test_why_a_peer_that_is_to_leave_stays(job: Situation, leave: Leave, stays: str) -> None:
    replicas = tuple(replace(one, leave=leave) if one.peer == C else one for one in job.replicas)
    assert stays in why_it_stays(replace(job, replicas=replicas), C)


def test_a_peer_that_is_no_replica_waits_for_nothing_and_a_suspect_to_be_heard() -> None:
    assert why_it_stays(situation(), D) == ""
    assert why_it_stays(situation(), A) == "it was asked to leave"
    assert "heard again" in why_it_stays(situation(replicas=changed(A, suspect=True)), A)


def test_a_job_that_waits_says_what_it_needs_and_what_is_there() -> None:
    waiting = standing(state=JobState.PLACING, reason="1 idle peer for 4", min_replicas=2, hint="start more")
    says = told(explain_job(waiting, None, [IdlePeer(D, Memory(3 << 29))], NOW_S))
    assert says["state"] == "placing for 1 min 05 s: 1 idle peer for 4"
    assert says["hint"] == "start more"
    assert says["needs"] == "4 stage servers (2 stages x 2 replicas); memory: stage 0 1.0 GiB, stage 1 1.0 MiB"
    assert says["idle"] == "1: d (1.5 GiB)"
    assert told(explain_job(waiting, None, [], NOW_S))["idle"] == "0: nobody"
    assert "needs" not in told(explain_job(standing(state=JobState.SUCCEEDED), None, [], NOW_S))


def test_a_slow_replica_gets_little_work_and_the_numbers_say_so() -> None:
    facts = explain_peer(peer(), situation(), None, {}, NOW_S)
    says = told(facts)
    assert says["state"] == "serving for 10.0 s: stage 0 of job"
    assert says["serves"] == "stage 0 of job"
    assert says["work"] == (
        "did 6 of 24 microbatches of the newest steps at stage 0: 25%; an equal share of 2 replicas is 50%; "
        "1 microbatch outstanding of the stage's 3"
    )
    assert says["pace"] == "1 s per microbatch (slow), the median of stage 0 is 0.625 s"
    assert numbers(facts, "work")["share"] == 0.25
    assert "(fast)" in told(explain_peer(peer(A), situation(), None, {}, NOW_S))["pace"]
    alone = told(explain_peer(peer(C, stage=1), situation(), None, {}, NOW_S))
    assert "it is the only replica" in alone["work"]
    none_yet = situation(replicas=tuple(replace(one, contributions=0) for one in situation().replicas))
    assert told(explain_peer(peer(), none_yet, None, {}, NOW_S))["work"].startswith("nothing of the newest steps")


def test_a_peer_says_that_it_is_suspect_joins_leaves_or_has_broken_links() -> None:
    suspect = told(explain_peer(peer(state=PeerState.SUSPECT), situation(links={(B, C): 101.0}), None, {}, NOW_S))
    assert suspect["suspect"] == "not heard for 2.0 s: it gets no work"
    assert suspect["link"] == "b and c cannot reach each other; avoided for 1.0 s more"
    joiner = situation(joiners=(JoinerStanding(D, 1, 88.0, True),))
    joining = told(explain_peer(peer(D, PeerState.LOADING, stage=1), joiner, None, {}, NOW_S))
    assert joining["joining"] == "d has been joining stage 1 for 12.0 s: its state is complete and is compared"
    assert "work" not in joining
    guest = situation(joiners=(JoinerStanding(D, 1, 88.0, False, waits=True),))
    waits = told(explain_peer(peer(D, PeerState.LOADING, stage=1), guest, None, {}, NOW_S))
    assert waits["joining"].endswith(": it waits for an exchange")
    admitted = situation(replicas=changed(B, needs_donors=True))
    leaning = told(explain_peer(peer(B, PeerState.LOADING), admitted, None, {}, NOW_S))
    assert leaning["joining"].startswith("it computes")
    assert "work" in leaning
    moving = situation(replicas=changed(B, leave=Leave("stage 1 limits", 1, 5)))
    assert told(explain_peer(peer(), moving, None, {}, NOW_S))["leaving"].startswith(
        "was asked to move from stage 0 to 1 (stage 1"
    )


def test_an_idle_peer_says_why_each_job_does_not_use_it() -> None:
    refused = IdlePeer(D, Memory(1), {JOB: "no stage fits its memory", JobId("other"): "the job takes nobody in now"})
    facts = explain_peer(idle_peer(), None, refused, {}, NOW_S)
    assert [fact.text for fact in facts if fact.topic == "not used"] == [
        "job: no stage fits its memory",
        "other: the job takes nobody in now",
    ]
    facts = explain_peer(idle_peer(), None, refused, {JobId("new"): "1 idle peer for 2 stages"}, NOW_S)
    assert [fact.text for fact in facts if fact.topic == "not used"] == [
        "new waits: 1 idle peer for 2 stages",
        "job: no stage fits its memory",
        "other: the job takes nobody in now",
    ]
    assert told(explain_peer(idle_peer(), None, None, {}, NOW_S))["not used"] == "no job is at work that could use it"
    drained = told(explain_peer(idle_peer(PeerState.DRAINING), None, None, {JOB: "waits"}, NOW_S))
    assert drained["not used"].startswith("it is drained")
    assert "not used" not in told(explain_peer(idle_peer(PeerState.GONE), None, None, {}, NOW_S))


def test_islands_say_how_far_they_are_and_a_stage_server_which_one_it_serves() -> None:
    islands = (
        IslandStanding(0, 4, 2, ((A,), (C,)), "waits for the other islands"),
        IslandStanding(1, 3, 1, ((B,), ()), "step 3: 1 microbatch in flight"),
        IslandStanding(2, 0, 0, (), "lost: nobody serves stage 0"),
    )
    facts = explain_job(standing(), situation(islands=islands), [], 100.0)
    told = {fact.topic: fact.text for fact in facts}
    assert told["island 0"] == f"step 4, 2 exchanges; waits for the other islands; stage 0: {A}; stage 1: {C}"
    assert told["island 1"].startswith("step 3, 1 exchange; step 3: 1 microbatch in flight; ")
    assert told["island 2"] == "lost: nobody serves stage 0"
    assert [dict(fact.numbers) for fact in facts if fact.topic == "island 2"] == [{"island": 2.0}]
    serves = {fact.topic: fact.text for fact in explain_peer(peer(), situation(islands=islands), None, {}, 100.0)}
    assert serves["serves"] == f"stage 0 of island 1 of {JOB}"
    plain = {fact.topic: fact.text for fact in explain_peer(peer(), situation(), None, {}, 100.0)}
    assert plain["serves"] == f"stage 0 of {JOB}"


def test_an_island_is_as_fast_as_its_slowest_stage() -> None:
    own = situation()
    slowest = min(own.capacity(stage) or 0.0 for stage in range(own.stages))
    assert slowest > 0.0
    assert IslandStanding(0, 4, 2, ((A,), (C,)), "", own).microbatches_per_s == slowest
    unmeasured = replace(own, replicas=tuple(replace(one, pace_s=0.0) for one in own.replicas))
    assert IslandStanding(0, 4, 2, ((A,), (C,)), "", unmeasured).microbatches_per_s == 0.0
    assert IslandStanding(1, 0, 0, (), "lost").microbatches_per_s == 0.0


def test_a_peer_says_how_fast_its_links_are() -> None:
    facts = explain_peer(replace(peer(), links=(LinkSpeed(C, 3.1e6, 0.0123),)), situation(), None, {}, NOW_S)
    assert told(facts)["link"] == "24.8 Mbit/s to c, a receipt after 12.3 ms at best"
    assert numbers(facts, "link") == {"bytes_per_s": 3.1e6, "receipt_s": 0.0123}


def test_the_slowest_link_of_a_job_is_named_with_what_takes_long_because_of_it() -> None:
    """A line of 1 Mbit/s held up saves and averaging for minutes, and nothing said which line it was."""
    one = peer(A)
    one.measured = Measured((LinkSpeed(C, 125_000.0, 0.2), LinkSpeed(D, 10.0, 9.0)))
    steps = (StepTimes(3, 0.0, 10.0, 33.0, 34.0), StepTimes(4, 34.0, 40.0))
    facts = explain_job(standing(), situation(state_bytes=(8_000_000, 1), steps=steps), [], NOW_S, [one, peer(C)])
    (fact,) = [fact for fact in facts if fact.topic == "slow link"]
    assert fact.text.startswith("a sends 1.0 Mbit/s to c, the slowest link of the job: at that rate a save of stage 0")
    assert fact.numbers == {"bytes_per_s": 125_000.0, "receipt_s": 0.2, "save_s": 64.0, "averaging_s": 23.0}
    assert "averaging.compression" in fact.text
    one.measured = Measured((LinkSpeed(C, 125e6, 0.01),))
    assert "slow link" not in told(explain_job(standing(), situation(), [], NOW_S, [one]))
