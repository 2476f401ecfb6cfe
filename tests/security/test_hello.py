"""A Hello is the word of its sender: what it says of a job at work is compared with what the scheduler knows itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from client.connection import Scheduler
from swarm.job.spec import JobSpec
from swarm.pki.identity import Application, Identity, Wallet
from swarm.pki.joining import join
from swarm.pki.names import Role
from swarm.pki.profiles import find_profile
from swarm.pki.tokens import parse_line
from swarm.reference.trainer import train_local
from swarm.rpc.session import GrpcSchedulerLink
from swarm.types import PROTOCOL_VERSION, JobId, PeerId
from swarm.wire import jobs_pb2 as pb
from swarm.wire import members_pb2 as members_pb
from swarm.wire.messages import Command, Event, Heartbeat, Hello, Release, Welcome
from tests.support.processes import Cluster
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text

pytestmark = pytest.mark.timeout(600)


def job_of(folder: Path, steps: int) -> JobSpec:
    spec = small_spec(write_text(folder), pipeline__stages=2, training__steps=steps)
    return resolved(spec)


def member(cluster: Cluster, name: str) -> Identity:
    """The certificate of a stage server that joins with a token."""
    asked = members_pb.CreateTokenRequest(role=Role.STAGE_SERVER, ttl_s=60.0, uses=1, names=name)
    with Scheduler(cluster.address, 30.0, find_profile(cluster.address)) as admin:
        line = parse_line(admin.call("CreateToken", asked).line)
    return join(line, name, Application(name)).identity


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
    spec = job_of(tmp_path, 400)
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)
        job = cluster.submit(spec, Tokens.make(tmp_path / "tokens", spec).manifest).id
        cluster.wait_for_step(job, 3)
        for restarts in (False, True):
            if restarts:
                cluster.restart_scheduler()
            for number, stage in enumerate((0, 1, 2)):
                name = f"eve-{number}-{restarts:d}"
                step = cluster.jobs.Get(pb.JobRequest(job=job), timeout=60).step
                hello = Hello(
                    PeerId(name), time.time_ns(), PROTOCOL_VERSION, "0", "127.0.0.1:1", "", "cpu", 1, 1 << 30, -1,
                    JobId(job), 0, step, (), stage,
                )  # fmt: skip
                commands = asyncio.run(told(cluster, member(cluster, name), hello))
                assert list(map(type, commands)) == [Welcome, Release], (restarts, stage)
        assert cluster.jobs.Get(pb.JobRequest(job=job), timeout=60).state == "running"
        cluster.jobs.Cancel(pb.CancelRequest(job=job, no_checkpoint=True), timeout=60)


def test_what_a_replica_falsely_says_that_it_added_changes_no_bit_after_a_restart(tmp_path: Path) -> None:
    spec = job_of(tmp_path, 60)
    tokens = Tokens.make(tmp_path / "tokens", spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(3)
        boaster = cluster.start_server(3, module="tests.support.boaster")
        cluster.servers[boaster.wait_ready()["peer"]] = boaster
        job = cluster.submit(spec, tokens.manifest).id
        cluster.wait_for_step(job, 5)
        cluster.restart_scheduler()
        view = cluster.succeeds(job)
        assert view.weights_sha256 == expected.sha256
        lines = cluster.jobs.Logs(pb.LogsRequest(job=job, stage=-1), timeout=60)
        assert any("reported work that this scheduler did not give" in line.message for line in lines)
