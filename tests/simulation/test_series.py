"""Series of jobs and peers go some time after their end, and not before; in simulated time."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from scheduler.assembly import assemble
from scheduler.brain.explain.facts import IslandStanding
from scheduler.brain.settings import DEADLINES
from scheduler.jobs.job import Announcer
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.series import SHOW_S, _show_speeds, show, tidy
from scheduler.metrics import IslandFigures, SchedulerMetrics
from scheduler.storage.stores import Stores
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, IslandState, JobId, PeerId
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


def test_the_islands_of_a_job_at_work_are_shown_now_and_then() -> None:
    standings = (
        IslandStanding(0, 4, 2, ((PeerId("a"),), (PeerId("b"),)), ""),
        IslandStanding(1, 0, 0, (), "", state=IslandState.LOST),
    )
    spec = SimpleNamespace(
        training=SimpleNamespace(global_batch_sequences=8, microbatches=2),
        data=SimpleNamespace(sequence_length=16),
        has_outer_steps=True,
    )
    job: Any = SimpleNamespace(
        brain=SimpleNamespace(),
        spec=spec,
        stages={},
        record=SimpleNamespace(id="j"),
        situation=lambda: SimpleNamespace(islands=standings, outer_rounds={"averaged": 2}),
    )
    told: list[Any] = []
    metrics: Any = SimpleNamespace(speeds=lambda *values: None, islands=lambda *values: told.append(values))
    _show_speeds(job, metrics)
    figures = [IslandFigures(IslandState.TRAINING, 4, 2, 2, {}), IslandFigures(IslandState.LOST, 0, 0, 0, {})]
    assert told == [("j", figures, {"averaged": 2})]
