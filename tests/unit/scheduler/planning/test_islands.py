"""Islands in the play: production's brain cuts their leases, lets them exchange, loses them and lets them begin anew.
And what `swarm plan` says of them."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scheduler.brain.islands.brain import IslandsBrain
from scheduler.planning import islands
from scheduler.planning.__main__ import cli
from scheduler.planning.bound import CutBound
from scheduler.planning.islands import again, best, played
from scheduler.planning.plan import Plan, read_plan
from scheduler.planning.planner import cut_as
from scheduler.planning.play import Play, PlayRules, workload
from scheduler.planning.pool import PeerPool, PoolLink
from scheduler.planning.search import basis_of
from scheduler.planning.simulate.__main__ import simulation
from swarm.errors import INTERRUPTED, InvalidConfig, SwarmError, UsageError
from swarm.job.islands import island_spec
from swarm.job.resolve import choose
from swarm.job.spec import JobSpec, load_job
from tests.support.pools import equals, machine, planned_job

STAGES, MICROBATCHES, EVERY = 2, 32, 10


def sites(slower: float = 1.0, between: float = 1e9, each: int = 4) -> PeerPool:
    """Machines at two sites; those of the second are so many times slower, and so is the link between them."""
    peers = tuple(
        machine(f"{site}-{number}", site, speed=3e10 / (slower if site == "oslo" else 1.0))
        for site in ("lyon", "oslo")
        for number in range(each)
    )
    ways = {(a, b): PoolLink(0.05, between) for a, b in (("lyon", "oslo"), ("oslo", "lyon"))}
    return PeerPool(peers, ways)


def job(mode: str = "diloco", **sections: dict[str, Any]) -> JobSpec:
    values: dict[str, dict[str, Any]] = {
        "training": {"global_batch_sequences": 2 * MICROBATCHES, "microbatch_sequences": 2, "steps": 1000},
        "data": {"sequence_length": 128},
        "averaging": {"mode": mode},
        "outer": {"every_steps": EVERY, **({} if mode == "allreduce" else {"overlap_steps": int(mode != "diloco")})},
        "pipeline": {"stages": STAGES},
    }
    return planned_job(4, **values | sections)


def play(pool: PeerPool, spec: JobSpec, **rules: float) -> Play:
    resolved, _ = choose(spec, basis_of(pool, spec))
    load = workload(CutBound(pool, island_spec(resolved)), resolved)
    placed = load.placed(pool.peers).plan or {}
    count = len(resolved.split) * resolved.island_count
    places = tuple(tuple(name for name, at in placed.items() if at == number) for number in range(count))
    assert all({pool.peer(name).site for name in place} == {("lyon", "oslo")[at // STAGES]} for at, place in
               enumerate(places)), "an island is at one site"  # fmt: skip
    plan = Plan(resolved.split, places, 2, resolved.overlap)
    return Play(pool, plan, load, PlayRules(warm_up=EVERY, measured=2 * EVERY, **rules))  # type: ignore[arg-type]


def period_s(whole: Play) -> float:
    return EVERY * whole.run().step_s


@pytest.mark.parametrize("mode", ["diloco", "streaming", "gaia"])
def test_played_islands_train_each_microbatch_of_a_period_once_whatever_their_speeds(mode: str) -> None:
    """Leases follow speed: the slow island trains about a third of what the other one does."""
    whole = play(sites(slower=3.0), job(mode))
    whole.run()
    assert isinstance(whole.brain, IslandsBrain)
    assert whole.brain.present == (0, 1)
    for first in range(0, 3 * EVERY, EVERY):
        made = {key: tokens for key, (_, tokens) in whole.made.items() if first <= key[0] < first + EVERY}
        assert len(made) == 2 * EVERY
        assert sum(made.values()) == EVERY * whole.load.step_tokens
    of = [sum(tokens for (_, at), (_, tokens) in whole.made.items() if at == island) for island in (0, 1)]
    assert 0.2 < of[1] / of[0] < 0.6
    assert any("others train" in reason for reason in whole.reasons)
    whole.brain.validate()


def test_played_islands_that_share_equally_wait_for_the_slowest() -> None:
    pool = sites(slower=3.0)
    assert period_s(play(pool, job(islands={"shares": "equal"}))) > 1.3 * period_s(play(pool, job()))


def test_a_played_exchange_takes_as_long_as_the_link_and_overlap_hides_it() -> None:
    near, far = (play(sites(between=rate), job()) for rate in (1e12, 2e8))
    longer_s = period_s(far) - period_s(near)
    bits = 8.0 * 2.0 * sum(far.load.moved.values())  # bfloat16, all stages over one link
    assert longer_s == pytest.approx(bits / 2e8 - bits / 1e9, rel=0.01), "near, lines of 1 Gbit/s limit"
    hidden = play(sites(between=2e8), job(outer={"every_steps": EVERY, "overlap_steps": 4}))
    assert period_s(hidden) < period_s(far) - 0.5 * longer_s
    steps_s = [later_s - earlier_s for earlier_s, later_s in pairwise(far.committed_s)]
    assert [step for step, took_s in enumerate(steps_s, 1) if took_s > 0.8 * (longer_s + min(steps_s))] == [
        EVERY,
        2 * EVERY,
    ]


def test_a_played_island_that_is_lost_leaves_the_others_at_work_and_begins_anew_when_its_peers_are_back() -> None:
    pool = sites(between=1e10)
    whole = play(pool, job(outer={"every_steps": EVERY, "patience": "none"}))
    whole.watch()
    while len(whole.committed_s) < EVERY + 3:
        whole.turn()
    dead = [peer for peer in pool.peers if peer.site == "oslo"]
    for peer in dead:
        whole.die(peer.name)
    whole.run_until(whole.now_s + 40.0)
    assert isinstance(whole.brain, IslandsBrain)
    assert (whole.counts["islands_lost"], whole.counts["stalls"], whole.brain.present) == (1, 0, (0,))
    assert not any(step >= EVERY for step, island in whole.made if island == 1), "it does not count"
    for peer in dead:
        whole.come(peer)
    whole.run_until(whole.now_s + 300.0)
    assert whole.brain.present == (0, 1)
    newest = len(whole.committed_s) - 1
    assert {(newest, 0), (newest, 1)} <= whole.made.keys()
    whole.brain.validate()


def test_a_played_island_that_may_be_late_is_lost_only_once_it_was_silent_for_the_time_of_no_progress() -> None:
    pool = sites(between=1e10)
    whole = play(pool, job(outer={"every_steps": EVERY, "patience": 0.2}, limits={"no_progress_s": 120.0}))
    whole.watch()
    while len(whole.committed_s) < EVERY + 3:
        whole.turn()
    for peer in pool.peers[4:]:
        whole.die(peer.name)
    died_s = whole.now_s
    whole.run_until(died_s + 100.0)
    assert isinstance(whole.brain, IslandsBrain)
    assert (whole.counts["islands_lost"], whole.brain.present) == (0, (0, 1))
    assert max(step for step, island in whole.made if island == 0) > 2 * EVERY, "the other went on without it"
    whole.run_until(died_s + 140.0)
    assert (whole.counts["islands_lost"], whole.brain.present) == (1, (0,))


def test_a_play_whose_islands_are_all_lost_goes_back_behind_the_exchange_of_its_newest_checkpoint() -> None:
    pool = sites(between=1e10)
    whole = play(pool, job(limits={"no_progress_s": 30.0}), checkpoint_s=1.0)
    whole.watch()
    while len(whole.committed_s) < EVERY + 5:
        whole.turn()
    for peer in pool.peers:
        whole.die(peer.name)
    whole.run_until(whole.now_s + 60.0)
    assert whole.counts["stalls"] == 1
    assert len(whole.committed_s) == EVERY == 1 + max(step for step, _ in whole.made)
    for peer in pool.peers:
        whole.come(peer)
    whole.run_until(whole.now_s + 900.0)
    assert len(whole.committed_s) > 2 * EVERY
    assert whole.counts["steps_done_again"] == 5


def test_rebalancing_that_a_job_file_turns_off_moves_nobody() -> None:
    names = [("s0-0", 0.2), *((f"s{stage}-{number}", 1.0) for stage in (1, 2) for number in range(3))]
    pool = PeerPool(tuple(machine(name, speed=3e10 * speed) for name, speed in names), {})
    places = tuple(tuple(name for name, _ in names if name.startswith(f"s{stage}")) for stage in range(3))
    for rebalance in (True, False):
        spec = job("allreduce", pipeline={"stages": 3, "rebalance": rebalance}, outer={})
        resolved, _ = choose(spec, basis_of(pool, spec))
        whole = Play(pool, Plan(resolved.split, places, 2, resolved.overlap), workload(CutBound(pool, resolved)))
        whole.watch()
        whole.run_until(600.0)
        assert (whole.counts["moves"] > 0) is rebalance


# The plan -------------------------------------------------------------------------------------------------------------

JOB = """
name = "t"
model.config = { hidden_size = 256, num_hidden_layers = 4, num_attention_heads = 4, vocab_size = 8192 }
data = { source = "x", sequence_length = 512 }
training = { global_batch_sequences = 24, microbatch_sequences = 1 }
pipeline.stages = 1
"""
POOL = 'schema = "swarm.pool/1"\n' + "".join(
    f'[[peer]]\nname = "{site}"\ncount = 4\nspeed = {speed}\nsite = "{site}"\nup = "1Gbit"\ndown = "1Gbit"\n'
    for site, speed in (("lyon", 4e9), ("oslo", 3e9))
)


def planned(folder: Path, *flags: str, between: str = "0.02", pool: str = POOL, exits: int = 0) -> str:
    (folder / "job.toml").write_text(JOB)
    (folder / "bandwidth.csv").write_text(f",lyon,oslo\nlyon,,{between}\noslo,{between},\n")
    (folder / "pool.toml").write_text(pool + ('[links]\nbandwidth_gbps = "bandwidth.csv"\n' if "oslo" in pool else ""))
    words = [str(folder / "job.toml"), "--pool", str(folder / "pool.toml"), "--effort", "500", *flags]
    made = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert made.exit_code == exits, made.output
    return made.output


def test_a_plan_of_islands_names_their_places_leases_and_exchanges_and_is_simulated(tmp_path: Path) -> None:
    flags = ("--set", "averaging.mode=diloco", "--set", "outer.every_steps=10")
    (tmp_path / "plan.json").write_text(planned(tmp_path, *flags, "-o", "json"))
    assert read_plan(tmp_path / "plan.json", load_job(tmp_path / "job.toml", ())).islands == 2
    first, *rows = planned(tmp_path, *flags, "--compare", str(tmp_path / "plan.json")).splitlines()
    assert re.match(r"2 islands of \d stages? of .* 8 of 8 peers: [\d,]+ tokens/s \(played, ±\d+ %\)", first)
    assert any(re.match(r"0 of island 1 .* oslo 4 ", row) for row in rows)
    assert any(re.match(r"leases +of a step of [\d.]+ s lyon 5\d%, oslo 4\d%", row) for row in rows), rows
    assert any(
        re.match(r"exchange +.* by the bound, once in 10 steps; islands wait [\d.]+ m?s for each", row) for row in rows
    )
    assert "\ntoo short  averaging.timeout_s = 60: " in planned(tmp_path, *flags, between="0.001")
    assert any("this plan +0 %" in row for row in rows)
    made = simulation(sites(), job(pipeline={"stages": 2}), (), 0).run(0.1, lambda _: None)
    assert made["tokens_per_s"] > 0
    assert made["cut"].startswith("2 islands of 2 stages of ")


def test_a_plan_says_what_islands_would_bring_where_two_sites_can_each_serve_the_job(tmp_path: Path) -> None:
    told = {}
    for between in ("0.02", "10"):
        text = planned(tmp_path, "-o", "json", between=between)
        (line,) = [reason for reason in json.loads(text)["reasons"] if reason.startswith("islands: ")]
        found = re.fullmatch(r'islands: 2 with .* = "diloco": [\d,]+ tokens/s \(played\), ([\d.]+) times.*; (.*)', line)
        assert found, line
        told[between] = float(found[1]), found[2]
    assert told["0.02"][0] > 1.3 > told["10"][0]
    assert told["0.02"][1] == "docs/islands.md says what they cost in loss"
    assert told["10"][1] == "not worth what they cost in loss"
    assert "islands" not in planned(tmp_path, pool=POOL.partition('[[peer]]\nname = "oslo"')[0])


@pytest.mark.parametrize(("mode", "shares"), [("diloco", "speed"), ("streaming", "equal"), ("gaia", "speed")])
def test_what_is_played_of_islands_is_no_better_than_their_bound(mode: str, shares: str) -> None:
    """Chance may lift a play a little."""
    pool, spec = sites(slower=2.0, between=2e8), job(mode, islands={"shares": shares})
    plan = best(pool, spec)
    bound = again(pool, spec, plan)
    assert plan.predicted is not None
    assert bound.predicted is not None
    assert (plan.predicted.by, bound.predicted.by) == ("played", "bound")
    assert 0.5 < plan.predicted.tokens_per_s / bound.predicted.tokens_per_s < 1.03


@pytest.mark.parametrize(
    ("pool", "spec", "told"),
    [
        (equals(8), job(islands={"count": 9}, training={"global_batch_sequences": 18}), "islands.count does not work"),
        (sites(each=1), job(limits={"min_replicas": 2}), "the job cannot begin"),
    ],
)
def test_islands_that_a_scheduler_refuses_are_not_planned(pool: PeerPool, spec: JobSpec, told: str) -> None:
    with pytest.raises(SwarmError, match=told):
        best(pool, spec)
    with pytest.raises(SwarmError, match=told):
        simulation(pool, spec, (), 0)


def test_where_the_shortest_play_is_long_one_plan_is_played_once_and_islands_are_compared_by_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(islands, "HOPS", 1)
    text = planned(tmp_path, "--set", "training.global_batch_sequences=4")
    assert re.search(r"\nislands +2 with .* tokens/s by the bound, [\d.]+ times this plan by the bound; ", text), text
    seeds, real = list[int](), Play
    monkeypatch.setattr(islands, "Play", lambda *given: seeds.append(given[-1]) or real(*given))
    plan = best(sites(), job(pipeline={}, training={"global_batch_sequences": 8, "microbatch_sequences": 2}))
    assert plan.predicted is not None
    assert (plan.predicted.by, seeds) == ("played", [0])


def test_a_short_period_tells_the_step_of_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of streaming, whose short period has waits in most of its steps."""
    outer = {"every_steps": 24, "fragments": 4, "overlap_steps": 1}
    training = {"global_batch_sequences": 16, "microbatch_sequences": 2}
    spec, pool = job("streaming", outer=outer, training=training), sites(between=2e7)
    bound = best(pool, spec, plays=False)
    told = list[float]()
    for hops in (1, 10**6):
        monkeypatch.setattr(islands, "HOPS", hops)
        predicted = played(pool, spec, bound).predicted
        assert predicted is not None
        told.append(predicted.step_s)
    assert told[0] == pytest.approx(told[1], rel=0.2)


def test_advice_about_islands_says_which_time_limits_their_exchange_needs(tmp_path: Path) -> None:
    (line,) = [row for row in planned(tmp_path, between="0.001").splitlines() if row.startswith("islands ")]
    found = re.search(r"averaging.timeout_s = 60: .* set it to (\d+), and limits.no_progress_s to (\d+)$", line)
    assert found, line
    assert (int(found[1]) > 60, int(found[2])) == (True, 5 * int(found[1]))


def test_the_bound_of_an_exchange_counts_a_tied_embedding_and_shares_no_link_within_a_site() -> None:
    def exchange_s(pool: PeerPool, spec: JobSpec) -> tuple[float, CutBound]:
        plan = best(pool, spec, plays=False)
        cut = cut_as(pool, spec, plan)
        return islands._exchange_s(pool, cut, plan.places), CutBound(pool, island_spec(cut))

    spec = job()
    spec = spec.having("model", config=spec.model.config | {"tie_word_embeddings": True})
    seconds, facts = exchange_s(sites(between=2e7), spec)
    *own, tied = facts.unit_parameters
    assert tied
    assert seconds == pytest.approx(16.0 * (sum(own) + 2 * tied) / 2e7, rel=0.1)  # first to first and last stage
    one = PeerPool(tuple(machine(f"a-{number}", "lyon", line=1e9) for number in range(8)), {})
    two_s, four_s = (exchange_s(one, job(islands={"count": count}))[0] for count in (2, 4))
    assert four_s < 3.5 * two_s, "each sends to three in the place of one, on its own line"


def test_a_plan_of_islands_is_not_compared_with_one_without_nor_by_price(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(planned(tmp_path, "--set", "averaging.mode=diloco", "-o", "json"))
    words = [str(tmp_path / "job.toml"), "--pool", str(tmp_path / "pool.toml")]
    with pytest.raises(InvalidConfig, match="the plan has 2 islands, this job has none"):
        CliRunner().invoke(cli, [*words, "--compare", str(tmp_path / "plan.json")], catch_exceptions=False)
    with pytest.raises(UsageError, match="for speed alone"):
        CliRunner().invoke(cli, [*words, "--set", "averaging.mode=diloco", "--by", "price"], catch_exceptions=False)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"places": [*plan["places"][:-1], []]}))
    with pytest.raises(InvalidConfig, match="an empty one"):
        read_plan(tmp_path / "plan.json", job())


@pytest.mark.parametrize(("at", "flags"), [("beside", ()), ("played", ("--set", "averaging.mode=diloco"))])
def test_ctrl_c_while_islands_are_played_prints_the_plan_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, flags: tuple[str, ...]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(islands, at, interrupted)
    assert "tokens/s (" in planned(tmp_path, *flags, exits=INTERRUPTED)
