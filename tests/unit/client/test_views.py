"""How a job looks to people and programs."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from client.records import Island, Job, Link, Peer, Stage
from client.shell import Shell
from client.verbs.peers import drained_text
from client.verbs.watching import islands, overview
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


def view(**facts: object) -> Job:
    return Job(id="j", state="running", step=4, steps=9, loss=2.0, tokens_per_s=10.0, eta_s=3.0, **facts)


def shown(job: Job) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(job_table(job))
    return capture.get()


def test_validation_loss_and_perplexity_are_shown_once_there_is_an_evaluation() -> None:
    evaluated = view(evaluation_loss=math.log(10.0), evaluation_step=4)
    assert "validation 2.3026 (perplexity 10.00)" in progress_line(evaluated)
    assert "validation loss" in shown(evaluated)
    assert "2.3026 (perplexity 10.00) after step 4" in shown(evaluated)
    values = job_values(evaluated)["evaluation"]
    assert (values["step"], round(values["perplexity"], 6)) == (4, 10.0)
    never = view(evaluation_loss=math.nan)
    assert "validation" not in progress_line(never) + shown(never)
    assert job_values(never)["evaluation"] is None


def test_steps_that_were_skipped_are_counted_and_their_norm_is_no_number() -> None:
    """A job whose steps were all skipped showed a gradient norm of 0 and said nothing of it."""
    lines = [" ".join(line.split()) for line in shown(view(skipped_steps=4, grad_norm=math.nan)).splitlines()]
    assert "step 4 of 9, 4 of them skipped: not finite" in lines
    assert "gradient norm nan" in lines
    assert "skipped" not in shown(view())


def test_islands_are_shown_with_what_they_wait_for_and_of_a_stage_server_the_one_that_it_serves() -> None:
    some = (Island(0, ("a", "b"), 4, 2, "step 4: 1 microbatch in flight"), Island(1, ("c",), 5, 1, "waits"))
    job = view(islands=some)
    assert "step 4, 2 exchanges: a, b; step 4: 1 microbatch in flight" in shown(job)
    assert "step 5, 1 exchange: c; waits" in shown(job)
    assert job_values(job)["islands"][1] == {
        "island": 1, "state": "", "peers": ["c"], "step": 5, "exchanges": 1, "waits_for": "waits",
        "microbatches": 0, "microbatches_per_s": 0.0,
    }  # fmt: skip
    assert job_values(view())["islands"] == []
    at_work = view(islands=some)
    assert progress_line(at_work).endswith("  islands at 4 5, 1 exchange")
    assert "islands" not in progress_line(view())
    assert "islands" not in progress_line(replace(at_work, state="succeeded"))
    many = view(islands=tuple(Island(n, ("a",), 4, 2, "") for n in range(9)))
    assert progress_line(many).endswith("  islands at 4 4 4 4 4 4 4 4 ..., 2 exchanges")
    one_lost = view(islands=(Island(0, ("a",), 4, 2, ""), Island(1, (), 0, 0, "lost: stage 1 has no replica")))
    assert progress_line(one_lost).endswith("  islands at 4, 2 exchanges; island 1 lost")
    assert progress_line(view(islands=one_lost.islands[1:])).endswith("  island 1 lost")
    assert "lost: stage 1 has no replica" in shown(one_lost)
    assert "step 0" not in shown(one_lost)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(peers_table([Peer("c", job="j", stage=1, island="1"), Peer("d", job="k", stage=1)]))
    assert "1 in island 1" in capture.get()
    assert "in island" not in capture.get().splitlines()[2]
    assert [peer_values(Peer("c", job="j", stage=1, island=one))["island"] for one in ("1", "")] == [1, None]


def test_a_row_for_each_island_says_what_it_does_where_it_is_and_what_it_waits_for() -> None:
    stages = (Stage(0, 2, ("a", "c")), Stage(1, 2, ("b", "d", "e")))
    training = Island(0, ("a", "b", "e"), 4, 2, "step 4: 1 microbatch in flight", "training", 12, 3.14159)
    waiting = Island(1, ("c", "d"), 5, 1, "waits for the other islands", "waiting", 4)
    lost = Island(2, (), 0, 0, "lost: stage 1 has no replica", "lost", 4)
    job = view(stages=stages, islands=(training, waiting, lost))
    peers = [Peer("a", site="lyon"), Peer("b", site="berlin"), Peer("d", site="lyon"), Peer("x", site="oslo")]
    lines = [" ".join(line.split()) for line in printed(islands_table(job, peers), 200)]
    assert lines == [
        "ISLAND STATE SITE STEP EXCHANGES REPLICAS MICROBATCHES SPEED WAITS FOR",
        "0 training berlin, lyon 4 2 1 2 12 3.14/s step 4: 1 microbatch in flight",
        "1 waiting lyon 5 1 1 1 4 - the other islands",
        "2 lost - - - - - - lost: stage 1 has no replica",
    ]
    assert "SITE" not in printed(islands_table(job, []), 200)[0].split()
    values = islands_values(job, peers)
    assert [(one["sites"], one["replicas"]) for one in values] == [
        (["berlin", "lyon"], [1, 2]), (["lyon"], [1, 1]), ([], [0, 0]),
    ]  # fmt: skip
    assert (values[0]["state"], values[0]["microbatches"], values[1]["microbatches_per_s"]) == ("training", 12, 0.0)


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


def test_the_site_of_stage_servers_is_shown_where_one_has_said_it() -> None:
    with_site = printed(peers_table([Peer("c", site="lyon"), Peer("d")]), 200)
    assert "SITE" in with_site[0].split()
    assert "lyon" in with_site[1].split()
    assert "SITE" not in printed(peers_table([Peer("d")]), 200)[0].split()
    assert [peer_values(Peer("c", site=one))["site"] for one in ("lyon", "")] == ["lyon", None]


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


def test_a_list_of_jobs_begins_with_what_is_wrong_with_the_scheduler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ([view()], ["the broker is not connected"])
    connection = SimpleNamespace(jobs=lambda **_: found)
    monkeypatch.setattr(overview, "dial", lambda shell: nullcontext(connection))
    context: Any = SimpleNamespace(obj=Shell())
    overview.ls(context, all_=False, state="", limit=9)
    out, err = capsys.readouterr()
    assert err == "scheduler: the broker is not connected\n"
    assert "STATE" in out.splitlines()[0]


def test_a_validation_loss_that_is_not_finite_is_a_dash_and_null() -> None:
    broken = view(evaluation_loss=math.nan, evaluation_step=2)
    assert "validation - (perplexity -)" in progress_line(broken)
    assert job_values(broken)["evaluation"] == {"step": 2, "loss": None, "perplexity": None}
    assert job_values(view(evaluation_loss=1e9, evaluation_step=2))["evaluation"]["perplexity"] > 1e300


def printed(table: RenderableType, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (60, ["PEER", "STATE", "REASON"]),
        (80, ["PEER", "STATE", "STAGE", "JOB", "REASON"]),
        (120, ["PEER", "STATE", "STAGE", "JOB", "DEVICE", "MEMORY", "PACE", "WORK", "SINCE", "REASON"]),
    ],
)
def test_a_narrow_terminal_leaves_columns_of_peers_out_and_cuts_none(width: int, columns: list[str]) -> None:
    facts = {"stage": 1, "job": "example-1a2b3c", "device": "cpu", "threads": 4, "memory_bytes": 2 << 30, "pace_s": 0.1}
    reason = "stage 1 of example-1a2b3c; it fetches the state from vm-815eb3"
    peers = [
        Peer(id=f"build-machine-{n}", state="serving", address="127.0.0.1:40123", reason=reason, **facts)
        for n in range(3)
    ]
    lines = printed(peers_table(peers), width)
    assert max(map(len, lines)) <= width
    assert lines[0].split() == columns
    assert [line.split()[0] for line in lines if line.startswith("build")] == [peer.id for peer in peers]
    assert "…" not in "".join(lines)


def test_a_narrow_terminal_keeps_id_state_step_and_reason_of_jobs() -> None:
    jobs = [view(reason="training; all 4 replicas are loaded and at work") for _ in range(2)]
    lines = printed(jobs_table(jobs), 60)
    assert lines[0].split() == ["ID", "STATE", "STEP", "LOSS", "ETA", "REASON"]
    assert printed(jobs_table(jobs), 40)[0].split() == ["ID", "STATE", "REASON"]
    assert printed(jobs_table(jobs), 240)[0].split()[-2:] == ["AGE", "REASON"]


def test_priorities_have_a_column_only_where_somebody_gave_one() -> None:
    plain, high = view(), view(priority=7)
    assert "PRIORITY" not in printed(jobs_table([plain, plain]), 240)[0]
    header, first, second = printed(jobs_table([plain, high]), 240)
    at = header.index("PRIORITY")
    assert (first[at:].split()[0], second[at:].split()[0]) == ("0", "7")
    assert (job_values(high)["priority"], job_values(plain)["priority"]) == (7, 0)
    assert not any(line.startswith("priority") for line in printed(job_table(plain), 80))
    assert ["priority", "7"] in [line.split() for line in printed(job_table(high), 80)]


def test_an_explanation_names_a_topic_once_and_is_json_with_its_numbers() -> None:
    facts = [
        pb.Fact(topic="stage 0", text="2 replicas do 5 microbatches/s", numbers={"replicas": 2.0, "rate": math.inf}),
        pb.Fact(topic="idle", text="a is not used: [no] room"),
        pb.Fact(topic="idle", text="b is not used: no room"),
    ]
    found = pb.Explanation(kind="job", id="j", facts=facts)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explanation_table(found))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[0] == ["job", "j"]
    assert [line[0] for line in lines[2:]] == ["idle", "b"]
    assert "[no] room" in capture.get(), "a text is no markup"
    values = explanation_values(found)
    assert (values["kind"], values["id"]) == ("job", "j")
    assert values["facts"][0]["numbers"] == {"rate": None, "replicas": 2.0}
    json.dumps(values, allow_nan=False)


def test_what_became_of_a_drained_stage_server_is_told() -> None:
    assert "can be stopped" in drained_text(Peer(id="p", state="draining"))
    assert "p is gone: silent" in drained_text(Peer(id="p", state="gone", reason="silent"))


@pytest.mark.parametrize("microbatch", ["3", "3:", ":1", "-1:0", "a:b", "1:2:3"])
def test_a_microbatch_is_named_by_step_and_index(microbatch: str) -> None:
    with pytest.raises(UsageError, match="STEP:INDEX"):
        microbatch_name(microbatch)


def test_links_are_listed_with_the_slowest_first() -> None:
    views = [
        Peer(id="a", job="demo-1", links=(Link("b", 125e6, 0.0004), Link("c", 1.55e6, 0.02))),
        Peer(id="b", job="demo-1", links=(Link("a", 64e3, 0.3),)),
    ]
    head, *rows = (line.split() for line in printed(links_table(views), 80))
    assert head == ["FROM", "TO", "RATE", "RECEIPT", "JOB"]
    assert rows == [
        ["b", "a", "512", "kbit/s", "300.0", "ms", "demo-1"],
        ["a", "c", "12.4", "Mbit/s", "20.0", "ms", "demo-1"],
        ["a", "b", "1.0", "Gbit/s", "0.4", "ms", "demo-1"],
    ]
    assert peer_values(views[1])["links"] == [{"to": "a", "bytes_per_s": 64e3, "receipt_s": 0.3}]


def test_the_time_that_a_job_spent_is_shown_by_states_with_that_of_its_stage_servers() -> None:
    spent = {"stalled": 0.4, "running": 185.0, "queued": 3.0}
    assert "queued 3.0s, running 3m05s; its stage servers 6m10s together" in shown(view(times_s=spent, peer_s=370.0))
    assert "time spent" not in shown(view())
    assert (job_values(view(times_s=spent))["times_s"], job_values(view(peer_s=370.0))["peer_s"]) == (spent, 370.0)
