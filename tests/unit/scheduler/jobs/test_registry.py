from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import sqlalchemy as sa

from scheduler.brain.explain.facts import Holder
from scheduler.jobs.job import Announcer, Job
from scheduler.jobs.ports import SchedulerPorts
from scheduler.jobs.registry import JobRegistry
from scheduler.jobs.restart import spec_of
from scheduler.metrics import SchedulerMetrics
from scheduler.storage.database import Database
from scheduler.storage.job_record import JobRecord, JobTokens
from scheduler.storage.stores import Stores
from swarm.errors import InvalidConfig, NotFound
from swarm.process.logs import get_logger
from swarm.types import PROTOCOL_VERSION, JobId, JobState, PeerId
from tests.support.simulated import small_spec


def job(id_: str, name: str, state: JobState, created_s: float, folder: Path) -> Job:
    record = JobRecord(JobId(id_), name, state, "", created_s, created_s, "{}", JobTokens((), "uint16", 257, 1.0))
    return Job(record, small_spec(folder / "text.txt"))


def registry(folder: Path, jobs: Iterable[Job] = ()) -> JobRegistry:
    database = Database(sa.create_engine("sqlite://"), 1, None)  # nothing here reads or writes it
    metrics = SchedulerMetrics("0", PROTOCOL_VERSION)
    log = get_logger("test")
    made = JobRegistry(
        SchedulerPorts(Stores.under(folder, database), Announcer(), metrics, Random(1), lambda: 0.0, log)
    )
    for job in jobs:
        made.add(job)
    return made


def test_a_name_means_the_one_open_job_or_else_the_newest_that_ended(tmp_path: Path) -> None:
    """A second `swarm cancel dup` found the job that was cancelled first, while the other trained on."""

    def of(*states: JobState) -> JobRegistry:
        return registry(tmp_path, (job(f"dup-{at}", "dup", state, at, tmp_path) for at, state in enumerate(states)))

    made = of(JobState.RUNNING, JobState.CANCELLED)
    assert [made.find(name).record.id for name in ("dup", "dup-1")] == ["dup-0", "dup-1"]
    assert of(JobState.SUCCEEDED, JobState.FAILED).find("dup").record.id == "dup-1", "the newest"
    with pytest.raises(NotFound, match='2 open jobs are named "dup": dup-1, dup-0'):
        of(JobState.RUNNING, JobState.PAUSED).find("dup")


async def test_the_queue_is_in_order_of_age_and_says_how_far_jobs_are(tmp_path: Path) -> None:
    jobs = [job(f"w-{n}", "w", JobState.PLACING, float(n), tmp_path) for n in (2, 1)]
    for name, count in (("mine-1", 1), ("others-2", 3), ("ended-3", 9)):
        state = JobState.SUCCEEDED if name == "ended-3" else JobState.RUNNING
        works = job(name, name, state, 0.0, tmp_path)
        works.record = replace(works.record, peers={PeerId(f"{name}-{n}"): 0 for n in range(count)})
        works.progress.steps_done, works.progress.eta_s = 3, 60.0
        jobs.append(works)
    made = registry(tmp_path, jobs).queue()
    assert made.waiting == ("w-1", "w-2")
    assert made.holders == (Holder(JobId("others-2"), 3, 3, 4, 60.0), Holder(JobId("mine-1"), 1, 3, 4, 60.0))


async def test_a_job_enters_only_states_that_its_state_leads_to(tmp_path: Path) -> None:
    made = registry(tmp_path)
    for state in JobState:
        one = job(f"a-{state.value}", "a", state, 1.0, tmp_path)
        one.record = replace(one.record, state=JobState.SUCCEEDED)
        with pytest.raises(AssertionError, match=f"succeeded does not lead to {state.value}"):
            await made.enter(one, state, "")


def test_a_stored_job_with_an_optimizer_that_is_gone_is_named_with_what_to_do(tmp_path: Path) -> None:
    stored = job("a-1", "a", JobState.PAUSED, 1.0, tmp_path)
    text = stored.spec.model_dump_json()
    assert spec_of(replace(stored.record, spec_json=text)) == stored.spec
    with pytest.raises(InvalidConfig, match=r"job a-1 is from an earlier version: .*'nadamw'") as refused:
        spec_of(replace(stored.record, spec_json=text.replace('"adamw"', '"nadamw"')))
    assert "an empty --data-dir" in refused.value.hint
