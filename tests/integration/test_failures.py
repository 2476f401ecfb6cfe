"""What happens when a process of a running job goes away: an error that names it, soon, and a pool that works on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from swarm.config import JobSpec
from swarm.data import ByteTokenizer
from swarm.partition import resolve
from swarm.wire import jobs_pb2 as pb
from tests.cluster import Cluster, RpcError
from tests.rig import Tokens, small_spec, write_text

END_S_MAX = 30.0


def long_job(source: Path, **changes: object) -> JobSpec:
    spec = small_spec(source, pipeline__stages=2, training__steps=100_000, **changes)
    return resolve(spec, vocabulary_size=ByteTokenizer.vocabulary_size, stages_if_auto=1)


@pytest.mark.timeout(400)
def test_a_lost_stage_server_ends_the_job_with_its_name_and_the_rest_serve_the_next(tmp_path: Path) -> None:
    spec = long_job(write_text(tmp_path))
    tokens = Tokens.make(tmp_path / "tokens", spec)
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(4)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            job = cluster.submit(spec, tokens.manifest)
            cluster.wait_for_step(job.id, 3)
            victim = cluster.jobs.Get(pb.JobRequest(job=job.id), timeout=10).stages[1].peers[0]
            started_s = time.monotonic()
            cluster.servers[victim].kill(number)
            view = cluster.wait(job.id, timeout_s=END_S_MAX)
            assert view.state == "failed", f"{view.reason}\n{cluster.tails()}"
            assert victim in view.reason
            assert "stage 1" in view.reason
            assert view.hint
            assert time.monotonic() - started_s < END_S_MAX
            if number is signal.SIGSTOP:
                cluster.servers[victim].kill(signal.SIGCONT)

        short = spec.model_copy(update={"training": spec.training.model_copy(update={"steps": 2})})
        view = cluster.wait(cluster.submit(short, tokens.manifest).id)
        assert view.state == "succeeded", f"{view.reason}\n{cluster.tails()}"


@pytest.mark.timeout(200)
def test_a_job_can_be_cancelled_and_a_restarted_scheduler_knows_what_was(tmp_path: Path) -> None:
    spec = long_job(write_text(tmp_path))
    tokens = Tokens.make(tmp_path / "tokens", spec)
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)
        job = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(job.id, 2)
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=10)
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=10)
        assert cluster.wait(job.id).state == "cancelled"
        with pytest.raises(RpcError, match="has no weights"):
            list(cluster.jobs.Pull(pb.PullRequest(job=job.id), timeout=10))

        running = cluster.submit(spec, tokens.manifest)
        cluster.wait_for_step(running.id, 2)
        cluster.restart_scheduler()
        views = {view.id: view for view in cluster.jobs.List(pb.ListRequest(all=True), timeout=10).jobs}
        assert views[job.id].state == "cancelled"
        assert views[running.id].state == "failed"
        assert "restarted" in views[running.id].reason
        assert views[running.id].step >= 2


def test_a_job_without_enough_peers_says_what_it_waits_for(tmp_path: Path) -> None:
    spec = long_job(write_text(tmp_path))
    tokens = Tokens.make(tmp_path / "tokens", spec)
    with Cluster(tmp_path) as cluster:
        job = cluster.submit(spec, tokens.manifest)
        for view in cluster.jobs.Watch(pb.JobRequest(job=job.id), timeout=20):
            if view.state == "placing":
                break
        assert "stage 0" in view.reason
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=10)
        assert cluster.wait(job.id).state == "cancelled"
