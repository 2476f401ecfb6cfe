"""How a job looks to people and programs."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console, RenderableType

from client.records import Island, Job, Link, Peer, Stage
from client.shell import Shell
from client.verbs.peers import drained_text
from client.verbs.watching import islands
from client.verbs.watching.explain import explanation_table, explanation_values, microbatch_name
from client.verbs.watching.follow import _plain, progress_line
from client.views import (
    islands_table,
    islands_values,
    job_table,
    job_values,
    jobs_table,
    links_table,
    peer_values,
    peers_table,
)
from swarm.errors import UsageError
from swarm.wire import jobs_pb2 as pb
from tests.support.golden import Golden


def view(**facts: object) -> Job:
    return Job(id="j", state="running", step=4, steps=9, loss=2.0, tokens_per_s=10.0, eta_s=3.0, **facts)


def shown(job: Job) -> str:
    return text_of(job_table(job))


def text_of(table: RenderableType, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return re.sub(r"\d+d\d+h", "long ago ", capture.get())  # since jobs of no time were created


def as_json(*values: object) -> str:
    return "\n".join(json.dumps(value, allow_nan=False) for value in values)


def test_validation_loss_and_perplexity_are_shown_once_there_is_an_evaluation(golden: Golden) -> None:
    evaluated, never = view(evaluation_loss=math.log(10.0), evaluation_step=4), view(evaluation_loss=math.nan)
    golden(*(text for view in (evaluated, never) for text in (progress_line(view), shown(view))))
    values = job_values(evaluated)["evaluation"]
    assert (values["step"], round(values["perplexity"], 6)) == (4, 10.0)
    assert job_values(never)["evaluation"] is None


def test_steps_that_were_skipped_are_counted_and_their_norm_is_no_number(golden: Golden) -> None:
    """A job whose steps were all skipped showed a gradient norm of 0 and said nothing of it."""
    golden(shown(view(skipped_steps=4, grad_norm=math.nan)))
    assert "skipped" not in shown(view())


def test_islands_are_shown_with_what_they_wait_for_and_of_a_stage_server_the_one_that_it_serves(golden: Golden) -> None:
    some = (Island(0, ("a", "b"), 4, 2, "step 4: 1 microbatch in flight"), Island(1, ("c",), 5, 1, "waits"))
    at_work = view(islands=some)
    one_lost = view(islands=(Island(0, ("a",), 4, 2, ""), Island(1, (), 0, 0, "lost: stage 1 has no replica")))
    many = view(islands=tuple(Island(n, ("a",), 4, 2, "") for n in range(9)))
    jobs = (at_work, view(), replace(at_work, state="succeeded"), many, one_lost, view(islands=one_lost.islands[1:]))
    peers = [Peer("c", job="j", stage=1, island="1"), Peer("d", job="k", stage=1)]
    golden(
        shown(at_work),
        shown(one_lost),
        "\n".join(map(progress_line, jobs)),
        as_json(*job_values(at_work)["islands"], job_values(view())["islands"]),
        text_of(peers_table(peers)),
        as_json([peer_values(peer)["island"] for peer in peers]),
    )


def test_a_row_for_each_island_says_what_it_does_where_it_is_and_what_it_waits_for(golden: Golden) -> None:
    stages = (Stage(0, 2, ("a", "c")), Stage(1, 2, ("b", "d", "e")))
    training = Island(0, ("a", "b", "e"), 4, 2, "step 4: 1 microbatch in flight", "training", 12, 3.14159)
    waiting = Island(1, ("c", "d"), 5, 1, "waits for the other islands", "waiting", 4)
    lost = Island(2, (), 0, 0, "lost: stage 1 has no replica", "lost", 4)
    job = view(stages=stages, islands=(training, waiting, lost))
    peers = [Peer("a", site="lyon"), Peer("b", site="berlin"), Peer("d", site="lyon"), Peer("x", site="oslo")]
    golden(text_of(islands_table(job, peers)), text_of(islands_table(job, [])), as_json(*islands_values(job, peers)))


@pytest.mark.parametrize(
    ("state", "told"),
    [("running", "job j has no islands: its replicas"), ("paused", "job j is paused: only a job at work has islands")],
)
def test_a_job_without_islands_is_told_to_have_none(
    state: str, told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = SimpleNamespace(get=lambda job: replace(view(), state=state))
    monkeypatch.setattr(islands, "dial", lambda shell: nullcontext(connection))
    islands.islands(SimpleNamespace(obj=Shell()), "j")  # type: ignore[arg-type]
    assert capsys.readouterr().err.startswith(told)
    islands.islands(SimpleNamespace(obj=Shell(output="json")), "j")  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["data"] == []


def test_a_job_whose_islands_are_not_known_yet_is_not_told_to_have_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just after a restart of the scheduler it was, although its job file names them."""
    job = view(reason="waits for stage servers", spec_json='{"averaging": {"mode": "diloco"}, "islands": {"count": 2}}')
    connection = SimpleNamespace(get=lambda name: job)
    monkeypatch.setattr(islands, "dial", lambda shell: nullcontext(connection))
    islands.islands(SimpleNamespace(obj=Shell()), "j")  # type: ignore[arg-type]
    told = " ".join(capsys.readouterr().err.split())
    assert told.startswith("job j has islands, but the scheduler has not heard of them since it started")
    assert told.endswith("(running, step 4 of 9: waits for stage servers)")


def test_the_site_of_stage_servers_is_shown_where_one_has_said_it(golden: Golden) -> None:
    peers = [Peer("c", site="lyon"), Peer("d")]
    golden(text_of(peers_table(peers)), text_of(peers_table(peers[1:])))
    assert [peer_values(peer)["site"] for peer in peers] == ["lyon", None]


def test_a_follower_says_why_a_running_job_is_in_another_situation(capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk was in `ls` only: `submit` showed the last step for minutes."""
    show = _plain(Shell())
    for reason in ("trains with 2 stage servers", "trains with 2 stage servers", "no space left"):
        show(view(reason=reason))
    show(Job(id="j", state="stalled", reason="stage 1 has no replica"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "running: trains with 2 stage servers"
    assert lines[1].startswith("step 4/9")
    assert lines[2:] == ["running: no space left", "stalled: stage 1 has no replica"]


def test_a_validation_loss_that_is_not_finite_is_a_dash_and_null() -> None:
    broken = view(evaluation_loss=math.nan, evaluation_step=2)
    assert "validation - (perplexity -)" in progress_line(broken)
    assert job_values(broken)["evaluation"] == {"step": 2, "loss": None, "perplexity": None}
    assert job_values(view(evaluation_loss=1e9, evaluation_step=2))["evaluation"]["perplexity"] > 1e300


def test_a_narrow_terminal_leaves_columns_of_peers_out_and_cuts_none(golden: Golden) -> None:
    facts = {"stage": 1, "job": "example-1a2b3c", "device": "cpu", "threads": 4, "memory_bytes": 2 << 30, "pace_s": 0.1}
    reason = "stage 1 of example-1a2b3c; it fetches the state from vm-815eb3"
    peers = [
        Peer(id=f"build-machine-{n}", state="serving", address="127.0.0.1:40123", reason=reason, **facts)
        for n in range(3)
    ]
    for width in (60, 80, 120):
        assert max(map(len, text_of(peers_table(peers), width).splitlines())) <= width
    golden(*(text_of(peers_table(peers), width) for width in (60, 80, 120)))


def test_a_narrow_terminal_keeps_id_state_step_and_reason_of_jobs(golden: Golden) -> None:
    jobs = [view(reason="training; all 4 replicas are loaded and at work") for _ in range(2)]
    golden(*(text_of(jobs_table(jobs), width) for width in (40, 60, 240)))


def test_priorities_have_a_column_only_where_somebody_gave_one(golden: Golden) -> None:
    plain, high = view(), view(priority=7)
    golden(text_of(jobs_table([plain, plain]), 240), text_of(jobs_table([plain, high]), 240), shown(high))
    assert (job_values(high)["priority"], job_values(plain)["priority"]) == (7, 0)


def test_an_explanation_names_a_topic_once_and_is_json_with_its_numbers(golden: Golden) -> None:
    facts = [
        pb.Fact(topic="stage 0", text="2 replicas do 5 microbatches/s", numbers={"replicas": 2.0, "rate": math.inf}),
        pb.Fact(topic="idle", text="a is not used: [no] room"),
        pb.Fact(topic="idle", text="b is not used: no room"),
    ]
    found = pb.Explanation(kind="job", id="j", facts=facts)
    golden(text_of(explanation_table(found)), as_json(explanation_values(found)))


def test_what_became_of_a_drained_stage_server_is_told() -> None:
    assert "can be stopped" in drained_text(Peer(id="p", state="draining"))
    assert "p is gone: silent" in drained_text(Peer(id="p", state="gone", reason="silent"))


@pytest.mark.parametrize("microbatch", ["3", "3:", ":1", "-1:0", "a:b", "1:2:3"])
def test_a_microbatch_is_named_by_step_and_index(microbatch: str) -> None:
    with pytest.raises(UsageError, match="STEP:INDEX"):
        microbatch_name(microbatch)


def test_links_are_listed_with_the_slowest_first(golden: Golden) -> None:
    views = [
        Peer(id="a", job="demo-1", links=(Link("b", 125e6, 0.0004), Link("c", 1.55e6, 0.02))),
        Peer(id="b", job="demo-1", links=(Link("a", 64e3, 0.3),)),
    ]
    golden(text_of(links_table(views), 80), as_json(peer_values(views[1])["links"]))


def test_the_time_that_a_job_spent_is_shown_by_states_with_that_of_its_stage_servers(golden: Golden) -> None:
    spent = {"stalled": 0.4, "running": 185.0, "queued": 3.0}
    golden(shown(view(times_s=spent, peer_s=370.0)), shown(view()))
    assert (job_values(view(times_s=spent))["times_s"], job_values(view(peer_s=370.0))["peer_s"]) == (spent, 370.0)
