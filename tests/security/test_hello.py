"""A Hello is the word of its sender: what it says of a job at work is compared with what the scheduler knows itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarm.pki.identity import Identity, Wallet
from swarm.pki.names import Role
from swarm.rpc.session import GrpcSchedulerLink
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire.messages import Command, Event, Heartbeat, Hello, Release, Welcome
from tests.support.processes import Cluster
from tests.support.scenes import Task, resolved
from tests.support.simulated import Tokens, small_spec, write_text

pytestmark = pytest.mark.timeout(600)


async def told(cluster: Cluster, identity: Identity, hello: Hello) -> list[Command]:
    """The first two commands for a stage server that begins with this Hello."""
    link = GrpcSchedulerLink(cluster.address, Wallet(identity))

    async def events() -> AsyncIterator[Event]:
        yield hello
        while True:
            yield Heartbeat(0)
            await asyncio.sleep(0.5)

    commands: list[Command] = []
    async with asyncio.timeout(60):
        async for _, command in link.attach(events()):
            commands.append(command)
            if len(commands) == 2:
                break
    await link.close()
    return commands


def test_whoever_says_that_he_serves_a_stage_gets_no_pass_for_it(tmp_path: Path) -> None:
    """He was made a replica by his own word, and the pass for the stage came with it."""
    spec = resolved(small_spec(write_text(tmp_path), pipeline__stages=2, training__steps=400))
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)
        job = cluster.submit(spec, Tokens.make(tmp_path / "tokens", spec).manifest).id
        cluster.wait_for_step(job, 3)
        for restarts in (False, True):
            if restarts:
                cluster.restart_scheduler()
            for number, stage in enumerate((0, 1, 2)):
                name = f"eve-{number}-{restarts:d}"
                step = cluster.job(job).step
                hello = Hello(
                    PeerId(name), time.time_ns(), PROTOCOL_VERSION, "0", "127.0.0.1:1", "", "cpu", 1, 1 << 30, -1,
                    JobId(job), 0, step, (), stage,
                )  # fmt: skip
                commands = asyncio.run(told(cluster, cluster.member(Role.STAGE_SERVER, name), hello))
                assert list(map(type, commands)) == [Welcome, Release], (restarts, stage)
        assert cluster.job(job).state == "running"
        cluster.jobs.Cancel(pb.CancelRequest(job=job, no_checkpoint=True), timeout=60)


def test_what_a_replica_falsely_says_that_it_added_changes_no_bit_after_a_restart(tmp_path: Path) -> None:
    task = Task.make(tmp_path, training__steps=60)
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(3)
        boaster = cluster.start_server(3, module="tests.support.boaster")
        cluster.servers[boaster.wait_ready()["peer"]] = boaster
        job = cluster.submit(task.spec, task.tokens.manifest).id
        cluster.wait_for_step(job, 5)
        cluster.restart_scheduler()
        assert cluster.succeeds(job).weights_sha256 == task.sha256
        lines = cluster.jobs.Logs(pb.LogsRequest(job=job, stage=-1), timeout=60)
        assert any("reported work that this scheduler did not give" in line.message for line in lines)
