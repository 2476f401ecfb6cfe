"""An island that is killed whole, and a pause, with real processes: the weights are those of one process."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from client.cli import run
from swarm.checkpoint.reader import open_folder
from swarm.job.leases import Cut
from swarm.job.outer_log import OUTER_LOG, Entry, OuterRecord, read
from swarm.job.resolve import Basis, resolve
from swarm.job.spec import JobSpec
from swarm.reference.trainer import train_local
from swarm.wire import jobs_pb2 as pb
from tests.chaos.harmed_stage_server import write_harm
from tests.support.processes import Cluster
from tests.support.simulated import Tokens, small_spec, write_text

WAIT_S_MAX = 120.0


def job_of(folder: Path, **changes: object) -> tuple[JobSpec, Tokens]:
    """Two islands of two stages."""
    changes = {
        "islands__count": 2,
        "averaging__mode": "diloco",
        "outer__every_steps": 4,
        "pipeline__stages": 2,
        "training__global_batch_sequences": 8,
    } | changes
    spec = resolve(small_spec(write_text(folder), **changes), Basis(257))
    return spec, Tokens.make(folder / "tokens", spec)


def placed_in(folder: Path, island: int) -> str:
    """What the log of the scheduler says of the stage servers that an island got first."""
    placed = (folder / "scheduler.log").read_text().partition("placed: ")[2]
    return placed.partition(f"island {island}: ")[2].partition("\n")[0]


def succeeds_as_one_process(cluster: Cluster, job: str, folder: Path, spec: JobSpec, tokens: Tokens) -> list[Entry]:
    """The job ends with the bits of one process that repeats its outer log, which this gives."""
    view = cluster.succeeds(job)
    assert run(["pull", job, str(folder / "model"), "--scheduler", cluster.address]) == 0
    log = list(read((folder / "model" / OUTER_LOG).read_bytes()))
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"), log=log)
    assert (view.weights_sha256, view.loss) == (expected.sha256, expected.losses[-1])
    return log


@pytest.mark.timeout(900)
def test_a_job_with_too_few_islands_goes_on_from_its_checkpoint_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, tokens = job_of(
        tmp_path, islands__min=2, training__steps=48, checkpoint__every_steps=6, config__tie_word_embeddings=True
    )
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    with Cluster(tmp_path, "--grace", "8") as cluster:
        cluster.add_servers(4)
        job = cluster.submit(spec, tokens.manifest)
        until(lambda: view_of(cluster, job.id).checkpoint_step > 0)
        lost = re.findall(r"stage [01]: ([\w-]+)", placed_in(tmp_path, 1))
        assert len(lost) == 2
        for peer in lost:
            cluster.servers[peer].kill(signal.SIGKILL)
        until(lambda: view_of(cluster, job.id).state == "stalled")
        until(lambda: "goes on at step" in view_of(cluster, job.id).reason)
        stalled = view_of(cluster, job.id)
        assert re.search(r"island 1: stage server \S+ \(stage [01]\) is gone", stalled.reason)
        assert stalled.step > 0
        assert stalled.step % 4 == 0
        cluster.add_servers(2)
        cluster.wait_for_step(job.id, stalled.step + 1)

        def swarm(*arguments: str) -> None:
            assert run([*arguments, "--scheduler", cluster.address]) == 0, capsys.readouterr().err

        swarm("pause", job.id)
        until(lambda: view_of(cluster, job.id).state == "paused")
        paused = view_of(cluster, job.id)
        assert paused.checkpoint_step == paused.step > stalled.step
        swarm("resume", job.id, "--set", "pipeline.stages=1")
        view = cluster.succeeds(job.id)
        assert (view.weights_sha256, view.loss) == (expected.sha256, expected.losses[-1])

    # Another process goes on from what the swarm kept, and ends with the same bits.
    folder = tmp_path / "scheduler" / "jobs" / job.id / "checkpoints" / f"step-{paused.step:08d}"
    again = train_local(spec, tokens.batches(spec), device=torch.device("cpu"), start=open_folder(folder, print))
    assert again.sha256 == expected.sha256


@pytest.mark.timeout(900)
@pytest.mark.parametrize("restart", [False, True], ids=["", "and-the-scheduler-too"])
def test_an_island_is_killed_whole_and_begins_anew_bitwise(tmp_path: Path, restart: bool) -> None:
    """Over TLS, with passes: who goes over to another island is let in there."""
    spec, tokens = job_of(tmp_path, training__steps=60, checkpoint__every_steps=6)
    with Cluster(tmp_path, "--grace", "8") as cluster:
        cluster.add_servers(8)
        job = cluster.submit(spec, tokens.manifest)
        until(lambda: view_of(cluster, job.id).step > 5)
        lost = [peer for peer in cluster.servers if peer in placed_in(tmp_path, 1)]
        assert len(lost) == 4
        for peer in lost:
            cluster.servers[peer].kill(signal.SIGKILL)
        if restart:
            cluster.restart_scheduler()
        log = succeeds_as_one_process(cluster, job.id, tmp_path, spec, tokens)
    assert "stalled" not in (tmp_path / "scheduler.log").read_text(), "it was not taken back"
    exchanges = [record for record in log if isinstance(record, OuterRecord)]
    assert exchanges[0].islands == (0,)
    assert [exchange.begins for exchange in exchanges if exchange.begins] == [{1: 0}]
    assert exchanges[-1].after_step < 60, "both islands are there in the end"


@pytest.mark.timeout(900)
def test_a_job_that_lost_all_its_islands_goes_on_with_the_one_that_comes_back_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It waited for the other one for ever."""
    spec, tokens = job_of(
        tmp_path, averaging__timeout_s=10.0, training__steps=48, checkpoint__every_steps=4, limits__no_progress_s=20.0
    )
    with Cluster(tmp_path, "--grace", "8") as cluster:
        cluster.add_servers(4)
        job = cluster.submit(spec, tokens.manifest)
        until(lambda: view_of(cluster, job.id).checkpoint_step > 0)
        for server in cluster.servers.values():
            server.kill(signal.SIGKILL)
        until(lambda: "goes on at step" in view_of(cluster, job.id).reason)
        back_to = view_of(cluster, job.id).step
        cluster.add_servers(2)
        until(lambda: "goes on with 1 of 2 islands in" in view_of(cluster, job.id).reason)
        assert run(["explain", job.id, "--scheduler", cluster.address]) == 0
        assert "goes on with 1 of 2 islands in" in capsys.readouterr().out
        cluster.wait_for_step(job.id, back_to + 1)
        assert run(["islands", job.id, "--scheduler", cluster.address]) == 0
        assert "no stage servers were there for it when the job went on" in " ".join(capsys.readouterr().out.split())
        log = succeeds_as_one_process(cluster, job.id, tmp_path, spec, tokens)
    behind = [record for record in log if isinstance(record, OuterRecord) and record.after_step > back_to]
    assert [(exchange.islands, exchange.begins) for exchange in behind] == [((0,), {})] * (12 - back_to // 4)


def view_of(cluster: Cluster, job: str) -> Any:
    return cluster.jobs.Get(pb.JobRequest(job=job), timeout=60)


def until(says: Any) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not says():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.timeout(900)
def test_a_slow_island_trains_less_of_each_step_bitwise(tmp_path: Path) -> None:
    spec, tokens = job_of(
        tmp_path,
        islands__shares="speed",
        pipeline__stages=1,
        training__steps=40,
        training__global_batch_sequences=16,
        training__microbatch_sequences=1,
    )
    with Cluster(tmp_path, "--grace", "8") as cluster:
        cluster.add_servers(2, module="tests.chaos.harmed_stage_server")
        job = cluster.submit(spec, tokens.manifest)
        until(lambda: view_of(cluster, job.id).step > 1)
        peer = next(server for server in cluster.servers if server in placed_in(tmp_path, 1))
        write_harm(tmp_path / f"server-{list(cluster.servers).index(peer)}", slow=8.0)
        log = succeeds_as_one_process(cluster, job.id, tmp_path, spec, tokens)
    cuts = [record for record in log if isinstance(record, Cut)]
    sizes = [{island: sum(end - first for first, end in of) for island, of in cut.leases.items()} for cut in cuts]
    assert any(of[0] > of[1] for of in sizes), cuts
