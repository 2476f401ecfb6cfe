"""What happens when a process of a running job goes away: others do its work, or an error names it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from client.cli import run
from scheduler.brain.replay import replay
from scheduler.brain.transcript import Transcript
from swarm.data.shards import TokenManifest
from swarm.job.spec import JobSpec
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster, RpcError
from tests.support.scenes import Task, resolved
from tests.support.services import until
from tests.support.simulated import Tokens, small_spec, write_text

END_S_MAX = 120.0


def long_job(folder: Path, **changes: object) -> tuple[JobSpec, TokenManifest]:
    spec = resolved(small_spec(write_text(folder), pipeline__stages=2, training__steps=100_000, **changes))
    return spec, Tokens.make(folder / "tokens", spec).manifest


def wait_for_state(cluster: Cluster, job: str, state: str) -> pb.JobView:
    call = cluster.jobs.Watch(pb.JobRequest(job=job), timeout=END_S_MAX)
    for view in call:
        if view.state == state:
            call.cancel()
            return view
    raise AssertionError(f"{view.state}: {view.reason}")


@pytest.mark.timeout(900)
def test_with_on_stall_fail_the_last_replica_ends_the_job_with_its_name_and_the_rest_serve_the_next(
    tmp_path: Path,
) -> None:
    spec, manifest = long_job(tmp_path, limits__on_stall="fail")
    with Cluster(tmp_path, "--grace", "8") as cluster:
        cluster.add_servers(2)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            job = cluster.submit(spec, manifest)
            cluster.wait_for_step(job.id, 3)
            victim = cluster.job(job.id).stages[1].peers[0]
            cluster.servers[victim].kill(number)
            view = cluster.wait(job.id, timeout_s=END_S_MAX)
            assert view.state == "failed", f"{view.reason}\n{cluster.tails()}"
            assert victim in view.reason
            assert "stage 1" in view.reason
            assert view.hint
            if number is signal.SIGSTOP:
                cluster.servers[victim].kill(signal.SIGCONT)

        cluster.add_servers(1)
        short = spec.having("training", steps=2)
        cluster.succeeds(cluster.submit(short, manifest).id)


@pytest.mark.timeout(900)
def test_a_job_whose_stage_is_killed_stalls_and_goes_on_with_a_new_stage_server_bitwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Task.make(tmp_path, training__steps=50, checkpoint__every_steps=5)
    with Cluster(tmp_path, "--grace", "8") as cluster:
        cluster.add_servers(2)
        job = cluster.submit(task.spec, task.tokens.manifest)
        cluster.wait_for_step(job.id, 8)
        until("a checkpoint is kept", lambda: cluster.job(job.id).checkpoint_step)
        victim = cluster.job(job.id).stages[1].peers[0]
        cluster.servers[victim].kill(signal.SIGKILL)
        view = wait_for_state(cluster, job.id, "stalled")
        assert f"stage server {victim} (stage 1) is gone" in view.reason
        assert "start stage servers" in view.hint

        cluster.restart_scheduler()
        until("it waits", lambda: "stage 1 needs 1 replica more" in cluster.job(job.id).reason, END_S_MAX)
        view = cluster.job(job.id)
        assert (view.state, list(view.stages[0].peers)) == ("stalled", [])
        assert f"goes on at step {view.step} from checkpoint step-" in view.reason
        assert victim in view.reason
        capsys.readouterr()
        assert run(["ls", "--state", "stalled", "-o", "json", "--scheduler", cluster.address]) == 0
        (shown,) = json.loads(capsys.readouterr().out)["data"]
        assert (shown["id"], shown["state"], shown["hint"]) == (job.id, "stalled", view.hint)

        cluster.add_servers(1)
        view = cluster.succeeds(job.id)
        assert (view.step, view.weights_sha256) == (50, task.sha256)


@pytest.mark.timeout(900)
def test_frozen_killed_and_restarted_processes_do_not_change_a_bit(tmp_path: Path) -> None:
    task = Task.make(tmp_path, training__steps=100)
    with Cluster(tmp_path, "--record") as cluster:
        cluster.add_servers(5)
        job = cluster.submit(task.spec, task.tokens.manifest)

        cluster.wait_for_step(job.id, 5)
        pools = {stage.stage: list(stage.peers) for stage in cluster.job(job.id).stages}
        frozen, killed = pools[0][0], max(pools.values(), key=len)[-1]
        cluster.servers[frozen].kill(signal.SIGSTOP)
        time.sleep(4.0)  # suspect after 2.5 s; others do its work
        cluster.servers[frozen].kill(signal.SIGCONT)

        cluster.wait_for_step(job.id, cluster.job(job.id).step + 5)
        cluster.restart_scheduler()
        before = cluster.job(job.id)
        assert before.state == "running", before.reason
        cluster.wait_for_step(job.id, before.step + 1)

        cluster.servers[killed].kill(signal.SIGKILL)
        view = cluster.succeeds(job.id)
        assert (view.step, view.weights_sha256) == (100, task.sha256)
    # What the brain of each scheduler start heard leads another one to the same decisions.
    recorded = sorted((tmp_path / "scheduler" / "jobs" / job.id).glob("brain-*.jsonl"))
    assert len(recorded) == 2
    for path in recorded:
        transcript = Transcript(path.read_text().splitlines())
        assert all(step.is_same for step in replay(transcript, transcript.brain())), path.name


@pytest.mark.timeout(900)
def test_a_job_can_be_cancelled_and_a_restarted_scheduler_knows_what_was(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_servers(2)
        work = long_job(tmp_path)
        job = cluster.submit(*work)
        cluster.wait_for_step(job.id, 2)
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=60)
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=60)
        assert cluster.wait(job.id).state == "cancelled"
        with pytest.raises(RpcError, match="has no weights"):
            list(cluster.jobs.Pull(iter([pb.PullRequest(job=job.id)]), timeout=60))

        running = cluster.submit(*work)
        cluster.wait_for_step(running.id, 2)
        cluster.restart_scheduler()
        views = {view.id: view for view in cluster.jobs.List(pb.ListRequest(all=True), timeout=60).jobs}
        assert views[job.id].state == "cancelled"
        assert views[running.id].state == "running"
        assert views[running.id].step >= 2
        cluster.wait_for_step(running.id, views[running.id].step + 2)
        cluster.jobs.Cancel(pb.CancelRequest(job=running.id), timeout=60)
        assert cluster.wait(running.id).state == "cancelled"


def test_a_job_without_enough_peers_says_what_it_waits_for(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        job = cluster.submit(*long_job(tmp_path))
        for view in cluster.jobs.Watch(pb.JobRequest(job=job.id), timeout=60):
            if view.state == "placing":
                break
        assert "stage 0" in view.reason
        cluster.jobs.Cancel(pb.CancelRequest(job=job.id), timeout=60)
        assert cluster.wait(job.id).state == "cancelled"
