"""What the page is told is what the views say, as JSON without what is not known; a change leads to the next state."""

from __future__ import annotations

import json
from dataclasses import replace
from math import nan
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from scheduler.brain.explain.facts import Fact, IslandStanding, JoinerStanding, ReplicaStanding, Situation
from scheduler.brain.explain.step_times import StepTimes
from scheduler.brain.state.pool import Leave
from scheduler.storage.job_log import LogLine
from scheduler.web import snapshot
from scheduler.web.snapshot import job_values, jobs_values, news_values, patch, peers_values, reroutes_values
from swarm.types import PeerId
from swarm.wire import jobs_pb2 as pb
from tests.support.golden import Golden

A, B, C, D = map(PeerId, "abcd")


def merged(target: Any, changes: Any) -> Any:
    """RFC 7396, as the page does it."""
    if not isinstance(changes, dict):
        return changes
    found = dict(target) if isinstance(target, dict) else {}
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


VALUES = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.text(max_size=2) | st.lists(st.integers(0, 2) | st.none(), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=12,
)
STATES = st.dictionaries(st.sampled_from("abcd"), VALUES, max_size=4)


@given(STATES, STATES)
def test_a_change_leads_from_one_state_to_the_next(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert merged(before, json.loads(json.dumps(patch(before, after)))) == after


@given(STATES)
def test_nothing_is_said_if_nothing_has_changed(state: dict[str, Any]) -> None:
    assert patch(state, json.loads(json.dumps(state))) == {}


def view(**values: Any) -> pb.JobView:
    stages = [pb.StageView(stage=0, layers=2, peers=[A, B]), pb.StageView(stage=1, layers=3, peers=[C])]
    return pb.JobView(**{"id": "demo-1", "name": "demo", "state": "running", "steps": 10, "stages": stages} | values)


def as_json(values: object) -> str:
    return json.dumps(values, allow_nan=False, indent=1)


def test_a_job_without_a_step_has_no_loss_and_no_speed(golden: Golden) -> None:
    golden(as_json(jobs_values([view(loss=nan, tokens_per_s=0.0, eta_s=nan)], [])))


def test_a_job_at_work_has_its_numbers_with_the_digits_that_people_read(golden: Golden) -> None:
    known = view(step=3, loss=2.345678, tokens_per_s=12345.6, eta_s=nan, evaluation_step=2, evaluation_loss=2.5)
    golden(as_json(jobs_values([known], [])))


def test_jobs_that_wait_have_their_place_and_the_priority_that_somebody_gave() -> None:
    waiting = [view(id="x-1", state="queued"), view(id="x-2", state="queued", priority=-3)]
    jobs = jobs_values(waiting, ["other", "x-2", "x-1"])
    assert {name: job["place"] for name, job in jobs.items()} == {"x-1": 3, "x-2": 2}
    assert [job.get("priority") for job in jobs.values()] == [None, -3]


REPLICAS = (
    ReplicaStanding(A, 0, 0.01234567, 3, 7),
    ReplicaStanding(B, 0, 0.0, 0, 0, suspect=True),
    ReplicaStanding(C, 1, 0.5, 1, 2, leave=Leave("it is faster there", 0), asked_s=1.0),
)
SITUATION = Situation(
    True,
    2,
    4,
    "step 4",
    "one stage",
    REPLICAS,
    joiners=(JoinerStanding(D, 1, 2.0, False),),
    steps=(StepTimes(3, 1.0, 2.0, 2.5, 3.00049, 1), StepTimes(4, 2.0)),
)
PEERS = {
    peer: pb.PeerView(id=peer, state="serving", reason="stage 0", device="cuda:0", job="demo-1") for peer in (A, B, C)
}


def test_replicas_stand_in_their_stages_with_load_pace_health_and_device(golden: Golden) -> None:
    golden(as_json(job_values(view(), SITUATION, [], PEERS)["stages"]))


def test_a_job_that_is_not_at_work_shows_who_served_it(golden: Golden) -> None:
    golden(as_json(job_values(view(), None, [Fact("needs", "2 stage servers")], {A: PEERS[A]})))


def test_a_step_under_way_has_no_times_yet_for_what_is_to_come() -> None:
    timeline = job_values(view(), SITUATION, [], PEERS)["timeline"]
    assert timeline == {"3": [1.0, 2.0, 2.5, 3.0, 1.0], "4": [2.0, None, None, None, 0.0]}


def test_each_island_has_its_stages_and_its_steps(golden: Golden) -> None:
    """The page showed all replicas of a stage in one column, and the steps of the first island as those of the job."""
    a, b, c = REPLICAS
    first = replace(SITUATION, replicas=(a, c), joiners=(), steps=(StepTimes(3, 1.0), StepTimes(4, 2.0, 2.0, 2.0, 2.5)))
    second = replace(SITUATION, replicas=(b,), steps=())
    standings = (
        IslandStanding(0, 3, 1, ((A,), (C,)), "waits for the other islands", first, (3, 0)),
        IslandStanding(1, 2, 0, ((B,), ()), "step 2: nobody serves stage 1", second),
        IslandStanding(2, 0, 0, (), "lost: nobody serves stage 0"),
    )
    golden(as_json(job_values(view(), replace(SITUATION, islands=standings), [], PEERS)))
    serving = pb.PeerView(id="a", state="serving", job="demo-1", stage=1, island="0")
    assert (peers_values([serving])["a"]["island"], "island" in peers_values([PEERS[A]])["a"]) == (0, False)


def test_the_pool_says_what_each_serves_and_how_it_is_reached(golden: Golden) -> None:
    relay = pb.PeerView(id="r", state="relay", device="relay", stage=-1, address="10.0.0.9:7953")
    busy = pb.PeerView(id="a", state="serving", job="demo-1", stage=0, pace_s=0.02, outstanding=2, memory_bytes=1 << 30)
    busy.links.add(to="b", bytes_per_s=125e6, receipt_s=0.001)
    busy.links.add(to="c", bytes_per_s=3e6, receipt_s=0.02)
    golden(as_json(peers_values([relay, busy])))


def test_texts_and_lists_of_others_are_bounded() -> None:
    pool = [pb.PeerView(id=f"p{number}", state="idle") for number in range(snapshot.PEERS_MAX + 5)]
    assert len(peers_values(pool)) == snapshot.PEERS_MAX
    (job,) = jobs_values([view(reason="x" * 10_000, hint="y" * 10_000)], []).values()
    assert {len(job["reason"]), len(job["hint"])} == {snapshot.TEXT_MAX}
    (line,) = news_values([(7, LogLine(1.0, "info", "", -1, "z" * 10_000))]).values()
    assert len(line["text"]) == snapshot.TEXT_MAX


def test_hops_that_were_given_to_another_replica_are_counted_by_reason() -> None:
    assert reroutes_values({(0, "timeout"): 2, (1, "timeout"): 1, (1, "gone"): 4}) == {"timeout": 3, "gone": 4}


def test_whatever_is_not_known_is_left_out_so_that_all_of_it_is_json() -> None:
    values = {
        "jobs": jobs_values(
            [view(step=1, loss=nan, tokens_per_s=nan, eta_s=nan, evaluation_step=1, evaluation_loss=nan)], []
        ),
        "job": job_values(view(), SITUATION, [], PEERS),
    }
    json.dumps(values, allow_nan=False)
