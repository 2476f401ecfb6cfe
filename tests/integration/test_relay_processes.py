"""A job over stage servers that nobody can dial, while its relays are killed: the weights are those of one process."""

from __future__ import annotations

import signal
import time
import urllib.request
from pathlib import Path

import pytest
import torch

from swarm.reference.trainer import train_local
from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster, Process
from tests.support.scenes import resolved
from tests.support.simulated import Tokens, small_spec, write_text

HOLD_S = 3.0  # without any relay
WAIT_S_MAX = 120.0


def start_relay(cluster: Cluster, number: int) -> Process:
    folder = cluster.folder / f"relay-{number}"
    return Process.start(
        cluster.folder / f"relay-{number}.log",
        "swarm.relay",
        *("--listen", "127.0.0.1:0", "--scheduler", cluster.address, "--http-port", "0", "--data-dir", str(folder)),
    )


def carried_bytes(relay: Process) -> float:
    with urllib.request.urlopen(f"http://{relay.ready['http']}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("swarm_relay_bytes_total{"))


def job_of(cluster: Cluster, job: str) -> pb.JobView:
    return cluster.jobs.Get(pb.JobRequest(job=job), timeout=60)


def explained(cluster: Cluster, peer: str) -> str:
    facts = cluster.jobs.Explain(pb.ExplainRequest(about=peer), timeout=60).facts
    return " ".join(fact.text for fact in facts)


@pytest.mark.timeout(900)
def test_relays_are_killed_and_nobody_is_expelled_and_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    spec = small_spec(write_text(tmp_path), pipeline__stages=2, training__steps=40)
    spec = resolved(spec)
    tokens = Tokens.make(tmp_path / "tokens", spec)
    expected = train_local(spec, tokens.batches(spec), device=torch.device("cpu"))
    with Cluster(tmp_path, "--grace", "8") as cluster:
        relays = [start_relay(cluster, number) for number in range(2)]
        try:
            for relay in relays:
                relay.wait_ready()
            cluster.add_servers(2)
            hidden = cluster.add_servers(2, "--via-relay")
            shown = {view.id: view for view in cluster.peers()}
            assert {shown[peer].address for peer in hidden} == {"via relay"}
            assert {view.id for view in shown.values() if view.state == "relay"} == {
                one.ready["name"] for one in relays
            }
            job = cluster.submit(spec, tokens.manifest)
            cluster.wait_for_step(job.id, 5)
            used = [carried_bytes(relay) for relay in relays]
            victim = used.index(max(used))
            assert used[victim] > 0
            relays[victim].kill(signal.SIGKILL)
            cluster.wait_for_step(job.id, 12)
            relays[1 - victim].kill(signal.SIGKILL)
            time.sleep(HOLD_S)
            stuck = job_of(cluster, job.id)
            assert stuck.state == "running", stuck.reason
            assert sorted(len(stage.peers) for stage in stuck.stages) == [2, 2], "nobody was expelled"
            relays.append(start_relay(cluster, victim))
            relays[-1].wait_ready()
            view = cluster.succeeds(job.id)
            assert view.weights_sha256 == expected.sha256
            assert view.microbatches_committed == 40 * spec.training.microbatches
            assert sorted(len(stage.peers) for stage in view.stages) == [2, 2], "nobody was expelled"
            deadline_s = time.monotonic() + WAIT_S_MAX
            while f"through relay {relays[-1].ready['name']}" not in explained(cluster, hidden[0]):
                assert time.monotonic() < deadline_s, explained(cluster, hidden[0])
                time.sleep(0.2)
        finally:
            for relay in relays:
                relay.stop()
