"""`swarm plan` from files to the printed plan: golden plans, the reasons, and every wrong input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from client.records import Peer
from client.verbs.peers import pool_lines
from scheduler.planning.__main__ import cli
from scheduler.planning.bound import CutBound
from scheduler.planning.plan import Plan, document
from scheduler.planning.planner import ABOVE_BOUND, again, plan_of
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, PoolLink
from scheduler.planning.search import TIE, Search
from scheduler.planning.table import headline, lines
from swarm.errors import InvalidConfig, OutOfMemory, SwarmError
from tests.support.pools import GIB, cities, equals, machine, planned_job, two_sites

GOLDEN = Path(__file__).with_name("golden_plans.json")
POOLS = {"8 equal": equals, "8 cities": cities, "two sites": two_sites}
JOB = """
name = "t"
[model.config]
hidden_size = 768
num_hidden_layers = 4
num_attention_heads = 12
[data]
source = "x"
sequence_length = 512
"""
POOL = 'schema = "swarm.pool/1"\n[[peer]]\nname = "a"\ncount = 4\nspeed = 1e12\nprice_per_hour = 1.0\n'


def searched(pool: PeerPool, *, effort: int = 3000, **options: Any) -> Search:
    search = Search(pool, planned_job(options.pop("layers", 12)), effort=effort, **options)
    for _ in search.run():
        pass
    return search


def planned(search: Search) -> Plan:
    """The plan by the bound alone."""
    return plan_of(search, plays=False)


@pytest.mark.parametrize("name", POOLS)
def test_the_plans_of_three_pools_are_those_that_were_read(name: str) -> None:
    """SWARM_RECORD_GOLDEN=1 records them anew; the change is read before it is committed."""
    found = json.loads(json.dumps(document(planned(searched(POOLS[name]())), "t")))
    del found["facts_hash"]  # it changes with each new key of a job file
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("SWARM_RECORD_GOLDEN"):
        recorded[name] = found
        GOLDEN.write_text(json.dumps(recorded, indent=1, sort_keys=True) + "\n")
    assert found == recorded[name]


def test_another_seed_searches_otherwise_and_the_same_seed_alike() -> None:
    texts = [json.dumps(document(planned(searched(cities(), effort=600, seed=seed)), "t")) for seed in (0, 0, 1)]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["places"] != json.loads(texts[2])["places"]


def test_a_peer_is_left_out_with_the_reason() -> None:
    slow, small = machine("slow", line=1e5), machine("small", memory=GIB)
    plan = planned(searched(PeerPool((*equals(6).peers, slow, small)), layers=4))
    told = "; ".join(plan.reasons)
    assert not {"slow", "small"} & plan.peers
    assert "left out: slow: its line of 100 kbit/s would lengthen averaging from " in told
    assert "left out: small: no stage fits, the smallest needs" in told
    assert "next best: " in told


@pytest.mark.parametrize("slow", [(2e6,) * 5, (2e7, 2e7, 2e7, 2e6, 2e6), (2e6, 2.1e6, 2.2e6, 2.3e6, 2.4e6)])
def test_machines_with_slow_lines_are_left_out_however_many_they_are(slow: tuple[float, ...]) -> None:
    """Most of the machines had slow lines, and the plan used them: 80 tokens/s of 15,950 that the others alone make."""
    fast = tuple(machine(f"fast-{number}") for number in range(3))
    pool = PeerPool((*fast, *(machine(f"slow-{number}", line=line) for number, line in enumerate(slow))))
    best = searched(pool, effort=500).found[0]
    assert best.cost <= searched(PeerPool(fast), effort=500).found[0].cost * (1.0 + TIE)
    assert {name for place in best.places for name in place} == {peer.name for peer in fast}


def test_the_slowest_way_of_a_peer_is_named_and_a_title_once() -> None:
    pool = two_sites()
    one_link = {("oregon", "paris"): PoolLink(0.07, 2e8), ("paris", "oregon"): PoolLink(0.07, 2e6)}
    search = searched(replace(pool, links=one_link), layers=4, effort=1000)
    said = list(lines(search.pool, search.found[0].spec, planned(search)))
    assert any("its link with oregon of 2.0 Mbit/s would lengthen averaging from " in line for line in said)
    titles = [line[:11].strip() for line in said]
    assert titles.count("left out") == titles.count("next best") == 1


def test_what_is_assumed_is_in_the_plan_and_what_is_printed() -> None:
    pool = replace(equals(), assumed=("speed of p0 (median of its device, or of all)",))
    search = searched(pool, effort=500)
    plan = planned(search)
    assert f"assumed: {pool.assumed[0]}" in plan.reasons
    assert f"assumed    {pool.assumed[0]}" in list(lines(pool, search.found[0].spec, plan))


ADVISED: dict[str, dict[str, Any]] = {
    "model": {"narrow": {"kind": "maxout"}},
    "pipeline": {"stages": 2, "compression": "int8"},
}


@pytest.mark.parametrize(
    ("line", "sections", "is_advised"),
    [
        (1e7, {}, True),
        (1e10, {}, False),
        (1e7, {"pipeline": {"stages": 1}}, False),
        (1e7, {"model": {"config": {"hidden_size": 774, "num_attention_heads": 3, "num_key_value_heads": 3}}}, False),
        (1e7, {"model": ADVISED["model"]}, False),
        (1e7, {"model": {"id": "some/model", "family": "llama"}}, False),
        (1e7, {"model": {"id": "some/model", "family": "llama", "init": "random"}}, True),
        (1e7, {"checkpoint": {"resume_from": "other:500"}}, False),
    ],
)
def test_narrow_places_are_advised_where_even_int8_waits_for_bytes_with_what_they_bring(
    line: float, sections: dict[str, dict[str, Any]], is_advised: bool
) -> None:
    plan = of_two(line, sections)
    told = [reason for reason in plan.reasons if reason.startswith("narrow: ")]
    assert len(told) == is_advised
    for reason in told:
        figures = [float(figure.replace(",", "")) for figure in re.findall(r"(?:make|of|alone) ([0-9,]*[0-9])", reason)]
        then = (ADVISED, {}, {"pipeline": ADVISED["pipeline"]})
        said = [of_two(line, changes).predicted for changes in then]
        assert figures == [round(one.tokens_per_s) for one in said if one is not None]
        assert "more loss" in reason


def of_two(line: float, sections: dict[str, dict[str, Any]]) -> Plan:
    """A played plan for two machines with such lines, of two stages unless the job says otherwise."""
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12}
    config = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 8192} | heads
    model = sections.get("model", {})
    values = {"pipeline": {"stages": 2}, "training": {"global_batch_sequences": 8}} | sections
    values["model"] = model | {"config": config | model.get("config", {})}
    search = Search(PeerPool((machine("a", line=line), machine("b", line=line))), planned_job(**values), effort=100)
    for _ in search.run():
        pass
    return plan_of(search)


def test_by_price_dear_peers_are_left_out() -> None:
    dear = replace(machine("dear", speed=1e13), price_per_hour=50.0)
    pool = PeerPool((*(machine(f"p{number}", line=1e11) for number in range(4)), dear))
    assert "dear" in planned(searched(pool, layers=4)).peers
    cheap = planned(searched(pool, layers=4, by_price=True))
    assert "dear" not in cheap.peers
    best, others = (
        next(reason for reason in cheap.reasons if reason.startswith(title)) for title in ("price: ", "next best: ")
    )
    for_money = [int(told.replace(",", "")) for told in re.findall(r"([0-9,]+) tokens for 1\.00", best + others)]
    assert len(for_money) > 1
    assert for_money == sorted(for_money, reverse=True)
    with pytest.raises(InvalidConfig, match="peer p4 has no price"):
        searched(PeerPool((*equals(4).peers, replace(machine("p4"), price_per_hour=None))), by_price=True)


def test_of_machines_that_cost_nothing_the_fastest_plan_is_chosen() -> None:
    """All free placements were alike: six machines of one's own made 10,230 tokens/s of 11,080."""
    free = PeerPool(tuple(replace(machine(f"p{at}", speed=(1 + at) * 1e10), price_per_hour=0.0) for at in range(6)))
    fast, cheap = (planned(searched(free, layers=4, by_price=by_price)) for by_price in (False, True))
    assert (cheap.split, cheap.places, cheap.predicted) == (fast.split, fast.places, fast.predicted)
    assert "price: free" in cheap.reasons


def test_a_cut_that_can_be_is_not_said_to_be_impossible_nor_one_without_stages() -> None:
    """With smaller microbatches a step had too many hops, and "0 stages" were said to be impossible."""
    search = Search(equals(4), planned_job(4, training={"global_batch_sequences": 20_000}), effort=50)
    for _ in search.run():
        pass
    told = "; ".join(planned(search).reasons)
    held = {len(placement.places) for placement in search.found}
    assert search.refused
    assert not [stages for stages in (0, *held) if re.search(rf"[:;] {stages} stages?: ", told)]


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (2, 2)])
def test_no_stage_server_is_planned_or_played_beyond_those_that_the_job_takes(stages: int, replicas: int) -> None:
    """Of 8 machines a job with limits.max_replicas = 1 and two stages was planned for all, and gets two."""
    job = planned_job(4, pipeline={"stages": stages}, limits={"max_replicas": replicas})
    search = Search(equals(), job, effort=100)
    for _ in search.run():
        pass
    plan, most = planned(search), stages * replicas
    assert len(plan.peers) == most
    assert any(f"limits.max_replicas = {replicas} allows no more" in reason for reason in plan.reasons)
    load = workload(CutBound(search.pool, search.found[0].spec))
    placed = load.placed(search.pool.peers).plan
    assert placed is not None
    assert len(placed) == most
    play = Play(search.pool, plan, load, PlayRules(warm_up=1, measured=1))
    play.run()
    assert play.counts["joins"] == 0


def test_another_plan_is_judged_by_the_facts_of_now() -> None:
    pool = two_sites()
    search = searched(pool)
    plan = planned(search)
    assert again(pool, search.spec, plan).predicted == plan.predicted
    one_less = replace(plan, places=(("gone", *plan.places[0]), *plan.places[1:]))
    assert again(pool, search.spec, one_less).places == plan.places
    with pytest.raises(InvalidConfig, match="lacks the plan's peers of stage 0"):
        again(pool, search.spec, replace(plan, places=(("gone",), *plan.places[1:])))


def test_a_search_that_is_stopped_says_so_and_has_the_best_so_far() -> None:
    search = Search(cities(), planned_job())
    running = search.run()
    while not search.found:
        next(running)
    assert planned(search).reasons[-1] == f"stopped: after {search.spent} of 20000 placements"


@pytest.mark.parametrize(
    ("pool", "sections", "told"),
    [
        (equals(2), {"pipeline": {"stages": 4}}, "4 stages of 1 replica need 4 peers, there are 2"),
        (equals(2), {"limits": {"min_replicas": 3}}, "1 stage of 3 replicas needs 3 peers, there are 2"),
        (PeerPool((machine("a", memory=GIB),)), {}, "one decoder layer needs about"),
        (PeerPool((machine("a", memory=0),)),
         {"training": {"global_batch_sequences": 10**5, "microbatch_sequences": 1}}, "hops, of 32768"),
        (equals(2), {"model": {"tokenizer": "gpt2", "config": {"hidden_size": 768, "num_hidden_layers": 2,
                     "num_attention_heads": 12}}}, "the vocabulary of gpt2 is not known"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_the_limit(
    pool: PeerPool, sections: dict[str, dict[str, Any]], told: str
) -> None:
    with pytest.raises(SwarmError, match=told) as refused:
        for _ in Search(pool, planned_job(**sections)).run():
            pass
    assert isinstance(refused.value, InvalidConfig | OutOfMemory)
    assert refused.value.hint


def test_what_is_printed_was_played_and_is_no_better_than_its_bound() -> None:
    search = searched(two_sites(), layers=4, effort=500)
    plan, bound = plan_of(search), planned(search)
    assert plan.predicted is not None
    assert bound.predicted is not None
    assert plan.predicted.by == "played"
    assert plan == plan_of(search), "a play has its seed"
    told = "; ".join(plan.reasons)
    assert re.search(r"played: [0-9]+ % of that, a round of averaging takes [0-9.]+ s", told)
    assert re.search(r"as placed: the scheduler itself would use 8 peers: (below )?[0-9,]+ tokens/s", told)
    steady = replace(plan, predicted=replace(plan.predicted, spread=0.0))
    assert "(played, ±1 %)" in headline(search.pool, steady)
    bounded = again(search.pool, search.spec, plan).predicted
    assert bounded is not None
    assert plan.predicted.tokens_per_s < (1.0 + ABOVE_BOUND) * bounded.tokens_per_s


def run(folder: Path, *flags: str, pool: str = POOL) -> tuple[str, BaseException | None]:
    (folder / "job.toml").write_text(JOB)
    (folder / "pool.toml").write_text(pool)
    done = CliRunner().invoke(cli, [str(folder / "job.toml"), "--pool", str(folder / "pool.toml"), *flags])
    return done.output, done.exception


def test_the_command_prints_a_plan_that_it_can_compare_with(tmp_path: Path) -> None:
    said, error = run(tmp_path, "-o", "json")
    assert error is None
    (tmp_path / "plan.json").write_text(said)
    assert json.loads(said)["predicted"]["price_per_hour"] == len(Plan(**{
        key: value for key, value in json.loads(said).items() if key not in ("schema", "job")}).peers)  # fmt: skip
    said, error = run(tmp_path, "--compare", str(tmp_path / "plan.json"))
    assert error is None
    assert " layers, microbatches of " in said.splitlines()[0]
    assert re.search(r"\ncompared   .*plan.json: .* this plan \+0 %, with 0 peers elsewhere\n", said)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--set", "averaging.mode=diloco", "--picture", "x.svg"), "a plan of islands has no picture"),
        (("--set", "training.stepss=1"), "unknown key training.stepss"),
        (("--compare", "none.json"), "none.json"),
    ],
)
def test_a_wrong_flag_is_refused(tmp_path: Path, flags: tuple[str, ...], told: str) -> None:
    _, error = run(tmp_path, *flags)
    assert isinstance(error, SwarmError)
    assert told in str(error)


def test_a_plan_of_another_job_is_refused_and_old_links_are_warned_of(tmp_path: Path) -> None:
    said, _ = run(tmp_path, "-o", "json", pool=f'{POOL}[links]\nmeasured = "2020-01-01"\n')
    assert "warning: the links were measured" in said
    (tmp_path / "plan.json").write_text(
        said[said.index("{") : said.rindex("}") + 1].replace('"job": "t"', '"job": "other"')
    )
    _, error = run(tmp_path, "--compare", str(tmp_path / "plan.json"))
    assert "is a plan of job other, not of t" in str(error)


@pytest.mark.parametrize(
    ("change", "told"),
    [({"split": [1, 1], "places": [["a-0"], ["a-1"]]}, "is of a model of 2 layers, this job has 4"),
     ({"split": [4], "places": [["gone"]]}, "the pool lacks the plan's peers of stage 0")],
)  # fmt: skip
def test_a_plan_that_cannot_be_compared_is_named_before_the_search(
    tmp_path: Path, change: dict[str, object], told: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(document(Plan((4,), (("a-0",),), 2), "t") | change))
    _, error = run(tmp_path, "--compare", str(tmp_path / "plan.json"), "--effort", "100000000")
    assert told in str(error)
    assert "plan.json: " in str(error)


@pytest.mark.parametrize(
    ("peers", "told"),
    [([], "no stage servers are here"), ([Peer(id="a")], "the stage servers have not measured themselves yet")],
)
def test_a_scheduler_without_stage_servers_or_with_new_ones_cannot_be_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peers: list[Peer], told: str
) -> None:
    def asked(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 0, "\n".join(pool_lines(peers)))

    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setattr(subprocess, "run", asked)
    with pytest.raises(InvalidConfig, match=told) as refused:
        CliRunner().invoke(cli, [str(tmp_path / "job.toml")], catch_exceptions=False)
    assert refused.value.hint


def test_a_picture_that_cannot_be_written_is_refused_before_the_search_and_one_that_is_there_stays(
    tmp_path: Path,
) -> None:
    for name, told in (("none/x.svg", "No such file or directory"), ("", "Is a directory")):
        _, error = run(tmp_path, "--picture", str(tmp_path / name), "--effort", "100000000")
        assert f"cannot be written: {told}" in str(error)
    old, new = tmp_path / "old.svg", tmp_path / "new.svg"
    old.write_text("old")
    for picture in (old, new):
        _, error = run(tmp_path, "--picture", str(picture), "--compare", "none.json")
        assert "none.json" in str(error)
    assert (old.read_text(), new.exists()) == ("old", False)


def test_the_scheduler_of_a_profile_is_asked_for_its_stage_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.setenv("SWARM_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text('[profile.lab]\nscheduler = "127.0.0.1:1"\ninsecure = true\n')
    done = subprocess.run(
        [sys.executable, "-m", "scheduler.planning", str(tmp_path / "job.toml"), "-p", "lab"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 4
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    ("plays", "how", "told"),
    [(0, "by the bound)", "before the best plans"), (1, "its first steps played), step ", "amid the plays")],
)
def test_ctrl_c_prints_the_best_that_was_played_so_far_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plays: int, how: str, told: str
) -> None:
    """What had been played was dropped, and the plan was told by the bound. Of first steps it said idle 0 %, ±1 %."""
    old, _ = run(tmp_path, "-o", "json")
    (tmp_path / "old.json").write_text(old)
    left = iter(range(plays))

    def some(*values: Any) -> Play:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return Play(*values)

    monkeypatch.setattr("scheduler.planning.planner.Play", some)
    said, error = run(tmp_path, "--compare", str(tmp_path / "old.json"))
    assert f" tokens/s ({how}" in said.splitlines()[0]
    assert ("idle" in said.splitlines()[0]) == ("by the bound" in how)
    assert re.search(rf"\nstopped    {told}.*\n           before .*old.json was compared\n", said)
    assert isinstance(error, SystemExit)


def test_a_day_of_measuring_that_is_still_to_come_is_refused(tmp_path: Path) -> None:
    _, error = run(tmp_path, pool=f'{POOL}[links]\nmeasured = "2999-01-01"\n')
    assert "measured = 2999-01-01 is in the future" in str(error)
