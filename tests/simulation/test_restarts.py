"""The claim: a scheduler that was killed between two writes of a job's state goes on with what the rows say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.brain.explain.facts import RESUMED
from scheduler.brain.job import JobBrain
from stage_server.session.server import StageServer
from swarm.job.spec import spec_from_json
from swarm.types import PROTOCOL_VERSION, JobState, Microbatch, PeerId
from swarm.wire.messages import Command, Event, Heartbeat, Hello, Release, Route, Welcome
from tests.support.databases import BEFORE_ONE_MIGRATION, taken_over
from tests.support.reference import reference
from tests.support.scenes import Run, Task, play, replayed, train, training
from tests.support.simulated import Rig


async def restart(run: Run, stored: JobState) -> None:
    """Kill the scheduler when the database had only that state of the job, and start one on it."""
    await run.rig.kill_scheduler()
    with run.rig.engine.begin() as connection:
        connection.execute(sa.text("UPDATE jobs SET state = :state"), {"state": stored.value})
    await run.rig.start_scheduler()
    run.job = run.rig.jobs.registry.find(run.job.record.id)


@training(4, 1)
async def test_a_job_that_runs_although_its_row_says_that_it_loads_goes_on(run: Run) -> None:
    """It was placed anew: its stage servers were told to load the start, and what was committed was lost to them."""
    await run.until_step(2)
    peers = {peer for pool in run.job.stages.values() for peer in pool}
    await restart(run, JobState.LOADING)
    assert run.job.record.state is JobState.RUNNING
    assert run.job.progress.steps_done >= 2
    async for _ in run.rig.jobs.watch(run.job):
        if run.job.record.reason == RESUMED:
            break
    assert {peer for pool in run.job.stages.values() for peer in pool} == peers
    assert run.job.record.timeline == 0
    await run.succeeds()
    assert replayed(run) == 0


@training(4, 1)
async def test_a_job_that_had_committed_nothing_is_placed_again(run: Run) -> None:
    while run.job.record.state is not JobState.LOADING:
        await asyncio.sleep(0.001)
    await restart(run, JobState.LOADING)
    assert run.job.record.state is JobState.PLACING
    said = [line.message for line in run.rig.jobs.stores.logs.of(run.job.record.id).kept()[0]]
    assert "job is placing: the scheduler was restarted before the job ran" in said
    assert run.job.record.peers == {}


@pytest.mark.usefixtures("late_after_a_minute")
@training(2, 1, training__global_batch_sequences=32, training__steps=6, pipeline__overlap=0)
async def test_as_much_is_in_flight_on_long_links_as_before_the_restart(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of those that came back was taken to be unknown: the window stayed as narrow as on near links."""

    def widest(run: Run) -> int:
        brain = run.job.brain
        assert isinstance(brain, JobBrain)
        return brain._parts.dispatch._window.most

    monkeypatch.setattr(run.rig.network.weather, "delay", lambda _sender, _receiver: 0.2)
    await run.until_step(2)
    assert widest(run) == 16, "all microbatches of a step; four on near links"
    await restart(run, JobState.RUNNING)
    await run.until_step(run.job.progress.steps_done + 2)
    assert not run.job.record.state.is_final
    assert widest(run) == 16


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_nobody_added_is_not_counted_because_a_replica_says_so_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The ledger was rebuilt from whatever replicas reported, so the mean lacked what a liar had claimed."""
    task = Task.make(tmp_path)
    liars: set[PeerId] = set()
    hello = StageServer._hello

    def boast(server: StageServer) -> Hello:
        """Take every microbatch that this replica was not given for added, in its report and in its rounds."""
        if server._identity.peer in liars and server._replica is not None:
            cells = server._replica.cells
            for step in range(cells.version, cells.version + 1 + cells.staleness):
                for index in range(task.spec.training.microbatches):
                    cell = cells._cell(Microbatch(cells.timeline, step, index))
                    if not cell.attempt:
                        cell.attempt, cell.reported = 1, True
        return hello(server)

    monkeypatch.setattr(StageServer, "_hello", boast)

    async def lie(run: Run) -> None:
        await run.until_step(1)
        liar = run.spare()[seed % 2]
        await run.until_it_holds_something(liar)
        liars.add(liar)
        await run.restart_scheduler()

    run = train(task, 4, seed, lie)
    said = [line.message for line in run.rig.jobs.stores.logs.of(run.job.record.id).kept()[0]]
    assert any("reported work that this scheduler did not give" in line for line in said)


@pytest.mark.parametrize("restarts", [False, True])
@training(4, 1)
async def test_a_stranger_that_says_that_it_serves_a_stage_is_given_none_of_it(run: Run, restarts: bool) -> None:
    """It was believed, and was given work and the pass of that stage, whatever it held."""

    async def claims(run: Run, stage: int, version: int) -> list[Command]:
        """What a stage server is sent that says in its Hello that it has served this stage all the time."""
        over = asyncio.Event()
        hello = Hello(
            PeerId(f"stranger-{stage}-{version}"), 1, PROTOCOL_VERSION, "0", "10.0.9.9:1", "", "cpu", 1, 1 << 30, 0,
            job=run.job.record.id, timeline=0, version=version, stage=stage,
        )  # fmt: skip

        async def says() -> AsyncIterator[Event]:
            yield hello
            while not over.is_set():
                yield Heartbeat(0)
                await asyncio.sleep(0.1)

        told: list[Command] = []
        try:
            async with asyncio.timeout(1.0):
                async for _, command in run.rig.sessions.attach(says()):
                    told.append(command)
        except TimeoutError:
            over.set()
        return told

    await run.until_step(2)
    if restarts:
        await run.restart_scheduler()
    assert run.job.brain is not None
    committed = run.job.progress.steps_done
    told = await asyncio.gather(*(claims(run, stage, committed + late) for stage in (0, 1) for late in (-1, 0, 1)))
    for commands in told:  # later it may be sent to a stage as any idle one is: it loads, and shows a digest
        assert list(map(type, commands[:2])) == [Welcome, Release]
        assert not any(isinstance(command, Route) for command in commands)


def test_open_jobs_of_the_version_before_train_to_their_end(tmp_path: Path) -> None:
    task = Task.make(tmp_path)

    async def act(rig: Rig) -> None:
        await rig.kill_scheduler()
        rig.engine = taken_over(BEFORE_ONE_MIGRATION)
        await rig.start_scheduler()
        jobs = [job for job in rig.jobs.registry.all() if not job.record.state.is_final]
        assert sorted(job.record.owner for job in jobs) == ["submitter/ada", "submitter/bob"]
        for job in jobs:
            (tmp_path / "jobs" / job.record.id / "tokenizer").mkdir(parents=True)
        for job in reversed(jobs):
            await rig.finished(job)
            assert job.record.state is JobState.SUCCEEDED, job.record.reason
            trained = reference(spec_from_json(job.record.spec_json), task.tokens)
            assert job.record.weights_sha256 == trained.sha256

    play(task.tokens, 2, act)
