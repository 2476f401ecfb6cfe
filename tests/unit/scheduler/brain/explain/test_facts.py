"""What a person is told of a job that waits or is slow, and of a peer that gets little work."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

from scheduler.brain.checkpoint.schedule import OpenCheckpoint
from scheduler.brain.explain.facts import (
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
    return tuple(replace(replica, **changes) if replica.peer == peer else replica for replica in situation().replicas)


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
    golden(*(told(explain_job(waiting, None, [IdlePeer(A, offer)], NOW_S), "needs", "idle") for offer in offers))


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
        name: replace(
            job,
            replicas=tuple(replace(replica, leave=leave) if replica.peer == C else replica for replica in job.replicas),
        )
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
    none_yet = situation(replicas=tuple(replace(replica, contributions=0) for replica in situation().replicas))
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
    unmeasured = replace(own, replicas=tuple(replace(replica, pace_s=0.0) for replica in own.replicas))
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


def test_a_job_says_how_many_train_it_unless_something_else_was_decided_or_the_database_is_away(golden: Golden) -> None:
    teams = (Team(1), Team(4), Team(4, 1), Team(4, 2, 1, 3))
    decided = "cannot pause, goes on: the checkpoint at step 20 could not be written"
    golden(
        "\n".join(reason_at_work(LOADED, team, awaits_database=False, unsaved="") for team in teams),
        reason_at_work(RESUMED, Team(2), awaits_database=False, unsaved="the checkpoint at step 20: no space"),
        *(reason_at_work(decided, Team(2), awaits_database=is_away, unsaved="x") for is_away in (False, True)),
    )


def test_a_job_says_which_machines_it_lost_and_that_no_step_went_with_them(golden: Golden) -> None:
    """After a kill the headline stayed "trains with 4 stage servers", and nobody saw that something had happened."""
    lost = [(0, 0, True), (1, 0, False), (1, 1, True), (1, 0, True), (2, 2, True), (2, 1, False)]
    golden("\n".join(f"{facts}: {machines_lost(*facts[:2], are_enough=facts[2])}" for facts in lost))


def test_a_job_that_waits_is_told_its_place_and_who_has_the_stage_servers(golden: Golden) -> None:
    """`placing: stage 0 needs 1 replica more` did not say that another job had all four stage servers.

    Of a job that is not the reader's only its size is told, of a large pool a few lines, and priorities where those
    that wait differ in them.
    """
    one, two, three = JobId("a-1"), JobId("b-2"), JobId("c-3")
    pool = tuple(Holder(JobId(f"j-{number}"), 2) for number in range(SHOWN + 3))
    queues = (
        JobQueue((two,), ()),
        JobQueue((one, two), (Holder(three, 4, 50, 200, 185.0),)),
        JobQueue((two,), (Holder(three, 4), Holder(one, 1))),
        JobQueue((two,), pool),
        JobQueue((one, two), (), {one: 3, two: 3}),
        JobQueue((three, one, two), (), {three: 7, one: 0, two: 0}),
    )
    golden(*(f"{queue.text(two)}\n{told(queue.facts(two))}" for queue in queues))


def test_the_evidence_is_told_in_a_sentence(golden: Golden) -> None:
    single = TrustRecord().struck(Strike(4.0, "y was wrong", False, 1))
    twice = single.struck(Strike(6.0, "dx was wrong", True, 214))
    assert explain_trust(TrustRecord(), 9.0) == []
    golden(told(explain_trust(single, 9.0)), told(explain_trust(twice, 9.0)))
