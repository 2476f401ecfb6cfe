"""A job over stage servers that nobody can dial, while its relays are killed: the weights are those of one process."""

from __future__ import annotations

import signal
import time
import urllib.request
from pathlib import Path

import pytest

from swarm.wire import jobs_pb2 as pb
from tests.support.processes import Cluster, Process
from tests.support.scenes import Task
from tests.support.services import until

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


def explained(cluster: Cluster, peer: str) -> str:
    facts = cluster.jobs.Explain(pb.ExplainRequest(about=peer), timeout=60).facts
    return " ".join(fact.text for fact in facts)


@pytest.mark.timeout(900)
def test_relays_are_killed_and_nobody_is_expelled_and_the_weights_are_those_of_one_process(tmp_path: Path) -> None:
    task = Task.make(tmp_path, training__steps=40)
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
                relay.ready["name"] for relay in relays
            }
            job = cluster.submit(task.spec, task.tokens.manifest)
            cluster.wait_for_step(job.id, 5)
            used = [carried_bytes(relay) for relay in relays]
            victim = used.index(max(used))
            assert used[victim] > 0
            relays[victim].kill(signal.SIGKILL)
            cluster.wait_for_step(job.id, 12)
            relays[1 - victim].kill(signal.SIGKILL)
            time.sleep(HOLD_S)
            stuck = cluster.job(job.id)
            assert stuck.state == "running", stuck.reason
            assert sorted(len(stage.peers) for stage in stuck.stages) == [2, 2], "nobody was expelled"
            relays.append(start_relay(cluster, victim))
            relays[-1].wait_ready()
            view = cluster.succeeds(job.id)
            assert view.weights_sha256 == task.sha256
            assert view.microbatches_committed == 40 * task.spec.training.microbatches
            assert sorted(len(stage.peers) for stage in view.stages) == [2, 2], "nobody was expelled"
            through = f"through relay {relays[-1].ready['name']}"
            until(through, lambda: through in explained(cluster, hidden[0]), WAIT_S_MAX)
        finally:
            for relay in relays:
                relay.stop()
