"""Series of jobs and peers go some time after their end, and not before; in simulated time."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from math import nan
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from client.records import Job, record
from client.views import islands_table, job_table
from scheduler.api.views import _islands
from scheduler.assembly import assemble
from scheduler.brain.explain.facts import JobStanding, explain_job
from scheduler.brain.settings import DEADLINES
from scheduler.jobs.job import Announcer
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.series import SHOW_S, _show_speeds, show, tidy
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.stores import Stores
from scheduler.web.snapshot import job_values
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobId, JobState, PeerId
from swarm.wire import jobs_pb2 as pb
from tests.simulation.engine.islands import Harmed, Shape, World
from tests.support.scenes import play, resolved
from tests.support.simulated import WALL_START_UNIX_S, Rig, Tokens, small_spec, write_text


def _lines(metrics: SchedulerMetrics, name: str) -> list[str]:
    return [line for line in generate_latest(metrics.registry).decode().splitlines() if f'"{name}"' in line]


class Cleared(Announcer):
    """Notes of which jobs nobody is told any more."""

    def __init__(self) -> None:
        self.jobs: list[JobId] = []

    def job_removed(self, job: JobId) -> None:
        self.jobs.append(job)


def test_series_go_an_hour_after_a_job_and_ten_minutes_after_a_peer(tmp_path: Path) -> None:
    changes = {"pipeline__stages": 2, "training__steps": 2}
    spec = resolved(small_spec(write_text(tmp_path), **changes))
    tokens = Tokens.make(tmp_path, spec)

    async def act(rig: Rig) -> None:
        loop = asyncio.get_running_loop()
        metrics = rig.metrics
        rig.tasks.create_task(tidy(rig.jobs.registry, rig.membership, rig.ports))
        job = await rig.jobs.submit(spec, tokens.of_job(), {})
        await rig.finished(job)
        ended_s = loop.time()
        rig.kill(PeerId("peer-1"))
        await asyncio.sleep(500)
        assert len(_lines(metrics, "peer-1")) > 2
        await asyncio.sleep(250)
        assert _lines(metrics, "peer-1") == []
        assert len(_lines(metrics, "peer-0")) > 2
        rig.add_peer(PeerId("peer-1"), rig.tasks, Random(2))  # it comes back
        await asyncio.sleep(ended_s + 3500 - loop.time())
        assert len(_lines(metrics, "peer-1")) > 1
        assert len(_lines(metrics, job.record.id)) > 20
        await asyncio.sleep(200)
        assert _lines(metrics, job.record.id) == []
        assert metrics.known_jobs == set()

    play(tokens, 2, act)


def test_a_job_at_work_shows_speeds_and_deadlines_and_an_ended_one_none(tmp_path: Path) -> None:
    changes = {"pipeline__stages": 2, "training__steps": 30}
    spec = resolved(small_spec(write_text(tmp_path), **changes))
    tokens = Tokens.make(tmp_path, spec)
    names = ("swarm_route_weight{", "swarm_hop_deadline_seconds{")

    async def act(rig: Rig) -> None:
        rig.tasks.create_task(show(rig.jobs.registry, rig.ports, tmp_path))
        job = await rig.jobs.submit(spec, tokens.of_job(), {})

        def shown() -> list[tuple[str, float]]:
            lines = [line.rpartition(" ") for line in _lines(rig.metrics, job.record.id)]
            return [(line[0], float(line[2])) for line in lines if line[0].startswith(names)]

        while job.progress.steps_done < 10:
            await asyncio.sleep(0.1)
        await asyncio.sleep(SHOW_S)
        weights = [value for name, value in shown() if name.startswith(names[0])]
        deadlines = [value for name, value in shown() if name.startswith(names[1])]
        assert (len(weights), len(deadlines)) == (4, 4)
        assert all(0.2 < weight < 0.8 for weight in weights)
        assert sum(weights) == pytest.approx(2.0)
        assert all(0.0 < deadline_s <= DEADLINES.max_s for deadline_s in deadlines)
        speeds = [line for line in _lines(rig.metrics, "peer-1") if "speed_tokens" in line]
        assert float(speeds[0].rpartition(" ")[2]) > 100.0
        await rig.finished(job)
        await asyncio.sleep(SHOW_S)
        assert shown() == []

    play(tokens, 4, act)


def test_a_restarted_scheduler_shows_the_jobs_that_it_knows(tmp_path: Path) -> None:
    """swarm_job_info was there only for jobs submitted since the start."""
    spec = resolved(small_spec(write_text(tmp_path), pipeline__stages=1, training__steps=2))
    tokens = Tokens.make(tmp_path, spec)

    async def act(rig: Rig) -> None:
        job = await rig.jobs.submit(spec, tokens.of_job(), {})
        await rig.finished(job)
        metrics = SchedulerMetrics("0", PROTOCOL_VERSION)
        ports = SchedulerPorts(
            Stores.under(tmp_path, rig.store),
            Announcer(),
            metrics,
            Random(2),
            lambda: WALL_START_UNIX_S,
            get_logger("rig"),
        )
        await assemble(ports, rig.tasks).load()
        shown = "\n".join(_lines(metrics, job.record.id))
        assert re.search(r'swarm_job_info{family="llama",job_id="rig-\w+"} 1.0', shown)
        assert re.search(r'swarm_job_state{job_id="rig-\w+",state="succeeded"} 1.0', shown)
        assert re.search(r'swarm_job_step{job_id="rig-\w+"} 2.0', shown)
        # Once it ended long ago, it does not come back, and what the broker retains of it is cleared.
        metrics, announcer = SchedulerMetrics("0", PROTOCOL_VERSION), Cleared()
        ports = replace(ports, metrics=metrics, announcer=announcer, wall_s=lambda: WALL_START_UNIX_S + 9e4)
        later = assemble(ports, rig.tasks)
        await later.load()
        tidying = rig.tasks.create_task(tidy(later.jobs.registry, later.membership, ports))
        await asyncio.sleep(150)
        tidying.cancel()
        assert _lines(metrics, job.record.id) == []
        assert announcer.jobs == [job.record.id], "once"

    play(tokens, 1, act)


def test_a_late_island_is_counted_and_shown_everywhere_also_once_it_has_merged() -> None:
    """`swarm explain` alone said so, and nothing more once the island had merged."""
    world = World(Shape(steps=40, lease=4, still_s=60.0, patience=0.1), 0)
    spec = SimpleNamespace(training=SimpleNamespace(global_batch_sequences=8, microbatches=2), has_outer_steps=True)
    spec.data, spec.island_count = SimpleNamespace(sequence_length=16), 2
    job: Any = SimpleNamespace(brain=world.brain, spec=spec, stages={}, record=SimpleNamespace(id="j"))
    job.situation = lambda: world.brain.situation(world.now_s)
    metrics, roster = SchedulerMetrics("0", PROTOCOL_VERSION), lambda: world.brain._roster

    def counted() -> list[float | None]:
        """How often island 1 was late, and whether it is, or is lost."""
        _show_speeds(job, metrics)
        late, state = "swarm_island_late_total", "swarm_island_state"
        series = ((late, {}), (state, {"state": "late"}), (state, {"state": "lost"}))
        return [metrics.registry.get_sample_value(name, {"job_id": "j", "island": "1"} | of) for name, of in series]

    def shown() -> list[str]:
        """By `swarm islands`, `swarm status`, `swarm explain` and the page."""
        situation, view = job.situation(), pb.JobView(state="running", islands=_islands(job))
        standing = JobStanding(JobId("j"), JobState.RUNNING, "", 0.0, "", 0, 40, 2, nan, (), 1)
        console = Console(width=1000)
        with console.capture() as capture:
            console.print(islands_table(record(Job, view), []), job_table(record(Job, view)))
        printed = [line for line in capture.get().splitlines() if line.startswith(("1 ", "island 1 "))]
        facts = [fact.text for fact in explain_job(standing, situation, [], 0.0) if fact.topic == "island 1"]
        return [*printed, *facts, job_values(view, situation, [], {})["islands"]["1"]["waits_for"]]

    def hangs() -> None:
        due = len(world.made) + 2  # behind an exchange for which it was late, the next one waits for it
        world.play_until(
            lambda one: len(one.made) >= due and all(n.agreed > one.made[-1].step for n in roster().islands)
        )
        world.harm(Harmed(frozenset(p for p, one in world.replicas.items() if one.island == 1), world.now_s + 20.0))
        world.play_until(lambda one: 1 in roster().late)

    hangs()
    keeps = "late at step 12: the others exchanged without it; it keeps its steps, and they count at step 16"
    assert counted() == [1.0, 1.0, 0.0]
    assert ["flight; 0.01 s " + keeps in text for text in shown()] == [True] * 4
    world.play_until(lambda one: not roster().late)
    assert counted() == [1.0, 0.0, 0.0]
    assert ["flight; was 21.7 s " + keeps in text for text in shown()] == [True] * 4
    hangs()
    world.brain._pacing.relief[1], world.brain._pacing.relieved[1] = "others train 3 of its microbatches", 3
    assert counted() == [2.0, 1.0, 0.0]
    assert ["flight; others train 3 of its microbatches; 0.01 s late" in text for text in shown()] == [True] * 4
    assert ["step 28; 2 exchanges so far without it" in text for text in shown()] == [True] * 4
    assert "; others trained 3 microbatches in its place so far; " in shown()[2]
    world.lose(1)
    world.play_until(lambda one: one.brain.present == (0,))
    assert counted() == [2.0, 0.0, 1.0]
    assert ["late" in text for text in shown()] == [False] * 4
