"""A look shows a simulated job as it is and was, to each visitor what he may see, and costs the loop little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from math import nan
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scheduler.api.views import Overview
from scheduler.brain.members.persons import ANYBODY, Person
from scheduler.jobs.history import StepMade
from scheduler.jobs.job import Job
from scheduler.web import feed as module
from scheduler.web.feed import POINTS_MAX, Curves, Feed, Look, every
from swarm.data.tokenizer import ByteTokenizer
from swarm.errors import DatabaseUnavailable
from swarm.job.spec import JobSpec
from swarm.pki.names import Role
from tests.support.acts import Played, played
from tests.support.scenes import play
from tests.support.simulated import Rig, Tokens, small_spec, write_text


def watched(**changes: object) -> Played:
    """A test of what the page is told while a small job of two stages is trained on four peers."""

    def run(act: Callable[[Rig, Job, Feed], Awaitable[None]], tmp_path: Path) -> None:
        spec = small_spec(write_text(tmp_path), pipeline__stages=2, **changes)
        tokens = Tokens.make(tmp_path, spec)

        async def submits(rig: Rig) -> None:
            await act(rig, await submitted(rig, spec, tokens), feed_of(rig))

        play(tokens, 4, submits, rng=Random(3))

    return played(run, given=3)


async def submitted(rig: Rig, spec: JobSpec, tokens: Tokens, by: Person = ANYBODY) -> Job:
    return await rig.jobs.submit(spec, tokens.of_job(), ByteTokenizer().tokenizer_files(), by=by)


def feed_of(rig: Rig, entrance: Callable[[bytes | None], Person] = lambda _: ANYBODY) -> Feed:
    overview = Overview(rig.jobs, rig.membership, lambda: ANYBODY, rig.ports.wall_s)
    return Feed(overview, entrance, "0.1")


async def at_step(rig: Rig, job: Job, step: int) -> None:
    async for _ in rig.jobs.watch(job):
        if job.progress.steps_done >= step:
            return


async def passes(rig: Rig, seconds: float) -> None:
    """Time in which the job takes few steps, as each of them is computed here."""
    rig.slowness.update(dict.fromkeys(rig.servers, 20.0))
    await asyncio.sleep(seconds)


@watched(training__steps=8)
async def test_a_job_at_work_is_shown_with_its_stages_steps_curves_and_news(rig: Rig, job: Job, feed: Feed) -> None:
    await at_step(rig, job, 5)
    look = await feed.look(None, "")
    state = json.loads(json.dumps(look.state, allow_nan=False))
    full = state["job"]
    assert full["id"] == job.record.id
    assert state["jobs"][job.record.id]["step"] == job.progress.steps_done
    replicas = {peer: stage for stage, one in full["stages"].items() for peer in one["replicas"]}
    assert {peer: int(stage) for peer, stage in replicas.items()} == dict(job.record.peers)
    assert set(replicas) == set(state["peers"])
    assert list(map(int, full["curves"]["loss"])) == list(range(1, job.progress.steps_done + 1))
    assert any("loss" not in news and news["text"].startswith("placed") for news in full["news"].values())
    began, full_s, averaged, agreed, _ = full["timeline"]["1"]
    assert began < full_s < averaged < agreed <= look.clock_s
    assert {fact["topic"] for fact in full["facts"]} >= {"waits for", "stage 0", "stage 1"}


@watched(training__steps=400)
async def test_a_lost_stage_server_is_seen_to_be_suspect_then_gone_with_the_reason(
    rig: Rig, job: Job, feed: Feed
) -> None:
    await at_step(rig, job, 2)
    victim = next(peer for peer, stage in job.record.peers.items() if stage == 0)
    rig.kill(victim)

    async def shown() -> tuple[str, str]:
        await passes(rig, module.LOOK_S_MIN)
        state = (await feed.look(None, job.record.id)).state
        in_stage = state["job"]["stages"]["0"]["replicas"].get(victim, {"health": "none"})["health"]
        return in_stage, state["peers"][victim]["state"]

    seen = [await shown() for _ in range(40)]
    assert ("suspect", "suspect") in seen
    assert seen[-1] == ("none", "gone")
    news = (await feed.look(None, job.record.id)).state["job"]["news"].values()
    assert any(f"{victim} (stage 0) is gone" in new["text"] for new in news)
    told = (await feed.look(None, job.record.id)).state["jobs"][job.record.id]["reason"]
    assert told.endswith("; one machine was lost; no step lost"), "the headline of the page"


@watched()
async def test_a_job_that_ended_is_shown_from_database_and_log(rig: Rig, job: Job, feed: Feed) -> None:
    await rig.finished(job)
    full = (await feed.look(None, "")).state["job"]
    assert list(map(int, full["curves"]["loss"])) == [1, 2, 3, 4]
    assert any("succeeded" in news["text"] for news in full["news"].values())
    assert full["timeline"] == {}


@watched()
async def test_the_job_in_full_is_listed_however_many_newer_ones_there_are(
    rig: Rig, job: Job, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind more waiting jobs than the page lists, the one that ran was not shown at all."""
    monkeypatch.setattr("scheduler.web.feed.JOBS_MAX", 2)
    for _ in range(3):
        await rig.jobs.submit(job.spec, job.record.tokens, ByteTokenizer().tokenizer_files())
    state = (await feed.look(None, "")).state
    assert state["job"]["id"] == job.record.id
    assert len(state["jobs"]) == 2
    assert job.record.id in state["jobs"]


@watched(training__steps=400)
async def test_a_curve_has_no_gap_where_nobody_looked(rig: Rig, job: Job, feed: Feed) -> None:
    await at_step(rig, job, 2)
    await feed.look(None, "")
    await at_step(rig, job, 12)
    await passes(rig, module.AGAIN_S)
    look = await feed.look(None, "")
    steps = list(map(int, look.state["job"]["curves"]["loss"]))
    assert steps == list(range(1, max(steps) + 1))
    assert max(steps) >= 12


@watched(training__steps=400)
async def test_a_database_that_is_away_costs_the_past_of_a_curve_and_nothing_else(
    rig: Rig, job: Job, feed: Feed
) -> None:
    await at_step(rig, job, 3)
    database: Any = rig.jobs.stores.database
    select = database.select

    async def away(query: object) -> list[dict[str, Any]]:
        raise DatabaseUnavailable("no answer")

    database.select = away
    look = await feed.look(None, "")
    assert list(map(int, look.state["job"]["curves"]["loss"])) == [job.progress.steps_done]
    database.select = select
    await passes(rig, module.AGAIN_S)
    look = await feed.look(None, "")
    assert "1" in look.state["job"]["curves"]["loss"]


@watched(training__steps=400)
async def test_each_sees_every_job_and_admins_alone_see_addresses(rig: Rig, job: Job, feed: Feed) -> None:
    await at_step(rig, job, 1)
    visitors = {b"vera": Person(Role.VIEWER, "vera"), b"root": Person(Role.ADMIN, "root")}
    feed = feed_of(rig, lambda certificate: visitors[certificate or b""])
    veras, roots = [(await feed.look(name, "")).state for name in (b"vera", b"root")]
    assert list(veras["jobs"]) == list(roots["jobs"]) == [job.record.id]
    assert ("address" in json.dumps(veras["peers"]), "address" in json.dumps(roots["peers"])) == (False, True)


@watched(training__steps=400)
async def test_those_who_see_the_same_share_a_look_and_looks_are_few(rig: Rig, job: Job, feed: Feed) -> None:
    await at_step(rig, job, 1)
    looks: list[Look] = [await feed.look(None, "") for _ in range(3)]
    assert looks[0] is looks[1] is looks[2]
    for number in range(2 * module.LOOKS_MAX):
        await feed.look(None, f"none-{number}")
    assert len(feed._looks) == module.LOOKS_MAX


def step(number: int, loss: float = 2.0, at_unix_s: float = 0.0) -> StepMade:
    return StepMade(number, loss, 1.0, 1e-3, 100, False, at_unix_s, nan)


@pytest.mark.parametrize("steps", [0, 1, POINTS_MAX, POINTS_MAX + 1, 10 * POINTS_MAX - 1, 10**9])
def test_as_many_steps_are_read_as_there_are_points(steps: int) -> None:
    assert steps // every(steps) <= POINTS_MAX
    assert steps < POINTS_MAX or steps // every(steps) >= POINTS_MAX // 2


def test_the_past_is_read_with_speeds_between_its_rows() -> None:
    curves = Curves.read([step(10, 3.0, 100.0), step(20, nan, 110.0), step(30, 2.0, 120.0)], {20: 2.5, 10: 3.5})
    assert curves.values() == {
        "loss": {"10": 3.0, "30": 2.0},
        "validation": {"10": 3.5, "20": 2.5},
        "speed": {"20": 100.0, "30": 100.0},
    }


def test_a_step_that_was_seen_changes_nothing_and_an_unknown_loss_is_left_out() -> None:
    curves = Curves.read([step(4), step(5)], {})
    assert curves.speed == {}, "rows without a time have none"
    curves.add(5, 9.0, 50.0)
    curves.add(6, nan, nan)
    curves.evaluated(0, nan)
    assert curves.values() == {"loss": {"4": 2.0, "5": 2.0}, "validation": {}, "speed": {"5": 50.0}}


def test_a_long_curve_loses_every_second_point_and_neither_its_beginning_nor_its_end() -> None:
    curves = Curves()
    for number in range(1, 20 * POINTS_MAX):
        curves.add(number, 10.0 / number, 1000.0)
        assert len(curves.loss) <= POINTS_MAX
    steps = list(curves.loss)
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 20 * POINTS_MAX - 1)
