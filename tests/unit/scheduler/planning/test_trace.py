"""Traces, and `swarm simulate`, which plays them: bad lines are named, and figures say what became of a job."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler.planning.plan import Plan, document
from scheduler.planning.pool import PeerPool
from scheduler.planning.simulate.__main__ import cli
from scheduler.planning.trace import Churn, read_trace, spans
from swarm.errors import InvalidConfig, SwarmError
from tests.support.pools import equals

POOL = """
schema = "swarm.pool/1"
[[peer]]
name = "p"
count = 6
device = "cuda"
memory = "24GiB"
speed = 5e9
up = "1Gbit"
down = "1Gbit"
price_per_hour = 0.5
"""
JOB = """
schema_version = 1
name = "t"
model.config = { hidden_size = 768, num_hidden_layers = 6, num_attention_heads = 12, vocab_size = 8192 }
data = { source = "x", sequence_length = 512 }
training = { global_batch_sequences = 24, steps = 10, microbatch_sequences = 1 }
"""
HEAD = '{"schema": "swarm.trace/1", "unit": "s"}'
DIES = '{"t": 100, "event": "die", "peer": "p0"}'


def simulated(folder: Path, *flags: str, pool: str = POOL) -> str:
    (folder / "job.toml").write_text(JOB)
    (folder / "pool.toml").write_text(pool)
    words = [str(folder / "job.toml"), "--pool", str(folder / "pool.toml"), *flags]
    made = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert made.exit_code == 0, made.output
    return made.stdout


def read(folder: Path, *lines: str, pool: PeerPool | None = None) -> Sequence[object]:
    (folder / "trace.jsonl").write_text("\n".join(lines))
    return read_trace(folder / "trace.jsonl", pool or equals(2))


def test_deaths_and_a_changed_value_stand_beside_each_other(tmp_path: Path) -> None:
    flags = ("--hours", "0.5", "--churn", "4", "--also", "pipeline.stages=1", "-o", "json")
    text = simulated(tmp_path, *flags)
    assert text == simulated(tmp_path, *flags), "nothing is drawn that the seed does not say"
    document = json.loads(text)
    first, second = document["runs"].values()
    assert (document["schema"], document["job"], first["hours"]) == ("swarm.simulation/1", "t", 0.5)
    assert first["deaths"] > 0
    assert first["joins"] > 0
    assert 0 < first["tokens_per_s"] != second["tokens_per_s"] > 0
    assert 0.3 < first["of_possible"] < 1.0
    assert 1.2 < first["price"] <= 1.5, "six peers for half an hour, less what is away"


def test_hours_and_reasons_are_shown(tmp_path: Path) -> None:
    shown = simulated(tmp_path, "--hours", "1.5", "--churn", "2").splitlines()
    (hours,) = [line for line in shown if line.startswith("by hour")]
    assert len(hours.split()) == 2 + 2
    assert any(re.search(r" x stage server p-\d \(stage \d\) is gone: silent for \d", line) for line in shown)
    assert any(line.startswith("cut      job.toml: 3 stages of 3 x 2 layers, microb") for line in shown), shown
    assert any(re.fullmatch(r"price +[\d.]+ in the currency of the pool", line) for line in shown)
    assert any(re.fullmatch(r"of_possible +[\d.]+%", line) for line in shown)


def test_the_cut_and_the_places_of_a_plan_are_played_while_its_peers_are_there(tmp_path: Path) -> None:
    made = Plan((4, 2), (("p-0", "p-1", "p-2", "p-3"), ("p-4", "p-5")), 1, 3)
    for names, by in ((made.places, "plan"), ((("p-0", "p-1"), ("q",)), "scheduler")):
        (tmp_path / "plan.json").write_text(json.dumps(document(replace(made, places=names), "t")))
        shown = simulated(tmp_path, "--hours", "0.05", "--plan", str(tmp_path / "plan.json"))
        expected = "2 stages of 4 + 2 layers, microbatches of 1 sequence (3 of a step late)"
        assert f"cut      job.toml: {expected}, placed by the {by}" in shown


def test_machines_without_a_place_die_too_and_join_where_they_fit(tmp_path: Path) -> None:
    """`swarm simulate` knew only the placed machines, and the death of another ended it with a KeyError."""
    small = '[[peer]]\nname = "small"\ndevice = "cuda"\nmemory = "1MiB"\n'
    (tmp_path / "trace.jsonl").write_text(HEAD + '\n{"t": 30, "event": "die", "peer": "small"}')
    (tmp_path / "plan.json").write_text(json.dumps(document(Plan((6,), (("p-0", "p-1"),), 1), "t")))
    flags = "--hours", "0.05", "--trace", str(tmp_path / "trace.jsonl"), "-o", "json"
    (first,) = json.loads(simulated(tmp_path, *flags, pool=POOL + small))["runs"].values()
    assert (first["deaths"], first["joins"]) == (0, 0), "no stage fits the machine that dies"
    flags += "--plan", str(tmp_path / "plan.json")
    (second,) = json.loads(simulated(tmp_path, *flags, pool=POOL + small))["runs"].values()
    assert (second["joins"], second["cut"].split(", ")[0]) == (4, "1 stage of 6 layers")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ((), "line 1: it is no swarm.trace/1"),
        (('{"schema": "swarm.trace/2", "unit": "s"}',), r"line 1: it is no swarm.trace/1"),
        ((HEAD, "{"), "line 2: it is not JSON"),
        ((HEAD, "[]"), 'line 2: it has no "event"'),
        ((HEAD, '{"t": 1, "event": "explode", "peer": "p0"}'), 'line 2: "event" is "explode"'),
        ((HEAD, '{"t": 1, "event": "die", "peer": "p0", "n": 1}'), 'line 2: die has no key "n"'),
        ((HEAD, '{"t": NaN, "event": "die", "peer": "p0"}'), 'line 2: "t" is "NaN"'),
        ((HEAD, '{"t": -1, "event": "die", "peer": "p0"}'), 'line 2: "t" is -1'),
        ((HEAD, '{"t": 1, "event": "die"}'), 'line 2: it has no "peer"'),
        ((HEAD, '{"t": 1, "event": "die", "peer": "q"}'), 'line 2: the pool has no peer "q"'),
        ((HEAD, '{"t": 1, "event": "join", "peer": "p0"}'), "line 2: p0 is here already"),
        ((HEAD, DIES, '{"t": 101, "event": "leave", "peer": "p0"}'), "line 3: p0 is not here"),
        ((HEAD, DIES, "", '{"t": 99, "event": "die", "peer": "p1"}'), "line 4: t is 99, before 100 of the line above"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: Sequence[str], told: str) -> None:
    with pytest.raises(InvalidConfig, match=told) as refused:
        read(tmp_path, *lines)
    assert refused.value.hint


def test_a_trace_says_who_is_there(tmp_path: Path) -> None:
    trace = read(tmp_path, HEAD, DIES, '{"t": 200, "event": "join", "peer": "p0"}')
    there = [(seconds, sorted(peer.name for peer in peers)) for seconds, peers in spans(equals(2), trace, 1000.0)]
    assert there == [(100, ["p0", "p1"]), (100, ["p1"]), (800, ["p0", "p1"])]


def test_by_chance_each_peer_dies_as_often_as_it_is_told_and_comes_back() -> None:
    trace, again, other = (
        list(takewhile(lambda event: event.at_s < 48.0 * 3600.0, Churn(equals(40), 0.5, seed))) for seed in (3, 3, 4)
    )
    deaths = [event for event in trace if event.kind == "die"]
    assert len(deaths) == pytest.approx(40 * 48 * 0.5, rel=0.1)
    assert [event.at_s for event in trace] == sorted(event.at_s for event in trace)
    assert trace == again != other


def test_a_pool_whose_machines_are_all_dead_from_the_start_makes_nothing(tmp_path: Path) -> None:
    dies = [f'{{"t": 0, "event": "die", "peer": "p-{number}"}}' for number in range(6)]
    (tmp_path / "trace.jsonl").write_text("\n".join((HEAD, *dies)))
    shown = simulated(tmp_path, "--hours", "0.02", "--trace", str(tmp_path / "trace.jsonl"))
    assert re.search(r"^of_possible +0\.0%$", shown, re.MULTILINE)


def test_a_play_in_which_no_step_is_finished_says_so(tmp_path: Path) -> None:
    shown = simulated(tmp_path, "--hours", "0.01", "--set", "training.global_batch_sequences=4096")
    assert "In these 0.01 hours no step was finished." in shown


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--churn", "1", "--trace", "x"), "deaths come from one of them"),
        (("--also", "pipeline"), '--also needs KEY=VALUE, got "pipeline"'),
        (("--also", "pipeline.stages=1") * 2, "--also pipeline.stages=1 is given 2 times"),
        (("--set", "pipeline.stages=6", "--set", "limits.min_replicas=2"), "the job cannot begin"),
        (("--trace", "nothing.jsonl"), "there is no file"),
        (("--plan", "PLAN", "--set", "name=u"), r"is a plan of job t, not of u"),
        (("--plan", "PLAN", "--set", "model.config.num_hidden_layers=4"), "is of a model of 6 layers, this job has 4"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_its_cause(tmp_path: Path, flags: Sequence[str], told: str) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(document(Plan((6,), (("p-0",),), 1), "t")))
    with pytest.raises(SwarmError, match=told) as refused:
        simulated(tmp_path, *(str(plan) if flag == "PLAN" else flag for flag in flags))
    assert refused.value.hint
